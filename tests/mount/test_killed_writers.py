"""A killed writer never publishes; one that merely ends does."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tests.mounted import Mounted

MIB = 1 << 20

HALF = """
import os, sys, threading, signal, ctypes
path, how = sys.argv[1:]
def write():
    global fd
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.write(fd, b"h" * (1 << 20))
    print("half", flush=True)
if how.startswith("thread"):
    go = threading.Event()
    def run():
        write()
        if how == "thread-abort":
            os.abort()
        if how == "thread-leader-gone":
            go.set()
        threading.Event().wait()
    thread = threading.Thread(target=run)
    thread.start()
    if how == "thread-leader-gone":
        go.wait()
        # The first thread ends; the process lives on in the other.
        ctypes.CDLL(None).pthread_exit(None)
    thread.join()
write()
if how == "abort":
    os.abort()
if how == "exit":
    os._exit(3)
if how == "dup":
    os.close(os.dup(fd))
signal.pause()
"""


def half_written(path: Path, how: str) -> subprocess.Popen[bytes]:
    """A process that wrote half a block and does not close it."""
    writer = subprocess.Popen([sys.executable, "-c", HALF, str(path), how], stdout=subprocess.PIPE)
    assert writer.stdout is not None
    assert writer.stdout.readline() == b"half\n"
    return writer


def ended(writer: subprocess.Popen[bytes]) -> int:
    assert writer.stdout is not None
    writer.stdout.close()
    return writer.wait()


def assert_missing(mnt: Mounted, name: str) -> None:
    path = mnt / name
    assert name not in os.listdir(path.parent)
    with pytest.raises(FileNotFoundError):
        path.stat()
    assert mnt.lookup(name) == [False]
    mnt.flush()
    assert not (mnt.storage / name).exists()


@pytest.mark.parametrize("how", ["", "dup", "thread", "thread-leader-gone"])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_killed_in_the_middle_is_a_miss(mnt: Mounted, how: str, number: signal.Signals) -> None:
    mnt.expect("block: dropped, its writer was killed")
    writer = half_written(mnt / "block", how)
    writer.send_signal(number)
    assert ended(writer) == -number
    assert_missing(mnt, "block")
    stats = mnt.stats()
    assert stats["dropped"] == 1
    assert stats["stages"][0]["used"] == 0


@pytest.mark.parametrize("how", ["abort", "thread-abort"])
def test_aborted_in_the_middle_is_a_miss(mnt: Mounted, how: str) -> None:
    mnt.expect("block: dropped, its writer was killed")
    assert ended(half_written(mnt / "block", how)) == -signal.SIGABRT
    assert_missing(mnt, "block")


def test_exit_without_close_publishes(mnt: Mounted) -> None:
    assert ended(half_written(mnt / "block", "exit")) == 3
    assert (mnt / "block").read_bytes() == b"h" * MIB
    mnt.flush()
    assert (mnt.storage / "block").stat().st_size == MIB


def test_a_killed_overwriter_leaves_the_old_block(mnt: Mounted) -> None:
    mnt.expect("block: dropped, its writer was killed")
    (mnt / "block").write_bytes(b"old")
    writer = half_written(mnt / "block", "")
    assert (mnt / "block").read_bytes() == b"old"
    writer.kill()
    ended(writer)
    assert (mnt / "block").read_bytes() == b"old"
    mnt.flush()
    assert (mnt.storage / "block").read_bytes() == b"old"


def test_killed_after_close_keeps_the_block(mnt: Mounted) -> None:
    script = "import os,sys,signal; f=open(sys.argv[1],'wb'); f.write(b'done'); f.close(); os.kill(os.getpid(), 9)"
    for number in range(20):
        done = subprocess.run([sys.executable, "-S", "-c", script, str(mnt / f"{number}")], check=False)
        assert done.returncode == -signal.SIGKILL
        assert (mnt / f"{number}").read_bytes() == b"done"


def test_killed_reader_changes_nothing(mnt: Mounted) -> None:
    (mnt / "block").write_bytes(b"data")
    script = "import sys,signal; f=open(sys.argv[1],'r+b'); f.read(); print('open', flush=True); signal.pause()"
    reader = subprocess.Popen([sys.executable, "-c", script, str(mnt / "block")], stdout=subprocess.PIPE)
    assert reader.stdout is not None
    reader.stdout.readline()
    reader.kill()
    reader.stdout.close()
    reader.wait()
    assert (mnt / "block").read_bytes() == b"data"


def test_a_child_that_inherits_the_file_may_finish_it(mnt: Mounted) -> None:
    """The opener is gone and reaped; its child closes in peace."""
    script = """
import os, sys, signal
fd = os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT)
os.write(fd, b"first ")
parent = os.getpid()
if os.fork() == 0:
    while os.getppid() == parent:  # it has another parent once the first has closed all its files
        pass
    os.write(fd, b"second")
    os.close(fd)
    os._exit(0)
os.kill(parent, signal.SIGKILL)
"""
    writer = subprocess.Popen([sys.executable, "-c", script, str(mnt / "block")], stdout=subprocess.PIPE)
    assert writer.stdout is not None
    writer.stdout.read()  # the child holds the pipe's other end until it is done
    ended(writer)
    assert (mnt / "block").read_bytes() == b"first second"


def test_others_do_not_see_a_file_being_written(mnt: Mounted) -> None:
    writer = half_written(mnt / "block", "")
    try:
        assert os.listdir(mnt.point) == []
        assert not (mnt / "block").exists()
        with pytest.raises(FileNotFoundError):
            (mnt / "block").read_bytes()
        assert mnt.lookup("block") == [False]
    finally:
        mnt.expect("block: dropped")
        writer.kill()
        ended(writer)


def test_the_writer_and_its_children_see_it(mnt: Mounted) -> None:
    with open(mnt / "block", "wb", buffering=0) as file:
        file.write(b"123")
        assert (mnt / "block").stat().st_size == 3
        assert (mnt / "block").read_bytes() == b"123"
        assert subprocess.run(["mv", str(mnt / "block"), str(mnt / "moved")], check=False).returncode == 0
    assert (mnt / "moved").read_bytes() == b"123"
    assert os.listdir(mnt.point) == ["moved"]


def test_many_threads_write_and_close_at_once(mnt: Mounted) -> None:
    """More closes at once than the kernel sends at a time: each block is there when its close has returned."""
    missing: list[str] = []

    def work(number: int) -> None:
        for turn in range(20):
            path = mnt / f"{number}-{turn}"
            path.write_bytes(b"x" * 5000)
            if subprocess.run(["test", "-s", str(path)], check=False).returncode:
                missing.append(path.name)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(24)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not missing
