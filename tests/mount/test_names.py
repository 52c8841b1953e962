"""Names that the relay answers for: those that are not there, and those of blocks that were written lately."""

from __future__ import annotations

import contextlib
import functools
import mmap
import os
import random
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.mount.test_passthrough import stopped
from tests.mounted import Mounted
from tests.processes import has_exited, in_child
from ucm.store.pipeline.connector import UcmPipelineStore

LONG = {"consistency_ttl": 30.0}


def miss_until_known(mnt: Mounted, directory: Path, known: int = 1) -> None:
    """Miss names of *directory* until the relay answers for *known* directories."""
    number, deadline = 0, time.monotonic() + 20
    while mnt.status()["listed_directories"] < known:
        number += 1
        assert not (directory / f"missing{number}").exists()
        assert time.monotonic() < deadline


def test_a_missing_name_needs_no_daemon(make_mount: Callable[..., Mounted]) -> None:
    mnt = make_mount(**LONG)
    (mnt / "d").mkdir()
    (mnt / "d/there").write_bytes(b"data")
    miss_until_known(mnt, mnt / "d")
    with stopped(mnt):
        for number in range(100):
            assert not (mnt / f"d/{number}").exists()
    assert (mnt / "d/there").read_bytes() == b"data"
    (mnt / "d/5").write_bytes(b"new")
    assert (mnt / "d/5").read_bytes() == b"new"


def test_what_was_just_written_is_found_without_the_daemon(make_mount: Callable[..., Mounted]) -> None:
    mnt = make_mount(**LONG)
    miss_until_known(mnt, mnt.point)
    data = os.urandom(1 << 20)
    (mnt / "x.tmp").write_bytes(data)
    os.rename(mnt / "x.tmp", mnt / "x")
    (mnt / "y").write_bytes(data[:5000])
    os.chmod(mnt / "y", 0o600)
    os.utime(mnt / "y", ns=(10**18, 2 * 10**18 + 5))
    assert mnt.status()["inodes"] > 2  # all of that is done
    with stopped(mnt):
        assert (mnt / "x").read_bytes() == data
        found = os.stat(mnt / "y")
        assert (found.st_size, found.st_mode & 0o777, found.st_mtime_ns) == (5000, 0o600, 2 * 10**18 + 5)


def test_each_way_to_make_a_name_is_seen_at_once(make_mount: Callable[..., Mounted]) -> None:
    mnt = make_mount(**LONG)
    d = mnt / "d"
    d.mkdir()
    (mnt / "elsewhere").mkdir()
    (mnt / "elsewhere/x").write_bytes(b"x")

    def write(path: Path) -> None:
        path.write_bytes(b"x")

    def write_beside(path: Path) -> None:
        write(path.with_suffix(".tmp"))
        os.rename(path.with_suffix(".tmp"), path)

    def move_in(path: Path) -> None:
        write(mnt / "other")
        os.rename(mnt / "other", path)

    def move_a_directory_in(path: Path) -> None:
        (mnt / "dir").mkdir()
        os.rename(mnt / "dir", path)

    ways = (write, write_beside, move_in, os.mkdir, os.mknod, move_a_directory_in)
    for turn, make in enumerate(ways):
        path = d / f"{make.__name__}{turn}"
        miss_until_known(mnt, d)
        assert not path.exists()
        make(path)
        assert path.exists(), make
        assert path.name in os.listdir(d), make
        # Also to who did not make it.
        assert mnt.ucmfs("lookup", mnt.point, path, check=False).returncode == (0 if path.is_file() else 1), make
    miss_until_known(mnt, mnt.point, 2)
    os.rename(d, mnt / "renamed")
    assert not d.exists()
    assert (mnt / "renamed/write0").read_bytes() == b"x"
    os.rename(mnt / "elsewhere", d)
    assert (d / "x").read_bytes() == b"x"
    assert not (d / "write0").exists()


