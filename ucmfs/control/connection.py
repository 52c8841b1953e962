"""The caller's end of `.ucmfs/sock`: blocking, one request at a time, for the command line and the Python client."""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Sequence
from typing import Any

import msgspec

from ucmfs.control import protocol
from ucmfs.errors import MountError, ProtocolError, UcmfsError, from_errno

__all__ = ["Connection"]

SOCKET_NAME = ".ucmfs/sock"
_FD_SIZE = struct.calcsize("i")


class Connection:
    """A connection to a daemon. Not for use by several threads at once.

    Raises MountError if nothing answers, ProtocolError if the two do not understand each other.
    """

    def __init__(self, sock: socket.socket, *, timeout: float | None = None) -> None:
        self._sock = sock
        self._timeout = timeout
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, protocol.MAX_PACKET)
        self.daemon: dict[str, Any] = self.request(protocol.Hello()).result

    @classmethod
    def to_mount(cls, mount_point: str | os.PathLike[str], *, timeout: float | None = None) -> Connection:
        """Connect through the mount at *mount_point*."""
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        sock.settimeout(timeout)
        try:
            # By way of a descriptor: a socket address holds 107 bytes, a mount point may be longer.
            root = os.open(mount_point, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                sock.connect(f"/proc/self/fd/{root}/{SOCKET_NAME}")
            finally:
                os.close(root)
        except OSError as error:
            sock.close()
            raise MountError(
                f"{mount_point}: no ucmfs daemon answers at {SOCKET_NAME} ({error.strerror or error}); is it mounted?",
                code=error.errno,
            ) from error
        try:
            return cls(sock, timeout=timeout)
        except BaseException:
            sock.close()
            raise

    def request(self, request: protocol.Request, *, timeout: float | None = None) -> protocol.Reply:
        """Send *request* and give its reply; *timeout* (seconds) instead of the connection's own.

        Raises the reply's fault as an error of the project's tree.
        """
        reply, fds = self.exchange(request, timeout=timeout)
        for fd in fds:
            os.close(fd)
        return reply

    def exchange(self, request: protocol.Request, *, timeout: float | None = None) -> tuple[protocol.Reply, list[int]]:
        """Send *request*; give the reply and the descriptors that came with it, which are the caller's to close.

        Raises the reply's fault as an error of the project's tree; MountError if the daemon went away.
        """
        self._sock.settimeout(self._timeout if timeout is None else timeout)
        try:
            self._sock.send(protocol.encode(request))
            data, rights, flags, _ = self._sock.recvmsg(
                protocol.MAX_PACKET, socket.CMSG_SPACE(protocol.MAX_FDS * _FD_SIZE), socket.MSG_CMSG_CLOEXEC
            )
        except TimeoutError as error:
            raise MountError("the ucmfs daemon did not answer in time", code=error.errno or 110) from error
        except OSError as error:
            raise MountError(f"the ucmfs daemon went away: {error.strerror}", code=error.errno) from error
        fds = [
            fd
            for level, kind, held in rights
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS)
            for fd in struct.unpack(f"{len(held) // _FD_SIZE}i", held[: len(held) // _FD_SIZE * _FD_SIZE])
        ]
        if not data:
            raise MountError("the ucmfs daemon closed the connection", code=104)  # ECONNRESET
        try:
            if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
                raise ProtocolError(
                    "a reply was cut: this process is out of descriptors (ulimit -n), or of another version"
                )
            reply = protocol.decode_reply(data)
        except (msgspec.DecodeError, ProtocolError) as error:
            for fd in fds:
                os.close(fd)
            raise ProtocolError(f"not a reply of ucmfs: {error}") from error
        if reply.fault is not None:
            for fd in fds:
                os.close(fd)
            raise UcmfsError(reply.fault.message, code=reply.fault.errno)
        return reply, fds

    def close(self) -> None:
        self._sock.close()

    def __enter__(self) -> Connection:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def row_errors(names: Sequence[str], reply: protocol.Reply) -> dict[int, UcmfsError]:
    """The faults of *reply* as errors about the blocks of *names*, by row number."""
    return {
        row: from_errno(fault.errno, names[row], fault.message.removeprefix(f"{names[row]}: "))
        for row, fault in reply.faults.items()
    }
