"""Blocks on their way to being complete."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from concurrent.futures import Future

import msgspec

from ucm.client.blocks import Blocks, Staging, about
from ucm.client.intervals import Intervals
from ucm.client.tensors import Row
from ucmfs.errors import BlockError, ClientError, UcmfsError

__all__ = ["StagedBlock", "StagedBlocks", "Written"]

log = logging.getLogger(__name__)


class StagedBlock:
    """A block of `size` bytes being put together from parts. Its state belongs to StagedBlocks."""

    def __init__(self, name: str, size: int) -> None:
        self.name = name
        self.size = size
        self.staging: Future[Staging | UcmfsError] = Future()
        self.written = Intervals()
        self.writers = 1
        self.error: UcmfsError | None = None
        """Why it will never be published."""

    def created(self) -> Staging:
        """The staging file. Raises why there is none. Waits for whoever creates it."""
        outcome = self.staging.result()
        if isinstance(outcome, UcmfsError):
            raise outcome
        return outcome

    @property
    def complete(self) -> bool:
        return self.written.covered == self.size


class Written(msgspec.Struct, frozen=True):
    """What became of one writer's part of a block."""

    block: StagedBlock
    rows: Sequence[Row]
    error: UcmfsError | None


class StagedBlocks:
    """The blocks being dumped, each published by the last of its writers once every byte is there.

    A block is in `_incomplete`, where parts of later calls find it, until it is sealed: complete and without a
    writer, failed, or dropped. All state changes under `_lock`; no call to *blocks* is made while holding it. At
    most *limit* blocks wait for more parts: then the oldest is dropped.
    """

    def __init__(self, blocks: Blocks, limit: int) -> None:
        self._blocks = blocks
        self._limit = limit
        self._lock = threading.Lock()
        self._incomplete: dict[str, StagedBlock] = {}

    def enter(self, wanted: Sequence[tuple[str, int]], *, join: bool) -> list[StagedBlock | UcmfsError]:
        """Become a writer of each (name, size); leave() must follow for each StagedBlock given.

        With *join*, of the incomplete block of that name if there is one, and others may join; else of a new one.
        """
        entered: list[StagedBlock] = []
        new: list[StagedBlock] = []
        with self._lock:
            for name, size in wanted:
                block = self._incomplete.get(name) if join else None
                if block is None:
                    block = StagedBlock(name, size)
                    new.append(block)
                    if join:
                        self._incomplete[name] = block
                else:
                    block.writers += 1
                entered.append(block)
            dropped = self._over_limit()
        self._discard(dropped)
        self._create(new)
        # Only now wait for those that others create: nobody waits with something left to create.
        outcomes = [(block, block.staging.result()) for block in entered]
        return [block if isinstance(outcome, Staging) else outcome for block, outcome in outcomes]

    def leave(self, parts: Sequence[Written]) -> list[UcmfsError | None]:
        """These parts are written, or failed. Publishes what is complete; what cannot become so is discarded."""
        sealed: list[StagedBlock] = []
        failed: list[StagedBlock] = []
        with self._lock:
            for part in parts:
                block = part.block
                block.writers -= 1
                if part.error is None:
                    for row in part.rows:
                        block.written.add(row.offset, row.end)
                elif block.error is None:
                    block.error = part.error
                if block.error is not None or (block.complete and not block.writers):
                    self._forget(block)
                    if not block.writers:
                        (sealed if block.error is None else failed).append(block)
        self._discard(failed)
        published = dict(zip(sealed, self._blocks.publish([block.created() for block in sealed]), strict=True))
        return [part.error or published.get(part.block) or _failed_elsewhere(part.block) for part in parts]

    def close(self) -> None:
        """Drop what is incomplete. No writer may be left."""
        with self._lock:
            left = list(self._incomplete.values())
            self._incomplete.clear()
        if left:
            log.info("dropping %d incomplete blocks at close, %s the first", len(left), left[0].name)
        self._discard(left)

    def _create(self, new: Sequence[StagedBlock]) -> None:
        by_size: dict[int, list[StagedBlock]] = {}
        for block in new:
            by_size.setdefault(block.size, []).append(block)
        for size, group in by_size.items():
            outcomes: Sequence[Staging | UcmfsError]
            try:
                outcomes = self._blocks.create([block.name for block in group], size)
            except UcmfsError as error:
                outcomes = [about(block.name, error) for block in group]
            except Exception as error:
                # Others may wait for these very blocks: whatever happened, they must be told.
                log.exception("unexpected error while creating %d staging files", len(group))
                unexpected = ClientError(f"unexpected {type(error).__name__}: {error}")
                outcomes = [about(block.name, unexpected) for block in group]
            for block, outcome in zip(group, outcomes, strict=True):
                if not isinstance(outcome, Staging):
                    with self._lock:
                        block.error = outcome
                        self._forget(block)
                block.staging.set_result(outcome)

    def _forget(self, block: StagedBlock) -> None:
        if self._incomplete.get(block.name) is block:
            del self._incomplete[block.name]

    def _over_limit(self) -> list[StagedBlock]:
        """Take out the oldest blocks that nobody is writing to, until no more than the limit are left."""
        dropped: list[StagedBlock] = []
        for block in list(self._incomplete.values()):
            if len(self._incomplete) <= self._limit:
                break
            if not block.writers:
                del self._incomplete[block.name]
                dropped.append(block)
                log.warning(
                    "%s: dropped with %d of %d bytes written: over %d blocks are incomplete; dump whole blocks sooner",
                    block.name,
                    block.written.covered,
                    block.size,
                    self._limit,
                )
        return dropped

    def _discard(self, blocks: Sequence[StagedBlock]) -> None:
        if blocks:
            self._blocks.discard([block.created() for block in blocks])


def _failed_elsewhere(block: StagedBlock) -> UcmfsError | None:
    if block.error is None:
        return None
    failed = BlockError(block.name, f"another part of the block failed: {block.error}", code=block.error.errno)
    failed.__cause__ = block.error
    return failed
