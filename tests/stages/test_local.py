from __future__ import annotations

import errno
import fcntl
import mmap
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import trio

from tests.stages.conformance import attributes_of, contents, count_fds, memory_file, whole
from ucmfs.block import Changes
from ucmfs.errors import StageTimeout
from ucmfs.stages import local
from ucmfs.stages.base import Threads
from ucmfs.stages.local import Loan, StagingDirectory, copy_whole, lend

NO_PATIENCE = 0.01
PATIENCE = 60.0
"""Seconds after which a test is taken to hang."""


@pytest.fixture
def fds_kept() -> Iterator[None]:
    before = count_fds()
    yield
    assert count_fds() == before


def open_new(path: Path, data: bytes = b"") -> int:
    path.write_bytes(data)
    return os.open(path, os.O_RDWR | os.O_CLOEXEC)


class Blocked:
    """A call in a thread that stops in the middle until it is let go."""

    def __init__(self, then: Callable[[Loan], object]) -> None:
        self.then = then
        self.let_go = threading.Event()
        self.ended = threading.Event()

    def __call__(self, loan: Loan) -> object:
        self.let_go.wait()
        try:
            return self.then(loan)
        finally:
            self.ended.set()


# lend()


@pytest.mark.usefixtures("fds_kept")
def test_a_call_past_its_deadline_never_touches_a_reused_descriptor(tmp_path: Path) -> None:
    blocked = Blocked(lambda loan: os.pwrite(loan.fd(0), b"late", 0))
    fd = open_new(tmp_path / "callers")

    async def main() -> None:
        with pytest.raises(StageTimeout):
            await lend(Threads("Test", limit=1, timeout=NO_PATIENCE), blocked, [fd])

    trio.run(main)
    stranger = open_new(tmp_path / "strangers", b"untouched")
    os.dup2(stranger, fd)
    before = count_fds()
    blocked.let_go.set()
    assert blocked.ended.wait(PATIENCE)
    wait_until(lambda: count_fds() == before - 1)
    assert (tmp_path / "strangers").read_bytes() == b"untouched"
    assert (tmp_path / "callers").read_bytes() == b"late"
    os.close(fd)
    os.close(stranger)


@pytest.mark.usefixtures("fds_kept")
def test_a_call_that_never_got_a_thread_is_not_made_and_its_loan_is_returned(tmp_path: Path) -> None:
    threads = Threads("Test", limit=1, timeout=NO_PATIENCE)
    first = Blocked(lambda loan: None)
    fd = open_new(tmp_path / "callers")
    calls: list[Loan] = []

    async def main() -> None:
        with pytest.raises(StageTimeout):
            await lend(threads, first)
        before = count_fds()
        with pytest.raises(StageTimeout):
            await lend(threads, calls.append, [fd, fd])
        assert count_fds() == before
        first.let_go.set()
        assert await lend(Threads("Test", limit=1, timeout=30), lambda loan: whole(loan.fd(0)), [fd]) == b""

    trio.run(main)
    assert not calls
    os.close(fd)


