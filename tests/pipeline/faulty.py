"""A stage over another that does as a test tells it: waits, fails, gives wrong bytes."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable, Sequence
from typing import ClassVar

import trio

from ucmfs.block import Attributes, Changes
from ucmfs.errors import UcmfsError
from ucmfs.stages.base import Entry, Publication, Stage, Usage
from ucmfs.stages.posix import Posix, PosixOptions


class Faulty(Stage):
    """Posix with levers. `calls` counts what was asked, by method."""

    local: ClassVar[bool] = False
    persistent: ClassVar[bool] = True
    options = PosixOptions

    def __init__(self, root: str, label: str = "Faulty") -> None:
        super().__init__(label)
        self.inner = Posix(PosixOptions(storage_backends=root), timeout=30, label=label)
        self.calls: dict[str, int] = {}
        self.gate = trio.Event()
        self.gate.set()
        self.waiting = 0
        self.fail: Callable[[str, str], UcmfsError | None] = lambda method, name: None
        self.down: UcmfsError | None = None

    async def _enter(self, method: str) -> None:
        self.calls[method] = self.calls.get(method, 0) + 1
        self.waiting += 1
        await self.gate.wait()
        self.waiting -= 1
        if self.down is not None:
            raise self.down

    async def start(self) -> None:
        await self.inner.start()

    async def stop(self) -> None:
        await self.inner.stop()

    async def lookup(self, names: Sequence[str], *, xattrs: bool = False) -> list[Attributes | None]:
        if self.down is not None:
            raise self.down
        return await self.inner.lookup(names, xattrs=xattrs)

    async def read(self, targets: Sequence[tuple[str, int]]) -> list[Attributes | UcmfsError]:
        await self._enter("read")
        answers: list[Attributes | UcmfsError] = []
        for target, answer in zip(targets, await self.inner.read(targets), strict=True):
            answers.append(self.fail("read", target[0]) or answer)
        return answers

    async def publish(self, items: Sequence[Publication], *, durable: bool = False) -> list[UcmfsError | None]:
        await self._enter("publish")
        answers: list[UcmfsError | None] = []
        for item in items:
            failed = self.fail("publish", item.name)
            answers.append(failed or (await self.inner.publish([item], durable=durable))[0])
        return answers

    async def remove(self, names: Sequence[str]) -> list[bool | UcmfsError]:
        await self._enter("remove")
        return await self.inner.remove(names)

    async def scan(self, directory: str) -> AsyncIterator[Sequence[Entry]]:
        async for batch in self.inner.scan(directory):
            yield batch

    async def rename(self, pairs: Sequence[tuple[str, str]]) -> list[bool | UcmfsError]:
        await self._enter("rename")
        return await self.inner.rename(pairs)

    async def update(self, name: str, changes: Changes) -> bool | UcmfsError:
        return await self.inner.update(name, changes)

    async def make_directory(self, name: str, attributes: Attributes) -> UcmfsError | None:
        return await self.inner.make_directory(name, attributes)

    async def remove_directory(self, name: str) -> bool | UcmfsError:
        return await self.inner.remove_directory(name)

    async def usage(self) -> Usage:
        if self.down is not None:
            raise self.down
        return await self.inner.usage()

    async def set_aside(self, name: str) -> None:
        await self.inner.set_aside(name)


def flip_a_byte(path: str | os.PathLike[str]) -> None:
    """Rot on the disk: one byte changes, the times do not."""
    before = os.stat(path)
    with open(path, "r+b") as file:
        file.seek(before.st_size // 2)
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 1]))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
