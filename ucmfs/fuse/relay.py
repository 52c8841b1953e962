"""The relay: a small process between /dev/fuse and the daemon, which the mount is, whatever becomes of the daemon.

    python -I -S relay.py MOUNT_POINT DEVICE NAME=FD... -- COMMAND...

It starts the daemon (COMMAND MOUNT_POINT DEVICE NAME=FD...; DEVICE is the mount's, NAME=FD are descriptors) and starts
it again whenever it dies while the mount lives. It holds what a daemon needs of the one before: the connection to the
kernel, the requests that have no answer yet, which are asked again, and the descriptors that it was asked to keep.

It copies messages, one SEQPACKET packet each, and looks into few:

- The reply to INIT: accept passthrough where the kernel offers it, and keep pages when attributes change.
- OPEN and RELEASE of leased inodes are answered here (leases.py), LOOKUP and GETATTR of them and of names that are not
  there (entries.py), GETXATTR of xattrs that there are not (the kernel asks for `security.capability` before it writes,
  also what it writes by itself), and IOCTL, for Python asks of each file that it opens whether it is a terminal.
- FLUSH is answered here, and passed on with a mark if a signal ends the process that closes the file (process.py);
  mostly as one with the RELEASE that follows it.
- Replies to OPEN and CREATE: the upper half of `fh` is a backing id. Where the daemon put one, the kernel shall read
  and write the backing file by itself (FOPEN_PASSTHROUGH), and a read-only open needs no FLUSH. Which handles the
  kernel has been given, and has not released, is remembered for the next daemon.

A reply to nothing that was asked goes nowhere; one that the kernel could not take fails the request that it belongs
to. Started with `-I -S` and nothing of ucmfs but what is named here: it shall be small and have no way to fail.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import select
import signal
import socket
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from pathlib import Path

if not __package__:
    # Started as a program, with a search path of the standard library only.
    sys.path.insert(0, str(Path(__file__).parents[2]))
from ucmfs.fuse import wire
from ucmfs.fuse.entries import MISSING, Entries
from ucmfs.fuse.leases import Leases
from ucmfs.fuse.process import being_killed

__all__ = ["RESTART", "Forwarder", "Supervisor", "device_at"]

MOST_DATA = 1 << 20
BUFFER = MOST_DATA + (1 << 16)
"""Bytes of the largest message: 1 MiB of data and its headers."""
PAGE = 4096
COPIED = 1 << 16
"""Bytes up to which an unanswered request is kept as a copy; of a larger one the buffer itself is kept."""
SPARE_BUFFERS = 4
SOCKET_BUFFER = 8 << 20
UNSENT = 4096
"""Messages without an answer (FORGET) that are kept for the next daemon."""
MOST_COMPLAINTS = 100

RESTART = 75
"""Exit status of a daemon that wants to be replaced (EX_TEMPFAIL)."""
MOST_FAILURES, FAILURE_WINDOW = 5, 60.0
"""So many daemons that fail on start within so many seconds end the mount."""
SETTLED = 0.2
"""Seconds that a daemon must have served to count as one that started."""
SPARE_AFTER = 0.3
"""Seconds that a daemon serves until another is started to stand by: most of a start is loading modules."""
REPORTS = 1.0
"""Seconds between reports of leases."""
START = 120.0
"""Seconds that a daemon may take to take over from another."""
SHUTDOWN = 120.0
"""Seconds that a daemon may take to end once the kernel ended the connection; it writes back what is dirty."""

_XATTR_NAME = wire.IN_HEADER.size + wire.GETXATTR_NAME
_OURS = frozenset({wire.LOOKUP, wire.GETATTR, wire.IOCTL, wire.OPEN, wire.RELEASE, wire.GETXATTR})
"""Opcodes of requests that may be answered here."""
_NOT_STARTED = 127
_SO_SNDBUFFORCE = 32
_PACKET_OVERHEAD = 32
"""Bytes of a socket's buffer that no packet may have."""
_MNT_DETACH, _UMOUNT_NOFOLLOW = 2, 8


def log(level: str, text: str) -> None:
    """One line as the daemon's log has them."""
    now = time.time()
    stamp = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(now))
    with contextlib.suppress(OSError):
        os.write(2, f"{stamp},{int(now % 1 * 1000):03} {level} ucmfs.relay: {text}\n".encode())


