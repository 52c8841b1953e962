"""The kernel writes blocks by itself: what it does not tell of is seen all the same, and the bound is kept."""

from __future__ import annotations

import ctypes
import mmap
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from tests.mount.test_passthrough import stopped
from tests.mounted import Mounted

MIB = 1 << 20

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *3 * [ctypes.c_int], ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


@contextmanager
def mapping(fd: int, size: int) -> Iterator[int]:
    """The address of a shared mapping. Python's own would keep a descriptor."""
    address = _libc.mmap(None, size, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, fd, 0)
    assert address not in (None, ctypes.c_void_p(-1).value)
    try:
        yield address
    finally:
        _libc.munmap(address, size)


def used(mnt: Mounted) -> int:
    return int(mnt.stats()["stages"][0]["used"])


def others_see(mnt: Mounted, name: str) -> bool:
    """Whether a process that is no relative of the writer finds *name*."""
    return mnt.lookup(name)[0]


def test_writes_do_not_need_the_daemon(mnt: Mounted) -> None:
    data = os.urandom(5 * MIB + 3)
    assert mnt.status()["write_path"] == "passthrough"
    fd = os.open(mnt / "x", os.O_RDWR | os.O_CREAT)
    with stopped(mnt):
        assert os.write(fd, data) == len(data)
        assert os.pread(fd, 6 * MIB, 0) == data
        assert os.pwrite(fd, b"changed", MIB) == 7
        with mapping(fd, 4096) as address:
            ctypes.memset(address, ord("m"), 10)
    os.close(fd)
    data = b"m" * 10 + data[10:MIB] + b"changed" + data[MIB + 7 :]
    assert (mnt / "x").read_bytes() == data
    mnt.flush()
    assert (mnt.storage / "x").read_bytes() == data
    assert mnt.stats()["unexpected"] == 0


