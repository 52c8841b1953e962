"""The relay between a kernel and daemons that are all this test."""

from __future__ import annotations

import errno
import os
import queue
import random
import socket
import struct
import threading
from collections.abc import Iterator

import pytest

from ucmfs.fuse import relay, wire
from ucmfs.fuse.leases import Leases

MIB = 1 << 20


class Ends:
    """A Forwarder with sockets for /dev/fuse and for the daemons, one after the other."""

    def __init__(self) -> None:
        self.kernel, self.fuse = relay._socketpair()
        self.ended = threading.Event()
        self.reports: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self.forwarder = relay.Forwarder(self.fuse.fileno(), self.ended.set, self.reports.put)
        self.forwarder.start()
        self.new_daemon()
        self.kernel.settimeout(20)

    def new_daemon(self, *, buffer: int | None = None) -> None:
        """Attach one, whose socket takes *buffer* bytes."""
        self.daemon, theirs = relay._socketpair()
        self.daemon.settimeout(20)
        if buffer is not None:
            theirs.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, buffer // 2)  # the kernel doubles it
        self.forwarder.attach(theirs)

    def kill_daemon(self) -> None:
        self.daemon.close()
        self.forwarder.detach()

    def ask(self, opcode: int, unique: int, body: bytes = b"", *, reaches: bool = True) -> bytes:
        request = wire.IN_HEADER.pack(wire.IN_HEADER.size + len(body), opcode, unique, 1, 0, 0, 0, 0, 0) + body
        self.kernel.send(request)
        if reaches:
            assert self.daemon.recv(2 * MIB) == request
        return request

    def told(self) -> list[wire.Reported]:
        """What the daemon is told of leases next."""
        return wire.unpack_report(self.reports.get(timeout=20))

    def reply(self, unique: int, body: bytes = b"", *, error: int = 0) -> bytes:
        """Send a reply of the daemon."""
        reply = wire.OUT_HEADER.pack(wire.OUT_HEADER.size + len(body), error, unique) + body
        self.daemon.send(reply)
        return reply

    def answer(self, unique: int, body: bytes = b"", *, error: int = 0) -> bytes:
        """What the kernel gets for this reply of the daemon."""
        self.reply(unique, body, error=error)
        return self.kernel.recv(2 * MIB)

    def close(self) -> None:
        self.kernel.shutdown(socket.SHUT_RDWR)
        assert self.ended.wait(20)
        self.kill_daemon()
        self.kernel.close()
        self.fuse.close()


@pytest.fixture
def ends() -> Iterator[Ends]:
    ends = Ends()
    yield ends
    ends.close()


def open_reply(fh: int, flags: int = 0) -> bytes:
    return wire.OPEN_OUT.pack(fh, flags, 0)


def asked(access: int = os.O_RDONLY) -> bytes:
    return wire.OPEN_IN.pack(access, 0)


def test_messages_pass_as_they_are(ends: Ends) -> None:
    ends.ask(wire.GETATTR, 8, b"anything")
    assert ends.answer(8, b"attributes") == wire.OUT_HEADER.pack(26, 0, 8) + b"attributes"
    notification = wire.OUT_HEADER.pack(20, 3, 0) + b"name"
    ends.daemon.send(notification)
    assert ends.kernel.recv(100) == notification
    assert ends.forwarder.complaints == 0


def test_an_open_with_a_backing_id(ends: Ends) -> None:
    for unique, access, more in ((2, os.O_RDONLY, wire.FOPEN_NOFLUSH), (4, os.O_RDWR, 0)):
        ends.ask(wire.OPEN, unique, asked(access | os.O_DIRECT))
        got = ends.answer(unique, open_reply(5 << 32 | 9, wire.FOPEN_DIRECT_IO | wire.FOPEN_KEEP_CACHE))
        assert wire.OPEN_OUT.unpack(got[16:]) == (
            5 << 32 | 9,
            wire.FOPEN_PASSTHROUGH | wire.FOPEN_DIRECT_IO | more,
            5,
        )