@pytest.mark.usefixtures("fds_kept")
def test_loans_are_closed_after_a_result_and_after_an_error(tmp_path: Path) -> None:
    fd = open_new(tmp_path / "callers", b"data")

    async def main() -> None:
        threads = Threads("Test", limit=1, timeout=30)
        assert await lend(threads, lambda loan: [whole(loan.fd(0)), loan.fd(1) != fd], [fd, fd]) == [b"data", True]
        with pytest.raises(ZeroDivisionError):
            await lend(threads, lambda loan: 1 // 0, [fd])

    trio.run(main)
    os.close(fd)


def test_a_descriptor_that_is_not_open_is_an_error_of_its_row_alone() -> None:
    async def main() -> None:
        def call(loan: Loan) -> bytes:
            with pytest.raises(OSError, match="Bad file descriptor"):
                loan.fd(0)
            return whole(loan.fd(1))

        with memory_file(b"data") as fd:
            assert await lend(Threads("Test", limit=1, timeout=30), call, [-1, fd]) == b"data"

    trio.run(main)


def test_a_result_that_nobody_waits_for_is_discarded_once() -> None:
    discarded: list[object] = []
    blocked = Blocked(lambda loan: "late")
    gone = threading.Event()

    def discard(result: object) -> None:
        discarded.append(result)
        gone.set()

    async def main() -> None:
        with pytest.raises(StageTimeout):
            await lend(Threads("Test", limit=1, timeout=NO_PATIENCE), blocked, discard=discard)

    trio.run(main)
    blocked.let_go.set()
    assert gone.wait(PATIENCE)
    assert discarded == ["late"]


def test_a_result_overtaken_by_a_cancellation_is_discarded() -> None:
    discarded: list[str] = []

    async def main() -> None:
        threads = Threads("Test", limit=1, timeout=30)

        class Overtaken(Threads):
            async def run(self, call: Callable[[], object], *, timeout: float | None = None) -> object:  # type: ignore[override]
                await threads.run(call)
                await trio.sleep_forever()

        with trio.move_on_after(NO_PATIENCE):
            await lend(Overtaken("Test", limit=1, timeout=30), lambda loan: "made", discard=discarded.append)

    trio.run(main)
    assert discarded == ["made"]


def test_an_abandoned_call_learns_that_its_caller_has_gone() -> None:
    seen: list[int | None] = []

    def then(loan: Loan) -> None:
        try:
            loan.check()
        except OSError as error:
            seen.append(error.errno)

    blocked = Blocked(then)

    async def main() -> None:
        with pytest.raises(StageTimeout):
            await lend(Threads("Test", limit=1, timeout=NO_PATIENCE), blocked)

    trio.run(main)
    blocked.let_go.set()
    assert blocked.ended.wait(PATIENCE)
    assert seen == [errno.ECANCELED]


@pytest.mark.usefixtures("fds_kept")
def test_a_thread_that_comes_after_its_caller_has_gone_does_nothing() -> None:
    late: list[Callable[[], object]] = []
    calls: list[Loan] = []

    class Late(Threads):
        async def run(self, call: Callable[[], object], *, timeout: float | None = None) -> object:  # type: ignore[override]
            late.append(call)
            raise StageTimeout(self.label, "no answer")

    async def main() -> None:
        with memory_file() as fd, pytest.raises(StageTimeout):
            await lend(Late("Test", limit=1, timeout=30), calls.append, [fd])

    trio.run(main)
    with pytest.raises(OSError, match="the caller has gone"):
        late[0]()
    assert not calls


def wait_until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end
        os.sched_yield()


# Bytes


@pytest.mark.parametrize("size", [0, 1, 4096, 300_001])
def test_copy_whole_copies_within_and_across_file_systems(tmp_path: Path, size: int) -> None:
    data = contents(size)
    here, there = open_new(tmp_path / "here", data + b"more"), open_new(tmp_path / "there", b"old")
    with memory_file() as memory:
        os.lseek(here, 5, os.SEEK_SET)
        os.lseek(there, 9, os.SEEK_SET)
        copy_whole(here, memory, size)
        copy_whole(memory, there, size)
        assert whole(memory) == data
        assert (tmp_path / "there").read_bytes() == data + b"old"[size:]
        copy_whole(here, there, size)
        assert os.lseek(here, 0, os.SEEK_CUR) == 5
    os.close(here)
    os.close(there)


def test_copy_whole_is_never_short(tmp_path: Path) -> None:
    target = open_new(tmp_path / "target")
    with memory_file(b"x" * 100) as source:
        with pytest.raises(OSError, match="fewer than the 101 bytes") as caught:
            copy_whole(source, target, 101)
        assert caught.value.errno == errno.EIO
    os.close(target)


@pytest.mark.parametrize("refusal", [errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP])
def test_copy_whole_goes_on_with_sendfile_where_copy_file_range_stops(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, refusal: int
) -> None:
    data = contents(50_000)
    real, calls = os.copy_file_range, iter([10_000, 7])

    def partial(source: int, target: int, count: int, at: int, to: int) -> int:
        for some in calls:
            return real(source, target, min(some, count), at, to)
        raise OSError(refusal, os.strerror(refusal))

    monkeypatch.setattr(os, "copy_file_range", partial)
    source, target = open_new(tmp_path / "source", data), open_new(tmp_path / "target")
    copy_whole(source, target, len(data))
    assert (tmp_path / "target").read_bytes() == data
    os.close(source)
    os.close(target)


def test_copy_whole_raises_what_the_last_way_says(tmp_path: Path) -> None:
    target = os.open(tmp_path / "target", os.O_WRONLY | os.O_CREAT)
    reader, writer = os.pipe()
    with pytest.raises(OSError, match=r"Invalid argument|Illegal seek"):
        copy_whole(reader, target, 10)
    for fd in (reader, writer, target):
        os.close(fd)


def uses_direct(monkeypatch: pytest.MonkeyPatch, call: str) -> list[tuple[bool, int]]:
    """Records, for each *call* of local.py, whether its descriptor has O_DIRECT, and the bytes moved."""
    real, seen = getattr(os, call), []

    def record(fd: int, *args: object) -> int:
        moved: int = real(fd, *args)
        seen.append((bool(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT), moved))
        return moved

    monkeypatch.setattr(os, call, record)
    return seen


@pytest.mark.parametrize("size", [1, 4095, 4096, 4097, (1 << 20) + 3])
def test_write_direct_passes_the_page_cache_but_for_the_last_part(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, size: int
) -> None:
    data = contents(size)
    target = open_new(tmp_path / "target")
    with memory_file(data) as source:
        seen = uses_direct(monkeypatch, "pwrite")
        local.write_direct(source, target, size)
    assert (tmp_path / "target").read_bytes() == data
    direct = sum(moved for is_direct, moved in seen if is_direct)
    assert direct == size - size % 4096
    assert not fcntl.fcntl(target, fcntl.F_GETFL) & os.O_DIRECT
    os.close(target)


def test_write_direct_is_never_short(tmp_path: Path) -> None:
    target = open_new(tmp_path / "target")
    with memory_file(b"x" * 8192) as source, pytest.raises(OSError, match="fewer than"):
        local.write_direct(source, target, 8193)
    os.close(target)


@pytest.mark.parametrize("size", [1, 4096, 4097, 100_000])
def test_read_direct_passes_the_page_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, size: int) -> None:
    data = contents(size)
    source = open_new(tmp_path / "source", data)
    with memory_file() as target, mmap.mmap(-1, 16_384) as buffer:
        seen = uses_direct(monkeypatch, "preadv")
        local.read_direct(source, target, size, buffer)
        assert whole(target) == data
        assert all(is_direct for is_direct, _ in seen)
        assert sum(moved for _, moved in seen) >= size
        with pytest.raises(OSError, match="fewer than"):
            local.read_direct(source, target, size + 4096, buffer)
    os.close(source)


