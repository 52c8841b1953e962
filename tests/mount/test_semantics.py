"""What engines do to a directory (engines.md, "What follows"), over a real mount."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import xxhash

from tests.mounted import Mounted

MIB = 1 << 20


def direct_buffer(size: int, fill: bytes) -> mmap.mmap:
    buffer = mmap.mmap(-1, size)
    buffer.write((fill * (size // len(fill) + 1))[:size])
    return buffer


def test_a_file_is_what_was_written_and_goes_down(mnt: Mounted) -> None:
    data = os.urandom(3 * MIB + 17)
    (mnt / "a/b").mkdir(parents=True)
    (mnt / "a/b/c").write_bytes(data)
    assert (mnt / "a/b/c").read_bytes() == data
    mnt.flush()
    assert (mnt.storage / "a/b/c").read_bytes() == data
    assert mnt.status()["stages"][0]["dirty"] == 0


def test_an_existing_directory_is_mounted_as_it_is(make_mount: Callable[..., Mounted]) -> None:
    mnt = make_mount(mount=False)
    data = os.urandom(MIB + 1)
    (mnt.storage / "d").mkdir(mode=0o750)
    (mnt.storage / "d/old").write_bytes(data)
    (mnt.storage / "d/old").chmod(0o640)
    os.mkfifo(mnt.storage / "d/fifo")
    mnt.mount()
    assert os.listdir(mnt / "d") == ["old"]
    assert (mnt / "d").stat().st_mode & 0o777 == 0o750
    assert (mnt / "d/old").stat().st_mode & 0o777 == 0o640
    assert (mnt / "d/old").read_bytes() == data
    assert (mnt / "d/old").stat().st_mtime_ns == (mnt.storage / "d/old").stat().st_mtime_ns
    stats = mnt.stats()
    assert (stats["fills"], stats["misses"]) == (1, 1)


def test_rename_before_close_publishes_under_the_new_name(mnt: Mounted) -> None:
    fd = os.open(mnt / "x.tmp", os.O_RDWR | os.O_CREAT, 0o600)
    os.write(fd, b"half")
    os.rename(mnt / "x.tmp", mnt / "x")
    os.write(fd, b"whole")
    os.close(fd)
    assert (mnt / "x").read_bytes() == b"halfwhole"
    assert os.listdir(mnt.point) == ["x"]
    mnt.flush()
    assert sorted(os.listdir(mnt.storage)) == [".ucmfs", "x"]


def test_temporary_names_stay_in_memory_until_renamed(mnt: Mounted) -> None:
    names = ["k.tmp", ".tmpAb3x9Q", "k.tmp.1234", "k_9f3a.tmp"]
    for name in names:
        (mnt / name).write_bytes(b"x")
    mnt.flush()
    assert os.listdir(mnt.storage) == [".ucmfs"]
    os.rename(mnt / "k.tmp", mnt / "k")
    mnt.flush()
    assert sorted(os.listdir(mnt.storage)) == [".ucmfs", "k"]


def test_unlink_while_open_keeps_the_bytes(mnt: Mounted) -> None:
    data = os.urandom(MIB)
    (mnt / "x").write_bytes(data)
    with open(mnt / "x", "rb") as file:
        os.unlink(mnt / "x")
        assert os.listdir(mnt.point) == []
        assert not (mnt / "x").exists()
        assert os.fstat(file.fileno()).st_size == MIB
        assert file.read() == data
    mnt.flush()
    assert os.listdir(mnt.storage) == [".ucmfs"]


def test_unlink_of_a_file_being_written_drops_it(mnt: Mounted) -> None:
    fd = os.open(mnt / "x", os.O_RDWR | os.O_CREAT)
    os.write(fd, b"123")
    os.unlink(mnt / "x")
    os.write(fd, b"456")
    assert os.pread(fd, 10, 0) == b"123456"
    os.close(fd)
    assert os.listdir(mnt.point) == []
    assert mnt.stats()["stages"][0]["used"] == 0


def test_unlinking_a_clean_block_removes_it_everywhere(mnt: Mounted) -> None:
    (mnt / "x").write_bytes(b"1")
    mnt.flush()
    os.unlink(mnt / "x")
    assert os.listdir(mnt.storage) == [".ucmfs"]
    with pytest.raises(FileNotFoundError):
        os.unlink(mnt / "x")


def test_readers_keep_the_version_they_opened(mnt: Mounted) -> None:
    old, new = os.urandom(2 * MIB), os.urandom(MIB)
    (mnt / "x").write_bytes(old)
    with open(mnt / "x", "rb") as reader:
        with open(mnt / "x", "wb") as writer:
            writer.write(new)
        assert (mnt / "x").read_bytes() == new
        assert reader.read() == old
    (mnt / "y").write_bytes(old)
    with open(mnt / "x", "rb") as reader:
        os.rename(mnt / "y", mnt / "x")
        assert reader.read() == new
    assert (mnt / "x").read_bytes() == old


def test_writing_in_place(mnt: Mounted) -> None:
    data = bytearray(os.urandom(MIB))
    (mnt / "x").write_bytes(data)
    mnt.flush()
    with open(mnt / "x", "r+b") as file:
        file.seek(5000)
        file.write(b"changed")
        data[5000:5007] = b"changed"
    assert (mnt / "x").read_bytes() == data
    with open(mnt / "x", "ab") as file:
        file.write(b"more")
    assert (mnt / "x").read_bytes() == bytes(data) + b"more"
    os.truncate(mnt / "x", 100)
    assert (mnt / "x").read_bytes() == data[:100]
    mnt.flush()
    assert (mnt.storage / "x").read_bytes() == data[:100]


def test_rename_while_changing_in_place(mnt: Mounted) -> None:
    (mnt / "x").write_bytes(b"data")
    mnt.flush()
    with open(mnt / "x", "r+b", buffering=0) as file:
        file.write(b"DA")
        os.rename(mnt / "x", mnt / "y")
        assert os.listdir(mnt.point) == ["y"]
        file.write(b"TA")
    assert (mnt / "y").read_bytes() == b"DATA"
    assert os.listdir(mnt.point) == ["y"]
    mnt.flush()
    assert (mnt.storage / "y").read_bytes() == b"DATA"
    assert not (mnt.storage / "x").exists()


def test_opening_for_writing_without_writing_changes_nothing(mnt: Mounted) -> None:
    (mnt / "x").write_bytes(b"data")
    mnt.flush()
    before = (mnt / "x").stat()
    fd = os.open(mnt / "x", os.O_RDWR | os.O_CREAT)
    assert os.pread(fd, 10, 0) == b"data"
    os.close(fd)
    assert (mnt / "x").stat().st_mtime_ns == before.st_mtime_ns
    assert mnt.stats()["stages"][0]["dirty"] == 0


@pytest.mark.parametrize("size", [4096, 1 * MIB, 3 * MIB])
def test_direct_io_aligned_and_unaligned(mnt: Mounted, size: int) -> None:
    buffer = direct_buffer(size, os.urandom(4096))
    fd = os.open(mnt / "x", os.O_RDWR | os.O_CREAT | os.O_DIRECT)
    assert os.pwrite(fd, buffer, 0) == size
    assert os.pwrite(fd, buffer[:100], size) == 100
    os.close(fd)
    fd = os.open(mnt / "x", os.O_RDONLY | os.O_DIRECT)
    back = mmap.mmap(-1, size)
    assert os.preadv(fd, [back], 0) == size
    assert back[:] == buffer[:]
    assert os.pread(fd, 200, size) == buffer[:100]
    os.close(fd)
    fd = os.open(mnt / "x", os.O_RDONLY)
    fcntl.fcntl(fd, fcntl.F_SETFL, os.O_DIRECT)
    assert os.preadv(fd, [back], 0) == size
    os.close(fd)


def test_shared_and_private_mappings(mnt: Mounted) -> None:
    size = 2 * MIB
    fd = os.open(mnt / "x", os.O_RDWR | os.O_CREAT)
    os.ftruncate(fd, size)
    with mmap.mmap(fd, size, mmap.MAP_SHARED) as shared:
        shared[1000:1010] = b"0123456789"
        shared[-1:] = b"z"
    os.close(fd)
    data = (mnt / "x").read_bytes()
    assert (len(data), data[1000:1010], data[-1:]) == (size, b"0123456789", b"z")
    fd = os.open(mnt / "x", os.O_RDONLY)
    with mmap.mmap(fd, size, mmap.MAP_PRIVATE, mmap.PROT_READ) as private:
        assert private[:] == data
    os.close(fd)
    mnt.flush()
    assert (mnt.storage / "x").read_bytes() == data


def test_fallocate_is_refused_not_a_lie(mnt: Mounted) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    fd = os.open(mnt / "x", os.O_RDWR | os.O_CREAT)
    keep_size = 1
    assert libc.fallocate(fd, keep_size, ctypes.c_long(0), ctypes.c_long(16 * MIB)) == -1
    assert ctypes.get_errno() == errno.EOPNOTSUPP
    os.posix_fallocate(fd, 0, MIB)
    assert os.fstat(fd).st_size == MIB
    os.close(fd)


def test_sparse_files_take_the_room_they_use(mnt: Mounted) -> None:
    fd = os.open(mnt / "pool", os.O_RDWR | os.O_CREAT)
    os.ftruncate(fd, 1 << 34)
    os.pwrite(fd, b"x" * 4096, 1 << 33)
    assert os.pread(fd, 5, (1 << 33) - 2) == b"\0\0xxx"
    # At most a huge page.
    assert 4096 <= mnt.stats()["stages"][0]["used"] <= 2 * MIB
    os.unlink(mnt / "pool")
    os.close(fd)


def test_a_file_too_large_gets_enospc_from_write(mnt: Mounted) -> None:
    fd = os.open(mnt / "x", os.O_RDWR | os.O_CREAT)
    for _ in range(128):
        os.write(fd, b"x" * MIB)
    with pytest.raises(OSError, match="No space") as caught:
        os.pwrite(fd, b"x" * MIB, 128 * MIB)
    assert caught.value.errno == errno.ENOSPC
    os.unlink(mnt / "x")
    os.close(fd)
    assert mnt.stats()["stages"][0]["used"] == 0


def test_a_write_that_failed_can_be_mended(make_mount: Callable[..., Mounted]) -> None:
    mnt = make_mount(store_pipeline="Cache|Empty", cache_buffer_capacity_gb=8 / 1024, write_back_deadline=0.1)
    for number in range(6):
        (mnt / f"pinned{number}").write_bytes(b"x" * MIB)
        os.setxattr(mnt / f"pinned{number}", "user.ucmfs.pin", b"1")
    fd = os.open(mnt / "x", os.O_RDWR | os.O_CREAT)
    os.pwrite(fd, b"x" * 2 * MIB, 0)
    with pytest.raises(OSError, match="No space"):
        os.pwrite(fd, b"x" * MIB, 2 * MIB)
    os.setxattr(mnt / "pinned0", "user.ucmfs.pin", b"0")
    assert os.pwrite(fd, b"x" * MIB, 2 * MIB) == MIB
    os.close(fd)
    assert (mnt / "x").read_bytes() == b"x" * 3 * MIB


def test_flags_that_engines_use(mnt: Mounted) -> None:
    os.close(os.open(mnt / "x", os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_TRUNC, 0o640))
    assert (mnt / "x").stat().st_mode & 0o777 == 0o640
    with pytest.raises(FileExistsError):
        os.open(mnt / "x", os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    os.close(os.open(mnt / "x", os.O_RDONLY | os.O_NOATIME))
    with pytest.raises(IsADirectoryError):
        os.open(mnt.point, os.O_WRONLY)
    with pytest.raises(FileNotFoundError):
        os.open(mnt / "no/such", os.O_WRONLY | os.O_CREAT)
    assert os.access(mnt / "x", os.R_OK | os.W_OK)
    assert not os.access(mnt / "x", os.X_OK)
    assert not os.access(mnt / "y", os.F_OK)


def test_times(mnt: Mounted) -> None:
    (mnt / "x").write_bytes(b"data")
    mnt.flush()
    os.utime(mnt / "x", ns=(1_000_000_007, 2_000_000_009))
    assert ((mnt / "x").stat().st_atime_ns, (mnt / "x").stat().st_mtime_ns) == (1_000_000_007, 2_000_000_009)
    with open(mnt / "x", "rb") as file:
        # atime alone, as eviction tools set it
        os.utime(mnt / "x", ns=(5_000_000_000, 2_000_000_009))
        assert file.read() == b"data"
    assert (mnt / "x").stat().st_atime_ns == 5_000_000_000
    assert (mnt.storage / "x").stat().st_mtime_ns == 2_000_000_009


def test_modes_and_owners_go_down(mnt: Mounted) -> None:
    (mnt / "x").write_bytes(b"data")
    os.chmod(mnt / "x", 0o604)
    os.chown(mnt / "x", 1234, 567)
    mnt.flush()
    for path in (mnt / "x", mnt.storage / "x"):
        found = path.stat()
        assert (found.st_mode & 0o777, found.st_uid, found.st_gid) == (0o604, 1234, 567)
    os.chmod(mnt / "x", 0o600)
    assert (mnt.storage / "x").stat().st_mode & 0o777 == 0o600


def test_permissions_are_checked(mnt: Mounted) -> None:
    (mnt / "secret").write_bytes(b"data")
    os.chmod(mnt / "secret", 0o600)
    script = f"import os; os.setuid(65534); os.open({str(mnt / 'secret')!r}, os.O_RDONLY)"
    for parent in mnt.point.parents:
        if str(parent).startswith("/tmp/"):
            parent.chmod(0o755)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert "PermissionError" in done.stderr


def test_xattrs_survive_rename_and_go_down(mnt: Mounted) -> None:
    fd = os.open(mnt / "x.tmp", os.O_WRONLY | os.O_CREAT)
    os.setxattr(fd, "user.model", b"llama")
    os.write(fd, b"data")
    os.close(fd)
    os.setxattr(mnt / "x.tmp", "user.more", b"1")
    os.rename(mnt / "x.tmp", mnt / "x")
    assert os.getxattr(mnt / "x", "user.model") == b"llama"
    mnt.flush()
    assert os.getxattr(mnt.storage / "x", "user.model") == b"llama"
    assert os.getxattr(mnt.storage / "x", "user.more") == b"1"
    os.removexattr(mnt / "x", "user.more")
    with pytest.raises(OSError, match="No data") as caught:
        os.getxattr(mnt.storage / "x", "user.more")
    assert caught.value.errno == errno.ENODATA
    with pytest.raises(OSError, match="No data"):
        os.removexattr(mnt / "x", "user.more")
    with pytest.raises(FileExistsError):
        os.setxattr(mnt / "x", "user.model", b"2", os.XATTR_CREATE)


def test_own_xattrs_tell_and_act(mnt: Mounted) -> None:
    (mnt / "x").write_bytes(b"data")

    def xattr(key: str) -> str:
        return os.getxattr(mnt / "x", f"user.ucmfs.{key}").decode()

    assert xattr("digest") == xxhash.xxh3_128_hexdigest(b"data")
    mnt.flush()
    assert (xattr("stage"), xattr("state")) == ("Cache,Posix", "clean")
    assert os.getxattr(mnt.storage / "x", "user.ucmfs.digest").decode() == xattr("digest")
    os.setxattr(mnt / "x", "user.ucmfs.pin", b"1")
    assert xattr("pin") == "1"
    with pytest.raises(OSError, match="busy"):
        os.setxattr(mnt / "x", "user.ucmfs.evict", b"1")
    os.setxattr(mnt / "x", "user.ucmfs.pin", b"0")
    os.setxattr(mnt / "x", "user.ucmfs.evict", b"1")
    assert xattr("stage") == "Posix"
    os.setxattr(mnt / "x", "user.ucmfs.prefetch", b"1")
    assert xattr("stage") == "Cache,Posix"
    with pytest.raises(PermissionError):
        os.setxattr(mnt / "x", "user.ucmfs.digest", b"0")


def test_directories(mnt: Mounted) -> None:
    deep = mnt / "a/b/c/d"
    deep.mkdir(parents=True)
    (deep / "x").write_bytes(b"1")
    with pytest.raises(OSError, match="not empty"):
        os.rmdir(mnt / "a/b")
    with pytest.raises(FileExistsError):
        os.mkdir(deep)
    mnt.flush()
    os.rename(mnt / "a", mnt / "z")
    assert (mnt / "z/b/c/d/x").read_bytes() == b"1"
    assert (mnt.storage / "z/b/c/d/x").read_bytes() == b"1"
    assert not (mnt / "a").exists()
    (mnt / "z/b/c/d/dirty").write_bytes(b"2")
    os.rename(mnt / "z/b", mnt / "z/bb")
    assert sorted(os.listdir(mnt / "z/bb/c/d")) == ["dirty", "x"]
    mnt.flush()
    assert (mnt.storage / "z/bb/c/d/dirty").read_bytes() == b"2"
    for name in ("dirty", "x"):
        os.unlink(mnt / f"z/bb/c/d/{name}")
    for name in ("z/bb/c/d", "z/bb/c", "z/bb", "z"):
        os.rmdir(mnt / name)
    assert os.listdir(mnt.point) == []
    assert os.listdir(mnt.storage) == [".ucmfs"]


def test_4096_directories_at_once(mnt: Mounted) -> None:
    for number in range(4096):
        (mnt / f"{number:03x}").mkdir()
    assert len(os.listdir(mnt.point)) == 4096


def test_names(mnt: Mounted) -> None:
    longest = "n" * 255
    odd = os.fsdecode(b"b\xff\xfe ")
    for name in (longest, odd, "ünïcode", "a b\nc"):
        (mnt / name).write_bytes(name.encode("utf-8", "surrogateescape"))
    with pytest.raises(OSError, match="too long") as caught:
        (mnt / ("n" * 256)).write_bytes(b"")
    assert caught.value.errno == errno.ENAMETOOLONG
    mnt.flush()
    for name in (longest, odd, "ünïcode", "a b\nc"):
        assert (mnt.storage / name).read_bytes() == name.encode("utf-8", "surrogateescape")


def test_links_are_refused_plainly(mnt: Mounted) -> None:
    (mnt / "x").write_bytes(b"")
    with pytest.raises(PermissionError):
        os.link(mnt / "x", mnt / "y")
    with pytest.raises(PermissionError):
        os.symlink("x", mnt / "y")
    with pytest.raises(PermissionError):
        os.mkfifo(mnt / "y")


def test_what_is_not_ours_to_change_in_dot_ucmfs(mnt: Mounted) -> None:
    assert ".ucmfs" not in os.listdir(mnt.point)
    assert sorted(os.listdir(mnt / ".ucmfs")) == ["config.yaml", "log", "metrics", "sock", "stats", "stats.json"]
    for act in (
        lambda: os.unlink(mnt / ".ucmfs/stats"),
        lambda: os.rename(mnt / ".ucmfs", mnt / "u"),
        lambda: os.rmdir(mnt / ".ucmfs"),
        lambda: (mnt / ".ucmfs/new").write_bytes(b""),
        lambda: (mnt / ".ucmfs/stats").write_bytes(b""),
    ):
        with pytest.raises(PermissionError):
            act()
    assert "serving Cache|Posix" in (mnt / ".ucmfs/log").read_text()
    assert "store_pipeline: Cache|Posix" in (mnt / ".ucmfs/config.yaml").read_text()
    assert "# TYPE ucmfs_hits_total counter" in (mnt / ".ucmfs/metrics").read_text()


def test_statfs_tells_of_the_last_stage(mnt: Mounted) -> None:
    here, there = os.statvfs(mnt.point), os.statvfs(mnt.storage)
    assert here.f_bsize == 4096
    assert here.f_blocks * here.f_frsize == there.f_blocks * there.f_frsize
    assert abs(here.f_bavail * here.f_frsize - there.f_bavail * there.f_frsize) < 1 << 30


def test_flock_between_processes(mnt: Mounted) -> None:
    with open(mnt / "lock", "w") as ours:
        fcntl.flock(ours, fcntl.LOCK_EX)
        script = (
            "import fcntl, sys\n"
            f"f = open({str(mnt / 'lock')!r}, 'w')\n"
            "try: fcntl.flock(f, fcntl.LOCK_EX | fcntl.LOCK_NB)\n"
            "except BlockingIOError: sys.exit(7)\n"
        )
        assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 7


def test_a_listing_of_100_000_names_is_streamed(make_mount: Callable[..., Mounted]) -> None:
    mnt = make_mount(mount=False)
    directory = mnt.storage / "many"
    directory.mkdir()
    for number in range(100_000):
        os.close(os.open(directory / f"{number:06}", os.O_CREAT | os.O_WRONLY))
    mnt.mount()
    (mnt / "many/new").write_bytes(b"1")
    (mnt / "many/000000").write_bytes(b"2")
    seen = 0
    with os.scandir(mnt / "many") as entries:
        first = next(entries)
        # The daemon has not read the directory to its end for the first entry.
        assert mnt.stats()["inodes"] < 20_000
        seen += 1 + sum(1 for _ in entries)
    assert first.name
    assert seen == 100_001
    names = os.listdir(mnt / "many")
    assert len(names) == len(set(names)) == 100_001


def test_cache_only(make_mount: Callable[..., Mounted]) -> None:
    mnt = make_mount(store_pipeline="Cache|Empty", cache_buffer_capacity_gb=0.0625)
    for number in range(100):
        (mnt / f"{number}").write_bytes(bytes([number]) * MIB)
    stats = mnt.stats()
    assert stats["eviction_count"] >= 36
    assert stats["stages"][0]["used"] <= 64 * MIB
    assert (mnt / "99").read_bytes() == bytes([99]) * MIB
    assert not Path(mnt / "0").exists()
    mnt.umount()
    mnt.mount()
    assert (mnt / "99").read_bytes() == bytes([99]) * MIB
