"""What watches the daemon: hangs, replacements, and how all of it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.mounted import Mounted
from ucmfs.control import protocol
from ucmfs.errors import ProtocolError, UcmfsError
from ucmfs.fuse import wire

MIB = 1 << 20
NOBODY = 65534


def test_a_daemon_that_hangs_is_replaced(make_mount: Callable[..., Mounted]) -> None:
    mnt = make_mount(daemon_hang_timeout=3)
    mnt.expect("answered nothing for 3 s; it is killed", "was ended by SIGKILL; starting another")
    with open(mnt / "x", "wb") as file:
        file.write(b"before")
        daemon = mnt.status()["daemon_pid"]
        os.kill(daemon, signal.SIGSTOP)
        # This waits for the next daemon.
        assert not (mnt / "missing").exists()
        file.write(b" and after")
    assert (mnt / "x").read_bytes() == b"before and after"
    status = mnt.status()
    assert status["daemon_pid"] != daemon
    assert status["restarts"] == 1


def test_a_daemon_that_nobody_waits_for_is_left_alone(make_mount: Callable[..., Mounted]) -> None:
    mnt = make_mount(daemon_hang_timeout=1)
    (mnt / "x").write_bytes(b"data")
    fd = os.open(mnt / "x", os.O_RDONLY)
    daemon = mnt.status()["daemon_pid"]
    os.kill(daemon, signal.SIGSTOP)
    done = threading.Event()
    # Longer than it may take.
    assert not done.wait(2)
    assert os.read(fd, 10) == b"data"  # by the kernel
    os.kill(daemon, signal.SIGCONT)
    os.close(fd)
    assert mnt.status()["daemon_pid"] == daemon


def children(pid: int) -> set[int]:
    return set(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()))


def test_another_stands_by(mnt: Mounted) -> None:
    mnt.expect("was ended by SIGKILL; starting another")
    status = mnt.status()
    relay, daemon = status["relay_pid"], status["daemon_pid"]
    while children(relay) == {daemon}:
        pass
    [spare] = children(relay) - {daemon}
    os.kill(daemon, signal.SIGKILL)
    mnt.wait_for_daemon(daemon)
    assert mnt.status()["daemon_pid"] == spare
    while children(relay) == {spare}:
        pass
    # A dead one is no loss, and one that may be of an old version is not taken.
    [second] = children(relay) - {spare}
    os.kill(second, signal.SIGKILL)
    os.kill(spare, signal.SIGKILL)
    mnt.wait_for_daemon(spare)
    third = mnt.status()["daemon_pid"]
    assert third not in (spare, second)
    while children(relay) == {third}:
        pass
    [fourth] = children(relay) - {third}
    mnt.ucmfs("restart", mnt.point)
    assert mnt.status()["daemon_pid"] not in (third, fourth)
    gone = os.pidfd_open(relay)
    mnt.umount()
    mnt.wait_exit(gone)
    assert not any(os.path.exists(f"/proc/{pid}") for pid in (third, fourth))


def test_a_relay_of_another_version_is_not_taken_over(mnt: Mounted) -> None:
    before = mnt.status()["daemon_pid"]
    with pytest.raises(
        UcmfsError, match=f"relay speaks version {wire.VERSION}, the installed one 99; unmount"
    ) as caught:
        mnt.ask(protocol.Restart(99))
    assert caught.value.errno == ProtocolError.code
    assert mnt.status()["daemon_pid"] == before


def test_sigterm_to_the_relay_writes_back_and_unmounts(mnt: Mounted) -> None:
    (mnt / "x").write_bytes(b"data")
    status = mnt.status()
    relay, daemon = (os.pidfd_open(status[key]) for key in ("relay_pid", "daemon_pid"))
    os.kill(status["relay_pid"], signal.SIGTERM)
    mnt.wait_exit(daemon)
    mnt.wait_exit(relay)
    assert not mnt.is_mounted
    assert (mnt.storage / "x").read_bytes() == b"data"


def test_sigterm_to_the_relay_while_a_daemon_takes_over(mnt: Mounted) -> None:
    mnt.expect("was ended by SIGKILL; starting another")
    (mnt / "x").write_bytes(b"data")
    status = mnt.status()
    relay = os.pidfd_open(status["relay_pid"])
    os.kill(status["daemon_pid"], signal.SIGKILL)
    while status["daemon_pid"] in children(status["relay_pid"]):
        pass
    os.kill(status["relay_pid"], signal.SIGTERM)
    mnt.wait_exit(relay)
    assert not mnt.is_mounted
    assert (mnt.storage / "x").read_bytes() == b"data"


def test_an_unmount_while_there_is_no_daemon(mnt: Mounted) -> None:
    """The next daemon sees that the mount is gone, writes back and ends, and so does the relay."""
    mnt.expect("was ended by SIGKILL; starting another")
    (mnt / "k.tmp").write_bytes(b"temporary")
    (mnt / "x").write_bytes(b"data")
    status = mnt.status()
    relay = os.pidfd_open(status["relay_pid"])
    os.kill(status["daemon_pid"], signal.SIGKILL)
    subprocess.run(["umount", str(mnt.point)], check=True)
    mnt.wait_exit(relay)
    assert (mnt.storage / "x").read_bytes() == b"data"


AS_NOBODY = """
import os, signal, sys
sys.path[:0] = sys.argv[4:]
from pathlib import Path
from ucmfs import mounting
from ucmfs.config import load
from ucmfs.control import protocol
from ucmfs.control.connection import Connection

