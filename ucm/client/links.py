"""Connections to one daemon, as many as threads talk to it at once, within a bound."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ucm.client.blocks import close_all
from ucmfs.control.connection import Connection
from ucmfs.control.protocol import Create, Discard, Open, Publish, Reply, Request
from ucmfs.errors import MountError, ProtocolError, StoreClosed, UcmfsError

__all__ = ["Link", "Links"]

_MOST_FRESH = 3
"""So many new connections may end in the middle of one request. Who connects waits for the next daemon."""


class Link:
    """One connection, and the staging files that live and die with it. Used by one thread at a time."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self.busy = True
        self.wanted = 0
        """Threads that wait for this very link."""
        self.used = False
        self.broken = False
        """Cannot be used any more; its staging files are gone."""
        self.stagings: set[int] = set()

    def exchange(self, request: Request) -> tuple[Reply, list[int]]:
        """Like Connection.exchange, for the thread that holds the link. Also checks that the reply fits *request*."""
        self.used = True
        try:
            reply, fds = self._connection.exchange(request)
            self._check(request, reply, fds)
        except UcmfsError as error:
            self.broken = isinstance(error, MountError | ProtocolError)
            raise
        except BaseException:
            self.broken = True  # interrupted between request and reply: the next reply would be the wrong one
            raise
        finally:
            if isinstance(request, Discard):
                self.stagings.difference_update(request.stagings)
        if isinstance(request, Create):
            self.stagings.update(number for number in reply.rows if number is not None)
        elif isinstance(request, Publish):
            self.stagings.difference_update(
                number for row, number in enumerate(request.stagings) if row not in reply.faults
            )
        return reply, fds

    def close(self) -> None:
        self._connection.close()

    @staticmethod
    def _check(request: Request, reply: Reply, fds: list[int]) -> None:
        rows = len(getattr(request, "names", getattr(request, "stagings", ())))
        expected = rows - len(reply.faults) if isinstance(request, Create | Open) else 0
        if len(reply.rows) != rows or len(fds) != expected:
            close_all(fds)
            raise ProtocolError(
                f"a reply of the daemon has {len(reply.rows)} rows and {len(fds)} descriptors instead of {rows} "
                f"and {expected}; do client and daemon differ in version?"
            )


class Links:
    """A bounded pool of links, made by *dial* when none is idle.

    A link with staging files is kept for what ends them, publish and discard, which never wait. Any other request may
    wait in the daemon for room, and the room may be just what these staging files occupy.
    """

    def __init__(self, dial: Callable[[], Connection], limit: int) -> None:
        self._dial = dial
        self._limit = limit
        self._changed = threading.Condition()
        self._links: list[Link] = []
        self._count = 0  # of the links, with those being dialled
        self._closed = False

    def exchange(self, request: Request) -> tuple[Link, Reply, list[int]]:
        """Send *request* over an idle link; also give the link that carried it.

        A link may have died while it was idle (the daemon was replaced), or with the request: then it goes over
        another. Only for requests that may be repeated. Raises what Connection.exchange raises, and StoreClosed.
        """
        fresh = 0
        while True:
            link = self._take()
            fresh += not link.used
            try:
                return link, *link.exchange(request)
            except MountError as error:
                if fresh == _MOST_FRESH or error.errno == errno.ETIMEDOUT:
                    raise
            finally:
                self._give(link)

    @contextmanager
    def hold(self, link: Link) -> Iterator[Link]:
        """Wait for *link* and hold it. Raises MountError if it is broken."""
        with self._changed:
            link.wanted += 1
            try:
                self._changed.wait_for(lambda: not link.busy)
            finally:
                link.wanted -= 1
            if link.broken or link not in self._links:
                raise MountError(
                    "the connection to the daemon was lost, and the bytes not yet published with it; dump again",
                    code=errno.ECONNRESET,
                )
            link.busy = True
        try:
            yield link
        finally:
            self._give(link)

    def _take(self) -> Link:
        with self._changed:
            while True:
                if self._closed:
                    raise StoreClosed
                # Who can use any link leaves a wanted one alone, or would always be there first.
                idle = [link for link in self._links if not link.busy and not link.wanted]
                free = [link for link in idle if not link.stagings]
                if not free and self._count < self._limit:
                    break
                if idle:
                    link = (free or idle)[0]
                    link.busy = True
                    return link
                self._changed.wait()
            self._count += 1
        try:
            link = Link(self._dial())
        except BaseException:
            with self._changed:
                self._count -= 1
                self._changed.notify_all()
            raise
        with self._changed:
            self._links.append(link)
        return link

    def _give(self, link: Link) -> None:
        with self._changed:
            link.busy = False
            if link.broken:
                self._links.remove(link)
                self._count -= 1
                link.close()
            self._changed.notify_all()

    def close(self) -> None:
        """Close every link once its request has been answered."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._count == sum(not link.busy for link in self._links))
            for link in self._links:
                link.close()
            self._links.clear()
            self._count = 0
            self._changed.notify_all()
