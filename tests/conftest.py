from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.mounted import Mounted


@pytest.fixture
def make_mount(tmp_path: Path) -> Iterator[Callable[..., Mounted]]:
    """Gives mounts by configuration keys; all are unmounted, and their logs looked into, at the end."""
    made: list[Mounted] = []

    def make(*, mount: bool = True, **config: Any) -> Mounted:
        root = tmp_path / f"m{len(made)}"
        root.mkdir()
        mounted = Mounted(root, config)
        made.append(mounted)
        if mount:
            mounted.mount()
        return mounted

    yield make
    for mounted in made:
        mounted.end()


@pytest.fixture
def mnt(make_mount: Callable[..., Mounted]) -> Mounted:
    """A mount of Cache|Posix with a Cache of 128 MiB."""
    return make_mount()