point = Path(sys.argv[2])
mounting.mount(load(sys.argv[1]), point)
data = os.urandom(3 << 20)
(point / "x").write_bytes(data)
with open(point / "x", "rb") as file:
    with Connection.to_mount(point) as connection:
        stats = connection.request(protocol.Stats()).result
    os.kill(stats["daemon_pid"], signal.SIGKILL)
    (point / "y").write_bytes(data)
    assert file.read() == data
assert (point / "y").read_bytes() == data
mounting.unmount(point)
assert (Path(sys.argv[3]) / "x").read_bytes() == data
print(stats["data_path_reason"])
"""


def test_without_root(tmp_path: Path) -> None:
    """fusermount3 makes the mount; a packet of 1 MiB may not fit the socket's buffer."""
    usable = subprocess.run(
        ["sh", "-c", f"test -x {sys.executable} && test -w /dev/fuse"], user=NOBODY, group=NOBODY, extra_groups=[]
    )
    if usable.returncode:
        pytest.skip("others than root cannot run this Python, or not open /dev/fuse")
    for directory in (tmp_path, *list(tmp_path.parents)[:-2]):
        os.chmod(directory, 0o755)
    home = tmp_path / "home"
    mnt = Mounted(tmp_path, {"cache_dir": f"/dev/shm/ucmfs-nobody-{os.getpid()}"})
    for path in (mnt.point, mnt.storage, home):
        path.mkdir(exist_ok=True)
        os.chown(path, NOBODY, NOBODY)
    mnt.log.touch()
    os.chown(mnt.log, NOBODY, NOBODY)
    mnt.write_config()
    mnt.config_file.chmod(0o644)
    root = Path(__file__).parents[2]
    try:
        done = subprocess.run(
            [sys.executable, "-c", AS_NOBODY, mnt.config_file, mnt.point, mnt.storage, str(root)],
            user=NOBODY,
            group=NOBODY,
            extra_groups=[],
            cwd=home,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 0, done.stderr + mnt.log.read_text()
        assert "needs root" in done.stdout
    finally:
        subprocess.run(["umount", "-l", str(mnt.point)], check=False, stderr=subprocess.DEVNULL)
        subprocess.run(["rm", "-rf", mnt.config["cache_dir"]], check=True)
