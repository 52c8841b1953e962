"""Room ahead of writers that ask nobody: blocks whose staging file the kernel writes by itself.

The daemon does not see such a write before it is done, so what it may take is set aside before:

- When the file is made, pages are allocated for as many bytes as blocks lately had. The common writer takes no more.
- Who takes more does so from a margin that nobody else is given while there are such writers. What it took is counted
  every TICK, and blocks are evicted until the margin is whole again.
- The tmpfs is as large as the Cache. A writer that used up the margin too, which takes a Cache full of dirty blocks,
  gets ENOSPC from it. The daemon is not told; but the tmpfs is full then until something is freed, and only the daemon
  frees. So it looks each time (Cache.freeing), and blocks that were being written while it was full are not published.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import trio

from ucmfs import system
from ucmfs.block import pages
from ucmfs.errors import StageFull
from ucmfs.pipeline.eviction import Room
from ucmfs.stages.cache import Cache, Staging

__all__ = ["Ahead"]

TICK, LONGEST_TICK = 0.005, 0.05
"""Seconds between looks while somebody writes, and while those who have files open did not for QUIET seconds."""
QUIET = 1.0
MARGIN = 16
"""The margin is one part in so many of the capacity; of a small one SMALL_MARGIN, up to ENOUGH bytes."""
SMALL_MARGIN, ENOUGH = 4, 64 << 20
LEAST_CAPACITY = 64 << 20
"""Bytes of the smallest Cache with a margin worth having."""
MOST_AHEAD = 64 << 20
"""Bytes that are allocated ahead for one file at most: the loop stands still while the kernel does."""
RECENT = 8
"""How many blocks tell how large the next may be."""


class Ahead:
    """The staging files that the kernel writes by itself. Touched on the trio loop only."""

    def __init__(self, cache: Cache, room: Room, *, usual: int) -> None:
        self._cache = cache
        self._room = room
        self._margin = max(cache.capacity // MARGIN, min(cache.capacity // SMALL_MARGIN, ENOUGH))
        self._sizes: deque[int] = deque([usual], maxlen=RECENT)
        self._open: set[Staging] = set()
        self._begun = trio.Event()
        self.on_full: Callable[[], None] = lambda: None
        """Called when a write to any of the files may have failed."""

    @property
    def refusal(self) -> str | None:
        """Why there is never room ahead; None where there may be."""
        if self._cache.unbounded is not None:
            return f"the kernel does not bound the cache: {self._cache.unbounded}"
        if self._cache.capacity < LEAST_CAPACITY:
            return f"a cache of under {LEAST_CAPACITY >> 20} MiB has no room to spare"
        return None

    async def begin(self, staging: Staging) -> bool:
        """Let the kernel write *staging*, which is empty; False where there is no room ahead of it now."""
        if self.refusal is not None:
            return False
        self._room.margin = self._margin
        size = min(pages(max(self._sizes)), self._margin, MOST_AHEAD)
        try:
            await self._room.reserve(staging, size, wait=False)
        except StageFull:
            self._end()
            return False
        try:
            system.preallocate(staging.fd, size)
        except OSError:
            # Memory is short. Nothing is wrong with the margin.
            pass
        finally:
            staging.pending -= size
            staging.settle()
        self._add(staging)
        return True

    def resume(self, staging: Staging) -> None:
        """A daemon before this one began with *staging*."""
        self._room.margin = self._margin
        self._add(staging)

    def _add(self, staging: Staging) -> None:
        self._open.add(staging)
        self._cache.on_full = self.on_full
        self._begun.set()

    def end(self, staging: Staging) -> None:
        """Nobody writes *staging* any more."""
        if staging in self._open:
            self._look()
            self._open.remove(staging)
            self._end()

    def _end(self) -> None:
        if not self._open:
            self._cache.on_full = None
            self._room.margin = 0
            self._cache.on_freed()

    def published(self, size: int) -> None:
        """A block of *size* bytes was written."""
        self._sizes.append(size)

    def _look(self) -> None:
        if self._open and not self._cache.bytes_left():
            self.on_full()

    async def run(self) -> None:
        """Count what is written, and keep the margin."""
        written_at = trio.current_time()
        while True:
            if not self._open:
                self._begun = trio.Event()
                await self._begun.wait()
                written_at = trio.current_time()
            await trio.sleep(TICK if trio.current_time() < written_at + QUIET else LONGEST_TICK)
            if self.count():
                written_at = trio.current_time()

    def count(self) -> bool:
        """Count what was written; whether that was anything."""
        before = self._cache.used
        self._look()
        for staging in list(self._open):
            staging.settle()
        self._room.restore_margin()
        return self._cache.used != before
