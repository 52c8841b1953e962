"""The daemon is killed while files are open and calls are under way: nothing fails, nothing is done twice."""

from __future__ import annotations

import errno
import mmap
import os
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.mount.test_write_passthrough import mapping
from tests.mounted import Mounted

MIB = 1 << 20
ROOT = Path(__file__).parents[2]
DATA = bytes(range(256)) * 5000


class Trapped(Mounted):
    """A mount whose daemon dies at a point set before."""

    @property
    def trap(self) -> Path:
        return self.root / "trap"

    def start(self) -> None:
        self.expect("was ended by SIGKILL; starting another")
        self.mount(daemon=[sys.executable, "-m", "tests.crashing_daemon", str(self.trap)])

    def settle(self) -> None:
        """Wait until the daemon served long enough to count as one that started."""
        while self.stats()["uptime_s"] < 0.4:
            pass
        # After the releases of what was read.
        os.statvfs(self.point)

    def was_reached(self) -> bool:
        """Whether the daemon died; it may do so a moment after the call returned."""
        deadline = time.monotonic() + 10
        while self.trap.exists() and time.monotonic() < deadline:
            pass
        return not self.trap.exists()

    def set(self, handler: str, point: str, passed: int = 0) -> None:
        self.trap.with_suffix(".new").write_text(f"{handler} {point} {passed}")
        os.rename(self.trap.with_suffix(".new"), self.trap)


