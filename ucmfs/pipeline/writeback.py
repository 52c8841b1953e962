"""Write-back: dirty blocks go down, in batches, in the background."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Sequence
from itertools import islice

import msgspec
import trio

from ucmfs.block import DIGEST_XATTR, OWN_XATTRS, digest_of, looks_temporary
from ucmfs.errors import StageError, UcmfsError
from ucmfs.pipeline.names import KnownBelow, NameLocks
from ucmfs.stages.base import Publication, Stage
from ucmfs.stages.cache import Cache, Cached, OpenBlock
from ucmfs.stages.local import read_xattrs, write_xattrs
from ucmfs.telemetry import Counters

__all__ = ["Flushed", "WriteBack"]

log = logging.getLogger(__name__)

RETRY_FIRST, RETRY_MOST = 1.0, 30.0
"""Seconds until a block that a stage refused is tried again; doubles up to the second figure."""


class Flushed(msgspec.Struct, frozen=True):
    """What a flush left dirty, and the last error that kept it so."""

    left: list[str]
    error: UcmfsError | None


class _Pending:
    """A dirty block in the queue."""

    __slots__ = ("delay", "due", "error", "tries")

    def __init__(self, due: float) -> None:
        self.due = due
        self.delay = RETRY_FIRST
        self.tries = 0
        self.error: UcmfsError | None = None


class WriteBack:
    """The queue of one pipeline and the task that empties it.

    The queue is the dirty blocks of the Cache that do not look temporary: bounded by the Cache, rebuilt from its
    layout at start. A batch is written when `batch_size` blocks wait, when the oldest waited `interval` seconds, or
    when someone waits for it. A block stays dirty until every persistent stage below has it.
    """

    def __init__(
        self,
        cache: Cache,
        lower: Sequence[Stage],
        locks: NameLocks,
        known: KnownBelow,
        counters: Counters,
        *,
        batch_size: int,
        interval: float,
        threads: trio.CapacityLimiter,
    ) -> None:
        self._cache = cache
        self._stages = [stage for stage in lower if stage.persistent]
        self._locks = locks
        self._known = known
        self._counters = counters
        self._batch_size = batch_size
        self._interval = interval
        self._threads = threads
        self._queue: dict[str, _Pending] = {}
        self._urgent = False
        self._wake = trio.Event()
        self._progress = trio.Condition()
        self.batches = trio.Lock()
        """Held while a batch is under way; whoever renames a directory holds it too."""

    @property
    def saves(self) -> bool:
        """Whether anything below keeps blocks: without, nothing is ever dirty."""
        return bool(self._stages)

    def add(self, name: str, *, even_temporary: bool = False) -> None:
        """Block *name* became dirty (again)."""
        if looks_temporary(name) and not even_temporary:
            return
        self._queue[name] = _Pending(trio.current_time() + self._interval)
        if len(self._queue) == 1 or len(self._queue) >= self._batch_size:
            self._wake.set()

    def discard(self, name: str) -> None:
        """Block *name* is no longer there, or no longer under that name."""
        self._queue.pop(name, None)

    def urge(self) -> None:
        """Somebody waits: do not wait for the interval."""
        self._urgent = True
        self._wake.set()

    async def run(self) -> None:
        """Empty the queue for ever."""
        while True:
            batch = self._due()
            if batch:
                async with self.batches:
                    await self._write(batch)
                async with self._progress:
                    self._progress.notify_all()
                continue
            self._urgent = False
            self._wake = trio.Event()
            first = min((pending.due for pending in self._queue.values()), default=None)
            with trio.move_on_at(first) if first is not None else trio.CancelScope():
                await self._wake.wait()

    def _due(self) -> list[str]:
        now = trio.current_time()
        # Neither look goes further than a batch: the queue may be as long as the Cache is large.
        fresh = (pending for pending in self._queue.values() if not pending.tries)
        everything = self._urgent or sum(1 for _ in islice(fresh, self._batch_size)) == self._batch_size
        due = (
            name for name, pending in self._queue.items() if pending.due <= now or (everything and not pending.tries)
        )
        return list(islice(due, self._batch_size))

    async def flush(self, names: Iterable[str] | None = None, *, timeout: float | None = None) -> Flushed:
        """Write *names* back (all that do not look temporary for None) and wait until it is done.

        Gives up on a block that a stage refused since the flush began, and at *timeout* (seconds).
        """
        wanted: dict[str, Cached] = {}
        for name in list(self._queue) if names is None else names:
            block = self._cache.blocks.get(name)
            if block is None or not block.dirty:
                continue
            wanted[name] = block
            pending = self._queue.get(name)
            if pending is None or pending.tries:
                self.add(name, even_temporary=True)
        with trio.move_on_after(math.inf if timeout is None else timeout):
            async with self._progress:
                # Progress is announced under the same lock: none can be missed between the look and the wait.
                # Each block is waited for in turn: what is settled is not looked at again.
                for block in wanted.values():
                    while block.dirty and self._hopeful(block):
                        self.urge()
                        await self._progress.wait()
        left = [block.name for block in wanted.values() if block.dirty and self._is_current(block)]
        errors = [pending.error for name in left if (pending := self._queue.get(name)) and pending.error]
        return Flushed(left, errors[-1] if errors else None)

    def _is_current(self, block: Cached) -> bool:
        return self._cache.blocks.get(block.name) is block

    def _hopeful(self, block: Cached) -> bool:
        pending = self._queue.get(block.name)
        return pending is not None and not pending.tries and self._is_current(block)

    async def _write(self, names: Sequence[str]) -> None:
        """Write one batch back. Never raises for a stage's sake: what failed stays queued."""
        async with self._locks.hold(names):
            opened: list[tuple[Cached, int, OpenBlock]] = []
            try:
                for name in names:
                    block = self._cache.blocks.get(name)
                    if block is None or not block.dirty:
                        self._queue.pop(name, None)
                    else:
                        # Who removes or renames it from now on has to do so below too, and waits for this batch.
                        block.below = True
                        opened.append((block, block.revision, self._cache.open_block(block)))
                await self._publish(opened)
            finally:
                for _, _, source in opened:
                    source.close()

    async def _publish(self, opened: Sequence[tuple[Cached, int, OpenBlock]]) -> None:
        if not opened:
            return
        items = await trio.to_thread.run_sync(
            lambda: [self._publication(block.name, source) for block, _, source in opened], limiter=self._threads
        )
        failed: list[UcmfsError | None] = [None] * len(items)
        for stage in self._stages:
            rows = [row for row, error in enumerate(failed) if error is None]
            answers: Sequence[UcmfsError | None]
            try:
                answers = await stage.publish([items[row] for row in rows])
            except StageError as error:
                answers = [error] * len(rows)
                for row in rows:
                    # A call past its deadline goes on holding its own descriptor: ask the kernel before evicting.
                    opened[row][0].lent = True
            for row, answer in zip(rows, answers, strict=True):
                failed[row] = answer
                if answer is not None:
                    self._counters.error(stage.label, answer)
        for (block, revision, _), item, failure in zip(opened, items, failed, strict=True):
            # The lower stages changed, whatever became of the block here meanwhile.
            self._known.forget(item.name)
            self._settle(block, revision, item, failure)

    def _settle(self, block: Cached, revision: int, item: Publication, error: UcmfsError | None) -> None:
        if error is None:
            self._counters.write_backs += 1
            self._counters.written_back_bytes += item.attributes.size
        if not self._is_current(block) or block.name != item.name:
            return
        block.below = True
        pending = self._queue.get(item.name)
        if error is None:
            if block.revision == revision:
                self._queue.pop(item.name, None)
                self._cache.mark_clean(block)
        elif pending is not None:
            pending.tries += 1
            pending.error = error
            pending.due = trio.current_time() + pending.delay
            pending.delay = min(pending.delay * 2, RETRY_MOST)
            (log.warning if pending.tries == 1 else log.debug)("%s stays dirty: %s", item.name, error)

    @staticmethod
    def _publication(name: str, source: OpenBlock) -> Publication:
        """Runs in a thread. The digest is taken here, off the writer's path, and kept with the block."""
        attributes = source.attributes
        xattrs = read_xattrs(source.fd)
        if DIGEST_XATTR not in xattrs:
            digest = digest_of(source.fd, attributes.size).encode()
            write_xattrs(source.fd, {DIGEST_XATTR: digest})
            xattrs[DIGEST_XATTR] = digest
        xattrs = {key: value for key, value in xattrs.items() if key == DIGEST_XATTR or not key.startswith(OWN_XATTRS)}
        return Publication(name, source.fd, msgspec.structs.replace(attributes, xattrs=xattrs))