# Attributes


def test_xattrs_are_written_read_and_removed(tmp_path: Path) -> None:
    path = str(tmp_path / "file")
    fd = open_new(tmp_path / "file")
    local.write_xattrs(path, {"user.a": b"1", "user.b": b"2", "trusted.mine": b"3", "user.none": None})
    assert local.read_xattrs(fd) == {"user.a": b"1", "user.b": b"2"}
    local.write_xattrs(fd, {"user.a": None})
    assert local.read_xattrs(path) == {"user.b": b"2"}
    os.close(fd)


def test_changes_leave_alone_what_they_do_not_name(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.touch(mode=0o600)
    os.utime(path, ns=(11, 22))
    local.apply_changes(str(path), Changes(mtime_ns=33))
    assert (path.stat().st_atime_ns, path.stat().st_mtime_ns) == (11, 33)
    local.apply_changes(str(path), Changes(atime_ns=44, mode=0o100640))
    assert (path.stat().st_atime_ns, path.stat().st_mtime_ns) == (44, 33)
    assert path.stat().st_mode == 0o100640
    local.apply_changes(str(path), Changes(gid=12345))
    assert (path.stat().st_uid, path.stat().st_gid) == (os.geteuid(), 12345)


def test_an_xattr_that_the_file_system_cannot_hold_does_not_stop_a_block(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(target: int, name: str, value: bytes) -> None:
        if len(value) > 1000:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(target, name, value)

    real = os.setxattr
    monkeypatch.setattr(os, "setxattr", refuse)
    with memory_file(b"data") as fd:
        given = attributes_of(b"data", xattrs={"user.large": b"x" * 2000, "user.small": b"x"}, mode=0o100640)
        local.apply_attributes(fd, given)
        assert sorted(local.read_xattrs(fd)) == ["user.small", "user.ucmfs.digest"]
        assert os.fstat(fd).st_mode == 0o100640
        assert os.fstat(fd).st_mtime_ns == given.mtime_ns
    assert "user.large of 2000 bytes is not kept" in caplog.text


# Files that are not published yet


@pytest.mark.usefixtures("fds_kept")
def test_a_temporary_file_goes_on_failure(tmp_path: Path) -> None:
    path = tmp_path / "temporary"

    def fail() -> None:
        with local.removed_on_failure(str(path)), local.create_file(str(path)) as fd:
            os.write(fd, b"x")
            assert path.stat().st_mode == 0o100600
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert not path.exists()
    with local.removed_on_failure(str(path)), local.create_file(str(path)):
        pass
    assert path.exists()


def test_make_parents_says_what_it_changed_and_never_makes_the_root(tmp_path: Path) -> None:
    root = str(tmp_path)
    assert local.make_parents(f"{root}/a/b/c", root) == [f"{root}/a", root]
    assert local.make_parents(f"{root}/a/b/c", root) == []
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError):
        local.make_parents(f"{root}/file/x/y", root)
    with pytest.raises(FileNotFoundError):
        local.make_parents(f"{root}/gone/a/b", f"{root}/gone")
    assert not (tmp_path / "gone").exists()


LEAVE_STAGING = """
import os, sys
from ucmfs.stages.local import StagingDirectory
directory = StagingDirectory(sys.argv[1])
directory.open()
open(directory.new_path(), "w").close()
print(directory.path, flush=True)
sys.stdin.read()
os._exit(9)
"""


@pytest.mark.usefixtures("fds_kept")
def test_staging_of_the_dead_is_removed_and_of_the_living_is_not(tmp_path: Path) -> None:
    command = [sys.executable, "-c", LEAVE_STAGING, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        its = Path(other.stdout.readline().strip())
        first, second = StagingDirectory(str(tmp_path)), StagingDirectory(str(tmp_path))
        first.open()
        mine = Path(first.new_path())
        mine.touch()
        second.open()
        # Both live: this process's other one, and the other process's.
        assert mine.exists()
        assert sorted(path.name for path in its.iterdir()) == ["0", "lock"]
        second.close()
    third = StagingDirectory(str(tmp_path))
    third.open()
    assert not its.exists()
    assert mine.exists()
    first.close()
    third.close()
    assert list(tmp_path.iterdir()) == []


def test_staging_that_was_not_locked_yet_may_be_swept_and_is_made_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    real = os.mkdir
    made: list[str] = []

    def mkdir(path: str, mode: int = 0o777) -> None:
        real(path, mode)
        made.append(path)
        if len(made) == 1:
            # Between mkdir and lock, another process starts and sweeps.
            other = StagingDirectory(str(tmp_path))
            other.open()
            other.close()

    monkeypatch.setattr(os, "mkdir", mkdir)
    directory = StagingDirectory(str(tmp_path))
    directory.open()
    assert not Path(made[0]).exists()
    assert Path(directory.new_path()).parent.exists()
    directory.close()


@pytest.mark.usefixtures("fds_kept")
def test_staging_swept_while_its_owner_waits_for_the_lock_is_made_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    real = fcntl.flock
    swept: list[Path] = []

    def flock(fd: int, operation: int) -> None:
        if not swept:
            # The sweeper had the lock first, and lets go of it with the directory gone.
            lock = Path(os.readlink(f"/proc/self/fd/{fd}"))
            lock.unlink()
            lock.parent.rmdir()
            swept.append(lock.parent)
        real(fd, operation)

    monkeypatch.setattr(fcntl, "flock", flock)
    directory = StagingDirectory(str(tmp_path))
    directory.open()
    with local.create_file(directory.new_path()):
        assert directory.path != str(swept[0])
    directory.close()
    assert list(tmp_path.iterdir()) == []


def test_a_foreign_file_in_staging_stays(tmp_path: Path) -> None:
    (tmp_path / "notes").touch()
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "notes").touch()
    directory = StagingDirectory(str(tmp_path))
    directory.open()
    directory.close()
    assert (tmp_path / "notes").exists()
    assert (tmp_path / "folder" / "notes").exists()
    with pytest.raises(OSError, match="not started"):
        directory.new_path()
