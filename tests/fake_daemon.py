"""A daemon with a script in place of a pipeline: speaks the protocol on a real socket, where no mount is needed."""

from __future__ import annotations

import errno
import os
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Self

from ucmfs.control import protocol

__all__ = ["FakeDaemon"]

Answer = Callable[[protocol.Request], protocol.Reply]


class FakeDaemon:
    """Listens at `<root>/.ucmfs/sock`. What `answer` gives is the reply to every request but Hello."""

    def __init__(self, root: Path, answer: Answer, *, pid: int | None = None) -> None:
        self.root = root
        self.requests: list[protocol.Request] = []
        """All requests but Hello, in order."""
        self._answer = answer
        self._pid = pid or os.getpid()
        (root / ".ucmfs").mkdir()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(str(root / ".ucmfs/sock"))
        self._listener.listen()
        self._thread = threading.Thread(target=self.serve)

    def serve(self, *, until: type[protocol.Request] | None = None) -> None:
        """Answer one connection after the other, to the end, or until a request of kind *until* was answered."""
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:  # shut down
                return
            with connection:
                while data := connection.recv(protocol.MAX_PACKET):
                    request = protocol.decode_request(data)
                    connection.send(protocol.encode(self._reply(request)))
                    if until is not None and isinstance(request, until):
                        return

    def _reply(self, request: protocol.Request) -> protocol.Reply:
        if isinstance(request, protocol.Hello):
            return protocol.Reply(result={"version": protocol.VERSION, "pid": self._pid, "pipeline": "Cache|Posix"})
        self.requests.append(request)
        try:
            return self._answer(request)
        except Exception as error:  # the caller gets it instead of a connection that hangs
            return protocol.Reply(fault=protocol.Fault(errno.EIO, f"the script failed: {error!r}"))

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._listener.close()
