"""Names that the relay answers LOOKUP and GETATTR for: those of leased blocks, and those that are not there.

The daemon says what an entry of a leased inode is, and which names a directory has; the relay sees every request that
changes names before the daemon does, and forgets what that is about. So it is never behind what the kernel was told.

What the kernel looked up here the daemon does not know of: FORGET of that is taken off before it is passed on, and what
is left when a lease is recalled is the daemon's to count.

Imported by the relay: only the standard library and wire.py may be needed here.
"""

from __future__ import annotations

import threading
import time
from array import array
from bisect import bisect_left
from zlib import crc32

from ucmfs.fuse import wire

__all__ = ["MISSING", "Entries"]

MISSING = b""
"""What lookup() gives for a name that is not there."""
MOST_DIRECTORIES = 4096
MOST_MORE = 4096
"""Names made in a directory since the daemon told of it."""


class _Directory:
    """`names` are the sorted CRC-32 of its names: one that is not among them is not there. Valid `until`."""

    __slots__ = ("entry", "gone", "more", "names", "until")

    def __init__(self, until: float, entry: bytes, names: array[int]) -> None:
        self.until = until
        self.entry = entry
        self.names = names
        self.more: set[bytes] = set()
        """Names of requests since."""
        self.gone: set[bytes] = set()
        """Names of its that are no more."""


class Entries:
    """All of them. Touched by every thread of the relay, under one lock."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._entries: dict[tuple[int, bytes], bytes] = {}
        """By directory and name."""
        self._of: dict[int, tuple[int, bytes]] = {}
        """By node, the key of its entry."""
        self._directories: dict[int, _Directory] = {}
        self._given: dict[int, int] = {}
        """By node, how often it was looked up here and not forgotten since."""

    def grant(self, node: int, directory: int, name: bytes, entry: bytes) -> None:
        """Answer LOOKUP of *name* in *directory* with *entry*, which is of *node*."""
        with self._lock:
            self._drop(node)
            self._of[node] = directory, name
            self._entries[directory, name] = entry

    def list(self, directory: int, until: float, entry: bytes, names: array[int]) -> None:
        """Until then (of time.monotonic) *directory*, with *entry*, has *names* (sorted CRC-32) and no others."""
        with self._lock:
            if directory not in self._directories and len(self._directories) >= MOST_DIRECTORIES:
                del self._directories[next(iter(self._directories))]
            self._directories[directory] = _Directory(until, entry, names)

    def recall(self, node: int) -> int:
        """Answer nothing of *node* any more, nor of what is in it. Gives how often the kernel looked it up here."""
        with self._lock:
            self._drop(node)
            return self._given.pop(node, 0)

    def change(self, node: int) -> None:
        """The attributes of *node* change."""
        with self._lock:
            self._drop(node)

    def _drop(self, node: int) -> None:
        self._directories.pop(node, None)
        key = self._of.pop(node, None)
        if key is not None:
            self._entries.pop(key, None)

    def changes(self, request: bytes | memoryview) -> None:
        """*request*, of wire.CHANGES, is on its way to the daemon, and not answered yet."""
        with self._lock:
            if self._entries or self._directories:
                for directory, name in wire.names_changed(request):
                    self._entries.pop((directory, name), None)
                    there = self._directories.get(directory)
                    if there is not None:
                        there.more.add(name)
                        there.gone.discard(name)
                        if len(there.more) > MOST_MORE:
                            del self._directories[directory]

    def gone(self, directory: int, name: bytes) -> None:
        """*name* is not in *directory* any more, as the reply that follows tells the kernel too."""
        with self._lock:
            there = self._directories.get(directory)
            if there is not None and len(there.gone) < MOST_MORE:
                there.more.discard(name)
                there.gone.add(name)

    def lookup(self, directory: int, name: bytes) -> bytes | None:
        """The body of the reply to a LOOKUP, MISSING, or None where the daemon must answer."""
        with self._lock:
            entry = self._entries.get((directory, name))
            if entry is not None:
                (node,) = wire.NODE.unpack_from(entry)
                self._given[node] = self._given.get(node, 0) + 1
                return entry
            there = self._directories.get(directory)
            if there is None or name in there.more:
                return None
            if time.monotonic() > there.until:
                del self._directories[directory]
                return None
            if name in there.gone:
                return MISSING
            code = crc32(name)
            at = bisect_left(there.names, code)
            return None if at < len(there.names) and there.names[at] == code else MISSING

    def attributes(self, node: int) -> bytes | None:
        """The body of the reply to a GETATTR of *node*, or None where the daemon must answer.

        A directory's times may be as old as its list is.
        """
        with self._lock:
            key = self._of.get(node)
            entry = None if key is None else self._entries.get(key)
            there = self._directories.get(node)
            if there is not None and time.monotonic() <= there.until:
                entry = there.entry
        return None if entry is None else wire.attributes_of(entry)

    def forget(self, request: memoryview) -> bytes | memoryview | None:
        """What the daemon is to be told of *request*, a FORGET or BATCH_FORGET; None if nothing."""
        with self._lock:
            if not self._given:
                return request
            rows = [(node, count - self._take(node, count)) for node, count in wire.forgotten(request)]
        return wire.pack_forget(request, [row for row in rows if row[1]])

    def _take(self, node: int, count: int) -> int:
        given = self._given.get(node, 0)
        taken = min(given, count)
        if given > taken:
            self._given[node] = given - taken
        else:
            self._given.pop(node, None)
        return taken

    def hand_over(self) -> dict[int, int]:
        """The daemon is dead: the next one tells anew. Gives how often each node was looked up here."""
        with self._lock:
            given, self._given = self._given, {}
            self._entries.clear()
            self._of.clear()
            self._directories.clear()
            return given
