"""The relay: a small process between /dev/fuse and the daemon, for what pyfuse3 cannot say.

    python relay.py FUSE_FD SOCKET_FD ENDED_FD

It copies messages, one SEQPACKET packet each, and looks into three replies only:

- INIT: accept passthrough where the kernel offers it.
- OPEN and CREATE: the upper half of `fh` is a backing id. Where the daemon put one, the kernel shall read and write
  the backing file by itself (FOPEN_PASSTHROUGH), and a read-only open needs no FLUSH.

Two threads, each a blocking loop one way (kernel.md measured this as the cheapest). A reply that the kernel could
not take never reaches it: the request it belongs to gets EIO. When the kernel ends the connection a byte goes to
ENDED_FD, and the relay lives until the daemon closes the socket.

Started with `-I -S` and nothing of ucmfs but wire.py: it shall be small and have no way to fail.
"""

from __future__ import annotations

import contextlib
import errno
import importlib.util
import os
import socket
import sys
import threading
from pathlib import Path
from types import ModuleType

__all__ = ["Relay"]

BUFFER = (1 << 20) + (1 << 16)
"""Bytes of the largest message: 1 MiB of data and its headers."""


def _load_wire() -> ModuleType:
    spec = importlib.util.spec_from_file_location("wire", Path(__file__).with_name("wire.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


wire = _load_wire()


class Relay:
    """Both directions. `_asked` holds what the replies to INIT, OPEN and CREATE are recognised by."""

    def __init__(self, fuse: int, daemon: socket.socket, ended: int) -> None:
        self._fuse = fuse
        self._daemon = daemon
        self._ended = ended
        self._asked: dict[int, tuple[int, int]] = {}
        """By unique: opcode, and open flags or what INIT offers (flags2). Set by one thread before the request is
        passed on, taken by the other with its reply."""
        self.unreadable = 0

    def run(self) -> None:
        """Until the daemon closes its end."""
        threading.Thread(target=self._requests, daemon=True).start()
        self._replies()

    def _requests(self) -> None:
        buffer = bytearray(BUFFER)
        view = memoryview(buffer)
        while (size := self._read(buffer)) >= wire.IN_HEADER.size:
            self._note(view[:size])
            try:
                self._daemon.send(view[:size])
            except OSError:
                return
        with contextlib.suppress(OSError):  # nobody there to be told
            os.write(self._ended, b"\0")

    def _read(self, buffer: bytearray) -> int:
        """One request; 0 when the kernel has ended the connection."""
        while True:
            try:
                return os.readv(self._fuse, [buffer])
            except OSError as error:
                # ENOENT: the request was interrupted before it could be read.
                if error.errno not in (errno.EINTR, errno.EAGAIN, errno.ENOENT):
                    return 0

    def _note(self, request: memoryview) -> None:
        _, opcode, unique, *_ = wire.IN_HEADER.unpack_from(request)
        if opcode == wire.OPEN:
            self._asked[unique] = opcode, wire.OPEN_IN.unpack_from(request, wire.IN_HEADER.size)[0]
        elif opcode == wire.CREATE:
            self._asked[unique] = opcode, os.O_RDWR
        elif opcode == wire.INIT and len(request) >= wire.IN_HEADER.size + wire.INIT_IN.size:
            *_, flags, flags2 = wire.INIT_IN.unpack_from(request, wire.IN_HEADER.size)
            self._asked[unique] = opcode, flags2 if flags & wire.INIT_EXT else 0

    def _replies(self) -> None:
        buffer = bytearray(BUFFER)
        view = memoryview(buffer)
        while True:
            try:
                size = self._daemon.recv_into(buffer)
            except OSError:
                return
            if size == 0:
                return
            self._answer(view[:size])

    def _answer(self, reply: memoryview) -> None:
        """Pass one packet of the daemon on to the kernel, if it is a message."""
        if len(reply) < wire.OUT_HEADER.size:
            self._complain(f"a packet of {len(reply)} bytes")
            return
        length, error, unique = wire.OUT_HEADER.unpack_from(reply)
        asked = self._asked.pop(unique, None)
        if length != len(reply):
            self._complain(f"a reply of {len(reply)} bytes that says {length}")
            self._write(wire.error_reply(unique, errno.EIO), unique)
            return
        if asked is not None and error == 0 and not self._amend(reply, *asked):
            self._complain(f"a reply of {len(reply)} bytes to opcode {asked[0]}")
            self._write(wire.error_reply(unique, errno.EIO), unique)
            return
        self._write(reply, unique)

    def _amend(self, reply: memoryview, opcode: int, asked: int) -> bool:
        """Say in *reply* what pyfuse3 cannot; False if it cannot be a reply to *opcode*."""
        start: int = wire.OUT_HEADER.size
        if opcode == wire.INIT:
            if len(reply) < start + wire.INIT_OUT_SIZE or not asked & wire.INIT_PASSTHROUGH2:
                return True
            for offset, bits in ((12, wire.INIT_EXT), (wire.INIT_FLAGS2, wire.INIT_PASSTHROUGH2)):
                (flags,) = wire.INIT_FLAGS.unpack_from(reply, start + offset)
                wire.INIT_FLAGS.pack_into(reply, start + offset, flags | bits)
            wire.INIT_FLAGS.pack_into(reply, start + wire.INIT_STACK_DEPTH, 1)
            return True
        if opcode == wire.CREATE:
            start += wire.ENTRY_OUT_SIZE
        if len(reply) < start + wire.OPEN_OUT.size:
            return False
        fh, flags, _ = wire.OPEN_OUT.unpack_from(reply, start)
        backing = fh >> 32
        if backing >= 1 << 31:
            return False
        if backing:
            # FOPEN_DIRECT_IO stays: with it the daemon serves this open, beside others that the kernel serves.
            flags = flags & ~wire.FOPEN_KEEP_CACHE | wire.FOPEN_PASSTHROUGH
            if asked & os.O_ACCMODE == os.O_RDONLY:
                flags |= wire.FOPEN_NOFLUSH
            wire.OPEN_OUT.pack_into(reply, start, fh, flags, backing)
        return True

    def _write(self, reply: memoryview | bytes, unique: int) -> None:
        try:
            os.write(self._fuse, reply)
        except OSError as error:
            # ENOENT: whoever asked was interrupted, and waits no more. ENODEV: the mount is gone.
            if error.errno not in (errno.ENOENT, errno.ENODEV) and unique:
                self._complain(f"a reply that the kernel refuses ({error.strerror})")
                self._fail(unique)

    def _fail(self, unique: int) -> None:
        try:
            os.write(self._fuse, wire.error_reply(unique, errno.EIO))
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ENODEV, errno.EINVAL):
                self._complain(f"an error that the kernel refuses ({error.strerror})")

    def _complain(self, what: str) -> None:
        """To the log; not without end, for a daemon gone mad must not fill the disk."""
        self.unreadable += 1
        if self.unreadable <= 100:
            print(f"ucmfs relay: the daemon sent {what}", file=sys.stderr, flush=True)


def main() -> None:
    fuse, daemon, ended = map(int, sys.argv[1:])
    Relay(fuse, socket.socket(fileno=daemon), ended).run()


if __name__ == "__main__":
    main()
