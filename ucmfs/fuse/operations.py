"""The FUSE handlers: from the kernel's requests to the pipeline's operations, and no more than that.

What the mount promises to those who write, beyond POSIX:

- A file being written at a final name is seen by the processes that write it and their children. For everybody
  else the name is what it was before, until the last writable close publishes it whole.
- open(O_TRUNC) begins a version of the opener's own and never touches the bytes of others: the opener is told to look
  again (ESTALE, which the kernel does by itself) and finds an inode of its own. Locks (`*.lock`) are shared instead.
- Writing to a published block without O_TRUNC changes a copy, which replaces the block at the last writable close. Who
  opens it for writing meanwhile changes the same copy.
- A file whose last writable close comes from a process that a signal ends is dropped, and so is one that has a hole
  where a write got an error.
"""

from __future__ import annotations

import errno
import functools
import logging
import os
import stat
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import suppress
from typing import Any, Concatenate, ParamSpec, TypeVar

import msgspec
import pyfuse3
import trio

from ucmfs.block import (
    OWN_XATTRS,
    Attributes,
    Changes,
    check_name,
    child_of,
    looks_like_lock,
    looks_temporary,
    parent_of,
)
from ucmfs.errors import BlockExists, BlockNotFound, UcmfsError
from ucmfs.fuse import wire
from ucmfs.fuse.grants import Grants
from ucmfs.fuse.inodes import STAT_BLOCK, Handle, Inode, Inodes, Writing, entry_attributes
from ucmfs.fuse.journal import Gone, InodeRecord, Journal, ListingRecord, Recalled, Record, VirtualRecord
from ucmfs.fuse.passthrough import Backing
from ucmfs.fuse.process import lineage, process_of
from ucmfs.fuse.virtual import DIRECTORY_NAME, Virtual
from ucmfs.pipeline.pipeline import Pipeline
from ucmfs.stages.base import Entry
from ucmfs.stages.cache import Cached, OpenBlock, Staging

__all__ = ["Operations"]

log = logging.getLogger(__name__)

P = ParamSpec("P")
R = TypeVar("R")

RECHECK = 0.02
"""Seconds between looks whether what was closed is still mapped."""
JUST_NOW = 1.0
"""Seconds after which what is still mapped will be so for longer."""
ATTRIBUTES_TTL = 3600.0
"""Seconds that the kernel may believe the attributes of a block's inode: it is one version, and who changes it does
so through the kernel. How long a name may be believed to have that version is `consistency_ttl`."""
SETTLE_WAIT = 0.25
"""Seconds that a lookup waits for a block whose writer closed it, where the kernel is late to say it was the last."""


def handler(
    method: Callable[Concatenate[Operations, P], Coroutine[Any, Any, R]],
) -> Callable[Concatenate[Operations, P], Coroutine[Any, Any, R]]:
    """The one wrapper of all handlers: whatever goes wrong, the caller gets an errno and the mount goes on."""

    @functools.wraps(method)
    async def wrapped(self: Operations, /, *args: P.args, **kwargs: P.kwargs) -> R:
        try:
            if self._closed:
                self._publish_closed(eagerly=True)
            return await method(self, *args, **kwargs)
        except pyfuse3.FUSEError:
            raise
        except UcmfsError as error:
            if not isinstance(error, (BlockNotFound, BlockExists)):
                log.info("%s: %s", method.__name__, error)
            raise pyfuse3.FUSEError(error.errno or errno.EIO) from error
        except OSError as error:
            log.warning("%s: %s", method.__name__, error)
            raise pyfuse3.FUSEError(error.errno or errno.EIO) from error
        except Exception as error:
            log.exception("unexpected error in %s", method.__name__)
            self.pipeline.counters.unexpected += 1
            raise pyfuse3.FUSEError(errno.EIO) from error
        finally:
            # Before the answer is sent.
            self.commit()

    return wrapped


class _Listing:
    """An open directory: the stream of its entries, and the one that did not fit in the last reply."""

    def __init__(self, inode: Inode) -> None:
        self.inode = inode
        self.position = 0
        self.batches: AsyncGenerator[Sequence[Entry], None] | None = None
        self.batch: Sequence[Entry] = ()
        self.at = 0

    async def close(self) -> None:
        """Let go of the stream."""
        if self.batches is not None:
            await self.batches.aclose()


