"""Start-up, readiness, and the protocols of unmount and restart.

The command mounts and starts the relay, which starts the daemon (ucmfs/launch.py). It returns once the mount serves, or
raises what the daemon said; it never leaves a mount behind that does not serve.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from ucmfs import launch
from ucmfs.config import Section
from ucmfs.control import protocol
from ucmfs.control.connection import Connection
from ucmfs.errors import ConfigError, MountError, UcmfsError
from ucmfs.fuse import wire
from ucmfs.mountinfo import MOUNTINFO, Mount, find_mount

__all__ = ["Mount", "check_mount_point", "find_mount", "log_path", "mount", "resolve", "restart", "unmount"]

log = logging.getLogger(__name__)

DAEMON = (sys.executable, "-P", "-m", "ucmfs.daemon")
"""What the relay starts. -P: modules are not looked for in the working directory."""
FUSE_DEVICE = Path("/dev/fuse")
ANSWER_TIMEOUT = 10.0
"""Seconds that a daemon or a mount may take to answer what needs no work."""
END_TIMEOUT = 60.0
"""Seconds that a daemon may take to end after it agreed to; it tries once more to write back what is left."""
NAMES_SHOWN = 10
LOG_LINES_SHOWN = 10
LOG_DIRECTORY = Path("/var/log")

_CAP_SYS_ADMIN = 21


# What is mounted


def resolve(mount_point: str | os.PathLike[str]) -> Path:
    """*mount_point* as mountinfo spells it. Does not touch a mount there, which may be dead or hang."""
    path = Path(os.path.abspath(mount_point))
    return path if find_mount(path) else Path(os.path.realpath(path))


def _stat_error(path: Path) -> OSError | None:
    """Why statvfs of *path* fails, None if it works. A mount that hangs gives TimeoutError."""
    result: list[OSError | None] = [TimeoutError(errno.ETIMEDOUT, f"no answer within {ANSWER_TIMEOUT:g} s")]

    def call() -> None:
        try:
            # Not stat: the kernel may answer that by itself for a while after the daemon died.
            os.statvfs(path)
        except OSError as error:
            # ENOSYS is an answer too: a file system without statfs.
            result[0] = None if error.errno == errno.ENOSYS else error
        else:
            result[0] = None

    # Nothing but the mount's end can interrupt a call that hangs, so it may not be this thread that waits.
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(ANSWER_TIMEOUT)
    return result[0]


def _is_dead(path: Path) -> bool:
    """Whether a FUSE mount at *path* has lost its daemon."""
    error = _stat_error(path)
    return error is not None and error.errno in (errno.ENOTCONN, errno.ECONNABORTED)


def _detach(path: Path) -> None:
    """Unmount *path* lazily. Raises MountError."""
    command = ["fusermount3", "-u", "-z"] if shutil.which("fusermount3") else ["umount", "-l"]
    try:
        done = subprocess.run([*command, str(path)], stdin=subprocess.DEVNULL, capture_output=True, text=True)
    except OSError as error:
        raise MountError(f"{path}: cannot be unmounted: {command[0]}: {error.strerror}") from error
    if done.returncode:
        raise MountError(f"{path}: cannot be unmounted: {done.stderr.strip()}")


def _clear_dead(path: Path, level: int = logging.WARNING) -> None:
    """Unmount dead mounts at *path*; live ones stay."""
    while find_mount(path) and _is_dead(path):
        log.log(level, "%s: unmounting a dead mount: its daemon is gone", path)
        _detach(path)


# Before the mount


def check_mount_point(mount_point: str | os.PathLike[str], *, device: Path = FUSE_DEVICE) -> Path:
    """Make sure that *mount_point* can be mounted on, and give its absolute path. A dead mount there is cleared.

    Raises ConfigError if it is not an empty directory, MountError if this process cannot mount anything.
    """
    path = resolve(mount_point)
    _clear_dead(path)
    found = find_mount(path)
    if found is not None:
        reason = f"is already a mount ({found.kind} of {found.source}); unmount it or choose another directory"
        raise ConfigError(reason, path=str(path))
    try:
        with os.scandir(path) as entries:
            first = next(entries, None)
    except FileNotFoundError as error:
        raise ConfigError(f"there is no such directory; mkdir -p {path}", path=str(path)) from error
    except NotADirectoryError as error:
        raise ConfigError("is not a directory; choose another mount point", path=str(path)) from error
    except OSError as error:
        raise ConfigError(f"cannot be used as a mount point: {error.strerror}", path=str(path)) from error
    if first is not None:
        raise ConfigError(
            f"is not empty (it has {first.name}), and a mount would hide that; choose an empty directory",
            path=str(path),
        )
    _check_fuse(device)
    return path


def _check_fuse(device: Path) -> None:
    advice = f"load the fuse module (modprobe fuse), or run the container with --device {FUSE_DEVICE}"
    try:
        os.close(os.open(device, os.O_RDWR | os.O_CLOEXEC))
    except FileNotFoundError as error:
        raise MountError(f"{device} does not exist: {advice}", code=errno.ENODEV) from error
    except OSError as error:
        if error.errno == errno.EACCES:
            advice = f"run as root, or let others open it (chmod 0666 {device})"
        raise MountError(f"{device} cannot be opened ({error.strerror}): {advice}", code=error.errno) from error
    if not _is_privileged() and shutil.which("fusermount3") is None:
        raise MountError(
            "no permission to mount: run as root (in a container, with --cap-add SYS_ADMIN), "
            "or install fusermount3 (package fuse3)",
            code=errno.EPERM,
        )


def _is_privileged() -> bool:
    """Whether this process may call mount(2)."""
    effective = re.search(r"^CapEff:\s+([0-9a-f]+)", Path("/proc/self/status").read_text(), re.MULTILINE)
    return effective is not None and bool(int(effective[1], 16) >> _CAP_SYS_ADMIN & 1)


def log_path(section: Section, mount_point: Path) -> Path:
    """Where the daemon of *mount_point* logs; the file is made if it is not there. Raises ConfigError."""
    chosen = section.values.get("log_file")
    if isinstance(chosen, str):
        path = Path(os.path.abspath(chosen))
        try:
            path.open("ab").close()
        except OSError as error:
            raise section.refusal("log_file", f"{path} cannot be written: {error.strerror}") from error
        return path
    # '-' for '/' reads best; what stands for itself must not look like it.
    escaped = str(mount_point).strip("/").replace("%", "%25").replace("-", "%2D").replace("/", "-")
    state = os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
    for directory in (LOG_DIRECTORY, Path(state)):
        path = directory / "ucmfs" / f"{escaped}.log"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.open("ab").close()
        except OSError as error:
            reason = f"{path} cannot be written ({error.strerror}); name another file"
        else:
            return path
    raise section.refusal("log_file", reason)


# Mount


def mount(
    section: Section,
    mount_point: str | os.PathLike[str],
    options: frozenset[str] = frozenset(),
    *,
    foreground: bool = False,
    timeout: float = 30.0,
    daemon: Sequence[str] = DAEMON,
) -> None:
    """Mount *section* at *mount_point* with the FUSE *options*; *daemon* is the command that serves it.

    In the background, returns once the mount serves, or raises within *timeout* seconds and leaves nothing behind.
    In the foreground, this process becomes the mount and ends with it. Raises ConfigError, MountError, or what the
    daemon raised.
    """
    path = check_mount_point(mount_point)
    if foreground:
        launch.be_relay(launch.Launch.of(section, path, options, None), daemon)
    log_file = log_path(section, path)
    _run_in_background(launch.Launch.of(section, path, options, log_file), daemon, log_file, timeout)


def _run_in_background(what: launch.Launch, daemon: Sequence[str], log_file: Path, timeout: float) -> None:
    deadline = time.monotonic() + timeout
    path = Path(what.mount_point)
    logged = log_file.stat().st_size
    reading, writing = os.pipe2(os.O_CLOEXEC)
    processes: list[int] = []  # pidfds
    serves = False
    try:
        try:
            relay = launch.start_relay(what, daemon, writing)
        finally:
            os.close(writing)
        processes.append(os.pidfd_open(relay))
        for message in _messages(reading, deadline):
            if "pid" in message:
                with suppress(ProcessLookupError):  # dead already: the pipe ends
                    processes.append(os.pidfd_open(message["pid"]))
            elif "ready" in message:
                _check_serves(path)
                serves = True
                return
            else:
                raise _error_of(message, log_file, logged)
        raise MountError(f"{path}: the daemon ended before it served{_end_of(log_file, logged)}")
    except TimeoutError as error:
        raise MountError(
            f"{path}: does not serve after {timeout:g} s; the daemon is killed{_end_of(log_file, logged)}",
            code=errno.ETIMEDOUT,
        ) from error
    finally:
        os.close(reading)
        for process in processes:
            if not serves:
                _kill(process)
            os.close(process)
        if processes and not serves:
            _clear_dead(path, logging.DEBUG)


def _messages(pipe: int, deadline: float) -> Iterator[dict[str, Any]]:
    """What the daemon reports, to the end of the pipe. Raises TimeoutError at *deadline*."""
    poll = select.poll()
    poll.register(pipe, select.POLLIN)
    buffer = b""
    while _poll(poll, deadline):
        data = os.read(pipe, 1 << 16)
        if not data:
            return
        *lines, buffer = (buffer + data).split(b"\n")
        for line in lines:
            yield json.loads(line)
    raise TimeoutError


def _poll(poll: select.poll, deadline: float) -> list[tuple[int, int]]:
    """What happened before *deadline* (of time.monotonic); nothing if it passed."""
    return poll.poll(max(0, deadline - time.monotonic()) * 1000)


def _error_of(message: dict[str, Any], log_file: Path, logged: int) -> UcmfsError:
    if message["kind"] == "ConfigError":
        return ConfigError(message["message"])
    if message["kind"] == "MountError":
        # libfuse and fusermount3 say only there what was wrong.
        return MountError(message["message"] + _end_of(log_file, logged), code=message["errno"])
    return UcmfsError(message["message"], code=message["errno"])


def _end_of(log_file: Path, logged: int) -> str:
    """What is new in *log_file* since it had *logged* bytes, to be put behind a message."""
    data = log_file.read_bytes()
    new = data[logged if logged <= len(data) else 0 :]
    lines = [line.decode(errors="replace") for line in new.splitlines()[-LOG_LINES_SHOWN:]]
    shown = "".join(f"\n  {line}" for line in lines)
    return f"; {log_file} ends with:{shown}" if lines else f"; nothing new is in {log_file}"


def _check_serves(path: Path) -> None:
    if find_mount(path) is None:
        raise MountError(f"{path}: the daemon says that it serves, but nothing is mounted there")
    error = _stat_error(path)
    if error is not None:
        raise MountError(f"{path}: is mounted, but does not answer: {error.strerror}", code=error.errno) from error


def _kill(pidfd: int) -> None:
    with suppress(ProcessLookupError):
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    _poll(poll, time.monotonic() + ANSWER_TIMEOUT)


# Unmount


def unmount(mount_point: str | os.PathLike[str], *, timeout: float = 300.0, force: bool = False) -> None:
    """Write every dirty block back and end the mount at *mount_point*; return when it and its daemon are gone.

    Raises MountError if blocks are still dirty after *timeout* seconds: it names them, and the mount stays up. With
    *force* the mount is ended all the same (dirty blocks stay in the Cache's directory, for the next mount). A dead
    mount is cleared, with a warning. Raises MountError if there is no ucmfs at *mount_point*.
    """
    path = resolve(mount_point)
    daemon: int | None = None  # pidfd
    try:
        try:
            with Connection.to_mount(path, timeout=ANSWER_TIMEOUT) as connection:
                with suppress(ProcessLookupError):
                    daemon = os.pidfd_open(connection.daemon["pid"])
                request = protocol.Unmount(timeout, force)
                answer = connection.request(request, timeout=timeout + ANSWER_TIMEOUT).result
        except MountError as error:
            _unmount_unanswered(path, error, force=force)
            return
        left = _left(answer)
        if left and not force:
            raise MountError(f"{path}: stays mounted: {left}; mend that and try again, or use --force")
        _wait_for_end(path, daemon, time.monotonic() + END_TIMEOUT)
        if left:
            raise MountError(f"{path}: unmounted, but {left}; what is dirty is kept for the next mount there")
    finally:
        if daemon is not None:
            os.close(daemon)


def restart(mount_point: str | os.PathLike[str], *, timeout: float = 30.0) -> int:
    """Replace the daemon of *mount_point* by one of the version that is installed now; give the new one's pid.

    Returns once the new daemon answers. Open files stay open. Raises MountError if none answers within *timeout*
    seconds, UcmfsError if the daemon refuses.
    """
    path = resolve(mount_point)
    deadline = time.monotonic() + timeout
    with Connection.to_mount(path, timeout=ANSWER_TIMEOUT) as connection:
        before = connection.daemon["pid"]
        connection.request(protocol.Restart(wire.VERSION))
    while True:
        left = max(0.0, deadline - time.monotonic())
        try:
            # Who connects waits in the listener's backlog until there is a daemon; one that is just ending hangs up.
            with Connection.to_mount(path, timeout=left) as connection:
                if connection.daemon["pid"] != before:
                    return int(connection.daemon["pid"])
        except MountError:
            if time.monotonic() >= deadline or find_mount(path) is None:
                raise
        if time.monotonic() >= deadline:
            raise MountError(f"{path}: no new daemon answers after {timeout:g} s; see the log", code=errno.ETIMEDOUT)


def _left(answer: dict[str, Any]) -> str | None:
    """What the daemon could not write back, None if it could all."""
    names, reason = answer["left"], answer["error"]
    if not names:
        return str(reason) if reason else None
    shown = ", ".join(names[:NAMES_SHOWN]) + (", ..." if len(names) > NAMES_SHOWN else "")
    because = f" ({reason})" if reason else ""
    return f"{answer.get('total', len(names))} dirty blocks are left{because}: {shown}"


def _unmount_unanswered(path: Path, error: MountError, *, force: bool) -> None:
    """Unmount *path*, where no daemon answered, if that can be right."""
    found = find_mount(path)
    if found is None:
        raise MountError(f"{path}: is not a mount", code=errno.EINVAL) from error
    if _is_dead(path):
        _clear_dead(path)
    elif error.errno in (errno.ENOENT, errno.ENOTDIR):
        raise MountError(f"{path}: is a mount, but not of ucmfs ({found.kind} of {found.source})") from error
    elif force:
        _detach(path)
    else:
        reason = "the daemon does not answer; --force unmounts it all the same"
        raise MountError(f"{path}: {reason}", code=error.errno) from error


def _wait_for_end(path: Path, daemon: int | None, deadline: float) -> None:
    """Wait until nothing is mounted at *path* and *daemon* (a pidfd) has exited."""
    poll = select.poll()
    if daemon is not None:
        poll.register(daemon, select.POLLIN)
        if not _poll(poll, deadline):
            raise MountError(f"{path}: the daemon does not exit; see its log", code=errno.ETIMEDOUT)
        poll.unregister(daemon)
    # The kernel reports every change of what is mounted as an exceptional condition of this file.
    with MOUNTINFO.open("rb") as mountinfo:
        poll.register(mountinfo, select.POLLPRI)
        while find_mount(path) is not None:
            _clear_dead(path)
            if find_mount(path) is not None and not _poll(poll, deadline):
                raise MountError(f"{path}: is still mounted; see the daemon's log", code=errno.ETIMEDOUT)
