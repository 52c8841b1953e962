"""Connections to one daemon, as many as threads talk to it at once, within a bound."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ucmfs.control.connection import Connection
from ucmfs.control.protocol import Reply, Request
from ucmfs.errors import MountError, ProtocolError, StoreClosed, UcmfsError

__all__ = ["Link", "Links"]


class Link:
    """One connection. `broken` once it cannot be used any more; the staging files it made are gone then."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self.busy = True
        self.wanted = 0  # threads that wait for this very link
        self.used = False
        self.broken = False

    def exchange(self, request: Request) -> tuple[Reply, list[int]]:
        """Like Connection.exchange. The caller holds the link."""
        self.used = True
        try:
            return self._connection.exchange(request)
        except UcmfsError as error:
            self.broken = isinstance(error, MountError | ProtocolError)
            raise
        except BaseException:
            self.broken = True  # interrupted between request and reply: the next reply would be the wrong one
            raise

    def close(self) -> None:
        self._connection.close()


class Links:
    """A bounded pool of links, made by *dial* when none is idle.

    Staging files live and die with the link that made them, so a link can also be asked for by itself.
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

        A link may have died while it was idle (the daemon was restarted): then the request goes over another. Only
        for requests that may be repeated. Raises what Connection.exchange raises, and StoreClosed.
        """
        while True:
            link = self._take()
            seasoned = link.used
            try:
                return link, *link.exchange(request)
            except MountError as error:
                if not seasoned or error.errno == errno.ETIMEDOUT:
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
                for link in self._links:
                    # Who can use any link leaves a wanted one alone, or would always be there first.
                    if not link.busy and not link.wanted:
                        link.busy = True
                        return link
                if self._count < self._limit:
                    break
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
