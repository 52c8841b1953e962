"""More than fits: right bytes, the bound kept, errors that are true."""

from __future__ import annotations

import hashlib
import os
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.mounted import Mounted

MIB = 1 << 20


def content(number: int, size: int = 2 * MIB) -> bytes:
    seed = hashlib.sha256(str(number).encode()).digest()
    return (seed * (size // len(seed) + 1))[:size]


class Watch(threading.Thread):
    """Looks again and again at how much of a tmpfs is used: files that are open but have no name included."""

    def __init__(self, directory: Path) -> None:
        super().__init__()
        self._directory = directory
        self._end = threading.Event()
        self.most = 0

    def run(self) -> None:
        while not self._end.wait(0.0005):
            now = os.statvfs(self._directory)
            self.most = max(self.most, (now.f_blocks - now.f_bfree) * now.f_frsize)

    def __enter__(self) -> Watch:
        self.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._end.set()
        self.join()


@pytest.fixture
def make_tmpfs(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    made: list[Path] = []

    def make(size: str) -> Path:
        made.append(tmp_path / f"tmpfs{len(made)}")
        made[-1].mkdir()
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(made[-1])], check=True)
        return made[-1]

    yield make
    for path in made:
        subprocess.run(["umount", "-l", str(path)], check=True)


@pytest.mark.parametrize("passthrough", [True, False])
def test_a_working_set_of_four_times_the_cache(
    make_tmpfs: Callable[[str], Path], make_mount: Callable[..., Mounted], passthrough: bool
) -> None:
    # On a tmpfs that is larger and not its own, it is the daemon alone that keeps the bound.
    memory = make_tmpfs("512m")
    (memory / "cache").mkdir()
    (memory / "cache/.before").touch()
    cache_dir = {} if passthrough else {"cache_dir": str(memory / "cache")}
    mnt = make_mount(cache_buffer_capacity_gb=64 / 1024, passthrough=passthrough, **cache_dir)
    numbers = range(128)
    wrong: list[int] = []

    def work(turn: int) -> None:
        for number in numbers[turn::4]:
            # Threads of one process see what it is writing: as engines do, the final name is given when it is whole.
            (mnt / f"{number}.tmp").write_bytes(content(number))
            os.rename(mnt / f"{number}.tmp", mnt / f"{number}")
        for number in reversed(numbers):
            path = mnt / f"{number}"
            if (number + turn) % 2 and path.exists() and path.read_bytes() != content(number):
                wrong.append(number)

    with Watch(mnt.cache if passthrough else memory) as watch:
        threads = [threading.Thread(target=work, args=(turn,)) for turn in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not wrong
    for number in numbers:
        assert (mnt / f"{number}").read_bytes() == content(number)
    stats = mnt.stats()
    assert stats["eviction_count"] > 0
    assert 32 * MIB < watch.most <= 64 * MIB
    mnt.flush()
    for number in numbers:
        assert (mnt.storage / f"{number}").read_bytes() == content(number)


def test_a_full_disk_below(make_tmpfs: Callable[[str], Path], make_mount: Callable[..., Mounted]) -> None:
    """The disk is full: what was written is kept, the writer is told, nothing is half; room mends it."""
    small_disk = make_tmpfs("16m")
    mnt = make_mount(storage_backends=str(small_disk), cache_buffer_capacity_gb=64 / 1024, write_back_deadline=0.5)
    mnt.expect("stays dirty", "not written back", "no room for", "dropped, a write to it failed")
    written: list[int] = []

    def write_until_full() -> None:
        for number in range(60):
            (mnt / f"{number}").write_bytes(content(number))
            written.append(number)

    with pytest.raises(OSError, match="No space"):
        write_until_full()
    assert 30 <= len(written) < 60
    # What got the error is not there, not there empty, and not there in part.
    assert sorted(int(name) for name in os.listdir(mnt.point)) == written
    for number in written:
        assert (mnt / f"{number}").read_bytes() == content(number)
    for path in small_disk.iterdir():
        if path.is_file():
            assert path.read_bytes() == content(int(path.name))
    done = mnt.ucmfs("flush", mnt.point, check=False)
    assert done.returncode == 1
    assert mnt.ucmfs("umount", mnt.point, check=False).returncode == 1
    assert mnt.is_mounted
    subprocess.run(["mount", "-o", "remount,size=256m", str(small_disk)], check=True)
    mnt.flush()
    for number in written:
        assert (small_disk / f"{number}").read_bytes() == content(number)


def test_a_rotten_block_on_disk_is_a_miss(mnt: Mounted) -> None:
    mnt.expect("does not match its digest")
    (mnt / "x").write_bytes(content(1))
    mnt.flush()
    mnt.ucmfs("evict", mnt.point, "x")
    before = (mnt.storage / "x").stat()
    with open(mnt.storage / "x", "r+b") as file:
        file.seek(MIB)
        file.write(b"rot")
    os.utime(mnt.storage / "x", ns=(before.st_atime_ns, before.st_mtime_ns))
    with pytest.raises(FileNotFoundError):
        (mnt / "x").read_bytes()
    assert mnt.stats()["corrupt"] == 1
    (mnt / "x").write_bytes(content(2))
    assert (mnt / "x").read_bytes() == content(2)


def test_a_block_larger_than_the_cache_is_served_from_disk(make_mount: Callable[..., Mounted]) -> None:
    mnt = make_mount(mount=False, cache_buffer_capacity_gb=4 / 1024)
    (mnt.storage / "large").write_bytes(content(1, 9 * MIB + 5))
    mnt.mount()
    assert (mnt / "large").read_bytes() == content(1, 9 * MIB + 5)
    assert mnt.stats()["stages"][0]["used"] == 0


def test_nothing_leaks_over_many_files(mnt: Mounted) -> None:
    pid = mnt.status()["pid"]
    before = len(os.listdir(f"/proc/{pid}/fd"))
    for turn in range(5):
        for number in range(100):
            (mnt / f"{number}.tmp").write_bytes(content(number, 5000 + turn))
            os.rename(mnt / f"{number}.tmp", mnt / f"{number}")
            assert (mnt / f"{number}").read_bytes() == content(number, 5000 + turn)
    for number in range(100):
        os.unlink(mnt / f"{number}")
    mnt.flush()
    assert len(os.listdir(f"/proc/{pid}/fd")) <= before + 2
    stats = mnt.stats()
    assert stats["stages"][0]["used"] == 0
    assert stats["unexpected"] == 0