def test_an_open_without(ends: Ends) -> None:
    ends.ask(wire.OPEN, 2, asked())
    got = ends.answer(2, open_reply(9, wire.FOPEN_KEEP_CACHE))
    assert wire.OPEN_OUT.unpack(got[16:]) == (9, wire.FOPEN_KEEP_CACHE, 0)
    ends.ask(wire.OPEN, 4, asked())
    assert ends.answer(4, error=-errno.ENOENT) == wire.error_reply(4, errno.ENOENT)
    assert ends.forwarder.handles == {9}


def test_a_create_with_a_backing_id(ends: Ends) -> None:
    ends.ask(wire.CREATE, 2, b"name\0")
    got = ends.answer(2, bytes(wire.ENTRY_OUT_SIZE) + open_reply(3 << 32 | 1))
    assert wire.OPEN_OUT.unpack(got[16 + wire.ENTRY_OUT_SIZE :]) == (3 << 32 | 1, wire.FOPEN_PASSTHROUGH, 3)


@pytest.mark.parametrize("offered", [True, False])
def test_init_takes_passthrough_where_it_is_offered(ends: Ends, offered: bool) -> None:
    flags2 = wire.INIT_PASSTHROUGH2 if offered else 0
    ends.ask(wire.INIT, 2, wire.INIT_IN.pack(7, 40, 0, wire.INIT_EXT, flags2))
    got = ends.answer(2, bytes(wire.INIT_OUT_SIZE))[16:]
    values = [int.from_bytes(got[at : at + 4], "little") for at in (12, wire.INIT_FLAGS2, wire.INIT_STACK_DEPTH)]
    assert values == ([wire.INIT_EXT, wire.INIT_PASSTHROUGH2, 1] if offered else [0, 0, 0])


def test_which_handles_the_kernel_has(ends: Ends) -> None:
    for number in (1, 2, 3):
        ends.ask(wire.OPEN, 2 * number, asked())
        ends.answer(2 * number, open_reply(7 << 32 | number))
    ends.ask(wire.RELEASE, 20, wire.RELEASE_IN.pack(7 << 32 | 2) + bytes(16))
    assert ends.forwarder.handles == {1, 2, 3}  # until it is answered, it may have to be done by the next daemon
    ends.answer(20)
    ends.ask(wire.OPEN, 22, asked())
    ends.kill_daemon()
    assert ends.forwarder.handles == {1, 3}
    ends.new_daemon()


def test_what_is_no_reply_fails_its_request_and_is_told(ends: Ends, capfd: pytest.CaptureFixture[str]) -> None:
    ends.ask(wire.OPEN, 2, asked())
    assert ends.answer(2, b"short") == wire.error_reply(2, errno.EIO)
    ends.ask(wire.GETATTR, 4)
    ends.daemon.send(wire.OUT_HEADER.pack(4000, 0, 4) + b"less")
    assert ends.kernel.recv(100) == wire.error_reply(4, errno.EIO)
    ends.daemon.send(b"tiny")
    ends.daemon.send(b"")
    ends.reply(4, b"twice")
    ends.reply(1000, b"never asked")
    ends.ask(wire.GETATTR, 6)
    assert ends.answer(6, b"right") == wire.OUT_HEADER.pack(21, 0, 6) + b"right"
    lines = capfd.readouterr().err.splitlines()
    assert len(lines) == 6
    assert all(" ERROR ucmfs.relay: the daemon sent " in line for line in lines)


def test_random_replies(ends: Ends, capfd: pytest.CaptureFixture[str]) -> None:
    """Whatever the daemon sends, the kernel gets whole messages that answer what it asked, and the relay goes on."""
    chance = random.Random(1)
    for unique in range(2, 6000, 2):
        opcode = chance.choice([wire.OPEN, wire.CREATE, wire.INIT, wire.GETATTR, wire.READ])
        ends.ask(opcode, unique, chance.randbytes(chance.choice([8, 16, 20, 64])))
        packet = bytearray(chance.randbytes(chance.choice([0, 1, 15, 16, 17, 32, 80, 160, 5000])))
        if len(packet) >= 16 and chance.random() < 0.8:
            length = len(packet) if chance.random() < 0.7 else chance.getrandbits(32)
            wire.OUT_HEADER.pack_into(packet, 0, length, chance.choice([0, -2, 5]), unique)
        ends.daemon.send(packet)
        if len(packet) < 16 or wire.OUT_HEADER.unpack_from(packet)[2] != unique:
            ends.reply(unique, error=-errno.EIO)
        got = ends.kernel.recv(MIB)
        length, _, answered = wire.OUT_HEADER.unpack_from(got)
        assert (length, answered) == (len(got), unique)
    ends.ask(wire.GETATTR, 6000)
    assert ends.answer(6000, b"right") == wire.OUT_HEADER.pack(21, 0, 6000) + b"right"
    assert len(capfd.readouterr().err.splitlines()) == relay.MOST_COMPLAINTS < ends.forwarder.complaints


