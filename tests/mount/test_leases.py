"""Blocks that were opened lately are opened without the daemon, and everything else stays right."""

from __future__ import annotations

import contextlib
import functools
import mmap
import os
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.mount.test_passthrough import stopped
from tests.mounted import Mounted
from tests.processes import has_exited, in_child
from ucm.store.pipeline.connector import UcmPipelineStore

MIB = 1 << 20


def used(mnt: Mounted) -> int:
    return int(mnt.stats()["stages"][0]["used"])


def open_again(path: Path) -> int:
    """A second open, which is the relay's where there is a lease."""
    os.close(os.open(path, os.O_RDONLY))
    return os.open(path, os.O_RDONLY)


def test_a_leased_block_is_opened_and_read_without_the_daemon(mnt: Mounted) -> None:
    data = os.urandom(3 * MIB)
    (mnt / "x").write_bytes(data)
    os.stat(mnt / "x")
    first = open_again(mnt / "x")
    hits = mnt.stats()["hits"]
    os.stat(mnt / "x")  # what the kernel remembers of the name
    with stopped(mnt):
        fds = [os.open(mnt / "x", os.O_RDONLY) for _ in range(20)]
        assert all(os.pread(fd, 4 * MIB, 0) == data for fd in fds)
        for fd in fds[:15]:
            os.close(fd)
    stats = mnt.stats()
    assert stats["hits"] == hits + 20
    assert stats["open_files"] == 6
    for fd in (first, *fds[15:]):
        os.close(fd)
    assert mnt.stats()["open_files"] == 0


def test_a_lease_that_is_not_used_is_given_back(mnt: Mounted) -> None:
    (mnt / "x").write_bytes(bytes(MIB))
    os.close(open_again(mnt / "x"))
    os.unlink(mnt / "x")
    while used(mnt):
        pass
    (mnt / "y").write_bytes(bytes(MIB))
    mnt.flush()
    os.close(open_again(mnt / "y"))
    mnt.ucmfs("evict", mnt.point, "y")  # takes the lease back at once
    assert used(mnt) == 0
    assert (mnt / "y").read_bytes() == bytes(MIB)


def test_an_evicted_block_may_not_be_open(mnt: Mounted) -> None:
    (mnt / "x").write_bytes(b"data")
    mnt.flush()
    fd = open_again(mnt / "x")
    done = mnt.ucmfs("evict", mnt.point, "x", check=False)
    assert "it is open" in done.stderr
    os.close(fd)
    mnt.ucmfs("evict", mnt.point, "x")