def test_appends_and_direct_writes(mnt: Mounted) -> None:
    fd = os.open(mnt / "x", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    other = os.open(mnt / "x", os.O_WRONLY | os.O_APPEND)
    os.write(fd, b"one")
    os.write(other, b"two")
    os.close(other)
    os.write(fd, b"three")
    os.close(fd)
    assert (mnt / "x").read_bytes() == b"onetwothree"
    page = mmap.mmap(-1, 8192)
    page[:5] = b"data!"
    fd = os.open(mnt / "y", os.O_WRONLY | os.O_CREAT | os.O_DIRECT)
    assert os.pwrite(fd, page, 4096) == 8192
    os.close(fd)
    assert (mnt / "y").read_bytes() == bytes(4096) + page[:]


def test_what_is_allocated_ahead_is_given_back(mnt: Mounted) -> None:
    (mnt / "large").write_bytes(bytes(6 * MIB))
    assert used(mnt) == 6 * MIB
    fd = os.open(mnt / "small", os.O_WRONLY | os.O_CREAT)
    assert used(mnt) == 12 * MIB
    os.write(fd, b"data")
    os.utime(fd, ns=(10**18, 10**18))
    os.close(fd)
    assert used(mnt) == 6 * MIB + 4096
    assert os.stat(mnt / "small").st_mtime_ns == 10**18
    assert (mnt / "small").read_bytes() == b"data"
    fd = os.open(mnt / "dropped", os.O_WRONLY | os.O_CREAT)
    os.unlink(mnt / "dropped")
    os.close(fd)
    assert used(mnt) == 6 * MIB + 4096


def test_a_mapping_outlives_the_close(mnt: Mounted) -> None:
    """What its writer can still change is not published."""
    fd = os.open(mnt / "x", os.O_RDWR | os.O_CREAT)
    os.ftruncate(fd, 8192)
    with mapping(fd, 8192) as address:
        os.close(fd)
        assert os.stat(mnt / "x").st_size == 8192  # the writer sees it
        assert not others_see(mnt, "x")
        ctypes.memset(address, ord("a"), 8192)
        assert (mnt / "x").read_bytes() == b"a" * 8192
        assert not others_see(mnt, "x")
        ctypes.memset(address, ord("b"), 8192)
    assert os.listdir(mnt.point) == ["x"]
    assert others_see(mnt, "x")
    mnt.flush()
    assert (mnt.storage / "x").read_bytes() == b"b" * 8192


def test_a_mapping_outlives_the_close_and_the_daemon(mnt: Mounted) -> None:
    fd = os.open(mnt / "x", os.O_RDWR | os.O_CREAT)
    os.ftruncate(fd, 8192)
    with mapping(fd, 8192) as address:
        os.close(fd)
        mnt.kill_daemon()
        assert not others_see(mnt, "x")
        ctypes.memset(address, ord("a"), 8192)
    while not others_see(mnt, "x"):
        pass
    assert (mnt / "x").read_bytes() == b"a" * 8192


def test_a_mapped_file_is_renamed_and_opened_again(mnt: Mounted) -> None:
    fd = os.open(mnt / "x.tmp", os.O_RDWR | os.O_CREAT)
    os.ftruncate(fd, 8192)
    with mapping(fd, 8192) as address:
        os.close(fd)
        os.rename(mnt / "x.tmp", mnt / "x")
        ctypes.memset(address, ord("a"), 8192)
        fd = os.open(mnt / "x", os.O_WRONLY)
        os.pwrite(fd, b"end", 8189)
    assert not others_see(mnt, "x")
    os.close(fd)
    assert (mnt / "x").read_bytes() == b"a" * 8189 + b"end"
    assert others_see(mnt, "x")
    assert not others_see(mnt, "x.tmp")


def test_open_files_go_on_over_a_restart(mnt: Mounted) -> None:
    data = os.urandom(3 * MIB)
    fd = os.open(mnt / "x", os.O_RDWR | os.O_CREAT)
    os.write(fd, data[:MIB])
    for step in (1, 2):
        mnt.kill_daemon()
        os.write(fd, data[step * MIB : (step + 1) * MIB])
        # An open beside it has to be backed by the same file.
        assert (mnt / "x").read_bytes() == data[: (step + 1) * MIB]
    os.close(fd)
    assert (mnt / "x").read_bytes() == data
    mnt.flush()
    assert (mnt.storage / "x").read_bytes() == data


def full_of_dirty(make_mount: Callable[..., Mounted], left: int) -> Mounted:
    """A mount of 64 MiB, with all but *left* bytes dirty, 16 MiB of which are the margin."""
    mnt = make_mount(cache_buffer_capacity_gb=1 / 16, write_back_interval=3600.0, write_back_batch_size=10**6)
    # Below them a directory is in the way, so they stay dirty.
    mnt.expect("stays dirty", "not written back", "are left")
    for number in range((64 * MIB - left) // MIB):
        (mnt.storage / str(number)).mkdir()
        (mnt.storage / str(number) / "file").touch()
        (mnt / f"{number}.tmp").write_bytes(bytes([number]) * MIB)
    return mnt


def write_until_full(fd: int) -> int:
    """How many bytes were written before ENOSPC."""
    written = 0
    with suppress(OSError):
        while True:
            written += os.write(fd, bytes(MIB))
    with pytest.raises(OSError, match="No space left"):
        os.write(fd, bytes(MIB))
    return written


def test_a_writer_that_outruns_its_room_gets_enospc(make_mount: Callable[..., Mounted]) -> None:
    """The daemon is not told, but what has a hole is not published."""
    mnt = full_of_dirty(make_mount, 20 * MIB)
    mnt.expect("x: dropped, the cache was full", "beside: dropped, the cache was full")
    beside = os.open(mnt / "beside", os.O_WRONLY | os.O_CREAT)
    os.write(beside, b"fine")
    fd = os.open(mnt / "x", os.O_WRONLY | os.O_CREAT)
    written = write_until_full(fd)
    assert 16 * MIB <= written <= 20 * MIB
    os.pwrite(fd, b"over what is there", 0)
    os.close(fd)
    # Nobody knows which of them got the error.
    os.close(beside)
    assert not (mnt / "x").exists()
    assert not (mnt / "beside").exists()
    assert mnt.stats()["dropped"] == 2
    assert used(mnt) == 44 * MIB
    for number in range(44):
        assert (mnt / f"{number}.tmp").read_bytes() == bytes([number]) * MIB
    (mnt / "y").write_bytes(bytes(2 * MIB))
    assert (mnt / "y").read_bytes() == bytes(2 * MIB)


def test_the_doubt_outlives_the_daemon(make_mount: Callable[..., Mounted]) -> None:
    mnt = full_of_dirty(make_mount, 20 * MIB)
    mnt.expect("x: dropped, the cache was full")
    fd = os.open(mnt / "x", os.O_WRONLY | os.O_CREAT)
    with stopped(mnt):
        write_until_full(fd)
    mnt.kill_daemon()
    os.unlink(mnt / "0.tmp")
    os.close(fd)
    assert not (mnt / "x").exists()
    assert mnt.stats()["dropped"] == 1


def test_a_writer_within_its_room_is_published_whatever_others_do(make_mount: Callable[..., Mounted]) -> None:
    mnt = full_of_dirty(make_mount, 28 * MIB)
    files = [os.open(mnt / f"x{number}", os.O_WRONLY | os.O_CREAT) for number in range(8)]
    for number, fd in enumerate(files):
        os.write(fd, bytes([number]) * MIB)
        os.close(fd)
    for number in range(8):
        assert (mnt / f"x{number}").read_bytes() == bytes([number]) * MIB


def test_larger_files_than_before_push_out_what_is_clean(make_mount: Callable[..., Mounted]) -> None:
    """No writer of them is told that there is no room, and none of them is dropped."""
    mnt = make_mount(cache_buffer_capacity_gb=0.25)
    for turn in range(3):
        for number in range(240):
            (mnt / f"small{number}").write_bytes(bytes([turn]) * MIB)
        mnt.flush()
        large = bytes([turn + 100]) * (12 * MIB)
        threads = [threading.Thread(target=(mnt / f"large{n}").write_bytes, args=(large,)) for n in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for number in range(4):
            assert (mnt / f"large{number}").read_bytes() == large
            os.unlink(mnt / f"large{number}")
    assert mnt.stats()["dropped"] == 0


# The tmpfs


def test_the_tmpfs_is_as_large_as_the_cache_and_stays_with_what_it_has(make_mount: Callable[..., Mounted]) -> None:
    mnt = make_mount(cache_buffer_capacity_gb=0.125)
    (mnt / "x").write_bytes(b"data")
    mnt.umount()
    assert os.path.ismount(mnt.cache)
    assert os.statvfs(mnt.cache).f_blocks * 4096 == 128 * MIB
    for size in 0.25, 0.0625:
        mnt.config["cache_buffer_capacity_gb"] = size
        mnt.mount()
        assert os.statvfs(mnt.cache).f_blocks * 4096 == int(size * 1024) * MIB
        assert mnt.status()["stages"][0]["blocks"] == 1
        assert (mnt / "x").read_bytes() == b"data"
        mnt.umount()
    mnt.mount()
    os.unlink(mnt / "x")
    mnt.umount()
    assert not mnt.cache.exists()


def test_a_directory_with_files_stays_as_it_is(make_mount: Callable[..., Mounted]) -> None:
    mnt = make_mount(mount=False)
    (mnt.cache / "clean").mkdir(parents=True)
    (mnt.cache / "clean/x").write_bytes(b"data")
    mnt.mount()
    assert not os.path.ismount(mnt.cache)
    assert (mnt / "x").read_bytes() == b"data"
    (mnt / "y").write_bytes(b"more")
    assert (mnt / "y").read_bytes() == b"more"
    status = mnt.status()
    assert status["data_path"] == "passthrough"
    assert status["write_path"] == "daemon"
    assert "has files from before" in status["write_path_reason"]


def test_two_that_want_one_directory(make_mount: Callable[..., Mounted]) -> None:
    """The second is refused; the first keeps its tmpfs."""
    mnt = make_mount()
    (mnt / "x").write_bytes(b"data")
    other = make_mount(mount=False, cache_dir=str(mnt.cache))
    with pytest.raises(Exception, match="is in use by another process"):
        other.mount()
    other.expect("is in use by another process", "daemon")
    assert Path("/proc/self/mountinfo").read_text().count(f" {mnt.cache} ") == 1
    assert (mnt / "x").read_bytes() == b"data"


def test_the_embedded_client_takes_its_tmpfs_away(tmp_path: Path) -> None:
    program = f"""
import re
from pathlib import Path
from ucm.store.pipeline.connector import UcmPipelineStore

def mounted():
    return re.findall("/dev/shm/ucmfs-process-\\\\S+", Path("/proc/self/mountinfo").read_text())

before = mounted()
store = UcmPipelineStore({{"store_pipeline": "Cache|Posix", "storage_backends": {str(tmp_path)!r},
                          "cache_buffer_capacity_gb": 0.05}})
[directory] = set(mounted()) - set(before)
store.close()
assert mounted() == before and not Path(directory).exists()
"""
    subprocess.run([sys.executable, "-W", "error", "-c", program], check=True, timeout=60)
