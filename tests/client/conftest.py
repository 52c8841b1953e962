"""Stores in every place where one works: plain files, a daemon's socket, a pipeline in the process."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from tests.client.faulty_daemon import FaultyDaemon, files_of
from tests.memory import remove_cache
from ucm.store.pipeline.connector import UcmPipelineStore


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[FaultyDaemon]:
    served = FaultyDaemon(tmp_path / "mount")
    yield served
    served.stop()


@pytest.fixture
def cache_dir() -> Iterator[Path]:
    path = Path(f"/dev/shm/ucm-test-{os.getpid()}-{uuid4().hex[:8]}")
    yield path
    remove_cache(path)


@pytest.fixture(params=["plain", "socket", "embedded"])
def config(request: pytest.FixtureRequest, tmp_path: Path) -> dict[str, Any]:
    """The configuration of a store in one of the places."""
    if request.param == "embedded":
        root = tmp_path / "posix"
        root.mkdir()
        return {
            "store_pipeline": "Cache|Posix",
            "storage_backends": str(root),
            "cache_buffer_capacity_gb": 0.0625,
            "cache_dir": str(request.getfixturevalue("cache_dir")),
        }
    if request.param == "socket":
        return {"mount_point": str(request.getfixturevalue("daemon").root)}
    root = tmp_path / "plain"
    root.mkdir()
    return {"mount_point": str(root)}


@pytest.fixture
def open_store(config: dict[str, Any]) -> Iterator[Callable[..., UcmPipelineStore]]:
    """Make stores in that place; they are closed at the end."""
    stores: list[UcmPipelineStore] = []

    def make(**more: Any) -> UcmPipelineStore:
        stores.append(UcmPipelineStore({**config, **more}))
        return stores[-1]

    yield make
    for store in stores:
        store.close()


@pytest.fixture
def store(open_store: Callable[..., UcmPipelineStore]) -> UcmPipelineStore:
    return open_store()


@pytest.fixture
def written(config: dict[str, Any]) -> Callable[[], dict[str, bytes]]:
    """All files that exist in that place at the moment, temporary ones included."""

    def find() -> dict[str, bytes]:
        found: dict[str, bytes] = {}
        for key in ("mount_point", "storage_backends", "cache_dir"):
            if key in config:
                found |= {f"{key}/{name}": data for name, data in files_of(Path(config[key])).items()}
        found.pop("cache_dir/lock", None)
        return found

    return find
