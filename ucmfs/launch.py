"""From the command that mounts to the daemon that serves, by way of the relay, which stands between them.

The command mounts and starts the relay, with what the daemon has to know in a memfd (secrets stand in no argument and
no file). The relay starts the daemon, and the next one when it dies. The first daemon tells the command over a pipe how
it went: a line of JSON with its pid, then one with "ready" or with the error.
"""

from __future__ import annotations

import errno
import json
import logging
import logging.handlers
import os
import socket
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

import msgspec

from ucmfs.config import Section
from ucmfs.errors import UcmfsError
from ucmfs.fuse import mounts, relay
from ucmfs.fuse.link import Link

__all__ = ["Launch", "Run", "be_relay", "serve", "start_relay"]

log = logging.getLogger(__name__)

LOG_BYTES = 16 << 20
LOG_FILES = 3
LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


class Launch(msgspec.Struct, frozen=True):
    """What a daemon is to serve."""

    values: dict[str, Any]
    source: str | None
    path: str
    """With `source` and `values`, the section of the configuration."""
    mount_point: str
    options: frozenset[str]
    log_file: str | None
    """None: log to stderr."""

    @classmethod
    def of(cls, section: Section, mount_point: Path, options: frozenset[str], log_file: Path | None) -> Launch:
        return cls(
            dict(section.values),
            section.source,
            section.path,
            str(mount_point),
            options,
            None if log_file is None else str(log_file),
        )

    @property
    def section(self) -> Section:
        return Section(self.values, source=self.source, path=self.path)


Run = Callable[[Launch, Link, Callable[[], None]], None]
"""What serves a mount: blocks until it ends, calls the last argument once it serves, raises UcmfsError if it cannot."""


# The command's side


def start_relay(launch: Launch, daemon: Sequence[str], report: int) -> int:
    """Mount, and start the relay in the background; give its pid. Raises MountError, with nothing mounted.

    *report* is the writing end of a pipe, for the daemon (the command *daemon*).
    """
    assert launch.log_file is not None
    device, command, fds = _mounted(launch, daemon, {"report": report})
    open_log = (os.POSIX_SPAWN_OPEN, 1, launch.log_file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        return os.posix_spawn(
            command[0],
            command,
            os.environ,
            file_actions=[
                (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDWR, 0),
                open_log,
                (os.POSIX_SPAWN_DUP2, 1, 2),
                *((os.POSIX_SPAWN_DUP2, fd, fd) for fd in fds.values()),
            ],
            setsid=True,
        )
    except BaseException:
        mounts.take_away(Path(launch.mount_point), device)
        raise
    finally:
        for name, fd in fds.items():
            if name != "report":
                os.close(fd)


def be_relay(launch: Launch, daemon: Sequence[str]) -> NoReturn:
    """Mount, and become the relay. Raises MountError, with nothing mounted."""
    device, command, fds = _mounted(launch, daemon, {})
    for fd in fds.values():
        os.set_inheritable(fd, True)
    try:
        os.execv(command[0], command)
    except BaseException:
        mounts.take_away(Path(launch.mount_point), device)
        raise


def _mounted(launch: Launch, daemon: Sequence[str], more: Mapping[str, int]) -> tuple[str, list[str], dict[str, int]]:
    """Mount; give the mount's device, the relay's command, and the descriptors that it inherits."""
    # The daemon binds its socket through the mount before it makes it read-only.
    options = launch.options - {"ro"} if os.geteuid() == 0 else launch.options
    fuse = mounts.mount_fuse(Path(launch.mount_point), options)
    spec = os.memfd_create("launch")
    with open(spec, "wb", closefd=False) as file:
        file.write(msgspec.msgpack.encode(launch))
    fds = {"fuse": fuse, "spec": spec, **more}
    device = mounts.device_at(Path(launch.mount_point))
    named = [f"{name}={fd}" for name, fd in fds.items()]
    command = [sys.executable, "-I", "-S", relay.__file__, launch.mount_point, device, *named, "--", *daemon]
    return device, command, fds


# The daemon's side


def serve(run: Run, arguments: Sequence[str]) -> NoReturn:
    """Be the daemon that the relay started with *arguments*: mount point, its device, and descriptors as NAME=FD.

    With the descriptor `standby`, wait there until it is needed.
    """
    _, device, *named = arguments
    fds = {name: int(fd) for name, _, fd in (word.partition("=") for word in named)}
    if "standby" in fds:
        fds = _stand_by(fds["standby"])
    with open(fds.pop("spec"), "rb") as spec:
        # All daemons of a mount share the file, and its position.
        launch = msgspec.msgpack.decode(os.pread(spec.fileno(), os.fstat(spec.fileno()).st_size, 0), type=Launch)
    report = _Report(fds.pop("report", None))
    status = 1
    try:
        report.send(pid=os.getpid())
        _log_to(launch.log_file)
        run(launch, Link(device, fds), report.ready)
        status = 0
    except UcmfsError as error:
        log.error("%s", error)
        report.send(kind=type(error).__name__, message=str(error), errno=error.errno)
    except BaseException as error:
        log.critical("the daemon failed", exc_info=error)
        reason = "".join(traceback.format_exception_only(error)).strip()
        report.send(kind="MountError", message=f"the daemon failed: {reason}", errno=errno.EIO)
    finally:
        logging.shutdown()
        os._exit(status)


def _stand_by(fd: int) -> dict[str, int]:
    """Wait until this process is to be the daemon; give the descriptors that it is then given."""
    with socket.socket(fileno=fd) as relay:
        names, fds, _, _ = socket.recv_fds(relay, 4096, 64)
    if not names:
        # The relay is gone, and needs none.
        os._exit(0)
    return dict(zip(names.decode().split(), fds, strict=True))


def _log_to(log_file: str | None) -> None:
    handler: logging.Handler = logging.StreamHandler()
    if log_file is not None:
        handler = logging.handlers.RotatingFileHandler(log_file, maxBytes=LOG_BYTES, backupCount=LOG_FILES)
    logging.basicConfig(level=logging.INFO, format=LOG_FORMAT, handlers=[handler], force=True)


class _Report:
    """The daemon's end of the pipe to the command that started it; nothing where there is none."""

    def __init__(self, fd: int | None) -> None:
        self._fd = fd
        if fd is not None:
            os.set_inheritable(fd, False)

    def send(self, **message: Any) -> None:
        if self._fd is not None:
            with suppress(OSError):  # the command may be gone
                os.write(self._fd, json.dumps(message).encode() + b"\n")

    def ready(self) -> None:
        self.send(ready=True)
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None