def test_every_change_is_seen_at_once(mnt: Mounted) -> None:
    """Each way to change what a name stands for, under a lease that was just used, with a reader of the old."""

    def overwrite(path: Path, data: bytes) -> None:
        path.write_bytes(data)

    def replace(path: Path, data: bytes) -> None:
        (mnt / "y.tmp").write_bytes(data)
        os.rename(mnt / "y.tmp", path)

    def change_in_place(path: Path, data: bytes) -> None:
        with open(path, "r+b") as file:
            file.write(data)

    def truncate(path: Path, data: bytes) -> None:
        os.truncate(path, len(data) // 2)
        with open(path, "ab") as file:
            file.write(data[len(data) // 2 :])
        with open(path, "r+b") as file:
            file.write(data)

    def make_anew(path: Path, data: bytes) -> None:
        os.unlink(path)
        assert not path.exists()
        path.write_bytes(data)

    path = mnt / "x"
    before = b"0" * 5000
    path.write_bytes(before)
    for turn, change in enumerate((overwrite, replace, change_in_place, truncate, make_anew) * 3, 1):
        reader = open_again(path)
        assert os.pread(reader, 10_000, 0) == before
        data = b"%04d" % turn * 1250
        change(path, data)
        assert path.read_bytes() == data, change
        assert os.stat(path).st_size == len(data), change
        if change is not change_in_place and change is not truncate:
            assert os.pread(reader, 10_000, 0) == before, change
        os.close(reader)
        before = data
    mnt.flush()
    while used(mnt) != 8192:
        pass


def test_a_writer_maps_what_was_leased(mnt: Mounted) -> None:
    """A lease with nothing open is over before the writer opens: it may map the file as ever."""
    (mnt / "x").write_bytes(bytes(8192))
    os.close(open_again(mnt / "x"))
    with open(mnt / "x", "r+b") as file, mmap.mmap(file.fileno(), 0) as mapped:
        mapped[:4] = b"data"
    assert (mnt / "x").read_bytes() == b"data" + bytes(8188)


def test_changes_over_the_socket(mnt: Mounted) -> None:
    name = f"{b'id'.hex()[:3]}/{b'id'.hex()}"
    with UcmPipelineStore({"mount_point": str(mnt.point)}) as store:
        for turn in range(1, 20):
            data = bytes([turn]) * (4096 + turn)
            store.wait(store.dump([b"id"], [0], [data]))
            for _ in range(3):
                assert (mnt / name).read_bytes() == data


def test_leases_give_way_when_room_is_needed(make_mount: Callable[..., Mounted]) -> None:
    mnt = make_mount(cache_buffer_capacity_gb=16 / 1024)
    for number in range(4):
        (mnt / f"{number}").write_bytes(bytes(MIB))
        os.close(open_again(mnt / f"{number}"))
    for number in range(4, 40):
        (mnt / f"{number}").write_bytes(bytes([number]) * MIB)
        os.close(open_again(mnt / f"{number}"))
        assert used(mnt) <= 16 * MIB
    for number in range(4, 40):
        assert (mnt / f"{number}").read_bytes() == bytes([number]) * MIB


def test_leased_files_go_on_when_the_daemon_dies(mnt: Mounted) -> None:
    data = os.urandom(MIB)
    for name in ("kept", "removed"):
        (mnt / name).write_bytes(data)
    kept, removed = (open_again(mnt / name) for name in ("kept", "removed"))
    os.unlink(mnt / "removed")
    for _ in range(2):
        mnt.kill_daemon()
        assert os.pread(kept, MIB, 0) == os.pread(removed, MIB, 0) == data
        os.close(open_again(mnt / "kept"))
        assert mnt.stats()["open_files"] == 2
        assert used(mnt) == 2 * MIB
    os.close(removed)
    while used(mnt) != MIB:
        pass
    os.close(kept)
    mnt.flush()
    mnt.ucmfs("evict", mnt.point, "kept")
    assert used(mnt) == 0
    assert mnt.stats()["open_files"] == 0


class Worker:
    """A process that opens, reads, overwrites, replaces, removes and evicts a few blocks, at random.

    Each block has one process that changes it, which sees its own changes at once. Any reader sees one version, whole,
    and never one older than it saw before; what it holds open stays what it was.
    """

    SIZE = 700_000

    def __init__(self, mnt: Path, names: list[str], mine: list[str], seed: int) -> None:
        self.mnt = mnt
        self.names = names
        self.mine = mine
        self.chance = random.Random(seed)
        self.versions = dict.fromkeys(names, 0)
        """Which one must be seen at least; of its own blocks, exactly, 0 for none."""
        self.turn = 0
        self.held: list[tuple[int, bytes]] = []

    def content(self, version: int) -> bytes:
        return version.to_bytes(4, "little") * (self.SIZE // 4)

    def step(self) -> None:
        self.turn += 1
        name = self.chance.choice(self.names)
        actions = [self.read, self.read, self.read, self.hold, self.evict]
        if name in self.mine:
            actions += [self.write, self.replace, self.remove]
        self.chance.choice(actions)(name)
        while self.held and (len(self.held) > 2 or self.chance.random() < 0.2):
            self.let_go()

    def open(self, name: str) -> tuple[int, bytes] | None:
        try:
            fd = os.open(self.mnt / name, os.O_RDONLY)
        except FileNotFoundError:
            assert name not in self.mine or not self.versions[name]
            return None
        data = os.pread(fd, self.SIZE + 1, 0)
        seen = int.from_bytes(data[:4], "little")
        assert data == self.content(seen), "torn"
        if name in self.mine:
            assert seen == self.versions[name], (name, seen, self.versions[name])
        assert seen >= self.versions[name], (name, seen, self.versions[name])
        self.versions[name] = seen
        return fd, data

    def read(self, name: str) -> None:
        if (opened := self.open(name)) is not None:
            os.close(opened[0])

    def hold(self, name: str) -> None:
        if (opened := self.open(name)) is not None:
            self.held.append(opened)

    def let_go(self) -> None:
        fd, data = self.held.pop(0)
        assert os.pread(fd, self.SIZE + 1, 0) == data
        os.close(fd)

    def write(self, name: str) -> None:
        (self.mnt / name).write_bytes(self.content(self.turn))
        self.versions[name] = self.turn

    def replace(self, name: str) -> None:
        (self.mnt / f"{name}.tmp").write_bytes(self.content(self.turn))
        os.rename(self.mnt / f"{name}.tmp", self.mnt / name)
        self.versions[name] = self.turn

    def remove(self, name: str) -> None:
        (self.mnt / name).unlink(missing_ok=True)
        assert not (self.mnt / name).exists()
        self.versions[name] = 0

    def evict(self, name: str) -> None:
        with contextlib.suppress(OSError):  # dirty, open, or not there
            os.setxattr(self.mnt / name, "user.ucmfs.evict", b"1")


WORKERS = 3


@pytest.mark.parametrize("kills", [0, 3])
def test_everything_at_random(make_mount: Callable[..., Mounted], kills: int) -> None:
    """The Cache is too small for all blocks and what is held of them, and the daemon may be killed."""
    # Each may hold three and write one: there is room for that, or they would wait for each other.
    mnt = make_mount(cache_buffer_capacity_gb=10 / 1024)
    names = [f"b{number}" for number in range(15)]
    # Shared with the processes: the number of turns of each, and whether to end.
    shared = mmap.mmap(-1, 4096)
    counts = memoryview(shared).cast("Q")

    def work(number: int) -> None:
        worker = Worker(mnt.point, names, names[number::WORKERS], number)
        while not counts[WORKERS]:
            worker.step()
            counts[number] = worker.turn
        while worker.held:
            worker.let_go()

    processes = [in_child(functools.partial(work, number)) for number in range(WORKERS)]
    try:
        for kill in range(kills + 1):
            while min(counts[:WORKERS]) < 100 * (kill + 1) and not any(map(has_exited, processes)):
                os.sched_yield()
            if kill < kills:
                mnt.kill_daemon()
    finally:
        counts[WORKERS] = 1
        results = [os.waitpid(process, 0)[1] for process in processes]
    assert results == [0] * WORKERS
    stats = mnt.stats()
    assert stats["unexpected"] == 0
    assert stats["open_files"] == 0
    mnt.flush()
    for name in names:
        if (mnt / name).exists():
            mnt.ucmfs("evict", mnt.point, name)
    while used(mnt):
        pass
