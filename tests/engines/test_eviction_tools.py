"""Eviction tools that run beside the engines: scandir and stat, statvfs, unlink."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from concurrent.futures import Executor

from tests.engines.clients import KIB, content, same_on_disk
from tests.engines.processes import SteppedWriter
from tests.mounted import Mounted

BLOCK = 128 * KIB
BLOCKS = 120
KEEP = 20
NS = 10**9


def store(root: str, names: list[str]) -> None:
    """By kind A."""
    for name in names:
        temporary = f"{root}/{name}_{os.getpid()}.tmp"
        with open(temporary, "wb", buffering=0) as file:
            assert file.write(content(name, BLOCK)) == BLOCK
        os.replace(temporary, f"{root}/{name}")


def evict_by(key: Callable[[os.stat_result], int], root: str, keep: int) -> list[str]:
    """Unlink all but the *keep* latest of what is not temporary; what was unlinked."""
    with os.scandir(root) as entries:
        found = []
        for entry in entries:
            with contextlib.suppress(FileNotFoundError):
                if entry.is_file() and not entry.name.endswith(".tmp"):
                    found.append((key(entry.stat()), entry.name))
    evicted = []
    for _, name in sorted(found)[: max(0, len(found) - keep)]:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(f"{root}/{name}")
            evicted.append(name)
    return evicted


def by_atime(root: str, keep: int) -> list[str]:
    return evict_by(lambda found: found.st_atime_ns, root, keep)


def by_mtime(root: str, keep: int) -> list[str]:
    return evict_by(lambda found: found.st_mtime_ns, root, keep)


def by_watermark(root: str, last: str) -> int:
    """Evict, looking at the file system's room, until the writer is past *last*; how many were evicted."""
    count = 0
    while not os.path.exists(f"{root}/{last}"):
        room = os.statvfs(root)
        assert 0 <= room.f_bavail <= room.f_bfree <= room.f_blocks
        count += len(by_mtime(root, KEEP))
    return count


def test_a_tool_beside_a_writer(mnt: Mounted, engine: Callable[[], Executor]) -> None:
    root = str(mnt.point)
    names = [f"{number:04}" for number in range(BLOCKS)]
    writer, tool = engine(), engine()
    evicted = tool.submit(by_watermark, root, names[-1])
    writer.submit(store, root, names).result()
    assert evicted.result() > 0
    tool.submit(by_mtime, root, KEEP).result()
    left = os.listdir(root)
    assert sorted(left) == names[-KEEP:]
    assert {name: (mnt / name).read_bytes() for name in left} == {name: content(name, BLOCK) for name in left}
    same_on_disk(mnt, {name: content(name, BLOCK) for name in left})
    assert mnt.stats()["stages"][0]["used"] <= KEEP * BLOCK


def test_the_least_recently_used_goes_first(mnt: Mounted, engine: Callable[[], Executor]) -> None:
    root = str(mnt.point)
    names = [f"{number:02}" for number in range(12)]
    tool = engine()
    tool.submit(store, root, names).result()
    mnt.flush()
    for age, name in enumerate(names):
        # Engines mark a hit by the time of access alone.
        found = (mnt / name).stat()
        os.utime(mnt / name, ns=(found.st_atime_ns - age * NS, found.st_mtime_ns))
    assert tool.submit(by_atime, root, 8).result() == [*reversed(names[8:])]
    mnt.umount()
    mnt.mount()
    # The times of access outlive the mount.
    assert tool.submit(by_atime, root, 4).result() == [*reversed(names[4:8])]
    same_on_disk(mnt, {name: content(name, BLOCK) for name in names[:4]})


def test_unlink_of_a_block_that_is_being_replaced(mnt: Mounted) -> None:
    path = mnt / "block"
    path.write_bytes(b"old")
    with SteppedWriter() as writer:
        assert writer.step("open", path) == 0
        assert writer.step("write", b"new".hex(), BLOCK) == 0
        assert path.read_bytes() == b"old"
        path.unlink()
        assert not path.exists()
        assert writer.step("close") == 0
    # The tool saw the old version and unlinked that.
    assert path.read_bytes() == b"new" * BLOCK
    same_on_disk(mnt, {"block": b"new" * BLOCK})
