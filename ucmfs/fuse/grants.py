"""Leases, the daemon's side: which inodes the relay opens by itself (leases.py is the relay's side).

A leased inode keeps its file open here and its backing id in the kernel until the relay says that the lease is over:
recalled, and nothing open any more. So a leased block is not evicted; leases are bounded for that, and given back when
they are not used, or when room is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import trio

from ucmfs.fuse import wire

if TYPE_CHECKING:
    from ucmfs.fuse.inodes import Inode

__all__ = ["Grant", "Grants"]

MOST = 1024
"""Leases at a time."""
SHARE = 4
"""Leased blocks take at most one part in so many of the Cache's capacity."""
IDLE = 2.0
"""Seconds without an open after which a lease is given back."""


class Grant:
    """One lease. `opens` is what the relay last said, so that it may be more by now unless `returned` is set."""

    __slots__ = ("inode", "opens", "recalled", "returned", "size", "used_at")

    def __init__(self, inode: Inode, size: int) -> None:
        self.inode = inode
        self.size = size
        self.opens = 0
        self.recalled = False
        self.returned = trio.Event()
        """The relay opens it no more."""
        self.used_at = trio.current_time()


class Grants:
    """All leases of a mount.

    *send* puts a message among the daemon's replies, False if it cannot now. *over* is called for an inode whose lease
    is over, *hit* with the number of opens that the relay answered. Touched on the trio loop only.
    """

    def __init__(
        self,
        send: Callable[[bytes], bool],
        sync: Callable[[], None],
        capacity: int,
        *,
        over: Callable[[Inode], None],
        hit: Callable[[int], None],
    ) -> None:
        self._send = send
        self._sync = sync
        self._most_bytes = capacity // SHARE
        self._over = over
        self._hit = hit
        self._grants: dict[int, Grant] = {}
        """By inode number, the longest unused first as far as reports tell."""
        self._bytes = 0
        self._new: list[Grant] = []
        self._synced: trio.Event | None = None
        self._closed = False

    @property
    def opens(self) -> int:
        """Handles of the relay, as far as it said."""
        return sum(grant.opens for grant in self._grants.values())

    def give(self, inode: Inode, size: int) -> None:
        """Lease *inode*, of *size* bytes, unless it is too large. To be sent by send_new()."""
        if inode.lease is not None or size > self._most_bytes or self._closed:
            return
        grant = self._add(inode, size)
        self._new.append(grant)

    def _add(self, inode: Inode, size: int) -> Grant:
        grant = inode.lease = Grant(inode, size)
        self._grants[inode.number] = grant
        self._bytes += size
        return grant

    def restore(self, inode: Inode, size: int, opens: int) -> None:
        """A daemon before this one leased *inode*, which is recalled, but *opens* handles are still open."""
        grant = self._add(inode, size)
        grant.opens = opens
        grant.recalled = True
        grant.returned.set()

    def send_new(self) -> None:
        """Tell the relay of leases given since the last call; to be called once the journal knows of their inodes."""
        for grant in self._new:
            inode = grant.inode
            if grant.recalled:
                continue
            if not self._send(wire.lease_message(wire.GRANT, inode.number, inode.backing)):
                self._end(grant)
        self._new.clear()
        excess = len(self._grants) - MOST
        for grant in list(self._grants.values()) if excess > 0 or self._bytes > self._most_bytes else ():
            if excess <= 0 and self._bytes_standing() <= self._most_bytes:
                break
            if not grant.recalled:
                self.recall(grant.inode)
                excess -= 1

    def _bytes_standing(self) -> int:
        return sum(grant.size for grant in self._grants.values() if not grant.recalled)

    def recall(self, inode: Inode) -> None:
        """Have *inode* opened by the daemon only, from before the next reply on."""
        grant = inode.lease
        if grant is None or grant.recalled or self._closed:
            return
        grant.recalled = True
        if grant in self._new:
            self._new.remove(grant)
            self._end(grant)
        elif not self._send(wire.lease_message(wire.RECALL, inode.number)):
            # The relay is gone, or reads nothing: then it answers nothing either.
            grant.recalled = False

    async def take_back(self, inode: Inode) -> None:
        """recall(), and wait until the relay opens *inode* no more; what is open stays open."""
        grant = inode.lease
        if grant is not None and not self._closed:
            self.recall(inode)
            await grant.returned.wait()

    def recall_all(self) -> None:
        """Room is needed."""
        for grant in list(self._grants.values()):
            self.recall(grant.inode)

    def recall_idle(self) -> None:
        """Give back what nobody opened for a while."""
        now = trio.current_time()
        for grant in list(self._grants.values()):
            if not grant.opens and now - grant.used_at > IDLE:
                self.recall(grant.inode)

    def heard(self, report: Iterable[wire.Reported]) -> None:
        """What the relay says."""
        for number, hits, opens, recalled in report:
            self._hit(hits)
            grant = self._grants.get(number)
            if grant is None:
                continue
            grant.opens = opens
            if hits:
                grant.used_at = trio.current_time()
                self._grants[number] = self._grants.pop(number)
            if recalled:
                grant.recalled = True
                grant.returned.set()
                if not opens:
                    self._end(grant)

    def _end(self, grant: Grant) -> None:
        grant.returned.set()
        del self._grants[grant.inode.number]
        self._bytes -= grant.size
        grant.inode.lease = None
        self._over(grant.inode)

    async def sync(self) -> None:
        """Hear all that the relay counted so far, and of every lease that was recalled."""
        if self._closed:
            return
        if self._synced is None:
            self._synced = trio.Event()
            self._sync()
        await self._synced.wait()
        for grant in [grant for grant in self._grants.values() if grant.recalled]:
            await grant.returned.wait()

    def synced(self) -> None:
        if self._synced is not None:
            self._synced.set()
            self._synced = None

    def close(self) -> None:
        """The relay is gone or the mount is over: nobody waits for it, and nothing is sent any more."""
        self._closed = True
        for grant in list(self._grants.values()):
            grant.returned.set()
        self.synced()
