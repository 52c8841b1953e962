"""The stage contract: what the pipeline asks of a place that holds blocks.

Every method is a trio coroutine and batch first: names in, results in the same order. A result that concerns
one name alone is returned in its row (a value, or a UcmfsError); what concerns the stage as a whole is raised.
Calls that can block run in the stage's own threads (`self.threads`), each under a deadline, so that a hung
stage costs its own threads and nobody else's.

A new stage is one file with a class like these and one registry line (pipeline/builder.py), or an entry point
in the group `ucmfs.stages`. `tests/stages/conformance.py` is the contract as tests; subclass it for yours.
"""

from __future__ import annotations

import abc
from collections.abc import AsyncIterator, Callable, Sequence
from typing import ClassVar, Self, TypeVar

import msgspec
import trio

from ucmfs.block import Attributes, Changes
from ucmfs.config import Options
from ucmfs.errors import StageError, StageTimeout, UcmfsError, Unsupported

__all__ = ["Entry", "Publication", "Stage", "Threads", "Usage"]

T = TypeVar("T")


class Publication(msgspec.Struct, frozen=True):
    """A whole block to be made visible under `name`.

    The bytes are the first `attributes.size` of descriptor `fd`. Mode, owner, times and xattrs (the digest
    among them) of `attributes` go with it as far as the stage can keep them.
    """

    name: str
    fd: int
    attributes: Attributes


class Entry(msgspec.Struct, frozen=True):
    """One entry of a directory: its last component and its attributes (xattrs not filled in)."""

    name: str
    attributes: Attributes


class Usage(msgspec.Struct, frozen=True):
    """How full a stage is. Bytes; None where the stage has no bound or cannot tell."""

    capacity: int | None
    used: int
    free: int | None
    blocks: int | None = None


class Stage(abc.ABC):
    """A place that holds whole blocks under their names.

    Rules: a name is visible only once its block is complete. publish replaces what was there in one step and
    may be repeated. Nothing is ever short or wrong; a miss is always allowed. A stage never keeps a caller's
    descriptor past the call. Other people's files (unreadable, of another type, in the stage's own working
    directories) are never listed as blocks and never break a batch or a listing.
    """

    local: ClassVar[bool] = False
    """Whether open() gives descriptors."""
    persistent: ClassVar[bool] = True
    """Whether a block published here counts as saved."""
    shared: ClassVar[bool] = False
    """Whether others may change the stage behind our back, so that answers age (`consistency_ttl`)."""
    options: ClassVar[type[Options]]
    """The configuration keys the stage knows."""

    def __init__(self, label: str) -> None:
        self.label = label

    @classmethod
    def build(cls, options: Options, *, timeout: float, label: str) -> Self:
        """Make the stage from its checked keys; *timeout* (seconds) is the deadline of a call.

        Override it where the constructor takes something else than (options, timeout=, label=).
        """
        return cls(options, timeout=timeout, label=label)  # type: ignore[call-arg, arg-type, misc]

    async def start(self) -> None:  # noqa: B027 - a stage may have nothing to make ready
        """Make ready. Raises ConfigError for what the user must mend, StageError for what may pass."""

    async def stop(self) -> None:  # noqa: B027 - a stage that holds nothing has nothing to let go
        """Let go of everything. Blocks stay where they are."""

    @abc.abstractmethod
    async def lookup(self, names: Sequence[str], *, xattrs: bool = False) -> list[Attributes | None]:
        """Attributes of each block or directory, None where there is none. '' is the root directory."""

    async def open(self, names: Sequence[str]) -> list[int | UcmfsError]:
        """A read-only descriptor of each block, the caller's to close. Local stages only."""
        raise Unsupported(self.label, "has no descriptors to give")

    @abc.abstractmethod
    async def read(self, targets: Sequence[tuple[str, int]]) -> list[Attributes | UcmfsError]:
        """Copy each (name, fd) whole into fd from offset 0; give the attributes with xattrs.

        The caller made sure of room, and checks the digest. A copy is whole or an error, never short.
        """

    @abc.abstractmethod
    async def publish(self, items: Sequence[Publication], *, durable: bool = False) -> list[UcmfsError | None]:
        """Make each block visible, whole, in one step. Parent directories are made as needed.

        With *durable*, return only once the blocks would survive a power cut.
        """

    @abc.abstractmethod
    async def remove(self, names: Sequence[str]) -> list[bool | UcmfsError]:
        """Remove each block; False where there was none."""

    @abc.abstractmethod
    def scan(self, directory: str) -> AsyncIterator[Sequence[Entry]]:
        """Stream the entries of *directory* in batches, blocks and directories, in no set order.

        A directory that does not exist gives nothing. Memory is bounded by the batch, not the directory.
        """

    @abc.abstractmethod
    async def rename(self, pairs: Sequence[tuple[str, str]]) -> list[bool | UcmfsError]:
        """Give each block or directory its new name, replacing a block there; False where there was none."""

    @abc.abstractmethod
    async def update(self, name: str, changes: Changes) -> bool | UcmfsError:
        """Change attributes of a block or directory; False where there is none."""

    @abc.abstractmethod
    async def make_directory(self, name: str, attributes: Attributes) -> UcmfsError | None:
        """Make a directory and its parents; to have it already is success."""

    @abc.abstractmethod
    async def remove_directory(self, name: str) -> bool | UcmfsError:
        """Remove an empty directory; False where there was none, ENOTEMPTY where it is not empty."""

    @abc.abstractmethod
    async def usage(self) -> Usage:
        """How full it is."""

    async def health(self) -> StageError | None:
        """None if it answers, else why not."""
        try:
            await self.usage()
        except StageError as error:
            return error
        return None

    @abc.abstractmethod
    async def set_aside(self, name: str) -> None:
        """Take a corrupt block out of sight, kept for inspection where the stage can."""


class Threads:
    """A bounded pool for one stage's blocking calls, each under a deadline.

    A call that outlasts its deadline is abandoned: the caller gets StageTimeout, the thread stays busy (and
    counted against the bound) until the call returns, so that a hung server can never take more threads.
    """

    def __init__(self, label: str, *, limit: int, timeout: float) -> None:
        self.label = label
        self.timeout = timeout
        self._limiter = trio.CapacityLimiter(limit)

    async def run(self, call: Callable[[], T], *, timeout: float | None = None) -> T:
        """Run *call* in a thread. Raises StageTimeout past the deadline (seconds)."""
        limit = self.timeout if timeout is None else timeout
        with trio.move_on_after(limit):
            return await trio.to_thread.run_sync(call, limiter=self._limiter, abandon_on_cancel=True)
        raise StageTimeout(self.label, f"no answer within {limit:g} s; is the storage reachable?")
