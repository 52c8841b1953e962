"""Blocks of a mount: descriptors over `.ucmfs/sock`, or plain files where no daemon answers."""

from __future__ import annotations

import errno
import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from ucm.client.blocks import Blocks, Staging, about, close_all
from ucm.client.links import Link, Links
from ucm.client.plain import PlainBlocks
from ucmfs.control import protocol
from ucmfs.control.connection import SOCKET_NAME, Connection, row_errors
from ucmfs.errors import BlockBusy, ConfigError, MountError, ProtocolError, UcmfsError

__all__ = ["SocketBlocks", "connect"]

log = logging.getLogger(__name__)

_LINKS = 64
"""As many as threads use at once, and one for each batch of blocks that are incomplete."""
_BUSY_DELAYS = tuple(0.001 * 2**n for n in range(10))
"""Seconds between tries to publish: a process being started holds a copy of every descriptor until its exec."""


def connect(mount_point: str | os.PathLike[str], *, timeout: float | None = None) -> Blocks:
    """The blocks under *mount_point*: over its socket if a daemon answers there, else as plain files.

    *timeout* (seconds) bounds each exchange with the daemon. Raises ConfigError if *mount_point* is not a directory,
    MountError if a daemon is there and does not answer in time.
    """
    if not os.path.isdir(mount_point):
        raise ConfigError(f"{os.fspath(mount_point)} is not a directory; mount it first", path="mount_point")

    def dial() -> Connection:
        return Connection.to_mount(mount_point, timeout=timeout)

    blocks = SocketBlocks(dial)
    try:
        blocks.ping()
    except (MountError, ProtocolError) as error:
        blocks.close()
        if error.errno == errno.ETIMEDOUT:
            raise
        log.info("%s: reading and writing plain files, as %s does not answer: %s", mount_point, SOCKET_NAME, error)
        return PlainBlocks(mount_point)
    return blocks


class SocketBlocks(Blocks):
    """Blocks of the daemon that *dial* connects to."""

    def __init__(self, dial: Callable[[], Connection]) -> None:
        self._links = Links(dial, _LINKS)

    def ping(self) -> None:
        """Raises what *dial* raises if nobody answers."""
        self._links.exchange(protocol.Lookup([]))

    def lookup(self, names: Sequence[str]) -> list[int | None]:
        sizes: list[int | None] = []
        for chunk in _chunks(names, protocol.MAX_NAMES):
            sizes += self._links.exchange(protocol.Lookup(chunk))[1].rows
        return sizes

    def open(self, names: Sequence[str]) -> list[int | UcmfsError]:
        opened: list[int | UcmfsError] = []
        try:
            for chunk in _chunks(names, protocol.MAX_FDS):
                _, reply, fds = self._links.exchange(protocol.Open(chunk))
                errors, descriptors = row_errors(chunk, reply), iter(fds)
                opened += [errors[row] if row in errors else next(descriptors) for row in range(len(chunk))]
        except BaseException:
            close_all([fd for fd in opened if isinstance(fd, int)])
            raise
        return opened

    def create(self, names: Sequence[str], size: int) -> list[Staging | UcmfsError]:
        created: list[Staging | UcmfsError] = []
        try:
            for chunk in _chunks(names, protocol.MAX_FDS):
                link, reply, fds = self._links.exchange(protocol.Create(chunk, size))
                errors, descriptors = row_errors(chunk, reply), iter(fds)
                created += [
                    errors[row] if row in errors else Staging(name, next(descriptors), (link, reply.rows[row]))
                    for row, name in enumerate(chunk)
                ]
        except BaseException:
            self.discard([staging for staging in created if isinstance(staging, Staging)])
            raise
        return created

    def publish(self, stagings: Sequence[Staging]) -> list[UcmfsError | None]:
        outcome = {staging.fd: _close(staging) for staging in stagings}
        failed = [staging for staging in stagings if outcome[staging.fd] is not None]
        for link, group in _by_link([staging for staging in stagings if outcome[staging.fd] is None]):
            try:
                with self._links.hold(link):
                    errors = _publish(link, group)
            except UcmfsError as error:
                errors = {row: about(staging.name, error) for row, staging in enumerate(group)}
            outcome.update((group[row].fd, error) for row, error in errors.items())
            failed += [group[row] for row in errors]
        self._forget(failed)
        return [outcome[staging.fd] for staging in stagings]

    def discard(self, stagings: Sequence[Staging]) -> None:
        for staging in stagings:
            _close(staging)
        self._forget(stagings)

    def _forget(self, stagings: Sequence[Staging]) -> None:
        for link, group in _by_link(stagings):
            try:
                with self._links.hold(link):
                    for first in range(0, len(group), protocol.MAX_NAMES):
                        ids = [staging.token[1] for staging in group[first : first + protocol.MAX_NAMES]]
                        link.exchange(protocol.Discard(ids))
            except UcmfsError as error:
                # A lost connection has discarded them already; in any other case its end will.
                log.debug("could not discard %d staging files: %s", len(group), error)

    def prefetch(self, names: Sequence[str]) -> None:
        for chunk in _chunks(names, protocol.MAX_NAMES):
            self._links.exchange(protocol.Prefetch(chunk))

    def stats(self) -> dict[str, Any]:
        result = self._links.exchange(protocol.Stats())[1].result
        return result if isinstance(result, dict) else {}

    def close(self) -> None:
        self._links.close()


def _publish(link: Link, stagings: Sequence[Staging]) -> dict[int, UcmfsError]:
    """Publish over *link*, which the caller holds; give the errors by row."""
    errors: dict[int, UcmfsError] = {}
    waiting = list(range(len(stagings)))
    for delay in (0.0, *_BUSY_DELAYS):
        if delay:
            time.sleep(delay)
        for first in range(0, len(waiting), protocol.MAX_NAMES):
            rows = waiting[first : first + protocol.MAX_NAMES]
            reply, _ = link.exchange(protocol.Publish([stagings[row].token[1] for row in rows]))
            for row in rows:
                errors.pop(row, None)
            found = row_errors([stagings[row].name for row in rows], reply)
            errors.update((rows[place], error) for place, error in found.items())
        waiting = [row for row in waiting if isinstance(errors.get(row), BlockBusy)]
        if not waiting:
            break
    return errors


def _by_link(stagings: Sequence[Staging]) -> list[tuple[Link, list[Staging]]]:
    groups: dict[Link, list[Staging]] = {}
    for staging in stagings:
        groups.setdefault(staging.token[0], []).append(staging)
    return list(groups.items())


def _close(staging: Staging) -> UcmfsError | None:
    try:
        os.close(staging.fd)
    except OSError as error:
        return MountError(f"{staging.name}: closing the staging file failed: {error.strerror}", code=error.errno)
    return None


def _chunks(names: Sequence[str], most: int) -> Iterator[list[str]]:
    """Split *names* into requests of at most *most* names."""
    for first in range(0, len(names), most):
        yield list(names[first : first + most])
