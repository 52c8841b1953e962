"""Leases, the daemon's side: which inodes the relay opens by itself (leases.py is the relay's side).

A leased inode keeps its file open here and its backing id in the kernel until the relay says that the lease is over:
recalled, and nothing open any more. So a leased block is not evicted; leases are bounded for that, and given back when
they are not used, or when room is needed.
"""

from __future__ import annotations

import time
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
IDLE = 5.0
"""Seconds without an open after which a lease is given back."""


_NOT_LISTED = 0.0, False


class Grant:
    """One lease. `opens` is what the relay last said, so that it may be more by now unless `returned` is set."""

    __slots__ = ("inode", "opens", "recalled", "returned", "sent", "size", "used_at")

    def __init__(self, inode: Inode, size: int) -> None:
        self.inode = inode
        self.size = size
        self.opens = 0
        self.sent = False
        """Whether the relay was told of it."""
        self.recalled = False
        self.returned = trio.Event()
        """The relay opens it no more."""
        self.used_at = trio.current_time()


class Grants:
    """All leases of a mount.

    *send* puts a message among the daemon's replies, False if it cannot now. *named* gives what the relay may answer a
    LOOKUP of an inode with. *over* is called for an inode whose lease is over, *hit* with the number of opens that the
    relay answered, *looked_up* with lookups of an inode that it leaves to us to count. Touched on the trio loop only.
    """

    def __init__(
        self,
        send: Callable[[bytes], bool],
        sync: Callable[[], None],
        capacity: int,
        *,
        named: Callable[[Inode], wire.Named | None],
        over: Callable[[Inode], None],
        hit: Callable[[int], None],
        looked_up: Callable[[Inode, int], None],
    ) -> None:
        self._send = send
        self._sync = sync
        self._most_bytes = capacity // SHARE
        self._named = named
        self._over = over
        self._hit = hit
        self._looked_up = looked_up
        self._grants: dict[int, Grant] = {}
        """By inode number, the longest unused first as far as reports tell."""
        self._bytes = 0
        self._new: list[Grant] = []
        self._listed: dict[int, tuple[float, bool]] = {}
        """By directory, until when (of trio's clock) the names that were last looked through are known, and whether the
        relay has them until then. They may be too many."""
        self._unlisted: dict[int, trio.Event] = {}
        self._synced: trio.Event | None = None
        self._closed = False

    def __len__(self) -> int:
        return len(self._grants)

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

    def renew(self, inode: Inode) -> None:
        """The name or the attributes of *inode* changed: if it is leased, tell the relay with the next send_new()."""
        grant = inode.lease
        if grant is not None and not grant.recalled and grant not in self._new:
            self._new.append(grant)

    def restore(self, inode: Inode, size: int, opens: int) -> None:
        """A daemon before this one leased *inode*, which is recalled, but *opens* handles are still open."""
        grant = self._add(inode, size)
        grant.opens = opens
        grant.sent = grant.recalled = True
        grant.returned.set()

    def send_new(self) -> None:
        """Tell the relay of leases given since the last call; to be called once the journal knows of their inodes."""
        for grant in self._new:
            inode = grant.inode
            if grant.recalled:
                continue
            if not self._send(wire.lease_message(wire.GRANT, inode.number, inode.backing, self._named(inode))):
                if not grant.sent:
                    self._end(grant)
            else:
                grant.sent = True
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
        if not grant.sent:
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
        for number, hits, opens, lookups, recalled in report:
            self._hit(hits)
            grant = self._grants.get(number)
            if grant is None:
                unlisted = self._unlisted.pop(number, None)
                if unlisted is not None:
                    unlisted.set()
                continue
            grant.opens = opens
            if lookups:
                self._looked_up(grant.inode, lookups)
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

    # Names that are not there

    @property
    def listed(self) -> int:
        """How many directories the relay has all names of."""
        now = trio.current_time()
        return sum(told and until >= now for until, told in self._listed.values())

    def is_listed(self, directory: Inode, until: float) -> bool:
        """Whether list_names() was called for what is known of *directory* until then."""
        return self._closed or self._listed.get(directory.number, _NOT_LISTED)[0] >= until

    def list_names(self, directory: Inode, until: float, entry: bytes, names: Iterable[bytes] | None) -> None:
        """Have the relay say of all names but *names*, until then, that they are not in *directory*; None: too many.

        *entry* is what is told of the directory itself, for whoever looks for a name asks for that too.
        """
        told = False
        if names is not None:
            clock = time.monotonic() - trio.current_time()
            told = self._send(wire.list_message(directory.number, until + clock, entry, names))
        while len(self._listed) >= MOST:
            del self._listed[next(iter(self._listed))]
        self._listed[directory.number] = until, told

    def name_gone(self, directory: Inode, name: bytes) -> None:
        """*name* is not in *directory* any more, to nobody."""
        until, told = self._listed.get(directory.number, _NOT_LISTED)
        if told and until >= trio.current_time() and not self._closed:
            # Where it cannot be sent, we are asked once more than needed.
            self._send(wire.gone_message(directory.number, name))

    async def unlist_names(self, directory: Inode) -> None:
        """Names are made in *directory* past the relay: wait until it says of none any more that it is not there."""
        until, told = self._listed.pop(directory.number, _NOT_LISTED)
        if not told or until < trio.current_time() or self._closed:
            return
        unlisted = self._unlisted.setdefault(directory.number, trio.Event())
        if self._send(wire.lease_message(wire.RECALL, directory.number)):
            await unlisted.wait()

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
        for unlisted in self._unlisted.values():
            unlisted.set()
        self.synced()
