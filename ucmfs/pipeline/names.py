"""What the pipeline remembers about names: who changes one below the Cache, and what a lower stage answered."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager

import trio

from ucmfs.block import Attributes
from ucmfs.pipeline.listing import Listings

__all__ = ["KnownBelow", "NameLocks"]


class NameLocks:
    """Orders the changes of one name in the lower stages: write-back, remove and rename never cross."""

    def __init__(self) -> None:
        self._locks: dict[str, tuple[trio.Lock, int]] = {}

    @asynccontextmanager
    async def hold(self, names: Iterable[str]) -> AsyncIterator[None]:
        """Hold all of *names*; taken in sorted order, so that no two holders wait for each other."""
        ordered = sorted(set(names))
        held: list[trio.Lock] = []
        for name in ordered:
            lock, users = self._locks.get(name) or (trio.Lock(), 0)
            self._locks[name] = (lock, users + 1)
        try:
            for name in ordered:
                lock = self._locks[name][0]
                await lock.acquire()
                held.append(lock)
            yield
        finally:
            for lock in held:
                lock.release()
            for name in ordered:
                lock, users = self._locks.pop(name)
                if users > 1:
                    self._locks[name] = (lock, users - 1)


class KnownBelow:
    """What the lower stages said of names lately: a hit with its attributes, or a miss (None).

    An answer lives `ttl` seconds. One that was under way while this mount changed anything below is not kept, for
    it may be older than the change. At most `limit` names are remembered. Names that nobody asked for may be known to
    be missing all the same, from *listings*.
    """

    def __init__(self, ttl: float, listings: Listings, limit: int = 1 << 16) -> None:
        self._ttl = ttl
        self._listings = listings
        self._limit = limit
        self._answers: dict[str, tuple[float, Attributes | None]] = {}
        self.epoch = 0

    def get(self, name: str) -> tuple[bool, Attributes | None]:
        """(whether an answer is known, the answer)."""
        found = self._answers.get(name)
        if found is not None and found[0] >= trio.current_time():
            return True, found[1]
        if found is not None:
            del self._answers[name]
        return self._listings.misses(name), None

    def put(self, name: str, answer: Attributes | None, *, epoch: int) -> None:
        """Remember *answer*, asked for when `self.epoch` was *epoch*."""
        if answer is None:
            self._listings.missed(name)
        if epoch != self.epoch or not self._ttl:
            return
        if len(self._answers) >= self._limit:
            del self._answers[next(iter(self._answers))]
        self._answers.pop(name, None)
        self._answers[name] = (trio.current_time() + self._ttl, answer)

    def forget(self, *names: str) -> None:
        """This mount changes *names* below."""
        self.epoch += 1
        for name in names:
            self._answers.pop(name, None)
        self._listings.forget(*names)

    def forget_all(self) -> None:
        self.epoch += 1
        self._answers.clear()
        self._listings.forget_all()
