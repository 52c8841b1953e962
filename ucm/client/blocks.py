"""What the store needs of a place with blocks: names in, descriptors out, batch first."""

from __future__ import annotations

import abc
import os
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self

import msgspec

from ucmfs.errors import BlockError, UcmfsError

__all__ = ["Blocks", "Staging", "about", "close_all"]


class Staging(msgspec.Struct, frozen=True):
    """A block being written: `fd` is open for writing, nothing is visible under `name` yet.

    It is its creator's until publish or discard, which close `fd`. `token` means something only to the Blocks
    that made it.
    """

    name: str
    fd: int
    token: Any


class Blocks(abc.ABC):
    """Blocks under their names. Results are in the order of the names.

    What concerns one block alone is returned in its row; what concerns the whole call is raised, as UcmfsError
    in both cases. Any thread may call any method. After close() every call raises StoreClosed.
    """

    @abc.abstractmethod
    def lookup(self, names: Sequence[str]) -> list[int | None]:
        """The size of each block in bytes; None for a miss."""

    @abc.abstractmethod
    def open(self, names: Sequence[str]) -> list[int | UcmfsError]:
        """A read-only descriptor of each block, the caller's to close."""

    @abc.abstractmethod
    def create(self, names: Sequence[str], size: int) -> list[Staging | UcmfsError]:
        """A staging file for each name, for a block of *size* bytes."""

    @abc.abstractmethod
    def publish(self, stagings: Sequence[Staging]) -> list[UcmfsError | None]:
        """Close the descriptors and make each block visible, whole, in one step. What fails is discarded."""

    @abc.abstractmethod
    def discard(self, stagings: Sequence[Staging]) -> None:
        """Close the descriptors and forget the bytes. Raises nothing: the caller is already failing."""

    @abc.abstractmethod
    def prefetch(self, names: Sequence[str]) -> None:
        """Ask that the blocks be brought near. A miss is no error, and the call does not wait for the fill."""

    @abc.abstractmethod
    def stats(self) -> dict[str, Any]:
        """What the place tells of itself; empty where it keeps no counters."""

    @abc.abstractmethod
    def close(self) -> None:
        """Let go of everything. May be repeated."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def close_all(fds: Sequence[int]) -> None:
    """Close read-only descriptors, whose close has no error to report."""
    for fd in fds:
        os.close(fd)


def about(name: str, error: UcmfsError) -> BlockError:
    """*error*, which concerned a whole call, as it concerns block *name*."""
    if isinstance(error, BlockError):
        return error
    one = BlockError(name, error.message, code=error.errno)
    one.__cause__ = error
    return one
