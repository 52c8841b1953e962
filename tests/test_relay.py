"""The relay between a kernel and a daemon that are both this test."""

from __future__ import annotations

import errno
import os
import random
import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest

from ucmfs.fuse import relay, wire


class Ends:
    """The relay as the process it is, with sockets for /dev/fuse and for the daemon."""

    def __init__(self) -> None:
        self.kernel, fuse = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.daemon, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.ended, told = os.pipe()
        fds = (fuse.fileno(), theirs.fileno(), told)
        self.process = subprocess.Popen(
            [sys.executable, "-I", "-S", relay.__file__, *map(str, fds)], pass_fds=fds, stderr=subprocess.PIPE
        )
        fuse.close()
        theirs.close()
        os.close(told)
        for end in (self.kernel, self.daemon):
            end.settimeout(20)

    def ask(self, opcode: int, unique: int, body: bytes = b"") -> None:
        request = wire.IN_HEADER.pack(wire.IN_HEADER.size + len(body), opcode, unique, 1, 0, 0, 0, 0, 0) + body
        self.kernel.send(request)
        assert self.daemon.recv(1 << 20) == request

    def answer(self, unique: int, body: bytes = b"", *, error: int = 0) -> bytes:
        """What the kernel gets for this reply of the daemon."""
        self.daemon.send(wire.OUT_HEADER.pack(wire.OUT_HEADER.size + len(body), error, unique) + body)
        return self.kernel.recv(1 << 20)

    def close(self) -> str:
        self.daemon.close()
        self.kernel.close()
        os.close(self.ended)
        _, errors = self.process.communicate(timeout=20)
        assert self.process.returncode == 0
        return errors.decode()


@pytest.fixture
def ends() -> Iterator[Ends]:
    ends = Ends()
    yield ends
    if ends.process.returncode is None:
        ends.close()


def open_reply(fh: int, flags: int = 0) -> bytes:
    return wire.OPEN_OUT.pack(fh, flags, 0)


def test_messages_pass_as_they_are(ends: Ends) -> None:
    ends.ask(3, 7, b"anything")
    assert ends.answer(7, b"attributes") == wire.OUT_HEADER.pack(26, 0, 7) + b"attributes"
    notification = wire.OUT_HEADER.pack(20, 3, 0) + b"name"
    ends.daemon.send(notification)
    assert ends.kernel.recv(100) == notification
    assert ends.close() == ""


def test_an_open_with_a_backing_id(ends: Ends) -> None:
    for unique, access, more in ((1, os.O_RDONLY, wire.FOPEN_NOFLUSH), (2, os.O_RDWR, 0)):
        ends.ask(wire.OPEN, unique, wire.OPEN_IN.pack(access | os.O_DIRECT, 0))
        got = ends.answer(unique, open_reply(5 << 32 | 9, wire.FOPEN_DIRECT_IO | wire.FOPEN_KEEP_CACHE))
        assert wire.OPEN_OUT.unpack(got[16:]) == (
            5 << 32 | 9,
            wire.FOPEN_PASSTHROUGH | wire.FOPEN_DIRECT_IO | more,
            5,
        )


def test_an_open_without(ends: Ends) -> None:
    ends.ask(wire.OPEN, 1, wire.OPEN_IN.pack(os.O_RDONLY, 0))
    assert wire.OPEN_OUT.unpack(ends.answer(1, open_reply(9, wire.FOPEN_KEEP_CACHE))[16:]) == (
        9,
        wire.FOPEN_KEEP_CACHE,
        0,
    )
    ends.ask(wire.OPEN, 2, wire.OPEN_IN.pack(os.O_RDONLY, 0))
    assert ends.answer(2, error=-errno.ENOENT) == wire.error_reply(2, errno.ENOENT)


def test_a_create_with_a_backing_id(ends: Ends) -> None:
    ends.ask(wire.CREATE, 1, b"name\0")
    got = ends.answer(1, bytes(wire.ENTRY_OUT_SIZE) + open_reply(3 << 32 | 1))
    assert wire.OPEN_OUT.unpack(got[16 + wire.ENTRY_OUT_SIZE :]) == (3 << 32 | 1, wire.FOPEN_PASSTHROUGH, 3)


@pytest.mark.parametrize("offered", [True, False])
def test_init_takes_passthrough_where_it_is_offered(ends: Ends, offered: bool) -> None:
    flags2 = wire.INIT_PASSTHROUGH2 if offered else 0
    ends.ask(wire.INIT, 1, wire.INIT_IN.pack(7, 40, 0, wire.INIT_EXT, flags2))
    got = ends.answer(1, bytes(wire.INIT_OUT_SIZE))[16:]
    values = [int.from_bytes(got[at : at + 4], "little") for at in (12, wire.INIT_FLAGS2, wire.INIT_STACK_DEPTH)]
    assert values == ([wire.INIT_EXT, wire.INIT_PASSTHROUGH2, 1] if offered else [0, 0, 0])


def test_what_is_no_reply_fails_its_request_and_is_told(ends: Ends) -> None:
    ends.ask(wire.OPEN, 1, wire.OPEN_IN.pack(os.O_RDONLY, 0))
    assert ends.answer(1, b"short") == wire.error_reply(1, errno.EIO)
    ends.ask(3, 2)
    ends.daemon.send(wire.OUT_HEADER.pack(4000, 0, 2) + b"less")
    assert ends.kernel.recv(100) == wire.error_reply(2, errno.EIO)
    ends.daemon.send(b"tiny")
    ends.ask(3, 3)
    assert ends.answer(3, b"right") == wire.OUT_HEADER.pack(21, 0, 3) + b"right"
    assert len(ends.close().splitlines()) == 3


def test_random_replies(ends: Ends) -> None:
    """Whatever the daemon sends, the kernel gets whole messages, and the relay goes on."""
    chance = random.Random(1)
    for unique in range(1, 3000):
        opcode = chance.choice([wire.OPEN, wire.CREATE, wire.INIT, 3, 15])
        ends.ask(opcode, unique, chance.randbytes(chance.choice([0, 8, 16, 20, 64])).ljust(8, b"\0"))
        packet = bytearray(chance.randbytes(chance.choice([1, 15, 16, 17, 32, 80, 160, 5000])))
        if len(packet) >= 16 and chance.random() < 0.7:
            length = len(packet) if chance.random() < 0.7 else chance.getrandbits(32)
            wire.OUT_HEADER.pack_into(packet, 0, length, chance.choice([0, -2, 5]), unique)
        ends.daemon.send(packet)
        if len(packet) >= 16:
            got = ends.kernel.recv(1 << 20)
            length, _, answered = wire.OUT_HEADER.unpack_from(got)
            assert length == len(got)
            assert answered == wire.OUT_HEADER.unpack_from(packet)[2]
    ends.ask(3, 5000)
    assert ends.answer(5000, b"right") == wire.OUT_HEADER.pack(21, 0, 5000) + b"right"
    assert len(ends.close().splitlines()) == 100


def test_the_end_of_the_kernels_side_is_told(ends: Ends) -> None:
    ends.kernel.shutdown(socket.SHUT_RDWR)
    assert os.read(ends.ended, 1) == b"\0"