def test_names_made_over_the_socket(make_mount: Callable[..., Mounted]) -> None:
    mnt = make_mount(**LONG)
    with UcmPipelineStore({"mount_point": str(mnt.point)}) as store:
        for block in (b"id", b"id2"):
            path = mnt / f"{block.hex()[:3]}/{block.hex()}"
            miss_until_known(mnt, mnt.point)
            if path.parent.exists():
                miss_until_known(mnt, path.parent, 2)
            assert not path.exists()
            store.wait(store.dump([block], [0], [b"data"]))
            assert path.read_bytes() == b"data"


def test_what_others_make_below_is_seen_in_time(make_mount: Callable[..., Mounted]) -> None:
    mnt = make_mount(consistency_ttl=0.5)
    miss_until_known(mnt, mnt.point)
    (mnt.storage / "x").write_bytes(b"data")
    made = time.monotonic()
    while not (mnt / "x").exists():
        assert time.monotonic() < made + 20
    assert (mnt / "x").read_bytes() == b"data"


def test_what_the_relay_gave_is_forgotten_with_it(make_mount: Callable[..., Mounted]) -> None:
    """The daemon knows nothing of what was looked up in the relay; all the same, no inode is left or lost."""
    mnt = make_mount(consistency_ttl=0.0001)
    before = mnt.status()["inodes"]
    for number in range(20):
        (mnt / f"{number}").write_bytes(b"data")
    for _ in range(50):
        for number in range(20):
            assert (mnt / f"{number}").read_bytes() == b"data"
    for number in range(20):
        os.unlink(mnt / f"{number}")
    deadline = time.monotonic() + 20
    while mnt.status()["inodes"] != before:
        Path("/proc/sys/vm/drop_caches").write_text("2")
        assert time.monotonic() < deadline, mnt.status()["inodes"]


def work(mnt: Path, number: int, go_on: Callable[[int], bool]) -> None:
    """Make, rename, remove and miss names of one's own, in directories that all share; each is as it was left."""
    chance = random.Random(number)
    there: dict[str, bytes] = {}
    names = [f"d{directory}/{number}-{name}" for directory in range(3) for name in range(6)]
    turn = 0
    while go_on(turn):
        turn += 1
        name, other = chance.sample(names, 2)
        match chance.choice(["write", "rename", "remove", "miss", "list"]):
            case "write":
                there[name] = b"%d-" % turn * chance.randrange(1, 2000)
                (mnt / name).write_bytes(there[name])
            case "rename" if name in there:
                os.rename(mnt / name, mnt / other)
                there[other] = there.pop(name)
            case "remove" if name in there:
                os.unlink(mnt / name)
                del there[name]
            case "miss":
                assert not (mnt / f"{name}-none{turn}").exists()
            case "list":
                directory, mine = name.partition("/")[0], f"{number}-"
                listed = {f"{directory}/{entry}" for entry in os.listdir(mnt / directory) if entry.startswith(mine)}
                assert listed == {path for path in there if path.startswith(directory)}
        for path in (name, other):
            if path in there:
                assert os.stat(mnt / path).st_size == len(there[path]), path
                assert (mnt / path).read_bytes() == there[path], path
            else:
                with contextlib.suppress(FileNotFoundError):
                    os.stat(mnt / path)
                    raise AssertionError(f"{path} is there")


@pytest.mark.parametrize("kills", [0, 3])
def test_names_at_random(mnt: Mounted, kills: int) -> None:
    for directory in range(3):
        (mnt / f"d{directory}").mkdir()
    counts = memoryview(mmap.mmap(-1, 4096)).cast("Q")

    def go_on(number: int, turn: int) -> bool:
        counts[number] = turn
        return not counts[3]

    processes = [in_child(functools.partial(work, mnt.point, n, functools.partial(go_on, n))) for n in range(3)]
    try:
        for kill in range(kills + 1):
            while min(counts[:3]) < 300 * (kill + 1) and not any(map(has_exited, processes)):
                os.sched_yield()
            if kill < kills:
                mnt.kill_daemon()
    finally:
        counts[3] = 1
        results = [os.waitpid(process, 0)[1] for process in processes]
    assert results == [0] * 3
    assert mnt.stats()["unexpected"] == 0
