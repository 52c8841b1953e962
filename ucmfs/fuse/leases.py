"""Leases, the relay's side: opens that need no daemon.

The daemon leases an inode with the backing id of its file. While the lease stands, the relay answers read-only OPENs of
the inode by itself, and RELEASEs of what it opened; the daemon is told the counts. A lease ends when the daemon recalls
it and nothing that was opened under it is open any more.

Imported by the relay: only the standard library and wire.py may be needed here.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping

from ucmfs.fuse import wire

__all__ = ["Lease", "Leases"]

_MARK = 1 << 63
"""Set in the file handles of the relay."""
_FLAGS = wire.FOPEN_PASSTHROUGH | wire.FOPEN_NOFLUSH


class Lease:
    """`hits` are opens that the daemon was not told of yet, `opens` the handles there are now."""

    __slots__ = ("backing", "hits", "node", "opens", "recalled", "serial", "told")

    def __init__(self, node: int, backing: int, serial: int) -> None:
        self.node = node
        self.backing = backing
        self.serial = serial
        self.opens = 0
        self.hits = 0
        self.recalled = False
        self.told = True
        """Whether the daemon knows all this."""


class Leases:
    """All of them. Touched by every thread of the relay, under one lock."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._standing: dict[int, Lease] = {}
        """By node; those that still answer."""
        self._open: dict[int, Lease] = {}
        """By serial number; those that stand or have something open."""
        self._next = 1

    def grant(self, node: int, backing: int) -> None:
        """Answer opens of *node* with *backing* from now on."""
        with self._lock:
            if node not in self._standing:
                while self._next in self._open:
                    self._next = self._next % wire.OUR_HALF + 1
                lease = Lease(node, backing, self._next)
                self._standing[node] = self._open[lease.serial] = lease
                self._next = self._next % wire.OUR_HALF + 1

    def recall(self, node: int, lookups: int) -> bytes:
        """Answer no opens of *node* any more; give what the daemon is to be told, with *lookups*."""
        with self._lock:
            lease = self._standing.pop(node, None)
            if lease is None:
                # Of none, all is over.
                return wire.pack_report([(node, 0, 0, lookups, True)])
            lease.recalled = True
            return wire.pack_report([self._tell(lease, lookups)])

    def open(self, node: int, flags: int) -> bytes | None:
        """The body of the reply to an OPEN of *node*, or None where the daemon must answer."""
        with self._lock:
            lease = self._standing.get(node)
            if lease is None or flags & (os.O_ACCMODE | os.O_TRUNC):
                return None
            lease.opens += 1
            lease.hits += 1
            lease.told = False
            return wire.OPEN_OUT.pack(_MARK | lease.backing << 32 | lease.serial, _FLAGS, lease.backing)

    def release(self, fh: int) -> tuple[bool, bytes | None]:
        """Whether *fh* was opened here, and closed now; and what the daemon is to be told, if it waits for that."""
        if not fh & _MARK:
            return False, None
        with self._lock:
            lease = self._open.get(fh & wire.OUR_HALF)
            if lease is not None:
                lease.opens -= 1
                lease.told = False
                if lease.recalled and not lease.opens:
                    return True, wire.pack_report([self._tell(lease)])
            return True, None

    def news(self) -> list[bytes]:
        """All that the daemon was not told yet."""
        with self._lock:
            rows = [self._tell(lease) for lease in list(self._open.values()) if not lease.told]
        most = wire.MOST_REPORTED
        return [wire.pack_report(rows[at : at + most]) for at in range(0, len(rows), most)]

    def hand_over(self, lookups: Mapping[int, int]) -> list[wire.Reported]:
        """The daemon is dead: recall all leases. What was opened under them stays open, and is told to the next.

        So are *lookups*, by node.
        """
        with self._lock:
            self._standing.clear()
            rows = []
            for lease in list(self._open.values()):
                lease.recalled = True
                rows.append(self._tell(lease))
        return rows + [(node, 0, 0, count, True) for node, count in lookups.items()]

    def _tell(self, lease: Lease, lookups: int = 0) -> wire.Reported:
        row = (lease.node, lease.hits, lease.opens, lookups, lease.recalled)
        lease.hits = 0
        lease.told = True
        if lease.recalled and not lease.opens:
            self._open.pop(lease.serial, None)
        return row
