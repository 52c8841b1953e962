from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, ProcessPoolExecutor
from contextlib import ExitStack
from typing import Any

import pytest


@pytest.fixture(scope="session")
def forkserver() -> multiprocessing.context.ForkServerContext:
    """Starts processes from one that has imported what takes seconds to import, and has nothing of this process."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "pytest", "safetensors.numpy", "yaml"])
    return context


@pytest.fixture
def engine(forkserver: Any) -> Iterator[Callable[[], Executor]]:
    """Gives processes, each an Executor; what is submitted to one runs in it, in order."""
    with ExitStack() as stack:
        yield lambda: stack.enter_context(ProcessPoolExecutor(1, mp_context=forkserver))
