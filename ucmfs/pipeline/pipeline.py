"""The pipeline: the Cache in front, any number of stages below, one name space.

Operations on blocks that the Cache has end without a checkpoint. Whatever a lower stage has to do is ordered per
name by NameLocks. ucmfs/DESIGN.md says which state may change between which checkpoints.
"""

from __future__ import annotations

import errno
import logging
import os
import stat
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import aclosing, asynccontextmanager
from typing import Any, TypeVar

import msgspec
import trio

from ucmfs import system
from ucmfs.block import DIGEST_XATTR, OWN_XATTRS, PAGE, Attributes, Changes, State, child_of, digest_of, pages
from ucmfs.config import PipelineOptions
from ucmfs.errors import (
    BlockExists,
    BlockNotFound,
    StageError,
    StageFull,
    UcmfsError,
    from_errno,
)
from ucmfs.pipeline.ahead import Ahead
from ucmfs.pipeline.eviction import Room
from ucmfs.pipeline.fill import Fills
from ucmfs.pipeline.listing import Listings
from ucmfs.pipeline.names import KnownBelow, NameLocks
from ucmfs.pipeline.writeback import Flushed, WriteBack
from ucmfs.stages.base import Entry, Publication, Stage, Usage
from ucmfs.stages.cache import Cache, Cached, OpenBlock, Staging
from ucmfs.stages.local import apply_changes, copy_whole, read_xattrs, write_xattrs
from ucmfs.telemetry import Counters

__all__ = ["Location", "Pipeline"]

log = logging.getLogger(__name__)

PREFETCH_QUEUE = 1 << 16
MOST_NAMES = 1 << 14
"""Of a directory that all names are told of."""
T = TypeVar("T")


class Location(msgspec.Struct, frozen=True):
    """Where a block is: the labels of the stages that have it, nearest first."""

    stages: list[str]
    state: State
    size: int
    digest: str | None
    pinned: bool