class Forwarder:
    """Both directions, one thread each: the cheapest way that kernel.md found.

    `_lock` is held while a request is put among the unanswered ones and sent, so that each goes to each daemon once:
    with attach() if it came before, else as it comes.
    """

    def __init__(
        self,
        fuse: int,
        ended: Callable[[], None] = lambda: None,
        report: Callable[[bytes], None] = lambda packet: None,
    ) -> None:
        self._fuse = fuse
        self._on_end = ended
        self._report = report
        """Tells the daemon of leases."""
        self.leases = Leases()
        self.entries = Entries()
        self._lock = threading.Lock()
        self._daemon: socket.socket | None = None
        self._threads: list[threading.Thread] = []
        """Of the daemon that is attached."""
        self._packet = 0
        """Bytes that a packet to the daemon may have."""
        self._init = b""
        self._flush: bytes | None = None
        """A FLUSH that has its answer, and that the daemon was not told of yet."""
        self._pending: dict[int, bytes | memoryview] = {}
        """Requests without a reply, by unique, in the order they came."""
        self._unsent: deque[bytes] = deque(maxlen=UNSENT)
        """What came without asking for a reply while there was no daemon."""
        self._spare: list[bytearray] = []
        self.handles: set[int] = set()
        """What the kernel has open, by the daemon's number."""
        self.replies = 0
        self.complaints = 0
        self.ended = False
        """Whether the kernel ended the connection."""

    def start(self) -> None:
        """Begin to read requests; they wait until there is a daemon."""
        threading.Thread(target=self._requests, daemon=True).start()

    @property
    def waits(self) -> bool:
        """Whether a request has no answer yet."""
        return bool(self._pending)

    def repeated(self) -> list[bytes]:
        """The requests without a reply that must not be done twice."""
        return [bytes(request) for request in list(self._pending.values()) if _opcode(request) in wire.ONCE]

    # The daemon comes and goes

    def attach(self, daemon: socket.socket) -> None:
        """Send all that is unanswered to *daemon*, and what comes from now on; pass on its replies."""
        self._packet = daemon.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) - _PACKET_OVERHEAD
        # Handed over in a thread: a daemon that reads nothing must not stop who watches it.
        self._threads = [
            threading.Thread(target=call, args=(daemon,), daemon=True) for call in (self._replies, self._hand_over)
        ]
        for thread in self._threads:
            thread.start()

    def _hand_over(self, daemon: socket.socket) -> None:
        with self._lock:
            self._daemon = daemon
            if self._init and _unique(self._init) not in self._pending:
                self._send(self._init)
            unsent, self._unsent = self._unsent, deque(maxlen=UNSENT)
            for request in [*unsent, *self._pending.values()]:
                self._send(request)

    def _send(self, request: bytes | memoryview) -> None:
        """To the daemon, with the lock. One that no daemon can be sent fails."""
        if self._daemon is not None:
            try:
                self._daemon.send(request)
                return
            except OSError as error:
                # Else it is dead: whoever comes next is asked.
                if error.errno in (errno.EMSGSIZE, errno.ENOBUFS, errno.ENOMEM):
                    log("ERROR", f"a request of {len(request)} bytes cannot be sent to the daemon ({error.strerror})")
                    if self._pending.pop(_unique(request), None) is not None:
                        self._write(wire.error_reply(_unique(request), errno.EIO), _unique(request))
                    return
        if _opcode(request) in wire.UNANSWERED:
            self._unsent.append(bytes(request))

    def detach(self) -> None:
        """The daemon is dead: pass on what it answered, then forget it."""
        # Its end is closed: the last packet is followed by an end of file, and who is sending to it gets an error.
        for thread in self._threads:
            thread.join()
        with self._lock:
            if self._daemon is not None:
                self._daemon.close()
            self._daemon = None

    # Requests

    def _requests(self) -> None:
        buffer = bytearray(BUFFER)
        while (size := self._read(buffer)) >= wire.IN_HEADER.size:
            view = memoryview(buffer)[:size]
            opcode = _opcode(view)
            if opcode == wire.INTERRUPT:
                # pyfuse3 heeds none, and libfuse would answer some.
                continue
            if opcode in _OURS and self._answer_ourselves(view, opcode):
                continue
            if opcode == wire.SETATTR:
                self.entries.change(wire.IN_HEADER.unpack_from(view)[3])
            if opcode in wire.UNANSWERED:
                forgotten = self.entries.forget(view)
                if forgotten is None:
                    continue
                view = memoryview(forgotten)
            if self._flush is not None and not (opcode == wire.RELEASE and self._merge_flush(view)):
                self._pass_on(self._flush)
                self._flush = None
            if opcode == wire.FLUSH:
                self._flush = self._answer_flush(view)
            elif self._pass_on(view):
                buffer = self._spare.pop() if self._spare else bytearray(BUFFER)
        if self._flush is not None:
            self._pass_on(self._flush)
        with self._lock:
            if self._daemon is not None:
                # After all that came before: a close may be among it, which publishes a block.
                with contextlib.suppress(OSError):
                    self._daemon.shutdown(socket.SHUT_WR)
        self.ended = True
        self._on_end()

    def _answer_ourselves(self, request: memoryview, opcode: int) -> bool:
        """Answer *request*, of _OURS, if the daemon need not."""
        _, _, unique, node, *_ = wire.IN_HEADER.unpack_from(request)
        body: bytes | None
        error = 0
        if opcode == wire.LOOKUP:
            body = self.entries.lookup(node, bytes(request[wire.IN_HEADER.size : -1]))
            error = errno.ENOENT if body == MISSING else 0
        elif opcode == wire.GETATTR:
            body = self.entries.attributes(node)
        elif opcode == wire.IOCTL:
            body, error = b"", errno.ENOTTY
        elif opcode == wire.OPEN:
            body = self.leases.open(node, wire.OPEN_IN.unpack_from(request, wire.IN_HEADER.size)[0])
        elif opcode == wire.RELEASE:
            ours, report = self.leases.release(wire.RELEASE_IN.unpack_from(request, wire.IN_HEADER.size)[0])
            body = b"" if ours else None
            if report is not None:
                self._report(report)
        else:
            there_is = bytes(request[_XATTR_NAME:]).startswith(wire.XATTRS)
            body, error = None if there_is else b"", errno.ENODATA
        if body is None:
            return False
        self._write(wire.OUT_HEADER.pack(wire.OUT_HEADER.size + len(body), -error, unique) + body, unique)
        return True

    def _pass_on(self, request: bytes | memoryview) -> bool:
        """Have the daemon answer *request*; whether its buffer is kept until then."""
        _, opcode, unique, *_ = wire.IN_HEADER.unpack_from(request)
        kept = False
        with self._lock:
            if opcode == wire.INIT:
                self._init = bytes(request)
            if opcode not in wire.UNANSWERED:
                kept = len(request) > COPIED
                self._pending[unique] = request if kept else bytes(request)
            if opcode in wire.CHANGES:
                # Before the daemon does it, and after it can be seen to be unanswered.
                self.entries.changes(request)
            self._send(request)
        return kept

    def _answer_flush(self, request: memoryview) -> bytes:
        """Tell who closes a file that all is well. Give what the daemon is to be told, and with which RELEASE.

        Whether a signal ends the process is to be seen only while it waits.
        """
        _, _, unique, _, _, _, pid, *_ = wire.IN_HEADER.unpack_from(request)
        if being_killed(pid):
            (fh,) = wire.FLUSH_IN.unpack_from(request, wire.IN_HEADER.size)
            wire.FLUSH_IN.pack_into(request, wire.IN_HEADER.size, fh | wire.KILLED)
        self._write(wire.OUT_HEADER.pack(wire.OUT_HEADER.size, 0, unique), unique)
        return bytes(request)

    def _merge_flush(self, release: memoryview) -> bool:
        """Have *release*, which follows a FLUSH, tell of both; False if it is of another file.

        A FLUSH alone tells that the last close is on its way, so it goes before anything else that the daemon is asked.
        """
        assert self._flush is not None
        (flushed,) = wire.FLUSH_IN.unpack_from(self._flush, wire.IN_HEADER.size)
        (fh,) = wire.RELEASE_IN.unpack_from(release, wire.IN_HEADER.size)
        if fh != flushed & ~wire.KILLED:
            return False
        wire.RELEASE_IN.pack_into(release, wire.IN_HEADER.size, flushed | wire.FLUSHED)
        self._flush = None
        return True

    def _read(self, buffer: bytearray) -> int:
        """One request; 0 when the kernel has ended the connection."""
        while True:
            try:
                return os.readv(self._fuse, [buffer])
            except OSError as error:
                # ENOENT: the request was interrupted before it could be read.
                if error.errno not in (errno.EINTR, errno.EAGAIN, errno.ENOENT):
                    return 0

    # Replies

    def _replies(self, daemon: socket.socket) -> None:
        """Until the daemon's end is closed."""
        buffer = bytearray(BUFFER)
        view = memoryview(buffer)
        while True:
            try:
                size = daemon.recv_into(buffer)
            except OSError:
                return
            if size == 0:
                if _is_closed(daemon):
                    return
                self.complain("an empty packet")
            else:
                self._answer(view[:size])

    def _answer(self, reply: memoryview) -> None:
        """Pass one packet of the daemon on to the kernel, if it is a message."""
        if len(reply) < wire.OUT_HEADER.size:
            self.complain(f"a packet of {len(reply)} bytes")
            return
        length, error, unique = wire.OUT_HEADER.unpack_from(reply)
        if unique == wire.LEASES_UNIQUE:
            self._lease(reply, error)
            return
        request = self._pending.get(unique)
        if request is None:
            if length != len(reply) or unique:
                self._stray(unique, length, len(reply))
            else:
                self._write(reply, 0)
            return
        self.replies += 1
        if _opcode(request) == wire.FLUSH:
            # It has its answer.
            pass
        elif length != len(reply):
            self.complain(f"a reply of {len(reply)} bytes that says {length}")
            self._write(wire.error_reply(unique, errno.EIO), unique)
        elif error or self._amend(reply, request):
            self._write(reply, unique)
        else:
            self.complain(f"a reply of {len(reply)} bytes to opcode {_opcode(request)}")
            self._write(wire.error_reply(unique, errno.EIO), unique)
        if _opcode(request) == wire.RELEASE:
            self.handles.discard(wire.RELEASE_IN.unpack_from(request, wire.IN_HEADER.size)[0] & wire.OUR_HALF)
        self._pending.pop(unique, None)
        if isinstance(request, memoryview) and len(self._spare) < SPARE_BUFFERS:
            assert isinstance(request.obj, bytearray)
            self._spare.append(request.obj)

    def _lease(self, message: memoryview, kind: int) -> None:
        """Heed what the daemon says of leases and names."""
        try:
            if kind == wire.LIST:
                listed = wire.unpack_list(message)
                if not any(self._may_change(listed[0], request) for request in list(self._pending.values())):
                    self.entries.list(*listed)
                return
            if kind == wire.GONE:
                self.entries.gone(*wire.unpack_gone(message))
                return
            if len(message) < wire.OUT_HEADER.size + wire.LEASE.size:
                raise ValueError
            node, backing = wire.LEASE.unpack_from(message, wire.OUT_HEADER.size)
            named = wire.unpack_named(message)
        except ValueError:
            self.complain(f"{len(message)} bytes about a lease or a name ({kind})")
            return
        if kind == wire.GRANT and 0 < backing <= wire.MOST_BACKING:
            self.leases.grant(node, backing)
            if named is not None:
                self.entries.grant(node, *named)
        elif kind == wire.RECALL:
            self._report(self.leases.recall(node, self.entries.recall(node)))
        else:
            self.complain(f"something unknown about a lease ({kind})")

    @staticmethod
    def _may_change(directory: int, request: bytes | memoryview) -> bool:
        """Whether *request* makes a name in *directory* that the daemon may not know of yet."""
        return _opcode(request) in wire.CHANGES and any(node == directory for node, _ in wire.names_changed(request))

    def _stray(self, unique: int, length: int, size: int) -> None:
        """A reply to no request: the second INIT's, which the kernel never sent, or nonsense."""
        if length != size or not self._init or unique != _unique(self._init):
            self.complain(f"{size} bytes that answer nothing")

    def _amend(self, reply: memoryview, request: bytes | memoryview) -> bool:
        """Say in *reply* what pyfuse3 cannot; False if it cannot be a reply to *request*."""
        opcode = _opcode(request)
        if opcode == wire.INIT:
            self._amend_init(reply, request)
            return True
        if opcode not in (wire.OPEN, wire.CREATE):
            return True
        start: int = wire.OUT_HEADER.size + (wire.ENTRY_OUT_SIZE if opcode == wire.CREATE else 0)
        if len(reply) < start + wire.OPEN_OUT.size:
            return False
        fh, flags, _ = wire.OPEN_OUT.unpack_from(reply, start)
        backing = fh >> 32
        if backing > wire.MOST_BACKING:
            return False
        if backing:
            # FOPEN_DIRECT_IO stays: with it the daemon serves this open, beside others that the kernel serves.
            flags = flags & ~wire.FOPEN_KEEP_CACHE | wire.FOPEN_PASSTHROUGH
            if opcode == wire.OPEN:
                (asked, _) = wire.OPEN_IN.unpack_from(request, wire.IN_HEADER.size)
                if asked & os.O_ACCMODE == os.O_RDONLY:
                    flags |= wire.FOPEN_NOFLUSH
            wire.OPEN_OUT.pack_into(reply, start, fh, flags, backing)
        self.handles.add(fh & wire.OUR_HALF)
        return True

    def _amend_init(self, reply: memoryview, request: bytes | memoryview) -> None:
        start: int = wire.OUT_HEADER.size
        if len(request) < wire.IN_HEADER.size + wire.INIT_IN.size or len(reply) < start + wire.INIT_OUT_SIZE:
            return
        *_, offered, offered2 = wire.INIT_IN.unpack_from(request, wire.IN_HEADER.size)
        (flags,) = wire.INIT_FLAGS.unpack_from(reply, start + 12)
        (flags2,) = wire.INIT_FLAGS.unpack_from(reply, start + wire.INIT_FLAGS2)
        if offered & wire.INIT_EXPLICIT_INVAL_DATA:
            # An inode is one version: whoever changes its bytes does so through the kernel. Times of a block may
            # change (its writer closes it, utime), and its pages are as good as before.
            flags = flags & ~wire.INIT_AUTO_INVAL_DATA | wire.INIT_EXPLICIT_INVAL_DATA
        # It need not ask before each write whether the file has privileges to lose: the mount is nosuid.
        flags |= offered & wire.INIT_HANDLE_KILLPRIV_V2
        if offered & wire.INIT_EXT and offered2 & wire.INIT_PASSTHROUGH2:
            flags |= wire.INIT_EXT
            flags2 |= wire.INIT_PASSTHROUGH2
            wire.INIT_FLAGS.pack_into(reply, start + wire.INIT_STACK_DEPTH, 1)
        largest = (self._packet - (BUFFER - MOST_DATA)) // PAGE
        if largest < MOST_DATA // PAGE:
            (max_write,) = wire.INIT_MAX_WRITE.unpack_from(reply, start + 20)
            (max_pages,) = wire.INIT_MAX_PAGES.unpack_from(reply, start + 28)
            wire.INIT_MAX_WRITE.pack_into(reply, start + 20, min(max_write, largest * PAGE))
            wire.INIT_MAX_PAGES.pack_into(reply, start + 28, min(max_pages, largest))
        wire.INIT_FLAGS.pack_into(reply, start + 12, flags)
        wire.INIT_FLAGS.pack_into(reply, start + wire.INIT_FLAGS2, flags2)

    def _write(self, reply: memoryview | bytes, unique: int) -> None:
        try:
            os.write(self._fuse, reply)
        except OSError as error:
            # ENOENT: whoever asked was interrupted, and waits no more; for a notification, nothing is known of what it
            # is about. ENODEV: the mount is gone.
            if error.errno not in (errno.ENOENT, errno.ENODEV) and unique:
                self.complain(f"a reply that the kernel refuses ({error.strerror})")
                with contextlib.suppress(OSError):
                    os.write(self._fuse, wire.error_reply(unique, errno.EIO))

    def complain(self, what: str) -> None:
        """To the log; not without end, for a daemon gone mad must not fill the disk."""
        self.complaints += 1
        if self.complaints <= MOST_COMPLAINTS:
            log("ERROR", f"the daemon sent {what}")


