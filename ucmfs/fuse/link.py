"""The daemon's end of the relay: the descriptors that it was started with, and the side channel."""

from __future__ import annotations

import os
import platform
import re
import socket
from collections.abc import Callable, Mapping

import trio

from ucmfs.fuse import wire
from ucmfs.fuse.passthrough import Backing

__all__ = ["Link", "why_no_passthrough"]

FIRST_KERNEL = (6, 9)
"""The first with FUSE passthrough."""
PACKET = 4096


def why_no_passthrough() -> str | None:
    """None where the kernel may read blocks by itself, else why it cannot."""
    if os.geteuid() != 0:
        return "passthrough needs root (CAP_SYS_ADMIN)"
    found = re.match(r"(\d+)\.(\d+)", platform.release())
    if found is None or tuple(map(int, found.groups())) < FIRST_KERNEL:
        return f"passthrough needs Linux {FIRST_KERNEL[0]}.{FIRST_KERNEL[1]}; this is {platform.release()}"
    return None


class Link:
    """What the relay gave a daemon, by name: `fuse`, `messages`, `side`, and what earlier daemons had it keep."""

    def __init__(self, device: str, fds: Mapping[str, int]) -> None:
        for fd in fds.values():
            os.set_inheritable(fd, False)
        self.device = device
        """Of the mount, as mountinfo writes it."""
        self._fds = fds
        self._side = socket.socket(fileno=fds["side"])
        self.relay = os.getppid()
        self.backing = Backing(fds["fuse"])
        self.starts = 0
        """How many daemons this mount had before."""
        self.handles: set[int] = set()
        """The handles that the kernel has from earlier daemons."""
        self.leased: list[wire.Reported] = []
        """What earlier daemons leased, and is still open."""
        self.repeated: list[bytes] = []
        """Requests that are asked again, and that an earlier daemon may have done."""
        if "known" in fds:
            with open(fds["known"], "rb") as known:
                known.seek(0)
                self.starts, self.handles, self.leased, self.repeated = wire.unpack_known(known.read())

    @property
    def messages(self) -> str:
        """What to give pyfuse3 as a mount point."""
        return f"/dev/fd/{self._fds['messages']}"

    def kept(self, name: str) -> int | None:
        """The descriptor that an earlier daemon had kept as *name*."""
        return self._fds.get(name)

    def keep(self, name: str, fd: int) -> None:
        """Have the next daemon inherit *fd* too."""
        socket.send_fds(self._side, [bytes([wire.KIND_KEEP]) + name.encode()], [fd])

    def drop(self, name: str) -> None:
        """Have the relay close what it keeps as *name*."""
        self._send(bytes([wire.KIND_DROP]) + name.encode())

    def ready(self, hang_timeout: float) -> None:
        """This daemon serves; one that answers nothing for *hang_timeout* seconds hangs (0: is never taken to)."""
        self._send(wire.READY.pack(wire.KIND_READY, hang_timeout))

    def ask_leases(self) -> None:
        """Have the relay report all that it knows of leases, and then say that it did."""
        self._send(bytes([wire.KIND_SYNC]))

    def send_between(self, message: bytes) -> bool:
        """Put *message* to the relay between the replies to the kernel; False if there is no room for it now."""
        try:
            os.write(self._fds["messages"], message)
        except OSError:
            return False
        return True

    def _send(self, packet: bytes) -> None:
        try:
            self._side.send(packet)
        except OSError:
            # The relay is gone; listen() tells.
            return

    async def listen(
        self,
        ended: Callable[[bool], None],
        heard: Callable[[list[wire.Reported]], None] = lambda report: None,
        synced: Callable[[], None] = lambda: None,
    ) -> None:
        """Answer the relay until the mount is over: then call *ended*, with whether the relay is gone.

        *heard* is called with reports of leases, *synced* after those that were asked for.
        """
        side = trio.socket.from_stdlib_socket(self._side)
        while True:
            try:
                packet = await side.recv(PACKET)
            except OSError:
                packet = b""
            if not packet or packet[0] == wire.KIND_ENDED:
                ended(not packet)
                return
            match packet[0]:
                case wire.KIND_PING:
                    self._send(bytes([wire.KIND_PONG]))
                case wire.KIND_REPORT:
                    heard(wire.unpack_report(packet))
                case wire.KIND_SYNCED:
                    synced()
