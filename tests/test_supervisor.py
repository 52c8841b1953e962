"""The supervisor of the relay, with daemons that are all this test; tests/mount/test_supervisor.py has real mounts."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.processes import has_exited, in_child, wait_for_exit
from ucmfs.fuse import relay, wire

DAEMON = """
import os, socket, sys
test = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
test.connect(sys.argv[1])
given = dict(word.split("=") for word in sys.argv[4:])
fds = list(map(int, given.values()))
socket.send_fds(test, [" ".join([str(os.getpid()), *given]).encode()], fds)
for fd in fds:
    os.close(fd)
os._exit(int(test.recv(10) or 1))
"""
"""Gives the test all that the relay gave it, and ends as the test says."""


class Daemon:
    """What a daemon has, and its end."""

    def __init__(self, test: socket.socket) -> None:
        test.settimeout(20)
        words, fds, _, _ = socket.recv_fds(test, 4096, 64)
        pid, *names = words.decode().split()
        self.pid = int(pid)
        self.names = set(names)
        self._test = test
        self._fds = dict(zip(names, fds, strict=True))
        self.messages, self.side = (socket.socket(fileno=self._fds.pop(name)) for name in ("messages", "side"))
        for end in (self.messages, self.side):
            end.settimeout(20)
        self.starts, self.handles, self.leases, self.requests = (
            wire.unpack_known(os.pread(self._fds["known"], 1 << 20, 0)) if "known" in names else (0, set(), [], [])
        )

    def ready(self, hang_timeout: float = 0) -> None:
        self.side.send(wire.READY.pack(wire.KIND_READY, hang_timeout))
        self.sync()

    def sync(self) -> None:
        """Until the relay heard all that was said before."""
        self.side.send(bytes([wire.KIND_SYNC]))
        while self.side.recv(4096)[0] != wire.KIND_SYNCED:
            pass

    def ino(self, name: str) -> int:
        return os.fstat(self._fds[name]).st_ino

    def let_go(self) -> None:
        """Of what the relay would take for a daemon that lives."""
        self.messages.close()
        self.side.close()
        for fd in self._fds.values():
            os.close(fd)
        self._fds.clear()
        self._test.close()

    def end(self, status: int = 1) -> None:
        self._test.send(b"%d" % status)
        self.let_go()

    def was_killed(self) -> None:
        """Wait until it is dead, and let go."""
        wait_for_exit(self.pid)
        self.let_go()


class Relay:
    """A supervisor in a process of its own, with a socket for /dev/fuse."""

    def __init__(self, root: Path, **constants: Any) -> None:
        self.kernel, fuse = relay._socketpair()
        self.kernel.settimeout(20)
        self.daemons = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.daemons.settimeout(20)
        self.daemons.bind(str(root / "test"))
        self.daemons.listen()
        self.log = root / "log"
        self._running: list[Daemon] = []

        def run() -> None:
            self.kernel.close()
            self.daemons.close()
            with open(self.log, "wb") as log:
                os.dup2(log.fileno(), 2)
            for name, value in ({"SPARE_AFTER": 1e9} | constants).items():
                assert hasattr(relay, name)
                setattr(relay, name, value)
            spec = os.memfd_create("spec")
            command = [sys.executable, "-c", DAEMON, str(root / "test")]
            status = relay.Supervisor(str(root), "0:0", {"fuse": fuse.fileno(), "spec": spec}, command).run()
            os._exit(status if status >= 0 else 128 - status)

        self.pid = in_child(run)
        fuse.close()

    def daemon(self) -> Daemon:
        """The next one that it starts."""
        self._running.append(Daemon(self.daemons.accept()[0]))
        return self._running[-1]

    def ask(self, unique: int) -> bytes:
        request = wire.IN_HEADER.pack(wire.IN_HEADER.size, wire.GETATTR, unique, 1, 0, 0, 0, 0, 0)
        self.kernel.send(request)
        return request

    def wait(self) -> int:
        wait_for_exit(self.pid)
        pid, self.pid = self.pid, 0
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

    def close(self) -> None:
        for daemon in self._running:
            daemon.let_go()
            with contextlib.suppress(ProcessLookupError):
                os.kill(daemon.pid, signal.SIGKILL)
        if self.pid:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
        self.kernel.close()
        self.daemons.close()


@pytest.fixture
def make_relay(tmp_path: Path) -> Iterator[Any]:
    made: list[Relay] = []

    def make(**constants: Any) -> Relay:
        made.append(Relay(tmp_path, **constants))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.fixture
def one(make_relay: Any) -> Relay:
    return make_relay()


def test_what_a_daemon_is_given(one: Relay) -> None:
    first = one.daemon()
    assert first.names == {"fuse", "spec", "messages", "side"}
    first.ready()
    journal = os.memfd_create("journal")
    socket.send_fds(first.side, [bytes([wire.KIND_KEEP]) + b"journal"], [journal])
    first.sync()
    second_journal = os.memfd_create("journal")
    socket.send_fds(first.side, [bytes([wire.KIND_KEEP]) + b"journal"], [second_journal])
    first.sync()
    request = one.ask(2)
    assert first.messages.recv(100) == request
    spec = first.ino("spec")
    first.end()
    second = one.daemon()
    assert second.names == {*first.names, "known", "journal"}
    assert second.starts == 1
    assert second.ino("journal") == os.fstat(second_journal).st_ino
    assert second.ino("spec") == spec
    assert second.messages.recv(100) == request
    second.ready()
    second.side.send(bytes([wire.KIND_DROP]) + b"journal")
    second.sync()
    second.end()
    third = one.daemon()
    assert third.names == {*first.names, "known"}
    assert third.starts == 2
    third.end(0)
    assert one.wait() == 0
    for fd in (journal, second_journal):
        os.close(fd)


def test_the_end_of_the_connection_is_told(one: Relay) -> None:
    daemon = one.daemon()
    daemon.ready()
    one.kernel.close()
    assert daemon.side.recv(100) == bytes([wire.KIND_ENDED])
    daemon.end(0)
    assert one.wait() == 0


def test_garbage_on_the_side_channel(one: Relay) -> None:
    """Whatever a daemon says, the next one is started, and given what it must be given."""
    chance = random.Random(3)
    daemon = one.daemon()
    daemon.ready()
    expected = daemon.names | {"known"}
    device = os.open(os.devnull, os.O_RDWR)
    names = [b"", b"\0", b"a\0b", b"fuse", b"spec", b"messages", b"side", b"known", b"report", b"x=5", b"a b", b"\xff"]
    for name in names:
        for kind in (wire.KIND_KEEP, wire.KIND_DROP):
            daemon.side.send(bytes([kind]) + name)
            socket.send_fds(daemon.side, [bytes([kind]) + name], [device] * 3)
            daemon.sync()
    for _ in range(2000):
        packet = chance.randbytes(chance.choice([1, 2, 9, 20, 5000]))
        if packet[0] == wire.KIND_READY and len(packet) == wire.READY.size:
            continue
        socket.send_fds(daemon.side, [packet], [device] * chance.choice([0, 1, 5, 60]))
        if chance.random() < 0.02:
            daemon.sync()
    daemon.sync()
    descriptors = len(os.listdir(f"/proc/{one.pid}/fd"))
    assert descriptors < 40
    socket.send_fds(daemon.side, [b""], [device])
    fuse, spec = daemon.ino("fuse"), daemon.ino("spec")
    daemon.end()
    second = one.daemon()
    assert second.names == expected
    assert (second.ino("fuse"), second.ino("spec")) == (fuse, spec)
    second.ready()
    assert len(os.listdir(f"/proc/{one.pid}/fd")) <= descriptors
    second.end(0)
    assert one.wait() == 0
    os.close(device)
    assert "Traceback" not in one.log.read_text()


def test_a_daemon_that_takes_over_may_be_asked_to_end_before_it_serves(one: Relay) -> None:
    first = one.daemon()
    first.ready()
    first.end()
    second = one.daemon()
    os.kill(one.pid, signal.SIGTERM)
    second.sync()
    assert not has_exited(second.pid, within=0.2)
    second.side.send(wire.READY.pack(wire.KIND_READY, 0))
    second.was_killed()  # it heeds no signal
    third = one.daemon()
    third.end(0)
    assert one.wait() == 0


def test_the_first_daemon_may_be_interrupted_before_it_serves(one: Relay) -> None:
    daemon = one.daemon()
    os.kill(one.pid, signal.SIGINT)
    daemon.was_killed()
    assert one.wait() == 128 + signal.SIGTERM


def test_a_daemon_that_does_not_end_is_killed_once(make_relay: Any) -> None:
    one = make_relay(SHUTDOWN=0)
    daemon = one.daemon()
    daemon.ready()
    one.kernel.close()
    daemon.was_killed()
    assert one.wait() == 128 + signal.SIGKILL
    assert one.log.read_text().count("does not end; it is killed") == 1


def test_a_daemon_that_hangs_while_it_takes_over_is_replaced(make_relay: Any) -> None:
    one = make_relay(START=3, REPORTS=0.1)
    first = one.daemon()
    first.ready()
    first.end()
    one.daemon().was_killed()
    third = one.daemon()
    third.ready()
    third.end(0)
    assert one.wait() == 0
    assert one.log.read_text().count("does not serve after 3 s; it is killed") == 1


def test_a_daemon_that_answers_nobody_who_waits_is_replaced(one: Relay) -> None:
    first = one.daemon()
    first.ready(0.2)
    request = one.ask(2)
    first.was_killed()
    second = one.daemon()
    second.ready()
    assert second.messages.recv(100) == request
    second.side.send(bytes([wire.KIND_PONG]))
    second.sync()
    second.end(0)
    assert one.wait() == 0
    assert "answered nothing for 0.2 s; it is killed" in one.log.read_text()
