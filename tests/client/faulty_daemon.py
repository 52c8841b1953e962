"""A daemon for tests of the client: the real protocol over a real socket, blocks in a directory, and faults on demand.

It keeps the rules that a client can break: staging files belong to their connection, a block is not published while
anything has it open for writing, and of the rows of one `create` only the first may wait for room.
"""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ucmfs.control import protocol
from ucmfs.control.protocol import Fault, Reply, Request

Fail = Callable[[Request], Reply | None]
"""May answer a request in the daemon's place; raises Drop to end the connection instead."""


class Drop(Exception):
    """End the connection without an answer."""


class FaultyDaemon:
    """Serves `<root>/.ucmfs/sock`; the blocks are the files below *root*, as a mount shows them.

    `fail` is asked about every request but Hello. `room` is the number of staging files that may exist at once, and
    `patience` the seconds that a request waits for one to go.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.fail: Fail = lambda request: None
        self.room = 1 << 30
        self.patience = 0.0
        self.stagings: dict[int, tuple[str, str]] = {}
        self.requests: list[Request] = []
        self._number = 0
        self._lock = threading.Condition()
        self._connections: set[socket.socket] = set()
        self._threads: list[threading.Thread] = []
        (root / ".ucmfs").mkdir(parents=True, exist_ok=True)
        (root / ".ucmfs/staging").mkdir(exist_ok=True)
        self._listen()

    def _listen(self) -> None:
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        fd = os.open(self.root, os.O_PATH)
        try:
            self._listener.bind(f"/proc/self/fd/{fd}/.ucmfs/sock")
        finally:
            os.close(fd)
        self._listener.listen()
        self._start(self._accept, self._listener)

    def restart(self) -> None:
        """As when the daemon dies and comes back: connections end, and staging files with them."""
        self.stop()
        self._listen()

    def stop(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        with self._lock:
            for connection in self._connections:
                connection.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        self._threads.clear()
        self._listener.close()
        (self.root / ".ucmfs/sock").unlink()

    def count(self, kind: type[Request]) -> int:
        return sum(isinstance(request, kind) for request in self.requests)

    def _start(self, target: Callable[..., None], *args: Any) -> None:
        thread = threading.Thread(target=target, args=args, name="faulty-daemon")
        self._threads.append(thread)
        thread.start()

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with self._lock:
                self._connections.add(connection)
            self._start(self._serve, connection)

    def _serve(self, connection: socket.socket) -> None:
        own: dict[int, tuple[str, str]] = {}
        with connection:
            try:
                while data := connection.recv(protocol.MAX_PACKET):
                    request = protocol.decode_request(data)
                    fds: list[int] = []
                    try:
                        socket.send_fds(connection, [protocol.encode(self._answer(request, own, fds))], fds)
                    finally:
                        for fd in fds:
                            os.close(fd)
            except (Drop, OSError):
                pass
            with self._lock:
                self._connections.discard(connection)
                for number in own:
                    os.unlink(self.stagings.pop(number)[1])
                self._lock.notify_all()

    def _answer(self, request: Request, own: dict[int, tuple[str, str]], fds: list[int]) -> Reply:
        if isinstance(request, protocol.Hello):
            return Reply(result={"version": protocol.VERSION, "pid": os.getpid(), "pipeline": "test"})
        self.requests.append(request)
        answer = self.fail(request)
        if answer is not None:
            return answer
        rows: list[Any] = []
        faults: dict[int, Fault] = {}
        items: list[Any] = getattr(request, "names", None) or getattr(request, "stagings", [])
        assert len(items) <= (
            protocol.MAX_FDS if isinstance(request, protocol.Open | protocol.Create) else protocol.MAX_NAMES
        )
        for row, item in enumerate(items):
            try:
                rows.append(self._row(request, item, own, fds))
            except OSError as error:
                rows.append(None)
                faults[row] = Fault(error.errno or errno.EIO, f"{item}: {error.strerror}")
        result = {"pipeline": "test"} if isinstance(request, protocol.Stats) else None
        return Reply(rows=rows, faults=faults, result=result)

    def _row(self, request: Request, item: Any, own: dict[int, tuple[str, str]], fds: list[int]) -> Any:
        match request:
            case protocol.Lookup():
                path = self.root / item
                return path.stat().st_size if path.is_file() else None
            case protocol.Open():
                fds.append(os.open(self.root / item, os.O_RDONLY | os.O_CLOEXEC))
                return os.fstat(fds[-1]).st_size
            case protocol.Create():
                return self._create(item, own, fds)
            case protocol.Publish():
                self._publish(item, own)
                return None
            case protocol.Discard():
                with self._lock:
                    os.unlink(self.stagings.pop(item)[1])
                    self._lock.notify_all()
                del own[item]
                return None
            case protocol.Prefetch():
                return (self.root / item).is_file()
        raise OSError(errno.EOPNOTSUPP, "not in this daemon")

    def _create(self, name: str, own: dict[int, tuple[str, str]], fds: list[int]) -> int:
        with self._lock:
            if not self._lock.wait_for(lambda: len(self.stagings) < self.room, 0 if fds else self.patience):
                raise OSError(errno.ENOSPC, "no room")
            self._number += 1
            number = self._number
            path = str(self.root / f".ucmfs/staging/{number}")
            fds.append(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644))
            self.stagings[number] = own[number] = (name, path)
        return number

    def _publish(self, number: int, own: dict[int, tuple[str, str]]) -> None:
        name, path = own[number]
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            # A read lease is refused while anyone has the file open for writing.
            fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_RDLCK)
            fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)
        except OSError as error:
            raise OSError(errno.EBUSY, "open for writing") from error
        finally:
            os.close(fd)
        (self.root / name).parent.mkdir(parents=True, exist_ok=True)
        os.rename(path, self.root / name)
        with self._lock:
            del self.stagings[number]
            self._lock.notify_all()
        del own[number]


def files_of(root: Path) -> dict[str, bytes]:
    """Every file below *root* but the daemon's socket, by name."""
    return {
        str(path.relative_to(root)): path.read_bytes()
        for path in sorted(root.rglob("*"))
        if path.is_file() and not path.is_socket()
    }