def _is_closed(end: socket.socket) -> bool:
    """Whether there is nobody at the other end."""
    poll = select.poll()
    poll.register(end, 0)
    return bool(poll.poll(0))


def _opcode(request: bytes | memoryview) -> int:
    return int(wire.IN_HEADER.unpack_from(request)[1])


def _unique(request: bytes | memoryview) -> int:
    return int(wire.IN_HEADER.unpack_from(request)[2])


class Supervisor:
    """Starts the daemon, watches it, and starts the next one; the only one that decides when the mount is over."""

    def __init__(self, mount_point: str, device: str, fds: dict[str, int], command: list[str]) -> None:
        self._mount_point = mount_point
        self._device = device
        self._command = command
        self._kept = fds
        """Descriptors that every daemon inherits, by name. "report" is for the first only."""
        self._wake, self._woken = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._forwarder = Forwarder(fds["fuse"], self._nudge, self._tell)
        self._starts = 0
        self._lookups: Counter[int] = Counter()
        """By node, what the kernel looked up in the relay, until a daemon that counts it serves."""
        self._spare: tuple[int, int, socket.socket] | None = None
        """A process that waits to become the daemon: pid, pidfd, and the socket that tells it what to serve."""
        self._side: socket.socket | None = None
        self._process = -1  # pidfd
        self._killed = False
        self._stopping = False
        """Whether a signal asked for the end of the mount."""
        self._started = 0.0
        self._ready_since = 0.0
        self._hang_timeout = 0.0
        self._next_look = 0.0
        self._asked_at: float | None = None
        """When the daemon was asked whether it is there; None once it said so."""
        self._waits_since: float | None = None
        """When a look first found that requests wait; None where the last found none."""

    def run(self) -> int:
        """Until the mount is over; give the exit status."""
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self._pass_signal)
        self._forwarder.start()
        failures: deque[float] = deque(maxlen=MOST_FAILURES)
        while True:
            pid = self._start()
            status = _NOT_STARTED if pid is None else self._watch(pid)
            served = self._ready_since > 0
            if status == 0 or self._forwarder.ended or not (served or self._starts > 1):
                # In order, or nothing is there to be served, or the command that mounts is told and sees to it.
                break
            if status == RESTART:
                # It may be of the version that is to be replaced.
                self._dismiss_spare()
            else:
                log("WARNING", f"the daemon (pid {pid}) {_ended_how(status)}; starting another, nothing is lost")
            if not served or time.monotonic() - self._ready_since < SETTLED:
                failures.append(time.monotonic())
                if len(failures) == MOST_FAILURES and failures[-1] - failures[0] < FAILURE_WINDOW:
                    reason = f"the last one {_ended_how(status)}; its reason is above"
                    log("ERROR", f"{MOST_FAILURES} daemons in a row failed on start, {reason}. The mount is ended")
                    break
        self._dismiss_spare()
        self._take_away()
        return status

    # One daemon

    def _start(self) -> int | None:
        """Start a daemon; give its pid, or None where the system refuses."""
        messages, theirs = _socketpair()
        self._side, side_theirs = _socketpair()
        self._started = time.monotonic()
        self._ready_since, self._next_look, self._asked_at = 0.0, self._started + REPORTS, None
        self._killed, self._waits_since = False, None
        fds = {**self._kept, "messages": theirs.fileno(), "side": side_theirs.fileno()}
        if self._starts:
            known = os.memfd_create("known")
            forwarder = self._forwarder
            self._lookups.update(forwarder.entries.hand_over())
            leases = forwarder.leases.hand_over(self._lookups)
            os.write(known, wire.pack_known(self._starts, forwarder.handles, leases, forwarder.repeated()))
            fds["known"] = known
        self._starts += 1
        try:
            pid, self._process = self._employ_spare(fds) or self._spawn(fds)
        except OSError as error:
            log("ERROR", f"{self._command[0]}: {error.strerror}")
            messages.close()
            return None
        finally:
            theirs.close()
            side_theirs.close()
            for name in ("report", "known"):
                if name in fds:
                    os.close(fds[name])
                    self._kept.pop(name, None)
        self._forwarder.attach(messages)
        return pid

    def _spawn(self, fds: dict[str, int]) -> tuple[int, int]:
        """Start a daemon with *fds*; give its pid and a pidfd. Raises OSError."""
        pid = os.posix_spawn(
            self._command[0],
            [*self._command, self._mount_point, self._device, *(f"{name}={fd}" for name, fd in fds.items())],
            os.environ,
            # A descriptor duplicated to its own number is inherited.
            file_actions=[(os.POSIX_SPAWN_DUP2, fd, fd) for fd in fds.values()],
            # A Ctrl-C is for the relay, which passes it on once.
            setsid=True,
            setsigdef=[signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGPIPE],
        )
        return pid, os.pidfd_open(pid)

    def _prepare_spare(self) -> None:
        """Have a process stand by that has loaded all a daemon needs."""
        ours, theirs = _socketpair()
        try:
            self._spare = (*self._spawn({"standby": theirs.fileno()}), ours)
        except OSError:
            # There is no hurry: the next daemon is started when it is needed.
            ours.close()
        finally:
            theirs.close()

    def _employ_spare(self, fds: dict[str, int]) -> tuple[int, int] | None:
        """Make the spare process the daemon; None where there is none."""
        if self._spare is None:
            return None
        pid, process, tell = self._spare
        self._spare = None
        with tell:
            try:
                socket.send_fds(tell, [" ".join(fds).encode()], list(fds.values()))
            except OSError:
                # It is dead.
                os.close(process)
                os.waitpid(pid, 0)
                return None
        return pid, process

    def _dismiss_spare(self) -> None:
        if self._spare is not None:
            pid, process, tell = self._spare
            self._spare = None
            tell.close()
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(process, signal.SIGKILL)
            os.close(process)
            os.waitpid(pid, 0)

    def _watch(self, pid: int) -> int:
        """Until daemon *pid* is gone; give its exit status, negative for a signal."""
        assert self._side is not None
        poll = select.poll()
        for fd in (self._process, self._side.fileno(), self._wake):
            poll.register(fd, select.POLLIN)
        told_end = False
        deadline = float("inf")
        while True:
            events = dict(poll.poll(max(0.0, min(self._next_look, deadline) - time.monotonic()) * 1000))
            if self._side.fileno() in events and not self._hear():
                poll.unregister(self._side.fileno())
            if self._process in events:
                break
            if self._wake in events:
                os.read(self._wake, 100)
            if self._forwarder.ended and not told_end:
                told_end = True
                deadline = time.monotonic() + SHUTDOWN
                self._tell(bytes([wire.KIND_ENDED]))
            if time.monotonic() > deadline:
                deadline = float("inf")
                self._kill(f"the mount is gone, but the daemon (pid {pid}) does not end")
            elif time.monotonic() >= self._next_look:
                self._look_after(pid)
        while self._hear():
            pass
        _, status = os.waitpid(pid, 0)
        self._forwarder.detach()
        self._side.close()
        process, self._process = self._process, -1
        os.close(process)
        return os.waitstatus_to_exitcode(status)

    def _look_after(self, pid: int) -> None:
        """Every second or so: report leases; ask whether the daemon is there, and kill one that was asked and is not.

        The looks are at most half as far apart as the time after which a daemon hangs: one to ask, one to wait.
        """
        now = time.monotonic()
        timeout = self._hang_timeout
        self._next_look = now + (min(REPORTS, timeout / 2) if timeout else REPORTS)
        if not self._ready_since:
            # The command that mounts has its own patience with the first.
            if self._starts > 1 and now - self._started >= START:
                self._kill(f"the daemon (pid {pid}) does not serve after {START:g} s")
            return
        for report in self._forwarder.leases.news():
            self._tell(report)
        if self._spare is None and now - self._ready_since >= SPARE_AFTER:
            self._prepare_spare()
        if not timeout:
            return
        # Who was stopped while nobody waited has time to answer the first who does.
        self._waits_since = (self._waits_since or now) if self._forwarder.waits else None
        if self._asked_at is None:
            self._asked_at = now
            self._tell(bytes([wire.KIND_PING]))
        elif self._waits_since is not None and now - max(self._asked_at, self._waits_since) >= timeout / 2:
            self._kill(f"the daemon (pid {pid}) answered nothing for {timeout:g} s")

    def _hear(self) -> bool:
        """One packet of the side channel, if there is one; False at its end."""
        assert self._side is not None
        try:
            packet, fds, _, _ = socket.recv_fds(self._side, 4096, 4, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except OSError:
            return False
        kind = packet[0] if packet else None
        name = packet[1:].decode(errors="replace")
        if kind == wire.KIND_READY and len(packet) == wire.READY.size:
            self._hang_timeout = max(0.0, wire.READY.unpack(packet)[1])
            self._ready_since = time.monotonic()
            self._next_look = self._ready_since + min(REPORTS, SPARE_AFTER)
            self._lookups.clear()
            if self._stopping:
                self._stop()
        elif kind == wire.KIND_PONG:
            self._asked_at = None
        elif kind == wire.KIND_SYNC:
            for report in [*self._forwarder.leases.news(), bytes([wire.KIND_SYNCED])]:
                self._tell(report)
        elif kind == wire.KIND_KEEP and fds and name in wire.KEPT:
            self._drop(name)
            self._kept[name] = fds.pop()
            os.set_inheritable(self._kept[name], False)
        elif kind == wire.KIND_DROP and name in wire.KEPT:
            self._drop(name)
        elif packet:
            self._forwarder.complain(f"something unknown ({len(packet)} bytes of kind {kind})")
        for fd in fds:
            os.close(fd)
        return bool(packet)

    def _drop(self, name: str) -> None:
        fd = self._kept.pop(name, None)
        if fd is not None:
            os.close(fd)

    def _tell(self, packet: bytes) -> None:
        """By every thread; a packet is sent whole or not at all."""
        assert self._side is not None
        with contextlib.suppress(OSError):  # there is nobody any more, or nobody who reads: either is seen elsewhere
            self._side.send(packet, socket.MSG_DONTWAIT)

    def _kill(self, why: str) -> None:
        """Once: one that hangs in the kernel dies when it comes out of it."""
        if self._killed:
            return
        self._killed = True
        log("ERROR", f"{why}; it is killed")
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._process, signal.SIGKILL)

    def _nudge(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.write(self._woken, b"\0")

    def _pass_signal(self, number: int, frame: object) -> None:
        """The daemon writes back and ends the mount; one that takes over does so once it serves."""
        self._stopping = True
        if self._ready_since or self._starts == 1:
            self._stop()

    def _stop(self) -> None:
        if self._process >= 0:
            with contextlib.suppress(OSError):
                signal.pidfd_send_signal(self._process, signal.SIGTERM)

    def _take_away(self) -> None:
        """Unmount what is still mounted of this connection: its files give an error from now on."""
        if self._forwarder.ended or device_at(self._mount_point) != self._device:
            return
        if os.geteuid() == 0:
            ctypes.CDLL(None).umount2(os.fsencode(self._mount_point), _UMOUNT_NOFOLLOW | _MNT_DETACH)
        else:
            with contextlib.suppress(OSError):
                os.spawnlp(os.P_WAIT, "fusermount3", "fusermount3", "-u", "-z", "-q", "--", self._mount_point)


def device_at(mount_point: str) -> str:
    """The device number of what is mounted uppermost at *mount_point*, '' for nothing. Asks no file system."""
    found = b""
    with open("/proc/self/mountinfo", "rb") as mountinfo:
        for line in mountinfo:
            fields = line.split(b" ", 5)
            if fields[4].decode("unicode_escape").encode("latin-1") == os.fsencode(mount_point):
                found = fields[2]
    return found.decode()


def _socketpair() -> tuple[socket.socket, socket.socket]:
    pair = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for end in pair:
        try:
            end.setsockopt(socket.SOL_SOCKET, _SO_SNDBUFFORCE, SOCKET_BUFFER)
        except PermissionError:
            # A packet is sent whole or not at all; without root, net.core.wmem_max bounds it.
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BUFFER)
    return pair


def _ended_how(status: int) -> str:
    if status < 0:
        with contextlib.suppress(ValueError):
            return f"was ended by {signal.Signals(-status).name}"
        return f"was ended by signal {-status}"
    return f"ended with status {status}"


def main() -> None:
    at = sys.argv.index("--")
    mount_point, device, *named = sys.argv[1:at]
    fds = {name: int(fd) for name, fd in (word.split("=") for word in named)}
    for fd in fds.values():
        os.set_inheritable(fd, False)
    # What the caller's shell left open would stay open as long as the mount.
    for fd in {int(fd) for fd in os.listdir("/proc/self/fd")} - {0, 1, 2, *fds.values()}:
        with contextlib.suppress(OSError):  # the one that listed
            os.close(fd)
    status = Supervisor(mount_point, device, fds, sys.argv[at + 1 :]).run()
    # Threads that wait for the kernel are no reason to stay.
    os._exit(status if status >= 0 else 128 - status)


if __name__ == "__main__":
    main()
