"""The Posix stage: a block named n is the file n below a directory, or below one of several.

    <root>/<name>                         blocks, and whatever was there before ucmfs came
    <root>/.ucmfs/staging/<process>/<n>   blocks being published; a process's own directory (local.StagingDirectory)
    <root>/.ucmfs/aside/<name>.<n>        corrupt blocks, `/` and `%` of their names written %2F and %25

Of several roots, a name's home is number `xxh3_64(name's bytes) modulo the number of roots`. Blocks are published
at home. They are looked for at home first and then in the other roots in order, so that roots can be added: what
is first in that search order is the block, and what other roots have under its name is out of date. Directories
are looked for in the same order; a new one is made in every root.

Symbolic links to files count as files. Links to directories, other kinds of files and files that may not be read
are not seen at all, and never replaced or removed.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Annotated, ClassVar, TypeVar

import pydantic
import trio

from ucmfs.block import Attributes, Changes
from ucmfs.config import Options
from ucmfs.errors import StageError, UcmfsError
from ucmfs.stages.base import Entry, Publication, Stage, Threads, Usage
from ucmfs.stages.local import Loan, lend
from ucmfs.stages.roots import Roots

__all__ = ["Posix", "PosixOptions"]

R = TypeVar("R")
T = TypeVar("T")

_GIB = 1 << 30
_PARTS = 4
"""Threads that one batch of reads or publications takes at most."""
_ROWS_PER_PART = 4


def _split(value: object) -> object:
    if isinstance(value, str):
        return tuple(part for part in value.split(":") if part)
    return tuple(value) if isinstance(value, list) else value


def _usable(directories: tuple[str, ...]) -> tuple[str, ...]:
    if not directories:
        raise ValueError("names no directory; give at least one")
    found: list[str] = []
    for directory in directories:
        path = os.path.realpath(directory)
        if not os.path.exists(path):
            raise ValueError(f"{directory} does not exist; make it (mkdir -p {directory}) or name another")
        if not os.path.isdir(path):
            raise ValueError(f"{directory} is not a directory; name one")
        if not os.access(path, os.R_OK | os.W_OK | os.X_OK, effective_ids=True):
            raise ValueError(f"{directory} is not writable; mount it read-write or change its owner or mode")
        for other, seen in zip(directories, found, strict=False):
            if os.path.samefile(path, seen):
                raise ValueError(f"{directory} and {other} are the same directory; name it once")
            if os.path.commonpath((path, seen)) in (path, seen):
                raise ValueError(f"{directory} and {other} lie one inside the other; name directories apart")
        found.append(path)
    return tuple(found)


class PosixOptions(Options):
    """Keys of the Posix stage."""

    storage_backends: Annotated[tuple[str, ...], pydantic.BeforeValidator(_split), pydantic.AfterValidator(_usable)]
    """Directories that hold the blocks: a string, several with `:` between them, or a list."""
    io_direct: bool = False
    """Read and write with O_DIRECT where the file system takes it."""
    posix_capacity_gb: float | None = pydantic.Field(None, gt=0)
    """GiB that blocks may take. Reported as the capacity; nothing is evicted yet."""


class Posix(Stage):
    """Blocks as files of a directory or several. See the module's text for the layout.

    *timeout* in seconds bounds each call; *threads* bounds the calls under way. A call past its deadline goes on in
    its thread but makes nothing visible any more; the target of such a read must not be used again.
    """

    local: ClassVar[bool] = True
    options = PosixOptions

    def __init__(self, options: PosixOptions, *, timeout: float, label: str = "Posix", threads: int = 8) -> None:
        super().__init__(label)
        self.threads = Threads(label, limit=threads, timeout=timeout)
        capacity = None if options.posix_capacity_gb is None else int(options.posix_capacity_gb * _GIB)
        self._roots = Roots(label, options.storage_backends, direct=options.io_direct, capacity=capacity)

    async def start(self) -> None:
        """Make the working directories. Raises ConfigError where one cannot be made, StageTimeout."""
        await self.threads.run(self._roots.start)

    async def stop(self) -> None:
        await self.threads.run(self._roots.stop)

    async def lookup(self, names: Sequence[str], *, xattrs: bool = False) -> list[Attributes | None]:
        return await lend(self.threads, lambda _: [self._roots.lookup(name, xattrs) for name in names])

    async def open(self, names: Sequence[str]) -> list[int | UcmfsError]:
        return await lend(
            self.threads,
            lambda loan: [self._roots.row(loan, name, partial(self._roots.open, name)) for name in names],
            discard=_close_all,
        )

    async def read(self, targets: Sequence[tuple[str, int]]) -> list[Attributes | UcmfsError]:
        return await self._spread(self._roots.read_rows, targets, [fd for _, fd in targets])

    async def publish(self, items: Sequence[Publication], *, durable: bool = False) -> list[UcmfsError | None]:
        return await self._spread(partial(self._roots.publish_rows, durable), items, [item.fd for item in items])

    async def remove(self, names: Sequence[str]) -> list[bool | UcmfsError]:
        return await lend(
            self.threads,
            lambda loan: [self._roots.row(loan, name, partial(self._roots.remove, name)) for name in names],
        )

    async def scan(self, directory: str) -> AsyncIterator[Sequence[Entry]]:
        batches = self._roots.scan(directory)

        def end(_: object) -> None:
            # ValueError: its thread is in it still, and ends it when it comes back.
            with suppress(ValueError):
                batches.close()

        try:
            while batch := await lend(self.threads, lambda _: next(batches, None), discard=end):
                yield batch
        except OSError as error:
            if isinstance(error, UcmfsError):
                raise
            raise StageError(self.label, f"{directory or '/'} cannot be listed: {error.strerror}") from error
        finally:
            end(None)

    async def rename(self, pairs: Sequence[tuple[str, str]]) -> list[bool | UcmfsError]:
        return await lend(
            self.threads,
            lambda loan: [self._roots.row(loan, old, partial(self._roots.rename, old, new)) for old, new in pairs],
        )

    async def update(self, name: str, changes: Changes) -> bool | UcmfsError:
        return await self._one(name, partial(self._roots.update, name, changes))

    async def make_directory(self, name: str, attributes: Attributes) -> UcmfsError | None:
        return await self._one(name, partial(self._roots.make_directory, name, attributes))

    async def remove_directory(self, name: str) -> bool | UcmfsError:
        return await self._one(name, partial(self._roots.remove_directory, name))

    async def usage(self) -> Usage:
        """The file systems' own figures; with posix_capacity_gb, what of it they cannot give counts as used."""
        return await self.threads.run(self._roots.usage)

    async def health(self) -> StageError | None:
        try:
            return await self.threads.run(self._roots.health)
        except StageError as error:
            return error

    async def set_aside(self, name: str) -> None:
        answer = await self._one(name, partial(self._roots.set_aside, name))
        if answer is not None:
            raise answer

    async def _one(self, name: str, call: Callable[[], T]) -> T | UcmfsError:
        return await lend(self.threads, lambda loan: self._roots.row(loan, name, call))

    async def _spread(
        self, call: Callable[[Sequence[R], Loan], list[T]], rows: Sequence[R], fds: Sequence[int]
    ) -> list[T]:
        """Run *call* on *rows* in up to _PARTS threads, each with its share of *fds*; give all results in order."""
        parts = max(1, min(_PARTS, len(rows) // _ROWS_PER_PART))
        bounds = [len(rows) * part // parts for part in range(parts + 1)]
        results: list[list[T]] = [[] for _ in range(parts)]
        failed: list[StageError] = []

        async def run(part: int) -> None:
            share = slice(bounds[part], bounds[part + 1])
            try:
                results[part] = await lend(self.threads, partial(call, rows[share]), fds[share])
            except StageError as error:
                failed.append(error)

        async with trio.open_nursery() as nursery:
            for part in range(parts):
                nursery.start_soon(run, part)
        if failed:
            raise failed[0]
        return list(itertools.chain.from_iterable(results))


def _close_all(opened: Sequence[int | UcmfsError]) -> None:
    for fd in opened:
        if isinstance(fd, int):
            os.close(fd)
