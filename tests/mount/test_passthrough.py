"""The kernel reads published blocks by itself: fast, and right beside everything else that goes on."""

from __future__ import annotations

import mmap
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.mounted import Mounted

MIB = 1 << 20


@contextmanager
def stopped(mnt: Mounted) -> Iterator[None]:
    """The daemon can answer nothing; a test that waits for it all the same is freed after a while, and fails."""
    pid = int(mnt.status()["pid"])
    freed = threading.Timer(20, os.kill, (pid, signal.SIGCONT))
    os.kill(pid, signal.SIGSTOP)
    freed.start()
    try:
        yield
        assert freed.is_alive(), "this waited for the daemon"
    finally:
        freed.cancel()
        os.kill(pid, signal.SIGCONT)


def test_reads_do_not_need_the_daemon(mnt: Mounted) -> None:
    data = os.urandom(5 * MIB + 3)
    (mnt / "x").write_bytes(data)
    assert mnt.stats()["data_path"] == "passthrough"
    first, second = (os.open(mnt / "x", os.O_RDONLY) for _ in range(2))
    with mmap.mmap(first, 0, mmap.MAP_SHARED, mmap.PROT_READ) as mapped, stopped(mnt):
        assert os.pread(first, 6 * MIB, 0) == data
        assert os.pread(second, 100, 5 * MIB) == data[5 * MIB :]
        assert mapped[:] == data
        os.close(first)  # no FLUSH
    os.close(second)
    assert mnt.stats()["open_files"] == 0


def test_a_block_served_from_disk_too(make_mount: Callable[..., Mounted]) -> None:
    mnt = make_mount(mount=False, cache_buffer_capacity_gb=4 / 1024)
    data = os.urandom(9 * MIB)
    (mnt.storage / "large").write_bytes(data)
    mnt.mount()
    fd = os.open(mnt / "large", os.O_RDONLY)
    with stopped(mnt):
        assert os.pread(fd, 10 * MIB, 0) == data
    os.close(fd)


def test_without(make_mount: Callable[..., Mounted]) -> None:
    mnt = make_mount(passthrough=False)
    data = os.urandom(5 * MIB + 3)
    (mnt / "x").write_bytes(data)
    assert (mnt / "x").read_bytes() == data
    status = mnt.status()
    assert status["data_path"] == "daemon"
    assert "switched off" in status["data_path_reason"]


def test_mount_options(make_mount: Callable[..., Mounted]) -> None:
    mnt = make_mount(mount=False)
    mnt.mount("ro,noatime")
    assert mnt.status()["data_path"] == "passthrough"
    with pytest.raises(OSError, match="Read-only"):
        (mnt / "x").write_bytes(b"")
    mnt.umount()
    mnt.mount("fsname=mine")
    assert f"{mnt.point} rw" in Path("/proc/self/mountinfo").read_text()
    assert " - fuse.ucmfs mine " in Path("/proc/self/mountinfo").read_text()
    (mnt / "x").write_bytes(b"data")
    assert (mnt / "x").read_bytes() == b"data"


@pytest.mark.parametrize("passthrough", [True, False])
def test_readers_beside_a_writer_in_place(make_mount: Callable[..., Mounted], passthrough: bool) -> None:
    mnt = make_mount(passthrough=passthrough)
    old = os.urandom(MIB)
    (mnt / "x").write_bytes(old)
    reader = os.open(mnt / "x", os.O_RDONLY)
    writer = os.open(mnt / "x", os.O_RDWR)
    assert os.pread(writer, MIB, 0) == old
    os.pwrite(writer, b"new", 0)
    assert os.pread(writer, 4, 0) == b"new" + old[3:4]
    late = os.open(mnt / "x", os.O_RDONLY)  # of the writing process: it sees what it writes
    assert os.pread(late, 3, 0) == b"new"
    if passthrough:
        assert os.pread(reader, MIB, 0) == old
    os.close(writer)
    assert (mnt / "x").read_bytes() == b"new" + old[3:]
    if passthrough:
        assert os.pread(reader, MIB, 0) == old
    for fd in (late, reader):
        os.close(fd)
    assert (mnt / "x").read_bytes() == b"new" + old[3:]


@pytest.mark.parametrize("size", [0.125, 4 / 1024])
def test_a_reader_before_the_writer_is_done(make_mount: Callable[..., Mounted], size: float) -> None:
    """In a small cache the daemon writes: the writer's open is cached, and so is that of its process's reader."""
    mnt = make_mount(cache_buffer_capacity_gb=size)
    writer = os.open(mnt / "x", os.O_RDWR | os.O_CREAT)
    os.write(writer, b"data")
    reader = os.open(mnt / "x", os.O_RDONLY)
    assert os.read(reader, 10) == b"data"
    os.close(writer)
    assert (mnt / "x").read_bytes() == b"data"
    os.close(reader)
    last = os.open(mnt / "x", os.O_RDONLY)
    with stopped(mnt):
        assert os.pread(last, 10, 0) == b"data"
    os.close(last)


def test_many_opens_at_once_and_after_another(mnt: Mounted) -> None:
    blocks = {f"{number}": os.urandom(10_000) for number in range(50)}
    for name, data in blocks.items():
        (mnt / name).write_bytes(data)
    wrong: list[str] = []

    def read() -> None:
        for _ in range(10):
            for name, data in blocks.items():
                if (mnt / name).read_bytes() != data:
                    wrong.append(name)

    threads = [threading.Thread(target=read) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert mnt.stats()["unexpected"] == 0


def test_the_relay_ends_with_the_mount(mnt: Mounted) -> None:
    relay = os.pidfd_open(mnt.status()["relay_pid"])
    mnt.umount()
    mnt.wait_exit(relay)


def test_a_dead_relay_ends_the_mount_in_order(mnt: Mounted) -> None:
    mnt.expect("the relay .* is gone")
    (mnt / "x").write_bytes(b"data")
    status = mnt.status()
    daemon = os.pidfd_open(status["pid"])
    os.kill(status["relay_pid"], signal.SIGKILL)
    mnt.wait_exit(daemon)
    assert not mnt.is_mounted
    assert (mnt.storage / "x").read_bytes() == b"data"


def test_the_relay_is_small(mnt: Mounted) -> None:
    pid = mnt.status()["relay_pid"]
    with open(f"/proc/{pid}/status") as status:
        resident = next(int(line.split()[1]) for line in status if line.startswith("VmRSS:"))
    assert resident < 30 * 1024