class Operations(pyfuse3.Operations):
    """The handlers of one mount."""

    supports_dot_lookup = False
    enable_writeback_cache = False

    def __init__(
        self, pipeline: Pipeline, virtual: Virtual, send: Callable[[bytes], bool], sync: Callable[[], None]
    ) -> None:
        """*send* and *sync* reach the relay; see Grants."""
        super().__init__()
        self.pipeline = pipeline
        self.virtual = virtual
        self.backing: Backing | None = None
        """Set where the kernel may be told to read published blocks by itself."""
        self.inodes = Inodes(lambda inode: self.grants.recall(inode))
        self.grants = Grants(
            send,
            sync,
            pipeline.cache.capacity,
            named=self.entry_of,
            over=self.lease_over,
            hit=self.hit,
            looked_up=self.inodes.looked_up,
        )
        pipeline.room.on_pressure = self.grants.recall_all
        self._journal: Journal | None = None
        self._repeated: Counter[tuple[int, int, int, tuple[bytes, ...]]] = Counter()
        """Requests of wire.ONCE that are asked again, and that an earlier daemon may have done."""
        self._ttl = pipeline.options.consistency_ttl
        pipeline.ahead.on_full = self._doubt
        self._listings: dict[int, _Listing] = {}
        self._next_listing = 1
        self._closed: dict[Inode, float] = {}
        """Closed by their writers, and when; to be published when the kernel says that nobody can write them."""
        self._any_closed = trio.Event()
        self._dropped: list[int] = []
        """Backing ids to close with the next commit: the next daemon believes what the journal says."""
        self._changed_opens: list[Record] = []
        """What opened or closed of directories and of `.ucmfs/` since the last commit."""

    # One daemon after the other

    def commit(self) -> None:
        """Put what changed into the journal."""
        changes = self.inodes.changes()
        if self._changed_opens:
            changes += self._changed_opens
            self._changed_opens.clear()
        if changes and self._journal is not None:
            self._journal.write(changes)
            if self._journal.is_long:
                self._journal.begin(self._snapshot())
        self._close_dropped()
        self.grants.send_new()

    def _snapshot(self) -> Iterator[Record]:
        yield from self.inodes.snapshot()
        for number, listing in self._listings.items():
            yield ListingRecord(number, listing.inode.number)
        for number, inode in self.virtual.opened():
            yield VirtualRecord(number, inode)

    def begin(self, journal: Journal) -> None:
        """From now on what changes goes into *journal*. To be called before the kernel asks anything."""
        self._journal = journal
        journal.begin(self._snapshot())
        self._close_dropped()

    async def recover(
        self, recalled: Recalled, handles: Set[int], leased: Iterable[wire.Reported], repeated: Iterable[bytes]
    ) -> None:
        """Go on where the daemon before ended, once the pipeline runs, whose Cache kept `recalled.files()`.

        *handles* are those that the kernel has: what was opened and never answered is undone. *leased* is what the
        relay opened, *repeated* are the requests of wire.ONCE that will be asked again.
        """
        inodes = self.inodes
        inodes.restore_numbers(recalled.numbers)
        blocks = self.pipeline.cache.by_file()
        opens = {number: count for number, _, count, _, _ in leased if count}
        lookups = {number: count for number, _, _, count, _ in leased if count}
        self.hit(sum(hits for _, hits, _, _, _ in leased))
        for record in recalled.inodes.values():
            kept = []
            for handle in recalled.handles.get(record.number, ()):
                if handle.number in handles:
                    kept.append(handle)
                elif handle.created:
                    record = msgspec.structs.replace(record, lookups=record.lookups - 1)
            if record.number != pyfuse3.ROOT_INODE:
                inode = inodes.restore(record, kept)
                inode.lookups += lookups.get(record.number, 0)
                if record.number in opens:
                    self.grants.restore(inode, record.size, opens[record.number])
                await self._reopen(inode, record, blocks)
        for listing in recalled.listings.values():
            with suppress(pyfuse3.FUSEError):
                self._listings[listing.number] = _Listing(self._listed(listing.inode))
            self._next_listing = max(self._next_listing, listing.number + 1)
        for virtual in recalled.virtuals.values():
            if virtual.number in handles:
                self.virtual.reopen(virtual.number, virtual.inode)
        for request in repeated:
            _, opcode, _, node, _, _, pid, *_ = wire.IN_HEADER.unpack_from(request)
            self._repeated[opcode, node, pid, wire.names_in(request)] += 1
        if self.backing is not None and self.pipeline.cache.lock is not None:
            known = {inode.backing for inode in inodes}
            self.backing.close_lost(self.pipeline.cache.lock, known)
        self.pipeline.cache.drop_leftovers()

    async def _reopen(self, inode: Inode, record: InodeRecord, blocks: Mapping[int, Cached]) -> None:
        """Open again what *inode* had open."""
        cache = self.pipeline.cache
        self._drop_backing(inode)
        if record.writing is not None:
            staging = cache.reopen_staging(record.writing.file, writable=not record.writing.by_kernel)
            if staging is not None:
                writing = Writing.of(record.writing, staging)
                self.inodes.restore_writing(inode, writing)
                if writing.by_kernel:
                    writing.doubtful |= cache.was_full
                    self.pipeline.ahead.resume(staging)
                if writing.closed:
                    self._await_close(inode)
                elif not inode.writers and inode.lookups <= 0 and writing.claimed:
                    # The answer to CREATE was never given: it is asked again.
                    self._drop_writing(inode)
                elif not inode.writers:
                    # Nor was that to OPEN, but its inode is known.
                    writing.claimed = False
            elif record.writing.file not in blocks:
                log.error("%s: lost: what was written is not in the cache's directory", inode.name)
                self.inodes.detach(inode)
            else:
                # It was published, and the daemon died before it could say so.
                block = blocks[record.writing.file]
                self.inodes.restore_published(
                    inode, block.attributes, is_current=block.retired is None, by_kernel=record.writing.by_kernel
                )
        if (inode.handles or inode.lease is not None) and inode.writing is None:
            file = record.file or (record.writing.file if record.writing is not None else 0)
            inode.file = await self._reopen_file(inode, file, blocks)
        self.inodes.settle(inode)

    async def _reopen_file(self, inode: Inode, file: int, blocks: Mapping[int, Cached]) -> OpenBlock | None:
        cache = self.pipeline.cache
        if file in blocks:
            return cache.open_block(blocks[file])
        staging = cache.reopen_staging(file) if file else None
        if staging is not None:
            return self._open_abandoned(staging, inode.attributes)
        try:
            found = await self.pipeline.open(inode.name)
        except UcmfsError as error:
            log.warning("%s: cannot be opened again: %s", inode.name, error)
            return None
        if found.attributes.version == inode.attributes.version:
            return found
        found.close()
        log.warning("%s: cannot be opened again: it was replaced", inode.name)
        return None

    def _open_abandoned(self, staging: Staging, attributes: Attributes) -> OpenBlock:
        """For readers of what will never be published; its room is theirs until they close."""
        label = self.pipeline.cache.label
        return OpenBlock(staging.fd, attributes, label, lambda fd: self.pipeline.abandon(staging), file=staging.file)

    def _is_repeated(self, opcode: int, node: int, ctx: pyfuse3.RequestContext, *names: bytes) -> bool:
        """Whether this request was asked of the daemon before, which may have done it.

        The kernel found the name there (or not there, to be made) and keeps its directory locked until the answer:
        if it is otherwise now, then because it was done. An xattr was not looked for, but to find none is as good.
        """
        key = (opcode, node, ctx.pid, names)
        if not self._repeated[key]:
            del self._repeated[key]
            return False
        self._repeated[key] -= 1
        return True

    # Leases

    def hit(self, count: int) -> None:
        """The relay opened blocks so many times."""
        self.pipeline.counters.hits += count

    def lease_over(self, inode: Inode) -> None:
        """The relay has nothing of *inode* open any more, and opens it no more."""
        self._let_go(inode)
        self.commit()

    async def take_back(self, path: str) -> None:
        """Have the published block *path* opened by nobody but this daemon."""
        inode = self.inodes.named(path)
        if inode is not None:
            await self.grants.take_back(inode)

    # Names

    def _path(self, parent: int, name: bytes) -> str:
        directory = self.inodes.get(parent)
        if directory.orphan:
            raise pyfuse3.FUSEError(errno.ENOENT)
        return check_name(child_of(directory.name, os.fsdecode(name)))

    def _refuse_virtual(self, parent: int, *names: bytes) -> None:
        """`.ucmfs` and what is in it are not for changing."""
        if self.virtual.owns(parent) or (parent == pyfuse3.ROOT_INODE and DIRECTORY_NAME in names):
            raise pyfuse3.FUSEError(errno.EPERM)

    async def _writing(self, path: str, pid: int) -> Inode | None:
        """The inode being written under *path* that thread *pid* may see; waits for one about to be published."""
        inodes = self.inodes.written(path)
        if not inodes:
            return None
        family = set(lineage(pid))
        for inode in reversed(inodes):
            writing = inode.writing
            if writing is not None and writing.is_seen_by(family):
                return inode
        for inode in list(inodes):
            if inode.writing is not None and not inode.writing.claimed:
                self._drop_unclaimed(inode)
            elif inode.writing is not None and self.inodes.is_flushed(inode):
                with trio.move_on_after(SETTLE_WAIT):
                    await inode.writing.settled.wait()
        return None

    async def _find(self, path: str, pid: int) -> Inode:
        """The inode that *path* is to thread *pid*. Raises BlockNotFound."""
        inode = await self._writing(path, pid)
        if inode is not None:
            return inode
        attributes = self.pipeline.peek(path)
        if attributes is None:
            [attributes] = await self.pipeline.lookup([path])
        if attributes is not None:
            return self.inodes.bind(path, attributes)
        others = self.inodes.written(path)
        if others and (looks_temporary(path) or looks_like_lock(path)):
            # Nobody takes it for a block, and who shares it has to find it.
            return others[-1]
        raise BlockNotFound(path)

    def _entry(self, inode: Inode) -> pyfuse3.EntryAttributes:
        """What the kernel is told of *inode*; for how long it may believe it."""
        attributes = inode.attributes
        # What is being replaced is asked for again each time: the new version counts from the writer's close on.
        ttl = 0 if self.inodes.written(inode.name) else self._ttl
        if inode.writing is not None:
            attributes = inode.writing.staging.attributes()
            ttl = 0
        entry = entry_attributes(inode.number, attributes, ttl)
        if not inode.is_directory:
            entry.attr_timeout = ATTRIBUTES_TTL
        if inode.orphan:
            entry.st_nlink = 0
        return entry

    @handler
    async def lookup(self, parent: int, name: bytes, ctx: pyfuse3.RequestContext) -> pyfuse3.EntryAttributes:
        if self.virtual.owns(parent) or (parent == pyfuse3.ROOT_INODE and name == DIRECTORY_NAME):
            return self.virtual.lookup(parent, name)
        path = self._path(parent, name)
        try:
            inode = await self._find(path, ctx.pid)
        except BlockNotFound:
            self._tell_names(self.inodes.get(parent))
            raise
        self.inodes.looked_up(inode)
        return self._entry(inode)

    def _tell_names(self, directory: Inode) -> None:
        """A name is missed in *directory*: have the relay answer for the next ones, where all names are known."""
        if directory.orphan:
            return
        until = self.pipeline.known_until(directory.name)
        if until is None or self.grants.is_listed(directory, until):
            return
        names = self.pipeline.names_in(directory.name)
        if names is not None:
            prefix = child_of(directory.name, "")
            names.update(name[len(prefix) :] for name in self.inodes.written_in(directory.name))
            if directory.number == pyfuse3.ROOT_INODE:
                names.add(os.fsdecode(DIRECTORY_NAME))
        encoded = None if names is None else map(os.fsencode, names)
        self.grants.list_names(directory, until, self._pack_entry(directory), encoded)

    def entry_of(self, inode: Inode) -> wire.Named | None:
        """The entry of a leased inode, as the relay may give it."""
        parent, _, name = inode.name.rpartition("/")
        directory = self.inodes.named(parent)
        if directory is None or self.inodes.named(inode.name) is not inode:
            return None
        return directory.number, os.fsencode(name), self._pack_entry(inode)

    def _pack_entry(self, inode: Inode) -> bytes:
        attributes = self.pipeline.peek(inode.name) or inode.attributes
        return wire.pack_entry(
            inode.number,
            self._ttl,
            self._ttl if attributes.is_directory else ATTRIBUTES_TTL,
            size=attributes.size,
            times=(attributes.atime_ns, attributes.mtime_ns, attributes.mtime_ns),
            mode=attributes.mode,
            links=2 if attributes.is_directory else 1,
            uid=attributes.uid,
            gid=attributes.gid,
            block=STAT_BLOCK,
        )

    async def forget(self, inode_list: Sequence[tuple[int, int]]) -> None:
        for number, lookups in inode_list:
            self.inodes.forget(number, lookups)
        self.commit()

    @handler
    async def getattr(self, number: int, ctx: pyfuse3.RequestContext) -> pyfuse3.EntryAttributes:
        if self.virtual.owns(number):
            return self.virtual.attributes(number)
        inode = self.inodes.get(number)
        if inode.writing is None and not inode.orphan:
            await self._refresh(inode)
        return self._entry(inode)

    async def _refresh(self, inode: Inode) -> None:
        attributes = self.pipeline.peek(inode.name)
        if attributes is None:
            [attributes] = await self.pipeline.lookup([inode.name])
        if attributes is None:
            if inode.file is None and not inode.is_directory:
                raise pyfuse3.FUSEError(errno.ENOENT)
        elif inode.is_directory or attributes.version == inode.attributes.version:
            inode.attributes = attributes

    # Attributes

    @handler
    async def setattr(
        self,
        number: int,
        attr: pyfuse3.EntryAttributes,
        fields: pyfuse3.SetattrFields,
        fh: int | None,
        ctx: pyfuse3.RequestContext,
    ) -> pyfuse3.EntryAttributes:
        if self.virtual.owns(number):
            raise pyfuse3.FUSEError(errno.EPERM)
        inode = self.inodes.get(number)
        if fields.update_size:
            await self._truncate(inode, attr.st_size)
        changes = Changes(
            mode=stat.S_IMODE(attr.st_mode) if fields.update_mode else None,
            uid=attr.st_uid if fields.update_uid else None,
            gid=attr.st_gid if fields.update_gid else None,
            atime_ns=attr.st_atime_ns if fields.update_atime else None,
            mtime_ns=attr.st_mtime_ns if fields.update_mtime and not fields.update_size else None,
        )
        if changes != Changes():
            await self._change(inode, changes)
        return self._entry(inode)

    async def _change(self, inode: Inode, changes: Changes) -> None:
        if inode.writing is not None:
            self.pipeline.change_staging(inode.writing.staging, changes)
            return
        if inode.orphan:
            return
        await self.pipeline.update(inode.name, changes)
        await self._adopt_version(inode)

    async def _adopt_version(self, inode: Inode) -> None:
        """Its times changed, its bytes did not: it is still the same inode."""
        [attributes] = await self.pipeline.lookup([inode.name])
        if attributes is not None:
            inode.attributes = attributes
            self.inodes.touch(inode)
        self.grants.renew(inode)

    async def _truncate(self, inode: Inode, size: int) -> None:
        if inode.is_directory:
            raise pyfuse3.FUSEError(errno.EISDIR)
        if inode.writing is None and size == inode.attributes.size:
            return
        writing = await self._start_in_place(inode)
        writing.staging.truncate(size)
        if not inode.writers:
            self._end_writing(inode)

    @handler
    async def getxattr(self, number: int, name: bytes, ctx: pyfuse3.RequestContext) -> bytes:
        inode = self._with_xattrs(number)
        key = os.fsdecode(name)
        if inode is None or not key.startswith("user."):
            raise pyfuse3.FUSEError(pyfuse3.ENOATTR)
        value = (await self._xattrs_like(inode, key)).get(key)
        if value is None:
            raise pyfuse3.FUSEError(pyfuse3.ENOATTR)
        return value

    @handler
    async def listxattr(self, number: int, ctx: pyfuse3.RequestContext) -> Sequence[bytes]:
        inode = self._with_xattrs(number)
        if inode is None:
            return []
        return [os.fsencode(key) for key in [*await self._users_xattrs(inode), *await self._own_xattrs(inode)]]

    def _with_xattrs(self, number: int) -> Inode | None:
        return None if self.virtual.owns(number) else self.inodes.get(number)

    async def _xattrs_like(self, inode: Inode, key: str) -> dict[str, bytes]:
        """The xattrs among which *key* is, if it is there. Only ours may cost a digest."""
        return await (self._own_xattrs(inode) if key.startswith(OWN_XATTRS) else self._users_xattrs(inode))

    async def _users_xattrs(self, inode: Inode) -> dict[str, bytes]:
        if inode.writing is not None:
            return self.pipeline.staging_xattrs(inode.writing.staging)
        if inode.orphan:
            return {}
        found = await self.pipeline.xattrs(inode.name)
        return {key: value for key, value in found.items() if not key.startswith(OWN_XATTRS)}

    async def _own_xattrs(self, inode: Inode) -> dict[str, bytes]:
        """What ucmfs tells of a published block."""
        if inode.writing is not None or inode.orphan or inode.is_directory:
            return {}
        location = await self.pipeline.locate(inode.name)
        if location is None:
            return {}
        found = {
            OWN_XATTRS + "stage": ",".join(location.stages).encode(),
            OWN_XATTRS + "state": location.state.encode(),
        }
        if location.digest is not None:
            found[OWN_XATTRS + "digest"] = location.digest.encode()
        if location.pinned:
            found[OWN_XATTRS + "pin"] = b"1"
        return found

    @handler
    async def setxattr(self, number: int, name: bytes, value: bytes, ctx: pyfuse3.RequestContext) -> None:
        await self._set_xattr(number, os.fsdecode(name), value)

    @handler
    async def removexattr(self, number: int, name: bytes, ctx: pyfuse3.RequestContext) -> None:
        key = os.fsdecode(name)
        repeated = self._is_repeated(wire.REMOVEXATTR, number, ctx, name)
        inode = self._with_xattrs(number)
        if inode is not None and key not in await self._xattrs_like(inode, key):
            if repeated:
                return
            raise pyfuse3.FUSEError(pyfuse3.ENOATTR)
        await self._set_xattr(number, key, None)

    async def _set_xattr(self, number: int, key: str, value: bytes | None) -> None:
        inode = self._with_xattrs(number)
        if inode is None:
            raise pyfuse3.FUSEError(errno.EPERM)
        if not key.startswith("user."):
            raise pyfuse3.FUSEError(errno.EOPNOTSUPP)
        if key.startswith(OWN_XATTRS):
            await self._act(inode, key.removeprefix(OWN_XATTRS), value)
        else:
            await self._change(inode, Changes(xattrs={key: value}))

    async def _act(self, inode: Inode, verb: str, value: bytes | None) -> None:
        """Setting one of ucmfs's own xattrs asks for something."""
        if inode.writing is not None or inode.is_directory or inode.orphan:
            raise pyfuse3.FUSEError(errno.EBUSY if inode.writing else errno.EINVAL)
        if verb == "pin":
            await self.pipeline.pin(inode.name, value not in (None, b"", b"0"))
        elif verb == "evict" and value is not None:
            await self.grants.take_back(inode)
            self.pipeline.evict(inode.name)
        elif verb == "prefetch" and value is not None:
            await self.pipeline.prefetch([inode.name])
        else:
            raise pyfuse3.FUSEError(errno.EPERM)

    @handler
    async def statfs(self, ctx: pyfuse3.RequestContext) -> pyfuse3.StatvfsData:
        usage = await self.pipeline.usage()
        free = usage.free or 0
        total = usage.capacity if usage.capacity is not None else usage.used + free
        data = pyfuse3.StatvfsData()
        data.f_bsize = data.f_frsize = STAT_BLOCK
        data.f_blocks = total // STAT_BLOCK
        data.f_bfree = max(0, total - usage.used) // STAT_BLOCK
        data.f_bavail = free // STAT_BLOCK
        data.f_files = data.f_ffree = data.f_favail = 0
        data.f_namemax = 255
        return data

    # Directories

    @handler
    async def mkdir(self, parent: int, name: bytes, mode: int, ctx: pyfuse3.RequestContext) -> pyfuse3.EntryAttributes:
        self._refuse_virtual(parent, name)
        path = self._path(parent, name)
        repeated = self._is_repeated(wire.MKDIR, parent, ctx, name)
        if self.inodes.written(path):
            raise pyfuse3.FUSEError(errno.EEXIST)
        attributes = self.pipeline.peek(path) if repeated else None
        if attributes is None or not attributes.is_directory:
            await self.pipeline.make_directory(path, Attributes(0, 0, mode, ctx.uid, ctx.gid))
            attributes = self.pipeline.peek(path)
        assert attributes is not None
        inode = self.inodes.bind(path, attributes)
        self.inodes.looked_up(inode)
        return self._entry(inode)

    @handler
    async def rmdir(self, parent: int, name: bytes, ctx: pyfuse3.RequestContext) -> None:
        self._refuse_virtual(parent, name)
        path = self._path(parent, name)
        repeated = self._is_repeated(wire.RMDIR, parent, ctx, name)
        if any(self.inodes.written_below(path)):
            raise pyfuse3.FUSEError(errno.ENOTEMPTY)
        try:
            await self.pipeline.remove_directory(path)
        except BlockNotFound:
            if not repeated:
                raise
        self._detach_named(path)

    @handler
    async def opendir(self, number: int, ctx: pyfuse3.RequestContext) -> int:
        handle = self._next_listing
        self._next_listing += 1
        self._listings[handle] = _Listing(self._listed(number))
        self._changed_opens.append(ListingRecord(handle, number))
        return handle

    def _listed(self, number: int) -> Inode:
        if self.virtual.owns(number):
            return Inode(number, "", self.virtual.directory)
        return self.inodes.get(number)

    @handler
    async def readdir(self, fh: int, start_id: int, token: pyfuse3.ReaddirToken) -> None:
        listing = self._listings[fh]
        if self.virtual.owns(listing.inode.number):
            self.virtual.readdir(start_id, token)
            return
        if listing.batches is None or start_id < listing.position:
            await listing.close()
            listing.batches = self.pipeline.scan(listing.inode.name)
            listing.batch, listing.at, listing.position = (), 0, 0
        while True:
            while listing.at >= len(listing.batch):
                try:
                    listing.batch = await anext(listing.batches)
                except StopAsyncIteration:
                    return
                listing.at = 0
            entry = listing.batch[listing.at]
            if listing.position >= start_id and not self._show(listing, entry, token):
                return
            listing.at += 1
            listing.position += 1

    def _show(self, listing: _Listing, entry: Entry, token: pyfuse3.ReaddirToken) -> bool:
        """Put *entry* in the reply; False if there is no room left in it."""
        inode = self.inodes.bind(child_of(listing.inode.name, entry.name), entry.attributes)
        shown: bool = pyfuse3.readdir_reply(token, os.fsencode(entry.name), self._entry(inode), listing.position + 1)
        if shown:
            self.inodes.looked_up(inode)
        return shown

    @handler
    async def releasedir(self, fh: int) -> None:
        listing = self._listings.pop(fh, None)
        self._changed_opens.append(Gone("listing", fh))
        # Of none that is known, when it is asked a second time.
        if listing is not None:
            await listing.close()

    @handler
    async def fsyncdir(self, fh: int, datasync: bool) -> None:
        """Names are as durable as their blocks, and an empty directory is not worth a wait."""

    # Opening

    @handler
    async def create(
        self, parent: int, name: bytes, mode: int, flags: int, ctx: pyfuse3.RequestContext
    ) -> tuple[pyfuse3.FileInfo, pyfuse3.EntryAttributes]:
        self._refuse_virtual(parent, name)
        path = self._path(parent, name)
        opener = process_of(ctx.pid)
        others = self.inodes.written(path)
        if flags & os.O_EXCL and (others or self.pipeline.peek(path) is not None):
            raise pyfuse3.FUSEError(errno.EEXIST)
        if others and (not flags & os.O_TRUNC or looks_like_lock(path)):
            # A pool that several processes share, or a lock: one file for all of them.
            inode = others[-1]
            assert inode.writing is not None
            inode.writing.openers.add(opener)
            self.inodes.touch(inode)
        elif self.pipeline.peek(path) is not None:
            # It was published since the kernel looked: look again.
            raise pyfuse3.FUSEError(errno.ESTALE)
        else:
            owner = Attributes(0, 0, stat.S_IFREG | stat.S_IMODE(mode), ctx.uid, ctx.gid)
            staging = await self.pipeline.create(attributes=owner)
            inode = self.inodes.start_writing(path, Writing(staging, opener))
        self.inodes.looked_up(inode)
        info = await self._open_handle(inode, opener, writable=flags & os.O_ACCMODE != os.O_RDONLY, created=True)
        return info, self._entry(inode)

    @handler
    async def mknod(
        self, parent: int, name: bytes, mode: int, rdev: int, ctx: pyfuse3.RequestContext
    ) -> pyfuse3.EntryAttributes:
        if self.virtual.owns(parent) and stat.S_ISSOCK(mode) and process_of(ctx.pid) == os.getpid():
            return self.virtual.make_socket(name)
        self._refuse_virtual(parent, name)
        if not stat.S_ISREG(mode):
            raise pyfuse3.FUSEError(errno.EPERM)
        path = self._path(parent, name)
        repeated = self._is_repeated(wire.MKNOD, parent, ctx, name)
        there = self.pipeline.peek(path)
        if repeated and there is not None and not there.is_directory:
            inode = self.inodes.bind(path, there)
            self.inodes.looked_up(inode)
            return self._entry(inode)
        if self.inodes.written(path) or there is not None:
            raise pyfuse3.FUSEError(errno.EEXIST)
        staging = await self.pipeline.create(attributes=Attributes(0, 0, mode, ctx.uid, ctx.gid))
        inode = self.inodes.start_writing(path, Writing(staging, process_of(ctx.pid)))
        self.inodes.looked_up(inode)
        self._end_writing(inode)
        return self._entry(inode)

    @handler
    async def open(self, number: int, flags: int, ctx: pyfuse3.RequestContext) -> pyfuse3.FileInfo:
        writable = flags & os.O_ACCMODE != os.O_RDONLY
        if self.virtual.owns(number):
            if writable:
                raise pyfuse3.FUSEError(errno.EACCES)
            virtual = await self.virtual.open(number)
            self._changed_opens.append(VirtualRecord(virtual, number))
            return pyfuse3.FileInfo(fh=virtual, direct_io=True)
        inode = self.inodes.get(number)
        opener = process_of(ctx.pid) if writable else 0
        if flags & os.O_TRUNC:
            await self._open_truncated(inode, opener or process_of(ctx.pid))
        elif inode.writing is None:
            if writable:
                self._join_in_place(inode, opener)
                await self.grants.take_back(inode)
            await self._open_published(inode)
        elif not writable and not self._is_shown(inode, ctx.pid):
            # The kernel remembers the name from before it was changed: the published version is another inode now.
            raise pyfuse3.FUSEError(errno.ESTALE)
        if inode.writing is not None and writable:
            inode.writing.openers.add(opener)
            inode.writing.closed = False
        return await self._open_handle(inode, opener, writable=writable)

    async def _open_handle(
        self, inode: Inode, opener: int, *, writable: bool, created: bool = False
    ) -> pyfuse3.FileInfo:
        writing = inode.writing
        if writing is not None or not writable:
            await self._back(inode)
        by_kernel = not writable if writing is None else writing.by_kernel
        fh = self.inodes.open_handle(
            inode, opener=opener, writable=writable, by_kernel=inode.backing > 0, created=created
        )
        if not writable:
            self._lease(inode)
        return pyfuse3.FileInfo(
            fh=inode.backing << 32 | fh,
            # Beside opens that the kernel serves by itself, one that we serve may not use its page cache.
            direct_io=inode.backing > 0 and not by_kernel,
            keep_cache=writing is None,
        )

    async def _back(self, inode: Inode) -> None:
        """Let the kernel serve *inode* by itself, unless opens of it that use the page cache are alive."""
        if self.backing is None or inode.handles or inode.is_backed:
            return
        writing = inode.writing
        if writing is None:
            if inode.file is not None:
                inode.backing = self.backing.open(inode.file.fd)
        elif writing.by_kernel:
            inode.backing = self.backing.open(writing.staging.fd)
        elif not writing.in_place and not looks_like_lock(inode.name):
            await self._back_writing(inode, writing, self.backing)

    async def _back_writing(self, inode: Inode, writing: Writing, backing: Backing) -> None:
        staging = writing.staging
        if backing.refusal is not None or not await self.pipeline.ahead.begin(staging):
            return
        staging.reopen(writable=False)
        inode.backing = backing.open(staging.fd)
        writing.by_kernel = inode.backing > 0
        if not writing.by_kernel:
            self.pipeline.ahead.end(staging)
            staging.reopen(writable=True)

    def _doubt(self) -> None:
        """The tmpfs is full, or was: nobody knows which writes failed that the kernel did by itself."""
        doubted = False
        for inode in self.inodes:
            if inode.writing is not None and inode.writing.by_kernel and not inode.writing.doubtful:
                inode.writing.doubtful = doubted = True
                self.inodes.touch(inode)
        if doubted:
            # What comes next frees pages, so that the next daemon would not see it.
            self.commit()

    def _lease(self, inode: Inode) -> None:
        """Let the relay answer what opens *inode* from now on, if it is a block of the Cache that nobody changes."""
        if (
            inode.backing
            and inode.file is not None
            and inode.file.file
            and not inode.writers
            and not inode.orphan
            and inode.lookups > 0
            and not self.inodes.written(inode.name)
        ):
            self.grants.give(inode, inode.attributes.size)

    def _drop_backing(self, inode: Inode) -> None:
        """Close the backing id of *inode* if nothing has it, once the journal does not tell of it any more."""
        if inode.backing and not inode.is_backed:
            self._dropped.append(inode.backing)
            inode.backing = 0
            self.inodes.touch(inode)

    def _close_dropped(self) -> None:
        for number in self._dropped:
            if self.backing is not None:
                self.backing.close(number)
        self._dropped.clear()

    def _join_in_place(self, inode: Inode, opener: int) -> None:
        """Who opens a published block to change it joins who is changing it: one file, as in a shared pool."""
        for other in self.inodes.written(inode.name):
            if other.writing is not None and other.writing.in_place:
                other.writing.openers.add(opener)
                self.inodes.touch(other)
                raise pyfuse3.FUSEError(errno.ESTALE)

    def _is_shown(self, inode: Inode, pid: int) -> bool:
        """Whether thread *pid* may see what is being written to *inode*."""
        writing = inode.writing
        if writing is None:
            return True
        if not writing.in_place and (looks_temporary(inode.name) or looks_like_lock(inode.name)):
            return True
        return writing.is_seen_by(set(lineage(pid)))

    async def _open_published(self, inode: Inode) -> None:
        async with inode.locked():
            if inode.orphan and (inode.file is None or self.pipeline.peek(inode.name) is not None):
                # Another version has the name by now.
                raise pyfuse3.FUSEError(errno.ESTALE)
            if inode.file is None and inode.writing is None:
                file = await self.pipeline.open(inode.name)
                if file.attributes.version != inode.attributes.version:
                    # Replaced since the kernel looked: look again.
                    file.close()
                    raise pyfuse3.FUSEError(errno.ESTALE)
                inode.file = file

    async def _open_truncated(self, inode: Inode, opener: int) -> None:
        """Begin a new version for *opener*: on its own inode if that is what this is, else by looking again."""
        writing = inode.writing
        if writing is not None and (writing.openers == {opener} or looks_like_lock(inode.name)):
            writing.staging.truncate(0)
            writing.failed.clear()
            writing.claimed = True
            self.inodes.touch(inode)
            return
        if inode.orphan or any(self._waits_for(other, opener) for other in self.inodes.written(inode.name)):
            # It was told so before, by a daemon that died or in another thread.
            raise pyfuse3.FUSEError(errno.ESTALE)
        attributes = inode.attributes if writing is None else writing.staging.attributes()
        staging = await self.pipeline.create(attributes=attributes)
        self.inodes.start_writing(inode.name, Writing(staging, opener, claimed=False))
        raise pyfuse3.FUSEError(errno.ESTALE)

    @staticmethod
    def _waits_for(inode: Inode, opener: int) -> bool:
        """Whether *inode* was made for *opener*, who has not looked again yet."""
        writing = inode.writing
        return writing is not None and not writing.claimed and writing.openers == {opener}

    def _drop_unclaimed(self, inode: Inode) -> None:
        """An open was told to look again. If its process is gone it never will."""
        writing = inode.writing
        assert writing is not None
        if not any(process_of(opener) for opener in writing.openers):
            self._drop_writing(inode)

    def _drop_writing(self, inode: Inode) -> None:
        """Forget what was written to *inode*, which nobody has open."""
        writing = inode.writing
        assert writing is not None
        self.inodes.end_writing(inode, published=False)
        self.pipeline.abandon(writing.staging)

    # Reading and writing

    @handler
    async def read(self, fh: int, off: int, size: int) -> bytes:
        fh &= wire.OUR_HALF
        if self.virtual.has_open(fh):
            return await self.virtual.read(fh, off, size)
        inode = self.inodes.handles[fh].inode
        if inode.writing is not None:
            return os.pread(inode.writing.staging.fd, size, off)
        file = inode.file
        if file is None:
            # A daemon before this one had it open, and it is gone.
            raise pyfuse3.FUSEError(errno.EIO)
        if file.stage == self.pipeline.cache.label:
            return os.pread(file.fd, size, off)
        return await self.pipeline.read_below(file, off, size)

    @handler
    async def write(self, fh: int, off: int, buf: bytes) -> int:
        fh &= wire.OUR_HALF
        handle = self.inodes.handles[fh]
        handle.flushed = False
        inode = handle.inode
        writing = inode.writing or await self._start_in_place(inode)
        try:
            done = await self.pipeline.write(writing.staging, off, buf)
        except OSError:
            writing.failed.append((off, off + len(buf)))
            self.inodes.touch(inode)
            raise
        if writing.failed:
            writing.written(off, off + len(buf))
            self.inodes.touch(inode)
        return done

    async def _start_in_place(self, inode: Inode) -> Writing:
        """Begin to change a published block: from now on *inode* is a copy of it."""
        await self.grants.take_back(inode)
        async with inode.locked():
            if inode.writing is not None:
                return inode.writing
            file = inode.file
            if file is None:
                if inode.orphan:
                    raise pyfuse3.FUSEError(errno.ESTALE)
                file = await self.pipeline.open(inode.name)
            staging = None
            try:
                staging = await self.pipeline.create(attributes=inode.attributes)
                await self.pipeline.copy_into(staging, file)
            except BaseException:
                if staging is not None:
                    self.pipeline.abandon(staging)
                if inode.file is None:
                    file.close()
                raise
            file.close()
            inode.file = None
            writing = Writing(staging, 0, in_place=True)
            writing.openers = {handle.opener for handle in self.inodes.handles.values() if handle.inode is inode}
            self.inodes.start_in_place(inode, writing)
            return writing

    @handler
    async def flush(self, fh: int) -> None:
        handle = self.inodes.handles.get(fh & wire.OUR_HALF)
        # None for a file of `.ucmfs/`, and where a daemon before this one closed it: it was told twice then.
        if handle is not None:
            self._flushed(handle, fh)

    def _flushed(self, handle: Handle, fh: int) -> None:
        handle.flushed = True
        writing = handle.inode.writing
        if handle.writable and writing is not None:
            writing.killed = not writing.in_place and bool(fh & wire.KILLED)
            self.inodes.touch(handle.inode)

    @handler
    async def release(self, fh: int) -> None:
        # No checkpoint before the block is published: what a process does after close() comes after this request,
        # and so finds the block.
        number = fh & wire.OUR_HALF
        if self.virtual.release(number):
            self._changed_opens.append(Gone("virtual", number))
            return
        if number not in self.inodes.handles:
            # A daemon before this one closed it, and died before it could say so.
            return
        if fh & wire.FLUSHED:
            self._flushed(self.inodes.handles[number], fh)
        handle = self.inodes.close_handle(number)
        inode = handle.inode
        if inode.writing is not None and not inode.writers:
            self._close_writing(inode, inode.writing)
        else:
            self._let_go(inode)

    def _let_go(self, inode: Inode) -> None:
        """A handle of *inode* or its lease is gone: close what nobody needs any more."""
        self._drop_backing(inode)
        if inode.handles or inode.lease is not None:
            return
        if inode.file is not None:
            inode.file.close()
            inode.file = None
        self.inodes.settle(inode)

    def _close_writing(self, inode: Inode, writing: Writing) -> None:
        """The last writer closed *inode*. What the kernel writes by itself may be mapped all the same."""
        writing.closed = True
        if writing.by_kernel and writing.staging.is_writable():
            self._await_close(inode)
            self._let_go(inode)
        else:
            self._end_writing(inode)

    def _await_close(self, inode: Inode) -> None:
        self._closed[inode] = trio.current_time()
        self._any_closed.set()

    async def finish_closed(self) -> None:
        """Publish what was closed while it was mapped, once it is not. Nothing tells but to ask again."""
        while True:
            if not self._closed:
                self._any_closed = trio.Event()
                await self._any_closed.wait()
            await trio.sleep(RECHECK)
            self._publish_closed()
            self.commit()

    def _publish_closed(self, *, eagerly: bool = False) -> None:
        """Publish what was closed and can be written no more.

        The kernel lets go of a file a moment after it told us, but before close() returns. So whatever its writer asks
        next finds it published: this is called *eagerly* then, for what was closed just now.
        """
        now = trio.current_time()
        for inode, closed_at in list(self._closed.items()):
            writing = inode.writing
            if writing is None or not writing.closed:
                del self._closed[inode]
            elif not (eagerly and now > closed_at + JUST_NOW) and not writing.staging.is_writable():
                del self._closed[inode]
                self._end_writing(inode)

    def _end_writing(self, inode: Inode) -> None:
        """The last writer is gone: publish what it wrote, or drop it."""
        writing = inode.writing
        assert writing is not None
        staging, cache = writing.staging, self.pipeline.cache
        self.pipeline.ahead.end(staging)
        published = None
        if inode.orphan:
            pass
        elif writing.flaw is not None:
            self.pipeline.counters.dropped += 1
            log.warning("%s: dropped, %s", inode.name, writing.flaw)
        else:
            try:
                published = self.pipeline.publish(staging, inode.name)
            except UcmfsError as error:
                log.error("%s: lost, it cannot be published: %s", inode.name, error)
        if published is not None:
            inode.attributes = published.attributes
            cache.adopt(published)
            close = functools.partial(cache.close_descriptor, published)
            inode.file = OpenBlock(staging.fd, published.attributes, cache.label, close, file=published.file)
        elif inode.handles:
            # Readers that found it while it was written go on; its room is theirs until they close.
            inode.attributes = staging.attributes()
            inode.file = self._open_abandoned(staging, inode.attributes)
        else:
            self.pipeline.abandon(staging)
        self.inodes.end_writing(inode, published=published is not None)
        if published is not None:
            # What was just written is often read soon.
            self._lease(inode)
        self._let_go(inode)

    @handler
    async def fsync(self, fh: int, datasync: bool) -> None:
        fh &= wire.OUR_HALF
        if self.virtual.has_open(fh):
            return
        inode = self.inodes.handles[fh].inode
        if inode.orphan:
            return
        if inode.writing is not None:
            await self.pipeline.persist(inode.writing.staging, inode.name)
            return
        flushed = await self.pipeline.flush([inode.name])
        if flushed.left:
            raise flushed.error or pyfuse3.FUSEError(errno.EIO)

    # Names again

    @handler
    async def unlink(self, parent: int, name: bytes, ctx: pyfuse3.RequestContext) -> None:
        self._refuse_virtual(parent, name)
        path = self._path(parent, name)
        repeated = self._is_repeated(wire.UNLINK, parent, ctx, name)
        inode = await self._writing(path, ctx.pid)
        removed = inode is not None
        if inode is not None:
            self.inodes.detach(inode)
        published = self.pipeline.peek(path)
        if published is not None and published.is_directory:
            raise pyfuse3.FUSEError(errno.EISDIR)
        removed = await self.pipeline.remove(path) or removed
        if not removed and not repeated:
            # Somebody else's temporary file, seen because it is one.
            others = self.inodes.written(path) if looks_temporary(path) else []
            if not others:
                raise BlockNotFound(path)
            self.inodes.detach(others[-1])
        self._detach_named(path)
        self._tell_gone(parent, name, path)

    def _tell_gone(self, parent: int, name: bytes, path: str) -> None:
        """*path* was removed or renamed. Who writes another version of it would still find that."""
        if not self.inodes.written(path):
            self.grants.name_gone(self.inodes.get(parent), name)

    def _detach_named(self, path: str) -> None:
        inode = self.inodes.named(path)
        if inode is not None:
            self.inodes.detach(inode)

    @handler
    async def rename(
        self,
        parent_old: int,
        name_old: bytes,
        parent_new: int,
        name_new: bytes,
        flags: int,
        ctx: pyfuse3.RequestContext,
    ) -> None:
        self._refuse_virtual(parent_old, name_old)
        self._refuse_virtual(parent_new, name_new)
        if flags & ~pyfuse3.RENAME_NOREPLACE:
            raise pyfuse3.FUSEError(errno.EINVAL)
        old, new = self._path(parent_old, name_old), self._path(parent_new, name_new)
        opcode = wire.RENAME2 if flags else wire.RENAME
        repeated = self._is_repeated(opcode, parent_old, ctx, name_old, name_new)
        if old == new:
            return
        if repeated and await self._is_renamed(old, new, ctx.pid):
            return
        source = await self._find(old, ctx.pid)
        target = self.pipeline.peek(new)
        if target is None:
            [target] = await self.pipeline.lookup([new])
        if flags & pyfuse3.RENAME_NOREPLACE and (target is not None or self.inodes.written(new)):
            raise pyfuse3.FUSEError(errno.EEXIST)
        if target is not None and target.is_directory != source.is_directory:
            raise pyfuse3.FUSEError(errno.EISDIR if target.is_directory else errno.ENOTDIR)
        if source.is_directory:
            await self._rename_directory(source, old, new)
            return
        if source.writing is None or source.writing.in_place:
            # Under a block that is changed in place, the published version has the name for everybody else.
            await self.pipeline.rename(old, new)
            self._detach_named(new)
            published = self.inodes.named(old)
            if published is not None:
                self.inodes.rename(published, new)
                self.grants.renew(published)
        for other in list(self.inodes.written(new)):
            # Who was writing there loses the name, as on any file system.
            self.inodes.detach(other)
        if source.writing is not None:
            self.inodes.rename(source, new)
        if self.pipeline.peek(old) is None:
            self._tell_gone(parent_old, name_old, old)

    async def _is_renamed(self, old: str, new: str, pid: int) -> bool:
        """Whether the daemon before renamed *old* already. What it had no time to note is noted."""
        if await self._writing(new, pid) is not None and await self._writing(old, pid) is None:
            return True
        if (await self.pipeline.lookup([old]))[0] is not None or await self._writing(old, pid) is not None:
            return False
        moved = self.inodes.named(old)
        if moved is not None:
            self._detach_named(new)
            if moved.is_directory:
                self.inodes.rename_below(old, new)
            self.inodes.rename(moved, new)
        return True

    async def _rename_directory(self, source: Inode, old: str, new: str) -> None:
        if new.startswith(old + "/"):
            raise pyfuse3.FUSEError(errno.EINVAL)
        if any(self.inodes.written_below(new)):
            raise pyfuse3.FUSEError(errno.ENOTEMPTY)
        await self.pipeline.rename_directory(old, new)
        self._detach_named(new)
        self.inodes.rename_below(old, new)
        self.inodes.rename(source, new)

    @handler
    async def link(
        self, number: int, new_parent: int, new_name: bytes, ctx: pyfuse3.RequestContext
    ) -> pyfuse3.EntryAttributes:
        # What link(2) says of a file system that has no hard links.
        raise pyfuse3.FUSEError(errno.EPERM)

    @handler
    async def symlink(
        self, parent: int, name: bytes, target: bytes, ctx: pyfuse3.RequestContext
    ) -> pyfuse3.EntryAttributes:
        raise pyfuse3.FUSEError(errno.EPERM)

    # From the control side

    async def changed_elsewhere(self, path: str) -> None:
        """A block was published or removed over the socket: the kernel must look again, and the relay."""
        await self._unlist(path)
        inode = self.inodes.named(path)
        if inode is None:
            return
        parent = self.inodes.named(path.rpartition("/")[0])
        self.inodes.detach(inode)
        if parent is not None:
            name = os.fsencode(path.rpartition("/")[2])
            pyfuse3.invalidate_entry_async(parent.number, name, ignore_enoent=True)
        self.commit()
        await self.grants.take_back(inode)

    async def _unlist(self, path: str) -> None:
        """*path* may be new, and directories above it."""
        while path:
            path = parent_of(path)
            directory = self.inodes.named(path)
            if directory is not None:
                await self.grants.unlist_names(directory)

    def close_all(self) -> None:
        """The mount is gone: let go of every staging file and descriptor; what was being written is dropped."""
        for inode in self.inodes:
            if inode.writing is not None:
                self.pipeline.abandon(inode.writing.staging)
                self.inodes.end_writing(inode, published=False)
            if inode.file is not None:
                inode.file.close()
                inode.file = None
        self.inodes.handles.clear()