# One daemon after the other


def test_what_has_no_answer_is_asked_again_in_order(ends: Ends) -> None:
    requests = [ends.ask(wire.GETATTR, unique, b"%d" % unique) for unique in range(2, 20, 2)]
    ends.answer(6)
    del requests[2]
    ends.kill_daemon()
    late = [ends.ask(wire.GETATTR, unique, b"late", reaches=False) for unique in (20, 22)]
    ends.new_daemon()
    assert [ends.daemon.recv(1000) for _ in requests + late] == requests + late
    for unique in (20, 2):
        assert ends.answer(unique, b"x") == wire.OUT_HEADER.pack(17, 0, unique) + b"x"
    fresh = ends.ask(wire.GETATTR, 24)
    assert fresh != late[-1]


def test_what_the_dead_daemon_answered_is_not_asked_again(ends: Ends) -> None:
    for unique in (2, 4):
        ends.ask(wire.GETATTR, unique)
    reply = ends.reply(2, b"last words")
    ends.kill_daemon()
    assert ends.kernel.recv(1000) == reply
    ends.new_daemon()
    assert wire.IN_HEADER.unpack(ends.daemon.recv(1000))[2] == 4


def test_init_is_asked_again_and_answered_once(ends: Ends) -> None:
    request = ends.ask(wire.INIT, 2, wire.INIT_IN.pack(7, 40, 0, 0, 0))
    ends.answer(2, bytes(wire.INIT_OUT_SIZE))
    ends.ask(wire.GETATTR, 4)
    ends.kill_daemon()
    ends.new_daemon()
    assert ends.daemon.recv(1000) == request
    ends.reply(2, bytes(wire.INIT_OUT_SIZE))
    assert wire.IN_HEADER.unpack(ends.daemon.recv(1000))[2] == 4
    assert ends.answer(4) == wire.OUT_HEADER.pack(16, 0, 4)
    assert ends.forwarder.complaints == 0


def test_init_without_an_answer_is_the_first_again(ends: Ends) -> None:
    request = ends.ask(wire.INIT, 2, wire.INIT_IN.pack(7, 40, 0, 0, 0))
    ends.kill_daemon()
    ends.new_daemon()
    assert ends.daemon.recv(1000) == request
    assert len(ends.answer(2, bytes(wire.INIT_OUT_SIZE))) == 16 + wire.INIT_OUT_SIZE


def test_large_writes_are_asked_again_unharmed(ends: Ends) -> None:
    chance = random.Random(2)
    writes = [ends.ask(wire.WRITE, unique, chance.randbytes(MIB - unique)) for unique in range(2, 10, 2)]
    ends.answer(4)
    writes += [ends.ask(wire.WRITE, unique, chance.randbytes(MIB)) for unique in (10, 12)]
    del writes[1]
    ends.kill_daemon()
    ends.new_daemon()
    assert [ends.daemon.recv(2 * MIB) for _ in writes] == writes


