"""Room in the Cache: which block leaves next, and who waits when none can."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import trio

from ucmfs.block import pages
from ucmfs.errors import StageFull
from ucmfs.stages.cache import Cache, Cached, Staging

__all__ = ["Lru", "Room"]

RECHECK = 0.05
"""Seconds after which a waiting writer looks again whether other processes closed blocks lent to them."""


class Lru:
    """Evicts the block whose last use is longest ago."""

    def __init__(self) -> None:
        self._order: dict[Cached, None] = {}

    def add(self, block: Cached) -> None:
        self._order[block] = None

    def discard(self, block: Cached) -> None:
        self._order.pop(block, None)

    def first(self) -> Cached | None:
        return next(iter(self._order), None)

    def __len__(self) -> int:
        return len(self._order)


class _Waiter:
    __slots__ = ("granted", "nbytes")

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.granted = trio.Event()


class Room:
    """Reserves bytes of the Cache, evicting as needed. First come, first served.

    Between two checkpoints a reservation either is counted in `cache.used` or does not exist, so the bound holds
    whatever happens in between.
    """

    def __init__(self, cache: Cache, *, deadline: float, urge_write_back: Callable[[], None]) -> None:
        self.evictions = 0
        self._cache = cache
        self._deadline = deadline
        self._urge_write_back = urge_write_back
        self._queue: deque[_Waiter] = deque()
        self._granting = False
        self.on_pressure: Callable[[], None] = lambda: None
        """Called when there is no room and nothing to evict: who keeps blocks open that need not be shall let go."""
        self.margin = 0
        """Bytes that nobody is given; see ahead.py."""
        cache.on_freed = self._grant

    async def reserve(self, staging: Staging, nbytes: int, *, wait: bool = True) -> None:
        """Reserve *nbytes* more for *staging*; `Staging.pending` holds them until it is settled.

        Raises StageFull at once if the block could never fit (or without *wait*, if there is no room now), else at
        the deadline if write-back and readers freed too little.
        """
        cache = self._cache
        if staging.charge + nbytes > cache.capacity:
            raise StageFull(cache.label, f"a block of over {cache.capacity} bytes does not fit; raise the capacity")
        if cache.dirty_blocks and cache.free - nbytes < cache.capacity // 4:
            self._urge_write_back()
        if self._queue or not self._make(nbytes):
            if not wait:
                raise StageFull(cache.label, f"no room for {nbytes} bytes now")
            await self._wait(nbytes)
        else:
            cache.count(nbytes)
        staging.charge += nbytes
        staging.pending += nbytes

    def restore_margin(self) -> None:
        """Evict until the margin is free."""
        if not self._make(0) and self._cache.dirty_blocks:
            self._urge_write_back()

    async def hold(self, staging: Staging, size: int, *, wait: bool = True) -> None:
        """Reserve room for all *size* bytes of *staging*, to be kept whatever is written. Raises StageFull."""
        await self.reserve(staging, pages(size), wait=wait)
        staging.floor = pages(size)
        staging.pending -= pages(size)

    def _make(self, nbytes: int) -> bool:
        """Evict until *nbytes* are free beside the margin; whether they are."""
        cache = self._cache
        while cache.free - self.margin < nbytes:
            if not cache.evict_one():
                self.on_pressure()
                return False
            self.evictions += 1
        return True

    async def _wait(self, nbytes: int) -> None:
        waiter = _Waiter(nbytes)
        self._queue.append(waiter)
        try:
            with trio.move_on_after(self._deadline):
                while not waiter.granted.is_set():
                    self._urge_write_back()
                    self._cache.reclaim()
                    self._grant()
                    with trio.move_on_after(RECHECK):
                        await waiter.granted.wait()
        except BaseException:
            if waiter.granted.is_set():
                self._cache.count(-nbytes)
            raise
        finally:
            if not waiter.granted.is_set():
                self._queue.remove(waiter)
                self._grant()
        if not waiter.granted.is_set():
            raise StageFull(
                self._cache.label,
                f"no room for {nbytes} bytes within {self._deadline:g} s: {self._cache.dirty_bytes} bytes wait for "
                "the next stage",
            )

    def _grant(self) -> None:
        # Evicting frees bytes, which comes back here.
        if self._granting:
            return
        self._granting = True
        try:
            while self._queue and self._make(self._queue[0].nbytes):
                waiter = self._queue.popleft()
                self._cache.count(waiter.nbytes)
                waiter.granted.set()
        finally:
            self._granting = False
