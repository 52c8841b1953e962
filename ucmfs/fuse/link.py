"""The mount with a relay in it: ucmfs opens /dev/fuse and mounts by itself, and gives pyfuse3 one end of a socket."""

from __future__ import annotations

import contextlib
import logging
import os
import platform
import re
import socket
import subprocess
import sys
from pathlib import Path

from ucmfs.fuse import mounts, relay
from ucmfs.fuse.passthrough import Backing

__all__ = ["RelayLink", "why_no_relay"]

log = logging.getLogger(__name__)

FIRST_KERNEL = (6, 9)
"""The first with FUSE passthrough."""
SOCKET_BUFFER = 8 << 20
"""Bytes; a message is up to 1 MiB and a little."""
RELAY_EXIT = 10.0
"""Seconds that the relay may take to see that its socket is closed."""

_ALWAYS = frozenset({"default_permissions", "allow_other"})


def why_no_relay(options: frozenset[str]) -> str | None:
    """None where passthrough may work for a mount with *options*, else why it cannot."""
    if os.geteuid() != 0:
        return "passthrough needs root (CAP_SYS_ADMIN)"
    others = sorted(options - _ALWAYS - mounts.FLAGS.keys())
    if others:
        return f"mount option {others[0]} is libfuse's, and so the mount is"
    found = re.match(r"(\d+)\.(\d+)", platform.release())
    if found is None or tuple(map(int, found.groups())) < FIRST_KERNEL:
        return f"passthrough needs Linux {FIRST_KERNEL[0]}.{FIRST_KERNEL[1]}; this is {platform.release()}"
    return None


class RelayLink:
    """A mount and its relay process. `daemon_fd` is for pyfuse3, which closes it."""

    def __init__(self, mount_point: Path, options: frozenset[str]) -> None:
        """Mount and start the relay. Raises MountError, with nothing mounted."""
        self._mount_point = mount_point
        self._fuse = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
        self.backing = Backing(self._fuse)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        so_sndbufforce = 32
        for end in (ours, theirs):
            end.setsockopt(socket.SOL_SOCKET, so_sndbufforce, SOCKET_BUFFER)
        self.ended_fd, told = os.pipe2(os.O_CLOEXEC)
        fds = (self._fuse, theirs.fileno(), told)
        try:
            mounts.mount_fuse(self._fuse, mount_point, options)
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", relay.__file__, *map(str, fds)],
                pass_fds=fds,
                stdin=subprocess.DEVNULL,
                # A Ctrl-C is for the daemon, which ends the mount in order.
                start_new_session=True,
            )
        except BaseException:
            self._take_away()
            for fd in (self._fuse, self.ended_fd, told):
                os.close(fd)
            ours.close()
            theirs.close()
            raise
        theirs.close()
        os.close(told)
        self.daemon_fd = ours.detach()

    @property
    def pid(self) -> int:
        return self._process.pid

    def is_gone(self) -> bool:
        """Whether the relay has ended; gives it a moment to do so, for its sockets close first."""
        try:
            self._process.wait(1)
        except subprocess.TimeoutExpired:
            return False
        return True

    def _take_away(self) -> None:
        with contextlib.suppress(OSError):  # it is gone already, or never came
            mounts.umount(self._mount_point, lazy=True)

    def close(self) -> None:
        """The daemon is done: take the mount away if it is still there, and see the relay end."""
        self._take_away()
        os.close(self._fuse)
        os.close(self.ended_fd)
        try:
            self._process.wait(RELAY_EXIT)
        except subprocess.TimeoutExpired:
            log.error("the relay (pid %d) does not end; killing it", self._process.pid)
            self._process.kill()
            self._process.wait()
