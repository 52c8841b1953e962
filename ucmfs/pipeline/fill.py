"""Fill: a read of a block that only a lower stage has copies it up, once however many ask."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence

import msgspec
import trio

from ucmfs.block import Attributes, digest_of
from ucmfs.errors import BlockCorrupt, BlockNotFound, NotABlock, StageError, StageFull, UcmfsError
from ucmfs.pipeline.eviction import Room
from ucmfs.pipeline.names import KnownBelow
from ucmfs.stages.base import Publication, Stage
from ucmfs.stages.cache import Cache, Cached
from ucmfs.telemetry import Counters

__all__ = ["Fills"]

log = logging.getLogger(__name__)


class _Fill:
    """One fill under way. When it is done, the block is in the Cache or there is an error.

    `stale` is set when the name changes meanwhile: the copy must not be published.
    """

    __slots__ = ("done", "error", "stale")

    def __init__(self) -> None:
        self.done = trio.Event()
        self.stale = False
        self.error: UcmfsError | None = None


class Fills:
    """The fills of one pipeline. A fill runs in the pipeline's nursery: who asked may go away."""

    def __init__(
        self,
        cache: Cache,
        lower: Sequence[Stage],
        room: Room,
        known: KnownBelow,
        counters: Counters,
        threads: trio.CapacityLimiter,
    ) -> None:
        self._cache = cache
        self._lower = lower
        self._room = room
        self._known = known
        self._counters = counters
        self._threads = threads
        self._running: dict[str, _Fill] = {}
        self.nursery: trio.Nursery | None = None

    def __len__(self) -> int:
        return len(self._running)

    async def fill(self, name: str) -> Cached:
        """Give block *name* in the Cache, copying it up if need be.

        Raises BlockNotFound if no stage has a right copy, StageFull if the Cache cannot take it now, another
        UcmfsError if the stage that has it fails.
        """
        while True:
            block = self._cache.blocks.get(name)
            if block is not None:
                return block
            running = self._running.get(name)
            if running is None:
                running = self._running[name] = _Fill()
                assert self.nursery is not None
                self.nursery.start_soon(self._run, name, running)
            else:
                self._counters.fills_joined += 1
            await running.done.wait()
            if running.error is not None and not running.stale:
                raise running.error

    def changed(self, name: str) -> None:
        """*name* is published, removed or renamed: a fill under way must not show what it read."""
        running = self._running.pop(name, None)
        if running is not None:
            running.stale = True

    def changed_below(self, directory: str) -> None:
        """All of *directory* is renamed."""
        for name in [name for name in self._running if name.startswith(directory + "/")]:
            self.changed(name)

    async def _run(self, name: str, fill: _Fill) -> None:
        try:
            await self._copy_up(name, fill)
        except UcmfsError as error:
            fill.error = error
        except trio.Cancelled:
            fill.error = StageError(self._cache.label, f"{name}: the pipeline is stopping")
            raise
        finally:
            if self._running.get(name) is fill:
                del self._running[name]
            fill.done.set()

    async def _copy_up(self, name: str, fill: _Fill) -> None:
        failure: UcmfsError | None = None
        for depth, stage in enumerate(self._lower):
            try:
                [found] = await stage.lookup([name])
                if found is None:
                    continue
                if found.is_directory:
                    raise NotABlock(name, "it is a directory")
                await self._copy_from(stage, depth, name, found, fill)
                return
            except (BlockCorrupt, BlockNotFound) as error:
                failure = error
            except (StageFull, NotABlock):
                raise
            except StageError as error:
                log.warning("%s: no fill from %s: %s", name, stage.label, error)
                self._counters.error(stage.label, error)
                failure = error
        if failure is not None and not isinstance(failure, (BlockCorrupt, BlockNotFound)):
            raise failure
        raise BlockNotFound(name) from failure

    async def _copy_from(self, stage: Stage, depth: int, name: str, found: Attributes, fill: _Fill) -> None:
        staging = self._cache.stage_file(found)
        committed = False
        try:
            await self._room.hold(staging, found.size, wait=False)
            [copied] = await stage.read([(name, staging.fd)])
            if isinstance(copied, UcmfsError):
                raise copied
            if copied.size != found.size:
                raise StageError(stage.label, f"{name}: changed while it was read")
            await self.verify(stage, name, staging.fd, copied)
            if fill.stale or name in self._cache.blocks:
                fill.stale = True
                raise BlockNotFound(name)
            block = self._cache.commit(staging, name, dirty=False, attributes=copied)
            committed = True
            block.below = True
            block.attributes = msgspec.structs.replace(copied, xattrs=None)
            self._counters.fills += 1
            self._counters.filled_bytes += copied.size
            if depth:
                # The stages between get it too; readers do not wait for them.
                assert self.nursery is not None
                self.nursery.start_soon(self._copy_between, depth, block)
        finally:
            if committed:
                os.close(staging.fd)
            else:
                self._cache.abandon(staging)

    async def verify(self, stage: Stage, name: str, fd: int, copied: Attributes) -> None:
        """Check what was read against its digest. Raises BlockCorrupt, after setting the bad copy aside."""
        if copied.digest is None:
            return
        found = await trio.to_thread.run_sync(digest_of, fd, copied.size, limiter=self._threads)
        if found == copied.digest:
            return
        self._counters.corrupt += 1
        log.error("%s: the copy in %s does not match its digest; it is set aside", name, stage.label)
        self._known.forget(name)
        await stage.set_aside(name)
        raise BlockCorrupt(name, f"the copy in {stage.label} did not match its digest and was set aside")

    async def _copy_between(self, depth: int, block: Cached) -> None:
        source = self._cache.open_block(block)
        try:
            attributes = self._cache.find(block.name, xattrs=True)
            if attributes is None or self._cache.blocks.get(block.name) is not block:
                return
            for stage in self._lower[:depth]:
                try:
                    for failed in await stage.publish([Publication(block.name, source.fd, attributes)]):
                        if failed is not None:
                            raise failed
                except UcmfsError as error:
                    log.warning("%s: not copied to %s: %s", block.name, stage.label, error)
                    self._counters.error(stage.label, error)
        finally:
            source.close()
