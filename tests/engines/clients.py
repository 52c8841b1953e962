"""How the engines' released clients are run: in processes of their own, without the packages that only a GPU needs."""

from __future__ import annotations

import importlib
import importlib.util
import mmap
import os
import random
import sys
import types
from collections.abc import Callable, Mapping
from typing import Any

from tests.mounted import Mounted

__all__ = ["KIB", "MIB", "bare_package", "check_round_trip", "content", "page_aligned", "same_on_disk", "stand_in"]

KIB = 1 << 10
MIB = 1 << 20


def content(seed: object, size: int) -> bytes:
    """*size* bytes that only *seed* gives, the same in every process."""
    return random.Random(repr(seed)).randbytes(size)


def page_aligned(size: int) -> memoryview:
    """A buffer that O_DIRECT takes anywhere."""
    return memoryview(mmap.mmap(-1, size))


def bare_package(name: str) -> None:
    """Make the modules of package *name* importable without what its __init__ imports."""
    spec = importlib.util.find_spec(name)
    assert spec is not None
    assert spec.submodule_search_locations is not None
    package = types.ModuleType(name)
    package.__path__ = list(spec.submodule_search_locations)
    sys.modules[name] = package


def stand_in(name: str, **attributes: Any) -> None:
    """Put a module with nothing but *attributes* in the place of *name*."""
    module = types.ModuleType(name)
    vars(module).update(attributes)
    sys.modules[name] = module


def same_on_disk(mnt: Mounted, files: Mapping[str, bytes]) -> None:
    """After a flush the Posix directory has *files*, at their paths, bit for bit, and nothing else."""
    mnt.flush()
    found = [
        path.relative_to(mnt.storage)
        for path in mnt.storage.rglob("*")
        if path.is_file() and path.relative_to(mnt.storage).parts[0] != ".ucmfs"
    ]
    assert sorted(map(str, found)) == sorted(files)
    different = [name for name, data in files.items() if (mnt.storage / name).read_bytes() != data]
    assert not different


def check_round_trip(mnt: Mounted, files: Mapping[str, bytes], load: Callable[[], object]) -> None:
    """*load*, which compares by the client's own reads, is content at once, after a new mount, and from Posix alone."""
    load()
    same_on_disk(mnt, files)
    mnt.umount()
    mnt.mount()
    load()
    for name in files:
        os.setxattr(mnt / name, "user.ucmfs.evict", b"1")
    assert mnt.stats()["stages"][0]["blocks"] == 0
    load()