class Pipeline:
    """The Cache and the stages below it, nearest first.

    Names are checked by those who make them (check_name); every error raised is a UcmfsError.
    """

    def __init__(self, description: str, cache: Cache, lower: Sequence[Stage], options: PipelineOptions) -> None:
        self.description = description
        self.cache = cache
        self.lower = tuple(lower)
        self.options = options
        self.counters = Counters()
        self.locks = NameLocks()
        self._listings = Listings(self.lower, options.consistency_ttl)
        self.known = KnownBelow(options.consistency_ttl, self._listings)
        threads = trio.CapacityLimiter(2)
        """For digests: memory bound, so that more than two only take turns."""
        self._threads = threads
        self._readers = trio.CapacityLimiter(8)
        self.write_back = WriteBack(
            cache,
            self.lower,
            self.locks,
            self.known,
            self.counters,
            batch_size=options.write_back_batch_size,
            interval=options.write_back_interval,
            threads=threads,
        )
        self.room = Room(cache, deadline=options.write_back_deadline, urge_write_back=self.write_back.urge)
        self.ahead = Ahead(cache, self.room, usual=options.block_size or 0)
        self.fills = Fills(cache, self.lower, self.room, self.known, self.counters, threads)
        self._prefetching: dict[str, None] = {}
        self._prefetch_wake = trio.Event()
        self._verified: dict[str, tuple[str, tuple[int, int]]] = {}

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Start the stages and the write-back; at the end stop them. Dirty blocks stay in the Cache's directory."""
        started: list[Stage] = []
        try:
            for stage in (*self.lower, self.cache):
                await stage.start()
                started.append(stage)
            self._recover()
            await self._adopt_root()
            async with trio.open_nursery() as nursery:
                self.fills.nursery = nursery
                if self.write_back.saves:
                    nursery.start_soon(self.write_back.run)
                nursery.start_soon(self._prefetch_for_ever)
                nursery.start_soon(self._listings.run)
                nursery.start_soon(self.ahead.run)
                try:
                    yield
                finally:
                    nursery.cancel_scope.cancel()
        finally:
            with trio.CancelScope(shield=True):
                for stage in reversed(started):
                    try:
                        await stage.stop()
                    except StageError as error:
                        log.warning("%s", error)

    def _recover(self) -> None:
        dirty = [block for block in self.cache.blocks.values() if block.dirty]
        for block in dirty:
            if self.write_back.saves:
                self.write_back.add(block.name)
            else:
                self.cache.mark_clean(block)
        if dirty:
            log.info("found %d dirty blocks (%d bytes) of an earlier run", len(dirty), sum(b.charge for b in dirty))

    async def _adopt_root(self) -> None:
        """The mount's root has the mode and owner of the storage that it shows."""
        for stage in self.lower:
            try:
                [root] = await stage.lookup([""])
            except StageError as error:
                log.warning("%s", error)
                continue
            if root is not None and stage.persistent:
                self.cache.change_directory("", Changes(mode=stat.S_IMODE(root.mode), uid=root.uid, gid=root.gid))
                return

    # Looking

    def peek(self, name: str) -> Attributes | None:
        """Attributes of *name* as far as they are known without asking a stage below; None where they are not."""
        return self.cache.find(name) or self.known.get(name)[1]

    async def lookup(self, names: Sequence[str]) -> list[Attributes | None]:
        """Attributes of each block or directory, None where no stage has it, or none that answers."""
        found = [self.cache.find(name) for name in names]
        missing: list[int] = []
        for row, name in enumerate(names):
            if found[row] is None:
                known, found[row] = self.known.get(name)
                if not known:
                    missing.append(row)
        epoch = self.known.epoch
        sure = True
        for stage in self.lower:
            if not missing:
                break
            try:
                answers = await stage.lookup([names[row] for row in missing])
            except StageError as error:
                log.warning("lookup: %s; its blocks count as misses", error)
                self.counters.error(stage.label, error)
                sure = False
                continue
            for row, answer in zip(missing, answers, strict=True):
                if answer is not None:
                    found[row] = answer
                    self.known.put(names[row], answer, epoch=epoch)
                    if answer.is_directory:
                        self._adopt_directory(names[row], answer)
            missing = [row for row in missing if found[row] is None]
        for row in missing if sure else ():
            self.known.put(names[row], None, epoch=epoch)
        for row in missing:
            # It may have been published here while a stage was asked.
            found[row] = self.cache.find(names[row])
        return found

    def known_until(self, directory: str) -> float | None:
        """Until when (of trio's clock) a name that names_in(*directory*) has not is nowhere; None where not known."""
        listed = self._listings.current(directory)
        return None if listed is None else listed[1]

    def names_in(self, directory: str) -> set[str] | None:
        """All names in *directory* that are published here or below; None if there are too many to tell of."""
        listed = self._listings.current(directory)
        if listed is None or len(listed[0]) > MOST_NAMES:
            return None
        here = self.cache.names_in(directory, MOST_NAMES)
        return None if here is None else here | listed[0]

    def _adopt_directory(self, name: str, attributes: Attributes) -> None:
        """Know a directory of a lower stage in the Cache too: what is in it is looked up often."""
        if not name or name in self.cache.blocks:
            return
        try:
            self.cache.add_directory(name, attributes)
        except UcmfsError as error:
            log.debug("directory %s is not known in the Cache: %s", name, error)

    async def scan(self, directory: str) -> AsyncGenerator[Sequence[Entry], None]:
        """Stream the entries of *directory* over all stages in batches, each once, nearest stage first."""
        above: list[Stage] = []
        for stage in (self.cache, *self.lower):
            try:
                async for batch in stage.scan(directory):
                    yield await self._not_above(above, directory, batch)
            except StageError as error:
                log.warning("listing %s: %s; its blocks are left out", directory or "/", error)
                self.counters.error(stage.label, error)
            above.append(stage)

    async def _not_above(self, above: Sequence[Stage], directory: str, batch: Sequence[Entry]) -> Sequence[Entry]:
        for stage in above:
            there = await stage.lookup([child_of(directory, entry.name) for entry in batch])
            batch = [entry for entry, found in zip(batch, there, strict=True) if found is None]
        return batch

    async def locate(self, name: str) -> Location | None:
        """Which stages have block *name*; None if none has."""
        labels: list[str] = []
        size, digest = 0, None
        block = self.cache.blocks.get(name)
        if block is not None:
            labels.append(self.cache.label)
            size = block.attributes.size
            digest = await self._digest(block)
        for stage in self.lower:
            [found] = await stage.lookup([name], xattrs=True)
            # An older version below a dirty block is not this block.
            if found is not None and not found.is_directory and (block is None or not block.dirty):
                if not labels:
                    size, digest = found.size, found.digest
                labels.append(stage.label)
        if not labels:
            return None
        dirty = block is not None and block.dirty
        return Location(labels, State.DIRTY if dirty else State.CLEAN, size, digest, block is not None and block.pinned)

    async def xattrs(self, name: str) -> dict[str, bytes]:
        """The `user.*` xattrs of a block or directory, its digest where one is known. Raises BlockNotFound."""
        for stage in (self.cache, *self.lower):
            [found] = await stage.lookup([name], xattrs=True)
            if found is not None:
                return dict(found.xattrs or {})
        raise BlockNotFound(name)

    async def _digest(self, block: Cached) -> str:
        """The digest of *block*; taken now if it was not taken yet."""
        known = self.cache.xattrs(block).get(DIGEST_XATTR)
        if known is not None:
            return known.decode()
        source = self.cache.open_block(block)
        try:
            size = block.attributes.size
            found = await trio.to_thread.run_sync(digest_of, source.fd, size, limiter=self._threads)
            write_xattrs(source.fd, {DIGEST_XATTR: found.encode()})
            return found
        finally:
            source.close()

    # Reading

    async def open(self, name: str, *, lend: bool = False) -> OpenBlock:
        """A descriptor of block *name*, from the Cache if it can be there. With *lend* it goes to another process.

        Raises BlockNotFound, NotABlock, or what the stage that has it says.
        """
        block = self.cache.blocks.get(name)
        if block is not None:
            self.counters.hits += 1
        else:
            self.counters.misses += 1
            try:
                block = await self.fills.fill(name)
            except StageFull:
                return await self._open_below(name)
        block.lent = block.lent or lend
        return self.cache.open_block(block)

    async def _open_below(self, name: str) -> OpenBlock:
        """Serve a block that the Cache cannot take from where it is, after checking its digest once."""
        for stage in self.lower:
            if not stage.local:
                continue
            [fd] = await stage.open([name])
            if isinstance(fd, BlockNotFound):
                continue
            if isinstance(fd, UcmfsError):
                raise fd
            try:
                [known] = await stage.lookup([name], xattrs=True)
                attributes = msgspec.structs.replace(Attributes.of(os.fstat(fd)), xattrs=(known and known.xattrs) or {})
                if self._verified.get(name) != (stage.label, attributes.version):
                    await self.fills.verify(stage, name, fd, attributes)
                    self._remember_verified(name, stage, attributes)
            except BaseException:
                os.close(fd)
                raise
            return OpenBlock(fd, attributes, stage.label)
        raise StageFull(self.cache.label, f"{name}: no room to fill it, and no local stage to serve it from")

    def _remember_verified(self, name: str, stage: Stage, attributes: Attributes) -> None:
        while len(self._verified) >= 1024:
            del self._verified[next(iter(self._verified))]
        self._verified[name] = (stage.label, attributes.version)

    # Writing

    async def create(self, size: int = 0, attributes: Attributes | None = None, *, wait: bool = True) -> Staging:
        """An empty staging file with room for *size* bytes. Raises StageFull: at once without *wait*."""
        staging = self.cache.stage_file(attributes)
        if size:
            try:
                await self.room.hold(staging, size, wait=wait)
                self._allocate(staging, size)
            except BaseException:
                self.cache.abandon(staging)
                raise
        return staging

    def _allocate(self, staging: Staging, size: int) -> None:
        """Who is given *staging* writes *size* bytes by itself, maybe into a mapping: nobody may be quicker."""
        if self.cache.unbounded is None:
            try:
                system.preallocate(staging.fd, size)
            except OSError as error:
                raise StageFull(self.cache.label, f"no memory for {size} bytes: {error.strerror}") from error

    def abandon(self, staging: Staging) -> None:
        """Forget *staging* and what was written to it."""
        self.ahead.end(staging)
        self.cache.abandon(staging)

    async def write(self, staging: Staging, offset: int, data: bytes | memoryview) -> int:
        """Write all of *data* at *offset*. Raises StageFull before anything is written."""
        end = offset + len(data)
        need = pages(end) - offset // PAGE * PAGE
        await self.room.reserve(staging, need)
        try:
            written = 0
            view = memoryview(data)
            while written < len(data):
                written += os.pwrite(staging.fd, view[written:], offset + written)
            return written
        finally:
            staging.pending -= need
            staging.settle()

    async def copy_into(self, staging: Staging, source: OpenBlock) -> None:
        """Copy *source* with its xattrs to an empty *staging*: a block about to be changed in place."""
        size = source.attributes.size
        need = pages(size)
        await self.room.reserve(staging, need)
        target, origin = os.dup(staging.fd), os.dup(source.fd)

        def copy() -> None:
            try:
                copy_whole(origin, target, size)
                write_xattrs(target, user_xattrs(origin))
            finally:
                os.close(target)
                os.close(origin)

        try:
            await trio.to_thread.run_sync(copy, limiter=self._threads)
        finally:
            staging.pending -= need
            staging.settle()

    def change_staging(self, staging: Staging, changes: Changes) -> None:
        """Change attributes of a block being written."""
        apply_changes(staging.fd, changes)

    def staging_xattrs(self, staging: Staging) -> dict[str, bytes]:
        """The user's xattrs of a block being written."""
        return user_xattrs(staging.fd)

    async def read_below(self, source: OpenBlock, offset: int, size: int) -> bytes:
        """Up to *size* bytes of a block that a lower stage serves where it is; short only at its end."""
        fd = os.dup(source.fd)

        def read() -> bytes:
            try:
                parts = []
                done = 0
                while done < size and (part := os.pread(fd, size - done, offset + done)):
                    parts.append(part)
                    done += len(part)
                return b"".join(parts)
            finally:
                os.close(fd)

        return await trio.to_thread.run_sync(read, limiter=self._readers)

    def publish(self, staging: Staging, name: str) -> Cached:
        """Publish *staging* in the Cache under *name*; write-back takes it further. Never waits.

        The descriptor stays open and the caller's. Raises NotABlock or another BlockError, with nothing changed.
        """
        fresh = self.known.get(name) == (True, None)
        block = self.cache.commit(staging, name, dirty=self.write_back.saves)
        self._changed(name)
        if fresh and block.below is None:
            block.below = False
        self.counters.published += 1
        self.ahead.published(block.attributes.size)
        if block.dirty:
            self.write_back.add(name)
        return block

    def _changed(self, name: str) -> None:
        self.fills.changed(name)
        self.known.forget(name)

    async def persist(self, staging: Staging, name: str) -> None:
        """fsync of a block that is still being written: what is there now goes to the next persistent stage."""
        attributes = staging.attributes()
        digest = await trio.to_thread.run_sync(digest_of, staging.fd, attributes.size, limiter=self._threads)
        attributes = msgspec.structs.replace(attributes, xattrs={DIGEST_XATTR: digest.encode()})
        async with self.locks.hold([name]):
            for stage in self.lower:
                if stage.persistent:
                    [failed] = await stage.publish([Publication(name, staging.fd, attributes)], durable=True)
                    self.known.forget(name)
                    if failed is not None:
                        raise failed
                    return

    # Changing names

    async def remove(self, name: str) -> bool:
        """Remove block *name* from every stage; whether there was one. Raises what a stage says."""
        block = self.cache.blocks.get(name)
        only_here = block is not None and block.below is False
        if only_here:
            self._drop(name)
            return True
        removed = block is not None
        async with self.locks.hold([name]):
            self._drop(name)
            removed = await _in_each(self.lower, lambda stage: _one(stage.remove([name]))) or removed
            filled = self.cache.blocks.get(name)
            if filled is not None and filled.below and not filled.dirty:
                # Copied up meanwhile, before it was removed below.
                self._drop(name)
            self._changed(name)
        return removed

    def _drop(self, name: str) -> None:
        self.cache.drop(name)
        self.write_back.discard(name)
        self._changed(name)

    async def rename(self, old: str, new: str) -> None:
        """Rename block *old*, replacing *new*. Raises BlockNotFound, NotABlock, or what a stage says."""
        block = self.cache.blocks.get(old)
        if block is not None and block.below is False and block.dirty:
            self._move(old, new)
            return
        async with self.locks.hold([old, new]):
            moved = await _in_each(self.lower, lambda stage: _one(stage.rename([(old, new)])))
            moved = self._move(old, new) or moved
            if not moved:
                raise BlockNotFound(old)
            if old not in self.cache.blocks and new in self.cache.blocks and block is None:
                # Only a lower stage had it: what the Cache has under the new name is the replaced block.
                self._drop(new)
            self._changed(old)
            self._changed(new)

    def _move(self, old: str, new: str) -> bool:
        moved = self.cache.move(old, new)
        if moved is None:
            return False
        self.write_back.discard(old)
        self.write_back.discard(new)
        if moved.dirty:
            self.write_back.add(new)
        self._changed(old)
        self._changed(new)
        return True

    async def make_directory(self, name: str, attributes: Attributes) -> None:
        """Make a directory. Lower stages get it with the first block in it. Raises BlockExists."""
        if (await self.lookup([name]))[0] is not None:
            raise BlockExists(name)
        self.cache.add_directory(name, attributes)
        self.known.forget(name)

    async def remove_directory(self, name: str) -> None:
        """Remove an empty directory. Raises BlockNotFound, BlockError ENOTEMPTY."""
        await self._check_empty(name)
        async with self.locks.hold([name]):
            removed = await _in_each((*self.lower, self.cache), lambda stage: stage.remove_directory(name))
            self.known.forget(name)
        if not removed:
            raise BlockNotFound(name)

    async def _check_empty(self, directory: str) -> None:
        async with aclosing(self.scan(directory)) as batches:
            async for batch in batches:
                if batch:
                    raise from_errno(errno.ENOTEMPTY, directory)

    async def rename_directory(self, old: str, new: str) -> None:
        """Rename a directory with all below it. Raises BlockNotFound, BlockError ENOTEMPTY."""
        await self._check_empty(new)
        # No batch may be under way to the old names.
        async with self.write_back.batches:
            moved = await _in_each(self.lower, lambda stage: _one(stage.rename([(old, new)])))
            self.fills.changed_below(old)
            prefix = old + "/"
            dirty = [name for name, block in self.cache.blocks.items() if block.dirty and name.startswith(prefix)]
            moved = self.cache.move_directory(old, new) or moved
            for name in dirty:
                self.write_back.discard(name)
                self.write_back.add(f"{new}/{name[len(prefix) :]}")
            self.known.forget_all()
        if not moved:
            raise BlockNotFound(old)

    async def update(self, name: str, changes: Changes) -> None:
        """Change attributes of a block or directory wherever it is. Raises BlockNotFound, or what a stage says."""
        block = self.cache.blocks.get(name)
        found = False
        if block is not None:
            self.cache.change(block, changes)
            found = True
            only_atime = changes == Changes(atime_ns=changes.atime_ns)
            if block.dirty or only_atime:
                return
        async with self.locks.hold([name]):
            stages = self.lower if block is not None else (self.cache, *self.lower)
            found = await _in_each(stages, lambda stage: stage.update(name, changes)) or found
            self.known.forget(name)
        if not found:
            raise BlockNotFound(name)

    # Asking for more

    async def prefetch(self, names: Iterable[str]) -> list[bool]:
        """Fill blocks into the Cache; whether each is there now. Errors of single blocks count as no."""
        wanted = list(names)
        there = [False] * len(wanted)
        limit = trio.CapacityLimiter(8)

        async def one(row: int, name: str) -> None:
            async with limit:
                try:
                    await self.fills.fill(name)
                    there[row] = True
                except UcmfsError as error:
                    log.debug("prefetch: %s", error)

        async with trio.open_nursery() as nursery:
            for row, name in enumerate(wanted):
                if name in self.cache.blocks:
                    there[row] = True
                else:
                    nursery.start_soon(one, row, name)
        return there

    def prefetch_soon(self, names: Sequence[str]) -> list[bool]:
        """Have blocks filled into the Cache in the background; whether each is there now or will be tried.

        At most PREFETCH_QUEUE blocks wait; what is over that is not tried.
        """
        answers = []
        for name in names:
            there = name in self.cache.blocks
            if not there and len(self._prefetching) < PREFETCH_QUEUE:
                self._prefetching[name] = None
                there = True
            answers.append(there)
        self._prefetch_wake.set()
        return answers

    async def _prefetch_for_ever(self) -> None:
        while True:
            batch = list(self._prefetching)[:64]
            if not batch:
                self._prefetch_wake = trio.Event()
                await self._prefetch_wake.wait()
                continue
            await self.prefetch(batch)
            for name in batch:
                self._prefetching.pop(name, None)

    def evict(self, name: str) -> bool:
        """Drop block *name* from the Cache; whether it was there. Raises BlockBusy."""
        block = self.cache.blocks.get(name)
        if block is None:
            return False
        self.cache.evict(block)
        self.room.evictions += 1
        return True

    async def pin(self, name: str, on: bool) -> bool:
        """Keep block *name* in the Cache, filling it if need be, or let it go. Whether there is such a block."""
        block = self.cache.blocks.get(name)
        if block is None and on:
            try:
                block = await self.fills.fill(name)
            except BlockNotFound:
                return False
        if block is None:
            return False
        self.cache.set_pinned(block, on)
        return True

    async def flush(self, names: Iterable[str] | None = None, *, timeout: float | None = None) -> Flushed:
        """Write *names* back, or everything that does not look temporary, and wait."""
        return await self.write_back.flush(names, timeout=timeout)

    # Figures

    async def usage(self) -> Usage:
        """What statfs tells: the last stage that keeps blocks, else the Cache."""
        for stage in reversed(self.lower):
            if stage.persistent:
                try:
                    return await stage.usage()
                except StageError as error:
                    self.counters.error(stage.label, error)
        return await self.cache.usage()

    async def stats(self) -> dict[str, Any]:
        """The mapping that status, `.ucmfs/stats.json` and the metrics are made of."""
        cache, counters = self.cache, self.counters
        self.ahead.count()
        # The kernel lets go of a file that it served by itself a moment after it told of the close.
        cache.reclaim()
        stages: list[dict[str, Any]] = []
        for stage in (cache, *self.lower):
            row: dict[str, Any] = {"label": stage.label, "capacity": None, "used": None, "free": None, "blocks": None}
            try:
                row.update(msgspec.to_builtins(await stage.usage()))
                row["error"] = None
            except StageError as error:
                row["error"] = str(error)
            stages.append(row)
        stages[0].update(dirty=cache.dirty_blocks, dirty_bytes=cache.dirty_bytes, dirty_age_s=round(cache.age(), 3))
        opens = counters.hits + counters.misses
        return {
            "pipeline": self.description,
            "stages": stages,
            "hits": counters.hits,
            "misses": counters.misses,
            "l1_hit_rate": counters.hits / opens if opens else None,
            "fills": counters.fills,
            "fills_joined": counters.fills_joined,
            "filled_bytes": counters.filled_bytes,
            "published": counters.published,
            "write_backs": counters.write_backs,
            "written_back_bytes": counters.written_back_bytes,
            "eviction_count": self.room.evictions,
            "dropped": counters.dropped,
            "corrupt": counters.corrupt,
            "unexpected": counters.unexpected,
            "errors": dict(counters.errors),
        }


async def _one(rows: Awaitable[Sequence[T]]) -> T:
    """The only row of a batch of one."""
    [row] = await rows
    return row


async def _in_each(stages: Iterable[Stage], act: Callable[[Stage], Awaitable[bool | UcmfsError]]) -> bool:
    """Do *act* in one of *stages* after the other; whether any had what it is about. Raises what a stage says."""
    found = False
    for stage in stages:
        done = await act(stage)
        if isinstance(done, UcmfsError):
            raise done
        found = found or done
    return found


def user_xattrs(fd: int) -> dict[str, bytes]:
    """The xattrs of *fd* that are the user's and not ours."""
    return {key: value for key, value in read_xattrs(fd).items() if not key.startswith(OWN_XATTRS)}
