"""The Empty stage: takes every block and remembers none. `Cache|Empty` is memory only."""

from __future__ import annotations

import stat
from collections.abc import AsyncIterator, Sequence
from typing import ClassVar, Self

from ucmfs.block import Attributes, Changes
from ucmfs.config import Options
from ucmfs.errors import BlockNotFound, UcmfsError
from ucmfs.stages.base import Entry, Publication, Stage, Usage

__all__ = ["Empty", "EmptyOptions"]

_ROOT = Attributes(size=0, mtime_ns=0, mode=stat.S_IFDIR | 0o755)


class EmptyOptions(Options):
    """The Empty stage has no keys."""


class Empty(Stage):
    """Holds nothing, and so a block published here does not count as saved."""

    persistent: ClassVar[bool] = False
    options = EmptyOptions

    def __init__(self, label: str = "Empty") -> None:
        super().__init__(label)

    @classmethod
    def build(cls, options: Options, *, timeout: float, label: str) -> Self:
        return cls(label)

    async def lookup(self, names: Sequence[str], *, xattrs: bool = False) -> list[Attributes | None]:
        return [None if name else _ROOT for name in names]

    async def read(self, targets: Sequence[tuple[str, int]]) -> list[Attributes | UcmfsError]:
        return [BlockNotFound(name) for name, _ in targets]

    async def publish(self, items: Sequence[Publication], *, durable: bool = False) -> list[UcmfsError | None]:
        return [None] * len(items)

    async def remove(self, names: Sequence[str]) -> list[bool | UcmfsError]:
        return [False] * len(names)

    async def scan(self, directory: str) -> AsyncIterator[Sequence[Entry]]:
        nothing: tuple[Sequence[Entry], ...] = ()
        for batch in nothing:
            yield batch

    async def rename(self, pairs: Sequence[tuple[str, str]]) -> list[bool | UcmfsError]:
        return [False] * len(pairs)

    async def update(self, name: str, changes: Changes) -> bool | UcmfsError:
        return False

    async def make_directory(self, name: str, attributes: Attributes) -> UcmfsError | None:
        return None

    async def remove_directory(self, name: str) -> bool | UcmfsError:
        return False

    async def usage(self) -> Usage:
        return Usage(None, 0, None, 0)

    async def set_aside(self, name: str) -> None:
        pass
