"""Mount points, start-up in the background, and the unmount protocol; the real daemon is in tests/mount/."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pyfuse3
import pytest

from tests.fake_daemon import FakeDaemon
from tests.processes import has_exited, in_child, wait_for_exit
from tests.scripted_daemon import EmptyRoot
from ucmfs import mounting
from ucmfs.config import Section
from ucmfs.control import protocol
from ucmfs.errors import ConfigError, MountError, UcmfsError

needs_mount = pytest.mark.mount


@pytest.fixture
def mount_point(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "mnt"
    path.mkdir()
    yield path
    while mounting.find_mount(path):
        subprocess.run(["umount", "-l", path], check=True)


@pytest.fixture
def section(tmp_path: Path) -> Section:
    return Section.of({"storage_backends": "/data", "log_file": str(tmp_path / "daemon.log")})


def scripted(name: str) -> list[str]:
    """The command of a daemon of tests/scripted_daemon.py."""
    return [sys.executable, "-m", "tests.scripted_daemon", name]


@pytest.fixture(autouse=True)
def modules_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))


def die(path: Path) -> None:
    """Mount on *path* and be killed without unmounting."""
    pyfuse3.init(EmptyRoot(), str(path), {"fsname=empty"})
    os.kill(os.getpid(), signal.SIGKILL)


def make_dead_mount(path: Path) -> None:
    _, status = os.waitpid(in_child(lambda: die(path)), 0)
    assert os.WTERMSIG(status) == signal.SIGKILL
    with pytest.raises(OSError, match=os.strerror(errno.ENOTCONN)):
        os.stat(path)


# Mount points


def test_an_empty_directory_is_a_mount_point(mount_point: Path) -> None:
    assert mounting.check_mount_point(mount_point) == mount_point


def test_a_symbolic_link_to_one_is_followed(mount_point: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(mount_point)
    assert mounting.check_mount_point(tmp_path / "link") == mount_point


def test_a_relative_path_is_made_absolute(mount_point: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(mount_point.parent)
    assert mounting.check_mount_point("mnt") == mount_point


def test_what_is_no_mount_point_is_refused(mount_point: Path) -> None:
    with pytest.raises(ConfigError, match=rf"^{mount_point}/x: there is no such directory; mkdir -p"):
        mounting.check_mount_point(mount_point / "x")
    (mount_point / "block").touch()
    with pytest.raises(ConfigError, match=r"mnt: is not empty \(it has block\)"):
        mounting.check_mount_point(mount_point)
    with pytest.raises(ConfigError, match="block: is not a directory"):
        mounting.check_mount_point(mount_point / "block")


@needs_mount
@pytest.mark.parametrize("name", ["plain", "with a blank", "tab\t and \\ backslash", "\udcff"])
def test_what_is_mounted_already_is_refused(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "a source", path], check=True)
    try:
        with pytest.raises(ConfigError, match=r"is already a mount \(tmpfs of a source\)"):
            mounting.check_mount_point(path)
    finally:
        subprocess.run(["umount", path], check=True)
    assert mounting.check_mount_point(path) == path


@needs_mount
def test_a_dead_mount_is_cleared_with_a_warning(mount_point: Path, caplog: pytest.LogCaptureFixture) -> None:
    make_dead_mount(mount_point)
    assert mounting.check_mount_point(mount_point) == mount_point
    assert mounting.find_mount(mount_point) is None
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert f"{mount_point}: unmounting a dead mount" in caplog.text


def test_no_fuse_device_is_said_plainly(mount_point: Path, tmp_path: Path) -> None:
    with pytest.raises(MountError, match=r"modprobe fuse.*--device /dev/fuse") as caught:
        mounting.check_mount_point(mount_point, device=tmp_path / "none")
    assert caught.value.errno == errno.ENODEV


@needs_mount
def test_a_fuse_device_that_cannot_be_opened_is_said_plainly(mount_point: Path, tmp_path: Path) -> None:
    device = tmp_path / "fuse"
    os.mknod(device, stat.S_IFCHR | 0o600, os.makedev(10, 255))  # no driver has this number
    with pytest.raises(MountError, match=r"cannot be opened \(No such device.*modprobe fuse"):
        mounting.check_mount_point(mount_point, device=device)


@needs_mount
def test_no_permission_is_said_plainly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))  # no fusermount3
    with tempfile.TemporaryDirectory() as root:  # tmp_path is closed to others
        os.chmod(root, 0o755)
        path, device = Path(root, "mnt"), Path(root, "device")
        path.mkdir()
        device.touch(mode=0o600)

        def as_nobody() -> None:
            os.setresuid(65534, 65534, 65534)
            with pytest.raises(MountError, match=r"device cannot be opened \(Permission denied\): run as root, or"):
                mounting.check_mount_point(path, device=device)
            with pytest.raises(MountError, match=r"no permission to mount: run as root.*fusermount3") as caught:
                mounting.check_mount_point(path, device=Path(os.devnull))  # /dev/fuse may be root's alone
            assert caught.value.errno == errno.EPERM

        assert os.waitpid(in_child(as_nobody), 0)[1] == 0


# Where the log is


def test_the_log_is_named_after_the_mount_point(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    unwritable = tmp_path / "file"
    unwritable.touch()
    monkeypatch.setattr(mounting, "LOG_DIRECTORY", unwritable)
    section = Section.of({"storage_backends": "/data"})
    names = {mounting.log_path(section, Path(path)).name for path in ("/mnt/a/b", "/mnt/a-b", "/mnt/a%2Db")}
    assert names == {"mnt-a-b.log", "mnt-a%2Db.log", "mnt-a%252Db.log"}
    assert {path.name for path in (tmp_path / "ucmfs").iterdir()} == names


def test_a_log_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    section = Section.of({"log_file": str(tmp_path / "none" / "log")})
    with pytest.raises(ConfigError, match=r"^log_file: .*cannot be written: No such file"):
        mounting.log_path(section, Path("/mnt"))


# Start-up


@needs_mount
def test_in_the_background_it_serves_when_the_call_returns(mount_point: Path, section: Section, tmp_path: Path) -> None:
    inherited = os.open(tmp_path, os.O_RDONLY)
    os.set_inheritable(inherited, True)
    facts = tmp_path / "facts"
    try:
        mounting.mount(section, mount_point, frozenset({"allow_other", "fsname=empty"}), daemon=scripted("empty"))
    finally:
        os.close(inherited)
    daemon, relay, session, directory, options, pipeline, *files = facts.read_text().split("\n")
    found = mounting.find_mount(mount_point)
    assert found == mounting.Mount(mount_point, "fuse.ucmfs", "empty")
    assert os.stat(mount_point).st_ino == pyfuse3.ROOT_INODE
    assert session == daemon  # which no terminal is of
    assert os.getsid(int(relay)) == int(relay)
    assert directory == os.getcwd()
    assert options == "allow_other,fsname=empty"
    assert pipeline == "Cache|Posix"
    assert files[:3] == [os.devnull, *[section.values["log_file"]] * 2]
    assert str(tmp_path) not in files
    for process in (daemon, relay):
        command = Path(f"/proc/{process}/cmdline").read_text()
        assert "/data" not in command  # values may be secrets
    log = Path(section.values["log_file"]).read_text()
    assert "INFO ucmfs.test: a line\n" in log
    assert "words of a library\n" in log
    subprocess.run(["fusermount3", "-u", mount_point], check=True)
    wait_for_exit(int(daemon))
    wait_for_exit(int(relay))
    assert not facts.exists()


def test_what_is_wrong_with_the_configuration_comes_out(mount_point: Path, section: Section) -> None:
    with pytest.raises(ConfigError, match=r"^storage_backends: no such directory$"):
        mounting.mount(section, mount_point, daemon=scripted("bad_configuration"))
    assert mounting.find_mount(mount_point) is None


def test_what_hinders_the_mount_comes_out_with_what_libraries_say(mount_point: Path, section: Section) -> None:
    Path(section.values["log_file"]).write_text("of yesterday\n")
    with pytest.raises(MountError, match=r"^the kernel refused; .*log ends with:\n  fuse: device not found") as caught:
        mounting.mount(section, mount_point, daemon=scripted("refused"))
    assert caught.value.errno == errno.ENODEV
    assert "of yesterday" not in str(caught.value)


def test_other_errors_keep_message_and_errno(mount_point: Path, section: Section) -> None:
    with pytest.raises(UcmfsError, match=r"^Posix: no room$") as caught:
        mounting.mount(section, mount_point, daemon=scripted("full"))
    assert caught.value.errno == errno.ENOSPC


def test_an_unexpected_exception_names_the_log_which_has_the_traceback(mount_point: Path, section: Section) -> None:
    with pytest.raises(MountError, match=r"^the daemon failed: ZeroDivisionError: of all things; "):
        mounting.mount(section, mount_point, daemon=scripted("unexpected"))
    assert "Traceback" in Path(section.values["log_file"]).read_text()


def test_a_daemon_that_ends_without_a_word_is_an_error(mount_point: Path, section: Section) -> None:
    with pytest.raises(MountError, match=r"the daemon ended before it served; nothing new is in .*daemon\.log"):
        mounting.mount(section, mount_point, daemon=scripted("silent"))
    assert mounting.find_mount(mount_point) is None


@needs_mount
def test_a_daemon_that_dies_leaves_no_mount(mount_point: Path, section: Section) -> None:
    with pytest.raises(MountError, match=r"the daemon ended before it served; (?s:.*)last words"):
        mounting.mount(section, mount_point, daemon=scripted("dies"))
    assert mounting.find_mount(mount_point) is None


def test_a_daemon_that_cannot_be_started(mount_point: Path, section: Section) -> None:
    with pytest.raises(MountError, match=r"the daemon ended before it served; (?s:.*)/none/python: No such file"):
        mounting.mount(section, mount_point, daemon=["/none/python"])
    assert mounting.find_mount(mount_point) is None


@needs_mount
def test_a_daemon_that_hangs_is_killed_and_leaves_no_mount(mount_point: Path, section: Section) -> None:
    with pytest.raises(
        MountError, match=r"does not serve after 2 s; the daemon is killed; [^\n]*\n.*pid \d+"
    ) as caught:
        mounting.mount(section, mount_point, daemon=scripted("hangs"), timeout=2)
    assert caught.value.errno == errno.ETIMEDOUT
    assert mounting.find_mount(mount_point) is None
    assert has_exited(int(str(caught.value).split()[-1]))


@needs_mount
def test_ready_is_not_believed_without_an_answer(
    mount_point: Path, section: Section, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mounting, "ANSWER_TIMEOUT", 0.5)
    with pytest.raises(MountError, match="is mounted, but does not answer"):
        mounting.mount(section, mount_point, daemon=scripted("ready_without_answers"))
    assert mounting.find_mount(mount_point) is None
    assert has_exited(int(Path(section.values["log_file"]).read_text().split()[-1]))


@needs_mount
def test_a_live_mount_of_another_is_never_cleared(mount_point: Path, section: Section) -> None:
    """A second command got past the check while the first was starting, and fails."""
    with pytest.raises(ConfigError, match="in use"):
        mounting.mount(section, mount_point, daemon=scripted("mounted_over"))
    assert mounting.find_mount(mount_point) == mounting.Mount(mount_point, "tmpfs", "other")


@needs_mount
def test_in_the_foreground_it_blocks_until_the_mount_ends(mount_point: Path, section: Section, tmp_path: Path) -> None:
    pid = in_child(lambda: mounting.mount(section, mount_point, daemon=scripted("empty"), foreground=True))
    while not (tmp_path / "facts").exists():
        assert os.waitpid(pid, os.WNOHANG) == (0, 0)
    assert os.stat(mount_point).st_ino == pyfuse3.ROOT_INODE
    assert os.waitpid(pid, os.WNOHANG) == (0, 0)
    assert Path(f"/proc/{pid}/cmdline").read_text().split("\0")[4] == str(mount_point)
    subprocess.run(["fusermount3", "-u", mount_point], check=True)
    assert os.waitpid(pid, 0)[1] == 0


@needs_mount
def test_five_daemons_that_fail_end_the_mount(mount_point: Path, section: Section, tmp_path: Path) -> None:
    mounting.mount(section, mount_point, daemon=scripted("serves_once"))
    daemon, relay, *_ = (tmp_path / "facts").read_text().split("\n")
    os.kill(int(daemon), signal.SIGKILL)
    wait_for_exit(int(relay))
    assert mounting.find_mount(mount_point) is None
    log = Path(section.values["log_file"]).read_text()
    # The first counts too if it was killed as soon as it served.
    assert log.count("ERROR ucmfs.launch: cache_dir: is gone") in (4, 5)
    assert "5 daemons in a row failed on start, the last one ended with status 1; its reason is above" in log


# Unmount


def answering(*left: str, error: str | None = None) -> Callable[[protocol.Request], protocol.Reply]:
    return lambda request: protocol.Reply(result={"left": list(left), "error": error})


def forked_daemon(root: Path, answer: Callable[[protocol.Request], protocol.Reply]) -> int:
    """A daemon in a process of its own, that ends after it answered Unmount. Gives its pid."""
    daemon = FakeDaemon(root, answer)

    def serve() -> None:
        daemon._pid = os.getpid()
        daemon.serve(until=protocol.Unmount)

    pid = in_child(serve)
    daemon._listener.close()
    return pid


def test_unmount_returns_when_the_daemon_has_exited(mount_point: Path) -> None:
    pid = forked_daemon(mount_point, answering())
    mounting.unmount(mount_point, timeout=20)
    assert has_exited(pid)
    assert os.waitpid(pid, 0)[1] == 0


@needs_mount
def test_unmount_waits_until_the_mount_is_gone(mount_point: Path) -> None:
    subprocess.run(["mount", "-t", "tmpfs", "x", mount_point], check=True)
    pid = forked_daemon(mount_point, answering())
    thread = threading.Thread(target=mounting.unmount, args=[mount_point])
    thread.start()
    assert os.waitpid(pid, 0)[1] == 0
    thread.join(0.2)
    assert thread.is_alive()
    subprocess.run(["umount", "-l", mount_point], check=True)
    thread.join(30)
    assert not thread.is_alive()


def test_dirty_blocks_keep_it_mounted_and_are_named(mount_point: Path) -> None:
    names = [f"abc/{number}" for number in range(12)]
    with FakeDaemon(mount_point, answering(*names, error="Posix: no room")) as daemon:
        with pytest.raises(MountError) as caught:
            mounting.unmount(mount_point, timeout=2.5)
        assert daemon.requests == [protocol.Unmount(2.5, False)]
    message = str(caught.value)
    assert "stays mounted: 12 dirty blocks are left (Posix: no room): abc/0, abc/1, " in message
    assert "abc/9, ...;" in message
    assert "abc/10" not in message


def test_an_error_without_names_keeps_it_mounted_too(mount_point: Path) -> None:
    with (
        FakeDaemon(mount_point, answering(error="Posix: no answer")),
        pytest.raises(MountError, match="stays mounted: Posix: no answer"),
    ):
        mounting.unmount(mount_point)


def test_force_ends_it_and_says_what_is_left(mount_point: Path) -> None:
    pid = forked_daemon(mount_point, answering("abc/1"))
    with pytest.raises(MountError, match="unmounted, but 1 dirty blocks are left: abc/1; what is dirty is kept"):
        mounting.unmount(mount_point, force=True)
    assert has_exited(pid)
    os.waitpid(pid, 0)


def test_a_refusal_of_the_daemon_comes_out(mount_point: Path) -> None:
    def answer(_: protocol.Request) -> protocol.Reply:
        return protocol.Reply(fault=protocol.Fault(errno.EPERM, "only root may"))

    with FakeDaemon(mount_point, answer), pytest.raises(UcmfsError, match="only root may"):
        mounting.unmount(mount_point)


def test_a_directory_is_no_mount(mount_point: Path) -> None:
    with pytest.raises(MountError, match=rf"^{mount_point}: is not a mount$"):
        mounting.unmount(mount_point)


@needs_mount
def test_the_mounts_of_others_stay(mount_point: Path) -> None:
    subprocess.run(["mount", "-t", "tmpfs", "x", mount_point], check=True)
    with pytest.raises(MountError, match=r"is a mount, but not of ucmfs \(tmpfs of x\)"):
        mounting.unmount(mount_point, force=True)
    assert mounting.find_mount(mount_point) is not None


@needs_mount
def test_unmount_clears_a_dead_mount(mount_point: Path, caplog: pytest.LogCaptureFixture) -> None:
    make_dead_mount(mount_point)
    mounting.unmount(mount_point)
    assert mounting.find_mount(mount_point) is None
    assert "unmounting a dead mount" in caplog.text


@needs_mount
@pytest.mark.parametrize("force", [False, True])
def test_a_daemon_that_does_not_listen_needs_force(mount_point: Path, force: bool) -> None:
    subprocess.run(["mount", "-t", "tmpfs", "x", mount_point], check=True)
    daemon = FakeDaemon(mount_point, answering())
    daemon._listener.close()
    if force:
        mounting.unmount(mount_point, force=True)
    else:
        with pytest.raises(MountError, match="the daemon does not answer; --force unmounts it all the same"):
            mounting.unmount(mount_point)
    assert (mounting.find_mount(mount_point) is None) == force


@needs_mount
def test_umount_serves_where_fusermount3_is_missing(
    mount_point: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_dead_mount(mount_point)
    umount = shutil.which("umount")
    assert umount is not None
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/umount").symlink_to(umount)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    mounting.unmount(mount_point)
    assert mounting.find_mount(mount_point) is None