def test_a_daemon_that_dies_at_once_takes_nothing_with_it(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is dead before anything is handed over to it; what comes then is for the next one."""
    hand_over = relay.Forwarder._hand_over

    def late(self: relay.Forwarder, daemon: socket.socket) -> None:
        self._threads[0].join()
        hand_over(self, daemon)

    ends.kill_daemon()
    for turn in range(20):
        forget = ends.ask(wire.FORGET, 4 * turn + 2, reaches=False)
        request = ends.ask(wire.GETATTR, 4 * turn + 4, reaches=False)
        while not ends.forwarder.waits:
            pass
        with monkeypatch.context() as patched:
            patched.setattr(relay.Forwarder, "_hand_over", late)
            ends.new_daemon()
            ends.kill_daemon()
        ends.new_daemon()
        assert [ends.daemon.recv(1000), ends.daemon.recv(1000)] == [forget, request]
        assert ends.answer(4 * turn + 4) == wire.OUT_HEADER.pack(16, 0, 4 * turn + 4)
        ends.ask(wire.GETATTR, 1000)
        ends.answer(1000)
        ends.kill_daemon()
    ends.new_daemon()


def test_forgets_wait_for_the_next_daemon(ends: Ends) -> None:
    ends.kill_daemon()
    forget = ends.ask(wire.FORGET, 2, bytes(8), reaches=False)
    request = ends.ask(wire.GETATTR, 4, reaches=False)
    while not ends.forwarder.waits:
        pass
    ends.new_daemon()
    assert [ends.daemon.recv(1000), ends.daemon.recv(1000)] == [forget, request]
    ends.answer(4)
    ends.kill_daemon()
    ends.new_daemon()
    ends.ask(wire.GETATTR, 6)  # comes first: the forget is not repeated


SMALL = 425_984
"""Bytes of a socket's buffer where nobody may have more, by default."""


def test_no_more_is_asked_at_a_time_than_a_packet_takes(ends: Ends) -> None:
    ends.kill_daemon()
    ends.new_daemon(buffer=SMALL)
    reply = bytearray(wire.INIT_OUT_SIZE)
    wire.INIT_MAX_WRITE.pack_into(reply, 20, MIB)
    wire.INIT_MAX_PAGES.pack_into(reply, 28, MIB // 4096)
    ends.ask(wire.INIT, 2, wire.INIT_IN.pack(7, 40, 0, 0, 0))
    got = ends.answer(2, bytes(reply))[16:]
    (max_write,) = wire.INIT_MAX_WRITE.unpack_from(got, 20)
    assert 128 << 10 <= max_write < SMALL
    assert max_write == 4096 * wire.INIT_MAX_PAGES.unpack_from(got, 28)[0]
    ends.ask(wire.WRITE, 4, bytes(max_write + 4096))
    assert ends.answer(4) == wire.OUT_HEADER.pack(16, 0, 4)


def test_what_fits_no_packet_fails_and_hinders_nobody(ends: Ends, capfd: pytest.CaptureFixture[str]) -> None:
    before = ends.ask(wire.GETATTR, 2)
    ends.ask(wire.WRITE, 4, bytes(MIB))
    after = ends.ask(wire.GETATTR, 6)
    ends.kill_daemon()
    ends.new_daemon(buffer=SMALL)
    assert ends.kernel.recv(100) == wire.error_reply(4, errno.EIO)
    assert [ends.daemon.recv(1000), ends.daemon.recv(1000)] == [before, after]
    ends.ask(wire.WRITE, 8, bytes(MIB), reaches=False)
    assert ends.kernel.recv(100) == wire.error_reply(8, errno.EIO)
    ends.ask(wire.GETATTR, 10)
    assert capfd.readouterr().err.count("cannot be sent to the daemon (Message too long)") == 2


def test_an_interrupt_goes_nowhere(ends: Ends) -> None:
    ends.ask(wire.INTERRUPT, 3, bytes(8), reaches=False)
    ends.ask(wire.GETATTR, 4)


def test_what_must_not_be_done_twice(ends: Ends) -> None:
    ends.ask(wire.GETATTR, 2)
    ends.ask(wire.WRITE, 4, bytes(MIB))
    once = [
        ends.ask(wire.MKDIR, 6, bytes(8) + b"name\0"),
        ends.ask(wire.RENAME, 8, bytes(8) + b"old\0new\0"),
    ]
    for opcode, unique, body in ((wire.UNLINK, 10, b"gone\0"), (wire.GETATTR, 12, b"")):
        ends.ask(opcode, unique, body)
        ends.answer(unique)  # the kernel has it a moment before it is crossed out, but not that of the one before
    assert ends.forwarder.repeated() == once
    assert [wire.names_in(request) for request in once] == [(b"name",), (b"old", b"new")]


@pytest.mark.parametrize(
    ("opcode", "before", "names"),
    [
        (wire.MKNOD, 16, [b"name"]),
        (wire.MKDIR, 8, [b"name"]),
        (wire.UNLINK, 0, [b"na\xffme"]),
        (wire.RMDIR, 0, [b"name"]),
        (wire.RENAME, 8, [b"old", b"new"]),
        (wire.RENAME2, 16, [b"old", b"new"]),
        (wire.REMOVEXATTR, 0, [b"user.mine"]),
    ],
)
def test_the_names_of_what_must_not_be_done_twice(opcode: int, before: int, names: list[bytes]) -> None:
    assert opcode in wire.ONCE
    header = wire.IN_HEADER.pack(0, opcode, 2, 1, 0, 0, 0, 0, 0)
    assert wire.names_in(header + b"\1" * before + b"".join(name + b"\0" for name in names)) == tuple(names)


def test_what_a_new_daemon_is_told() -> None:
    requests = [bytes(40), b"x" * 41]
    leases = [(64, 5, 1, 3, True), (1 << 40, 0, 2, 0, False)]
    known = (3, {1, 2, 1 << 31}, leases, requests)
    assert wire.unpack_known(wire.pack_known(*known)) == known
    assert wire.unpack_known(wire.pack_known(0, set(), [], [])) == (0, set(), [], [])


def test_init_keeps_pages_when_attributes_change(ends: Ends) -> None:
    offered = wire.INIT_AUTO_INVAL_DATA | wire.INIT_EXPLICIT_INVAL_DATA
    ends.ask(wire.INIT, 2, wire.INIT_IN.pack(7, 40, 0, offered, 0))
    flags = int.to_bytes(wire.INIT_AUTO_INVAL_DATA | 1, 4, "little")
    got = ends.answer(2, (bytes(12) + flags).ljust(wire.INIT_OUT_SIZE, b"\0"))[16:]
    assert int.from_bytes(got[12:16], "little") == wire.INIT_EXPLICIT_INVAL_DATA | 1


# Leases


def lease(ends: Ends, node: int, backing: int) -> None:
    """Lease *node* to the relay, before the next reply."""
    ends.daemon.send(wire.lease_message(wire.GRANT, node, backing))
    ends.ask(wire.GETATTR, 1000)
    ends.answer(1000)


def opened(ends: Ends, unique: int, flags: int = os.O_RDONLY) -> int:
    """Open node 1 under its lease; give the handle."""
    ends.ask(wire.OPEN, unique, asked(flags), reaches=False)
    got = ends.kernel.recv(1000)
    assert wire.OUT_HEADER.unpack_from(got) == (len(got), 0, unique)
    handle, how, backing = wire.OPEN_OUT.unpack(got[16:])
    assert (how, backing) == (wire.FOPEN_PASSTHROUGH | wire.FOPEN_NOFLUSH, 7)
    return int(handle)


def close(ends: Ends, unique: int, handle: int) -> None:
    ends.ask(wire.RELEASE, unique, wire.RELEASE_IN.pack(handle) + bytes(16), reaches=False)
    assert ends.kernel.recv(1000) == wire.OUT_HEADER.pack(16, 0, unique)


def test_a_leased_inode_is_opened_and_closed_here(ends: Ends) -> None:
    lease(ends, 1, 7)
    first, second = opened(ends, 2), opened(ends, 4, os.O_RDONLY | os.O_DIRECT)
    close(ends, 6, second)
    assert [wire.unpack_report(report) for report in ends.forwarder.leases.news()] == [[(1, 2, 1, 0, False)]]
    assert ends.forwarder.leases.news() == []
    for unique, flags in ((8, os.O_RDWR), (10, os.O_WRONLY), (12, os.O_RDONLY | os.O_TRUNC)):
        ends.ask(wire.OPEN, unique, asked(flags))  # the daemon's
        ends.answer(unique, open_reply(unique))
    ends.ask(wire.RELEASE, 14, wire.RELEASE_IN.pack(8) + bytes(16))
    ends.answer(14)
    close(ends, 16, first)
    assert ends.forwarder.complaints == 0


def test_a_lease_is_over_when_it_is_recalled_and_nothing_is_open(ends: Ends) -> None:
    lease(ends, 1, 7)
    handle = opened(ends, 2)
    ends.daemon.send(wire.lease_message(wire.RECALL, 1))
    assert ends.told() == [(1, 1, 1, 0, True)]
    ends.ask(wire.OPEN, 4, asked())  # the daemon's again
    ends.answer(4, open_reply(4))
    close(ends, 6, handle)
    assert ends.told() == [(1, 0, 0, 0, True)]
    lease(ends, 1, 7)
    close(ends, 8, opened(ends, 10))
    ends.daemon.send(wire.lease_message(wire.RECALL, 1))
    assert ends.told() == [(1, 1, 0, 0, True)]
    ends.daemon.send(wire.lease_message(wire.RECALL, 1))
    assert ends.told() == [(1, 0, 0, 0, True)]  # of none


def test_leases_end_with_the_daemon_but_not_what_was_opened(ends: Ends) -> None:
    lease(ends, 1, 7)
    lease(ends, 2, 8)
    handle = opened(ends, 2)
    ends.kill_daemon()
    assert sorted(ends.forwarder.leases.hand_over({})) == [(1, 1, 1, 0, True), (2, 0, 0, 0, True)]
    ends.new_daemon()
    ends.ask(wire.OPEN, 4, asked())
    ends.answer(4, open_reply(4))
    close(ends, 6, handle)
    assert ends.told() == [(1, 0, 0, 0, True)]
    assert ends.forwarder.leases.hand_over({}) == []


def test_nonsense_about_leases(ends: Ends, capfd: pytest.CaptureFixture[str]) -> None:
    header = wire.OUT_HEADER.pack
    for packet in (
        header(16, wire.GRANT, wire.LEASES_UNIQUE),
        wire.lease_message(wire.GRANT, 1, 0),
        wire.lease_message(wire.GRANT, 1, 1 << 31),
        wire.lease_message(-5, 1, 7),
        wire.lease_message(wire.GRANT, 1, 7) + b"more",
    ):
        ends.daemon.send(packet)
    ends.ask(wire.OPEN, 2, asked())
    ends.answer(2, open_reply(2))
    assert ends.forwarder.complaints == len(capfd.readouterr().err.splitlines()) == 5


def test_reports_are_of_bounded_length() -> None:
    leases = Leases()
    for node in range(2 * wire.MOST_REPORTED + 1):
        leases.grant(node, 7)
        leases.open(node, os.O_RDONLY)
    reports = [wire.unpack_report(report) for report in leases.news()]
    assert [len(report) for report in reports] == [wire.MOST_REPORTED, wire.MOST_REPORTED, 1]
    assert [row for report in reports for row in report] == [(node, 1, 1, 0, False) for node in range(401)]


# Names


def lookup(ends: Ends, unique: int, name: bytes, *, reaches: bool) -> bytes | None:
    """What the kernel gets for a LOOKUP in directory 1; None where the daemon is asked."""
    ends.ask(wire.LOOKUP, unique, name + b"\0", reaches=reaches)
    if reaches:
        ends.answer(unique, error=-errno.EIO)
        return None
    return ends.kernel.recv(1000)


def entry(node: int, size: int = 0) -> bytes:
    times = (5 * 10**9 + 1, 6 * 10**9 + 2, 7 * 10**9 + 3)
    return wire.pack_entry(node, 1.5, 7.25, size=size, times=times, mode=0o100600, links=1, uid=3, gid=4, block=4096)


def list_names(ends: Ends, *names: bytes, until: float = 1e12) -> None:
    ends.daemon.send(wire.list_message(1, until, entry(1), names))
    settle(ends)


def settle(ends: Ends) -> None:
    """What the daemon sent before is heeded."""
    ends.ask(wire.STATFS, 1000)
    ends.answer(1000)


def test_an_entry_is_what_the_kernel_expects() -> None:
    """The numbers of include/uapi/linux/fuse.h."""
    packed = entry(9, 10_000)
    assert len(packed) == wire.ENTRY_OUT_SIZE
    numbers = struct.unpack("<QQQQII6Q10I", packed)
    assert numbers[:6] == (9, 0, 1, 7, 500_000_000, 250_000_000)
    assert numbers[6:12] == (9, 10_000, 20, 5, 6, 7)
    assert numbers[12:] == (1, 2, 3, 0o100600, 1, 3, 4, 0, 4096, 0)
    attributes = wire.attributes_of(packed)
    assert len(attributes) == 104
    assert struct.unpack_from("<QII", attributes) == (7, 250_000_000, 0)
    assert attributes[16:] == packed[40:]


def test_names_that_are_not_there(ends: Ends) -> None:
    names = [b"name%d" % number for number in range(1000)]
    list_names(ends, *names)
    assert lookup(ends, 2, b"none", reaches=False) == wire.error_reply(2, errno.ENOENT)
    for unique, name in enumerate(names[::100], 3):
        lookup(ends, unique, name, reaches=True)
    ends.ask(wire.GETATTR, 2, reaches=False)
    assert ends.kernel.recv(1000)[16:] == wire.attributes_of(entry(1))
    list_names(ends, until=0.0)
    lookup(ends, 4, b"none", reaches=True)
    ends.ask(wire.GETATTR, 2)
    ends.answer(2)


REQUESTS = {
    wire.CREATE: bytes(16) + b"made\0",
    wire.MKNOD: bytes(16) + b"made\0",
    wire.MKDIR: bytes(8) + b"made\0",
    wire.SYMLINK: b"made\0target\0",
    wire.LINK: bytes(8) + b"made\0",
    wire.RENAME: wire.NODE.pack(1) + b"old\0made\0",
    wire.RENAME2: wire.NODE.pack(1) + bytes(8) + b"old\0made\0",
}


@pytest.mark.parametrize("opcode", REQUESTS)
def test_a_name_that_is_made_is_there_from_the_request_on(ends: Ends, opcode: int) -> None:
    list_names(ends)
    assert lookup(ends, 2, b"made", reaches=False) is not None
    ends.ask(opcode, 4, REQUESTS[opcode])
    lookup(ends, 6, b"made", reaches=True)
    assert lookup(ends, 8, b"else", reaches=False) is not None
    # A list from before the daemon did it would not have it.
    ends.daemon.send(wire.list_message(1, 1e12, entry(1), []))
    settle(ends)
    lookup(ends, 10, b"made", reaches=True)
    ends.answer(4, error=-errno.EIO)
    list_names(ends)
    assert lookup(ends, 12, b"made", reaches=False) is not None


def test_a_name_that_is_gone_is_not_there(ends: Ends) -> None:
    list_names(ends, b"old")
    lookup(ends, 2, b"old", reaches=True)
    for unique, opcode in (10, wire.UNLINK), (20, wire.MKDIR), (30, wire.RMDIR):
        ends.ask(opcode, unique, (bytes(8) if opcode == wire.MKDIR else b"") + b"old\0")
        lookup(ends, unique + 2, b"old", reaches=True)
        if opcode != wire.MKDIR:
            ends.daemon.send(wire.gone_message(1, b"old"))
        ends.answer(unique)
        if opcode != wire.MKDIR:
            lookup(ends, unique + 4, b"old", reaches=False)


def test_names_of_leased_inodes(ends: Ends) -> None:
    ends.daemon.send(wire.lease_message(wire.GRANT, 9, 5, (1, b"x", entry(9))))
    settle(ends)
    for unique in (2, 4):
        assert lookup(ends, unique, b"x", reaches=False) == wire.OUT_HEADER.pack(144, 0, unique) + entry(9)
    lookup(ends, 6, b"y", reaches=True)
    # It is renamed, and the daemon says so.
    ends.daemon.send(wire.lease_message(wire.GRANT, 9, 5, (1, b"y", entry(9, 1))))
    settle(ends)
    lookup(ends, 8, b"x", reaches=True)
    assert lookup(ends, 10, b"y", reaches=False) == wire.OUT_HEADER.pack(144, 0, 10) + entry(9, 1)
    ends.ask(wire.UNLINK, 12, b"y\0")
    lookup(ends, 14, b"y", reaches=True)
    ends.answer(12)
    ends.daemon.send(wire.lease_message(wire.GRANT, 9, 5, (1, b"z", entry(9))))
    settle(ends)
    ends.daemon.send(wire.lease_message(wire.RECALL, 9))
    settle(ends)
    lookup(ends, 16, b"z", reaches=True)
    # What was looked up here is the daemon's to count from now on.
    assert ends.told() == [(9, 0, 0, 3, True)]
    ends.ask(wire.FORGET, 18, struct.pack("<Q", 4))
    ends.ask(wire.BATCH_FORGET, 20, struct.pack("<IIQQQQ", 2, 0, 9, 2, 11, 3))


def test_forgets_of_what_was_looked_up_here_end_here(ends: Ends) -> None:
    ends.daemon.send(wire.lease_message(wire.GRANT, 9, 5, (1, b"x", entry(9))))
    settle(ends)
    for unique in (2, 4, 6):
        lookup(ends, unique, b"x", reaches=False)
    ends.ask(wire.BATCH_FORGET, 8, struct.pack("<IIQQ", 1, 0, 9, 2), reaches=False)
    ends.ask(wire.BATCH_FORGET, 10, struct.pack("<IIQQQQ", 2, 0, 11, 3, 9, 5), reaches=False)
    told = ends.daemon.recv(1000)
    assert told[40:] == struct.pack("<IIQQQQ", 2, 0, 11, 3, 9, 4)
    assert wire.IN_HEADER.unpack_from(told)[:3] == (len(told), wire.BATCH_FORGET, 10)


def test_the_next_daemon_tells_of_names_anew(ends: Ends) -> None:
    ends.daemon.send(wire.lease_message(wire.GRANT, 9, 5, (1, b"x", entry(9))))
    list_names(ends, b"x")
    ends.kill_daemon()
    assert ends.forwarder.entries.hand_over() == {}
    ends.new_daemon()
    lookup(ends, 2, b"x", reaches=True)
    lookup(ends, 4, b"none", reaches=True)


def flush(ends: Ends, unique: int, fh: int) -> bytes:
    """A FLUSH that is answered, and not passed on yet."""
    request = ends.ask(wire.FLUSH, unique, wire.FLUSH_IN.pack(fh) + bytes(16), reaches=False)
    assert ends.kernel.recv(100) == wire.OUT_HEADER.pack(16, 0, unique)
    return request


def test_a_flush_is_answered_and_passed_on_before_anything_else(ends: Ends) -> None:
    flushed = flush(ends, 2, 7 << 32 | 3)
    ends.kill_daemon()
    ends.new_daemon()
    asked = ends.ask(wire.STATFS, 4, reaches=False)
    assert [ends.daemon.recv(1000), ends.daemon.recv(1000)] == [flushed, asked]
    ends.kill_daemon()
    ends.new_daemon()
    assert [ends.daemon.recv(1000), ends.daemon.recv(1000)] == [flushed, asked]
    ends.reply(2)
    assert ends.answer(4) == wire.OUT_HEADER.pack(16, 0, 4)
    # Of two closes of one file the last is one with its release; that of another file is none of it.
    flushed = flush(ends, 6, 7 << 32 | 3)
    flush(ends, 8, 7 << 32 | 3)
    assert ends.daemon.recv(1000) == flushed
    ends.ask(wire.RELEASE, 10, wire.RELEASE_IN.pack(7 << 32 | 3) + bytes(16), reaches=False)
    told = ends.daemon.recv(1000)
    assert wire.IN_HEADER.unpack_from(told)[1:3] == (wire.RELEASE, 10)
    assert wire.RELEASE_IN.unpack_from(told, 40) == (wire.FLUSHED | 7 << 32 | 3,)
    flushed = flush(ends, 12, 4)
    release = ends.ask(wire.RELEASE, 14, wire.RELEASE_IN.pack(5) + bytes(16), reaches=False)
    assert [ends.daemon.recv(1000), ends.daemon.recv(1000)] == [flushed, release]
    assert ends.forwarder.complaints == 0


def test_no_file_is_a_terminal(ends: Ends) -> None:
    ends.ask(wire.IOCTL, 2, bytes(32), reaches=False)
    assert ends.kernel.recv(100) == wire.error_reply(2, errno.ENOTTY)


def test_xattrs_that_there_are_not(ends: Ends) -> None:
    for name in (b"security.capability", b"system.posix_acl_access", b"trusted.x"):
        ends.ask(wire.GETXATTR, 2, bytes(8) + name + b"\0", reaches=False)
        assert ends.kernel.recv(100) == wire.error_reply(2, errno.ENODATA)
    ends.ask(wire.GETXATTR, 4, bytes(8) + b"user.mine\0")
    ends.answer(4, b"1")