@pytest.fixture
def trapped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[Trapped]:
    """Its parameter: whether there is passthrough."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    mounted = Trapped(tmp_path, {"passthrough": getattr(request, "param", True), "consistency_ttl": 0.001})
    mounted.start()
    yield mounted
    mounted.end()


# What is done with a directory, on the mount and on a plain one. Each: (handler that dies, before, the call).


def write(path: Path, data: bytes = DATA) -> None:
    path.write_bytes(data)


def nothing(root: Path) -> None:
    pass


def a_block(root: Path) -> None:
    write(root / "a")


def an_unleased_block(root: Path) -> None:
    """The relay opens what was just written; who may change it makes it leave that to the daemon."""
    write(root / "a")
    os.close(os.open(root / "a", os.O_RDWR))


def two_blocks(root: Path) -> None:
    write(root / "a")
    write(root / "b", b"b")


def a_directory(root: Path) -> None:
    (root / "d").mkdir()


def a_full_directory(root: Path) -> None:
    (root / "d").mkdir()
    write(root / "d/x")


def with_xattr(root: Path) -> None:
    write(root / "a")
    os.setxattr(root / "a", "user.mine", b"1")


def create(root: Path) -> None:
    fd = os.open(root / "a", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o640)
    os.write(fd, b"data")
    os.close(fd)


def create_with_two_descriptors(root: Path) -> None:
    """A close that is not the last is told of by itself."""
    fd = os.open(root / "a", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o640)
    os.write(fd, b"data")
    os.close(os.dup(fd))
    os.close(fd)


def overwrite(root: Path) -> None:
    write(root / "a", b"new")


def change_in_place(root: Path) -> None:
    with open(root / "a", "r+b") as file:
        file.seek(5)
        file.write(b"changed")


def append(root: Path) -> None:
    with open(root / "a", "ab") as file:
        file.write(b"more")


def read(root: Path) -> bytes:
    return (root / "a").read_bytes()


def ls(root: Path) -> list[str]:
    return sorted(name for name in os.listdir(root) if name != ".ucmfs")


def truncate(root: Path) -> None:
    os.truncate(root / "a", 3)


def chmod(root: Path) -> None:
    os.chmod(root / "a", 0o600)


def set_times(root: Path) -> None:
    os.utime(root / "a", ns=(10**18, 10**18))


def sync(root: Path) -> None:
    fd = os.open(root / "a", os.O_RDWR)
    os.fsync(fd)
    os.close(fd)


def write_and_rename(root: Path) -> None:
    write(root / "a.tmp", b"whole")
    os.rename(root / "a.tmp", root / "a")


def rename_while_written(root: Path) -> None:
    with open(root / "a.tmp", "wb") as file:
        file.write(b"first")
        file.flush()
        os.rename(root / "a.tmp", root / "a")
        file.write(b"second")


Case = tuple[str, Callable[[Path], object], Callable[[Path], object]]
CASES: list[Case] = [
    ("create", nothing, create),
    ("write", nothing, create),
    ("flush", nothing, create_with_two_descriptors),
    ("release", nothing, create),
    ("open", a_block, overwrite),
    ("write", a_block, change_in_place),
    ("release", a_block, change_in_place),
    ("write", a_block, append),
    ("lookup", an_unleased_block, lambda root: os.stat(root / "a").st_size),
    ("lookup", nothing, lambda root: os.stat(root / "none")),
    ("open", an_unleased_block, read),
    ("read", an_unleased_block, read),
    ("release", an_unleased_block, read),
    ("opendir", a_full_directory, ls),
    ("readdir", two_blocks, ls),
    ("releasedir", two_blocks, ls),
    ("setattr", a_block, truncate),
    ("setattr", a_block, chmod),
    ("setattr", a_block, set_times),
    ("setxattr", a_block, lambda root: os.setxattr(root / "a", "user.mine", b"2")),
    ("getxattr", with_xattr, lambda root: os.getxattr(root / "a", "user.mine")),
    ("removexattr", with_xattr, lambda root: os.removexattr(root / "a", "user.mine")),
    ("fsync", a_block, sync),
    ("mkdir", nothing, a_directory),
    ("rmdir", a_directory, lambda root: os.rmdir(root / "d")),
    ("rmdir", a_full_directory, lambda root: os.rmdir(root / "d")),
    ("mknod", nothing, lambda root: os.mknod(root / "a", stat.S_IFREG | 0o644)),
    ("unlink", a_block, lambda root: os.unlink(root / "a")),
    ("rename", two_blocks, lambda root: os.rename(root / "a", root / "b")),
    ("rename", a_block, lambda root: os.rename(root / "a", root / "c")),
    ("rename", a_full_directory, lambda root: os.rename(root / "d", root / "e")),
    ("rename", a_block, write_and_rename),
    ("rename", a_block, rename_while_written),
]


def outcome(call: Callable[[Path], object], root: Path) -> object:
    try:
        return call(root)
    except OSError as error:
        # ENODATA and the like: the number is what a caller sees.
        return errno.errorcode[error.errno or 0]


def tree(root: Path) -> dict[str, Any]:
    """Everything below *root*, by relative path."""
    found: dict[str, Any] = {}
    for directory, directories, files in os.walk(root):
        if ".ucmfs" in directories:
            directories.remove(".ucmfs")
        for name in directories:
            found[os.path.relpath(os.path.join(directory, name), root)] = "directory"
        for name in files:
            path = os.path.join(directory, name)
            mode = stat.S_IMODE(os.stat(path).st_mode)
            xattrs = {key: os.getxattr(path, key) for key in os.listxattr(path) if not key.startswith("user.ucmfs.")}
            found[os.path.relpath(path, root)] = (Path(path).read_bytes(), mode, xattrs)
    return found


def first(cases: Sequence[Case]) -> Sequence[Case]:
    """One case for each handler."""
    return list({case[0]: case for case in reversed(cases)}.values())


THROUGH_DAEMON = [case for case in CASES if case[0] in ("read", "write", "flush") or case[1:] == (nothing, create)]
"""With passthrough the kernel reads and writes by itself; only what is changed in place goes through the daemon."""
BY_KERNEL = [case for case in CASES if case[0] not in ("read", "write") or case[2] in (change_in_place, append)]


@pytest.mark.parametrize(
    ("point", "cases", "trapped"),
    [
        ("before", first(BY_KERNEL), True),
        ("unjournaled", BY_KERNEL, True),
        ("after", first(BY_KERNEL), True),
        ("before", first(THROUGH_DAEMON), False),
        ("unjournaled", THROUGH_DAEMON, False),
        ("after", first(THROUGH_DAEMON), False),
    ],
    indirect=["trapped"],
)
def test_every_handler_killed(trapped: Trapped, tmp_path: Path, point: str, cases: Sequence[Case]) -> None:
    """Compared with a plain directory; one where the daemon did not die proves nothing, and fails."""
    plain = tmp_path / "plain"
    for number, (handler, prepare, call) in enumerate(cases):
        roots = (plain / str(number), trapped.point / str(number))
        for root in roots:
            root.mkdir(parents=True)
            prepare(root)
        trapped.settle()
        trapped.set(handler, point)
        results = [outcome(call, root) for root in roots]
        assert trapped.was_reached(), f"case {number}: {handler} was not reached"
        assert results[0] == results[1], f"case {number}: {handler}"
        assert tree(roots[0]) == tree(roots[1]), f"case {number}: {handler}"
    subprocess.run(["rm", "-r", *(trapped.point / str(number) for number in range(len(cases)))], check=True)
    while trapped.stats()["stages"][0]["used"]:
        pass
    stats = trapped.stats()
    assert stats["restarts"] == len(cases)
    assert stats["open_files"] == 0
    assert stats["unexpected"] == 0


def test_a_backing_file_that_was_let_go_and_nobody_told(trapped: Trapped) -> None:
    """The daemon closes a file that is still mapped, and dies before the journal says so."""
    fd = os.open(trapped / "x", os.O_RDWR | os.O_CREAT)
    os.ftruncate(fd, 8192)
    trapped.settle()
    with mapping(fd, 8192):
        trapped.set("release", "unjournaled")
        os.close(fd)
        assert trapped.was_reached()
    assert (trapped / "x").read_bytes() == bytes(8192)
    assert (trapped / "x").read_bytes() == bytes(8192)


def test_open_files_go_on(make_mount: Callable[..., Mounted], passthrough: bool) -> None:
    """Of all kinds, over two deaths: published, removed, replaced, changed in place, being written, renamed."""
    mnt = make_mount(passthrough=passthrough)
    for name in ("published", "removed", "replaced", "changed"):
        write(mnt / name)
    readers = {name: os.open(mnt / name, os.O_RDONLY) for name in ("published", "removed", "replaced")}
    mapped = mmap.mmap(readers["published"], 0, mmap.MAP_SHARED, mmap.PROT_READ)
    changer = os.open(mnt / "changed", os.O_RDWR)
    os.pwrite(changer, b"CHANGED", 7)
    writer = os.open(mnt / "new", os.O_RDWR | os.O_CREAT)
    os.write(writer, b"one ")
    renamed = os.open(mnt / "r.tmp", os.O_WRONLY | os.O_CREAT)
    os.write(renamed, b"re")
    os.unlink(mnt / "removed")
    write(mnt / "replaced", b"replacement")
    for turn in range(2):
        mnt.kill_daemon()
        for fd in readers.values():
            assert os.pread(fd, 2 * len(DATA), 0) == DATA
        assert mapped[:] == DATA
        assert os.pread(changer, 20, 0) == DATA[:7] + b"CHANGED" + DATA[14:20]
        assert os.pread(writer, 100, 0) == b"one " + b"more " * turn
        os.write(writer, b"more ")
        if turn == 0:
            os.rename(mnt / "r.tmp", mnt / "renamed")
        assert not (mnt / "removed").exists()
        assert (mnt / "replaced").read_bytes() == b"replacement"
    os.write(renamed, b"named")
    for fd in (*readers.values(), changer, writer, renamed):
        os.close(fd)
    mapped.close()
    assert (mnt / "changed").read_bytes() == DATA[:7] + b"CHANGED" + DATA[14:]
    assert (mnt / "new").read_bytes() == b"one more more "
    assert (mnt / "renamed").read_bytes() == b"renamed"
    assert not (mnt / "r.tmp").exists()
    mnt.flush()
    expected = sum(-(-(mnt / name).stat().st_size // 4096) * 4096 for name in os.listdir(mnt.point))
    stats = mnt.stats()
    assert stats["stages"][0]["used"] == expected
    assert stats["open_files"] == 0
    assert stats["unexpected"] == 0
    assert os.listdir(mnt.cache / "staging") == os.listdir(mnt.cache / "trash") == []


@pytest.fixture(params=[True, False], ids=["passthrough", "daemon"])
def passthrough(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


def test_an_open_directory_goes_on(mnt: Mounted) -> None:
    for number in range(500):
        write(mnt / f"{number}", b"x")
    with os.scandir(mnt.point) as entries:
        first = [next(entries).name]
        mnt.kill_daemon()
        rest = [entry.name for entry in entries]
    assert sorted(map(int, first + rest)) == list(range(500))


def test_what_is_dirty_and_pinned_stays_so(make_mount: Callable[..., Mounted]) -> None:
    mnt = make_mount(write_back_interval=3600, write_back_batch_size=1000)
    write(mnt / "a")
    mnt.flush()
    mnt.ucmfs("pin", mnt.point, "a")
    write(mnt / "b")
    mnt.kill_daemon()
    assert os.getxattr(mnt / "a", "user.ucmfs.pin") == b"1"
    assert os.getxattr(mnt / "b", "user.ucmfs.state") == b"dirty"
    mnt.flush()
    assert (mnt.storage / "b").read_bytes() == DATA


WRITER = """
import os, sys
fd = os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT)
os.write(fd, b"x")
print(flush=True)
input()
"""


def test_a_killed_writer_is_still_seen_as_one(mnt: Mounted) -> None:
    """The writer dies while there is no daemon; its close is asked of the next."""
    mnt.expect("dropped, its writer was killed in the middle")
    with subprocess.Popen(
        [sys.executable, "-c", WRITER, mnt / "x"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as writer:
        assert writer.stdout is not None
        writer.stdout.readline()
        mnt.expect("was ended by SIGKILL; starting another")
        daemon = mnt.status()["daemon_pid"]
        os.kill(daemon, 9)
        writer.kill()
        mnt.wait_for_daemon(daemon)
    assert not (mnt / "x").exists()
    assert mnt.stats()["dropped"] == 1
    assert mnt.stats()["stages"][0]["used"] == 0


def test_calls_under_way_wait_for_the_next_daemon(mnt: Mounted) -> None:
    """Eight threads work on files of their own while the daemon is killed again and again."""
    stop = threading.Event()
    failures: list[BaseException] = []
    rounds = [0] * 8

    def work(number: int) -> None:
        try:
            while not stop.is_set():
                data = os.urandom(4096) * (1 + rounds[number] % 300)
                path = mnt / f"{number}"
                write(mnt / f"{number}.tmp", data)
                os.rename(mnt / f"{number}.tmp", path)
                assert path.read_bytes() == data
                os.unlink(path)
                rounds[number] += 1
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for _ in range(4):
        before = sum(rounds)
        while sum(rounds) < before + 16 and not failures:
            stop.wait(0.01)
        mnt.kill_daemon()
        while mnt.stats()["uptime_s"] < 0.7 and not failures:
            stop.wait(0.01)
    stop.set()
    for thread in threads:
        thread.join()
    assert not failures
    assert min(rounds) > 0
    mnt.flush()
    assert mnt.stats()["stages"][0]["used"] == 0
    assert mnt.stats()["unexpected"] == 0


def test_restart(mnt: Mounted) -> None:
    with open(mnt / "x", "wb") as file:
        file.write(DATA)
        before = mnt.status()["daemon_pid"]
        done = mnt.ucmfs("restart", mnt.point)
        status = mnt.status()
        assert status["daemon_pid"] != before
        assert done.stdout == f"pid {status['daemon_pid']} serves {mnt.point}\n"
        assert status["restarts"] == 1
    assert (mnt / "x").read_bytes() == DATA


def test_names_that_are_no_text(mnt: Mounted) -> None:
    name = os.fsencode(mnt.point) + b"/\xff\xfe"
    fd = os.open(name, os.O_RDWR | os.O_CREAT)
    os.write(fd, b"data")
    mnt.kill_daemon()
    os.close(fd)
    with open(name, "rb") as file:
        assert file.read() == b"data"


def test_the_journal_is_made_short(make_mount: Callable[..., Mounted]) -> None:
    """After many opens, what the next daemon has to read is about what is open."""
    mnt = make_mount(passthrough=False)  # with leases these opens would not be its business
    write(mnt / "x", b"x")
    kept = os.open(mnt / "x", os.O_RDONLY)
    end = time.monotonic() + 60
    size = longest = 0
    while size >= longest and time.monotonic() < end:
        for _ in range(200):
            os.close(os.open(mnt / "x", os.O_RDONLY))
        longest, size = size, journal_size(mnt)
    assert size < longest, "it only grew"
    mnt.kill_daemon()
    assert os.read(kept, 10) == b"x"
    os.close(kept)


def journal_size(mnt: Mounted) -> int:
    directory = f"/proc/{mnt.stats()['relay_pid']}/fd"
    [size] = [
        os.stat(f"{directory}/{fd}").st_size
        for fd in os.listdir(directory)
        if "memfd:journal" in os.readlink(f"{directory}/{fd}")
    ]
    return size
