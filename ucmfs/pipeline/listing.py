"""Whole directories of the lower stages, so that a name that is nowhere costs no call to a stage.

Engines ask for every block of a prompt, and most are not there. Where names of a directory keep being missed, one task
lists the directory in all lower stages, in the background, and again as long as somebody asks. A name in no listing is
missing, as far as anybody can tell who looks once in `ttl` seconds: a listing is believed that long after it *began*.
Changes that this mount makes below are told by forget(): such a name is asked for, whatever the listing says.
"""

from __future__ import annotations

import logging
import math
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import cast

import trio

from ucmfs.block import parent_of
from ucmfs.errors import StageError
from ucmfs.stages.base import Entry, Stage

__all__ = ["Listings"]

log = logging.getLogger(__name__)

MOST_NAMES = 1 << 16
"""In all listings together."""
MOST_DIRECTORIES = 1024
MISSES = 2
"""So many names of a directory that are missed within WINDOW seconds have it listed."""
WINDOW = 1.0
SHARE = 4
"""A listing that takes over one part in so many of the ttl is not worth it."""
REFUSED = 60.0
"""Seconds until a directory that was too large, too slow or failed is tried again."""


class _Listing:
    __slots__ = ("began", "names", "used_at")

    def __init__(self, names: set[str], began: float) -> None:
        self.names = names
        self.began = began
        self.used_at = began


class Listings:
    """The listings of one pipeline. Touched on the trio loop only; *ttl* in seconds, 0 for none at all."""

    def __init__(self, stages: Sequence[Stage], ttl: float) -> None:
        self._stages = stages
        self._ttl = ttl
        self._listings: dict[str, _Listing] = {}
        self._names = 0
        self._missed: dict[str, tuple[int, float]] = {}
        """Of directories without a listing: how many names were missed since when."""
        self._refused: dict[str, float] = {}
        """Until when."""
        self._wanted: dict[str, None] = {}
        self._wake = trio.Event()
        self._under_way: set[str] = set()
        """Names, without the directory, that changed since the listing under way began."""
        self._listed: str | None = None
        """The directory of the listing under way."""

    def misses(self, name: str) -> bool:
        """Whether no lower stage has *name*, as far as the listings tell. No checkpoint."""
        directory, _, last = name.rpartition("/")
        listing = self._listings.get(directory)
        now = trio.current_time()
        if listing is None or not last or now > listing.began + self._ttl:
            return False
        listing.used_at = now
        return last not in listing.names

    def current(self, directory: str) -> tuple[set[str], float] | None:
        """The names of *directory* below, and until when they are believed; None where they are not known."""
        listing = self._listings.get(directory)
        if listing is None or trio.current_time() > listing.began + self._ttl:
            return None
        return listing.names, listing.began + self._ttl

    def missed(self, name: str) -> None:
        """The stages were asked for *name*, and none had it."""
        directory = parent_of(name)
        if not self._ttl or directory in self._listings or directory == self._listed:
            return
        now = trio.current_time()
        count, since = self._missed.pop(directory, (0, now))
        if now > since + WINDOW:
            count, since = 0, now
        if count + 1 < MISSES:
            if len(self._missed) >= MOST_DIRECTORIES:
                del self._missed[next(iter(self._missed))]
            self._missed[directory] = count + 1, since
        elif self._refused.get(directory, -math.inf) < now and len(self._wanted) < MOST_DIRECTORIES:
            self._wanted[directory] = None
            self._wake.set()

    def forget(self, *names: str) -> None:
        """This mount changes *names* below: what listings say of them counts no more."""
        for name in names:
            directory, _, last = name.rpartition("/")
            listing = self._listings.get(directory)
            if listing is not None and last not in listing.names:
                listing.names.add(last)
                self._names += 1
            if directory == self._listed:
                self._under_way.add(last)

    def forget_all(self) -> None:
        """Directories were renamed."""
        self._listings.clear()
        self._names = 0
        self._listed = None

    async def run(self) -> None:
        """List what is wanted, and again halfway through its time, until nobody asks any more."""
        while True:
            directory = self._next()
            if directory is not None:
                self._wanted.pop(directory, None)
                await self._list(directory)
                continue
            self._wake = trio.Event()
            next_due = min((listing.began for listing in self._listings.values()), default=math.inf) + self._ttl / 2
            with trio.move_on_at(next_due):
                await self._wake.wait()

    def _next(self) -> str | None:
        """A directory to list: one that is wanted, or whose listing is old and was used. Old ones that were not go."""
        if self._wanted:
            return next(iter(self._wanted))
        now = trio.current_time()
        for directory, listing in list(self._listings.items()):
            if now < listing.began + self._ttl / 2:
                continue
            if listing.used_at > listing.began:
                return directory
            self._drop(directory)
        return None

    def _drop(self, directory: str) -> None:
        listing = self._listings.pop(directory, None)
        if listing is not None:
            self._names -= len(listing.names)

    async def _list(self, directory: str) -> None:
        began = trio.current_time()
        self._listed, self._under_way = directory, set()
        names = await self._ask(directory)
        current = self._listed == directory
        self._listed = None
        if names is None or trio.current_time() > began + self._ttl / SHARE:
            self._drop(directory)
            while len(self._refused) >= MOST_DIRECTORIES:
                del self._refused[next(iter(self._refused))]
            self._refused[directory] = began + REFUSED
        elif current and len(self._listings) < MOST_DIRECTORIES:
            self._drop(directory)
            names |= self._under_way
            self._listings[directory] = _Listing(names, began)
            self._names += len(names)

    async def _ask(self, directory: str) -> set[str] | None:
        """All names of *directory* below, None where a stage cannot tell or there are too many."""
        found: set[str] = set()
        there = self._listings.get(directory)
        room = MOST_NAMES - self._names + (len(there.names) if there is not None else 0)
        for stage in self._stages:
            try:
                async with aclosing(cast(AsyncGenerator[Sequence[Entry], None], stage.scan(directory))) as batches:
                    async for batch in batches:
                        found.update(entry.name for entry in batch)
                        if len(found) > room:
                            return None
            except StageError as error:
                log.debug("%s is not listed: %s", directory or "/", error)
                return None
        return found
