"""Inodes and handles: what the kernel's numbers mean.

An inode is one version of one block, or a directory. A name whose contents are replaced gets a new inode at its
next lookup, and who has the old one open goes on reading the old bytes. A block being written has an inode of its
own, which its writers see under its name before anybody else does.

Whoever changes an inode or a handle says so (touch()); changes() gives what changed since it was last asked, as records
for the journal.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator, Set

import pyfuse3
import trio

from ucmfs.block import Attributes, parent_of
from ucmfs.fuse.grants import Grant
from ucmfs.fuse.journal import Gone, HandleRecord, InodeRecord, NumbersRecord, Record, WritingRecord
from ucmfs.stages.cache import OpenBlock, Staging

__all__ = ["FIRST_NUMBER", "STAT_BLOCK", "Handle", "Inode", "Inodes", "Writing", "entry_attributes"]

STAT_BLOCK = 4096

FIRST_NUMBER = 64
"""Numbers below are the root's and those of `.ucmfs/`."""


MOST_HANDLES = (1 << 31) - 1


class Writing:
    """A version of a block that is being written.

    `in_place` tells that it began as a copy of a published block, without O_TRUNC. `killed` is what /proc said at
    the latest close.
    """

    __slots__ = (
        "by_kernel",
        "claimed",
        "closed",
        "doubtful",
        "failed",
        "in_place",
        "killed",
        "openers",
        "settled",
        "staging",
    )

    def __init__(self, staging: Staging, opener: int, *, in_place: bool = False, claimed: bool = True) -> None:
        self.staging = staging
        self.openers = {opener}
        self.in_place = in_place
        self.claimed = claimed
        """False between an open that was told to look again (ESTALE) and the open that follows it."""
        self.failed: list[tuple[int, int]] = []
        """Ranges (from, to) of writes that got an error and were not written since: the block has holes there."""
        self.killed = False
        self.by_kernel = False
        """Whether the kernel writes the staging file by itself: the inode's backing id is that file's."""
        self.doubtful = False
        """Whether a write may have failed that only the kernel and the writer know of."""
        self.closed = False
        """Whether its last writer closed it. It is still being written where that was by the kernel, into a mapping."""
        self.settled = trio.Event()

    def record(self) -> WritingRecord:
        return WritingRecord(
            self.staging.file,
            sorted(self.openers),
            self.in_place,
            self.claimed,
            self.killed,
            self.failed,
            self.by_kernel,
            self.doubtful,
            self.closed,
        )

    @classmethod
    def of(cls, record: WritingRecord, staging: Staging) -> Writing:
        """What *record* tells of, with the staging file opened again."""
        writing = cls(staging, 0, in_place=record.in_place, claimed=record.claimed)
        writing.openers = set(record.openers)
        writing.failed = list(record.failed)
        writing.killed = record.killed
        writing.by_kernel = record.by_kernel
        writing.doubtful = record.doubtful
        writing.closed = record.closed
        return writing

    @property
    def flaw(self) -> str | None:
        """Why it must not be published, if it must not."""
        if self.killed:
            return "its writer was killed in the middle"
        if self.failed:
            return "a write to it failed"
        if self.doubtful:
            return "the cache was full, and a write to it may have failed"
        return None

    def is_seen_by(self, family: Set[int]) -> bool:
        """Whether a process sees it, given the process and its ancestors.

        A process that cannot be seen from here (pid 0, another pid namespace) has no family, and sees what POSIX says.
        """
        return not family or not family.isdisjoint(self.openers)

    def written(self, start: int, end: int) -> None:
        """A write succeeded: it mends what failed inside of it."""
        if self.failed:
            self.failed = [(a, b) for a, b in self.failed if a < start or b > end]


class Inode:
    """One inode. `name` is where it is, or was for an orphan: one whose name is gone or belongs to another."""

    __slots__ = (
        "attributes",
        "backing",
        "by_kernel",
        "file",
        "handles",
        "lease",
        "lock",
        "lookups",
        "name",
        "number",
        "orphan",
        "writers",
        "writing",
    )

    def __init__(self, number: int, name: str, attributes: Attributes) -> None:
        self.number = number
        self.name = name
        self.attributes = attributes
        self.orphan = False
        self.lookups = 0
        self.handles = 0
        self.writers = 0
        """How many of the handles may write."""
        self.by_kernel = 0
        """How many of the handles have backing id `backing`. The kernel wants it for all opens of an inode or for none;
        those that it shall not serve by itself have it too, with direct_io."""
        self.backing = 0
        self.lease: Grant | None = None
        """While the relay opens it by itself, or has it open. It has `backing` then too."""
        self.file: OpenBlock | None = None
        """The published block, while there are handles and it is not being written."""
        self.writing: Writing | None = None
        self.lock: trio.Lock | None = None
        """Held while its contents are opened or copied, which may take checkpoints."""

    @property
    def is_directory(self) -> bool:
        return self.attributes.is_directory

    @property
    def is_backed(self) -> bool:
        """Whether the kernel may have it open with `backing`."""
        return self.by_kernel > 0 or self.lease is not None

    def record(self, *, named: bool) -> InodeRecord:
        kept = self.attributes
        return InodeRecord(
            self.number,
            os.fsencode(self.name),
            kept.size,
            kept.mtime_ns,
            kept.mode,
            kept.uid,
            kept.gid,
            kept.atime_ns,
            self.orphan,
            named,
            self.lookups,
            self.backing,
            0 if self.file is None else self.file.file,
            None if self.writing is None else self.writing.record(),
        )

    @classmethod
    def of(cls, record: InodeRecord) -> Inode:
        """What *record* tells of; nothing of it is open yet."""
        kept = Attributes(record.size, record.mtime_ns, record.mode, record.uid, record.gid, record.atime_ns)
        inode = cls(record.number, os.fsdecode(record.name), kept)
        inode.orphan = record.orphan
        inode.lookups = record.lookups
        inode.backing = record.backing
        return inode

    def locked(self) -> trio.Lock:
        if self.lock is None:
            self.lock = trio.Lock()
        return self.lock


class Handle:
    """One open of an inode."""

    __slots__ = ("by_kernel", "created", "flushed", "inode", "opener", "writable")

    def __init__(self, inode: Inode, opener: int, writable: bool, by_kernel: bool, created: bool) -> None:
        self.inode = inode
        self.opener = opener
        """The process; 0 if unknown or of no interest."""
        self.writable = writable
        self.by_kernel = by_kernel
        self.created = created
        """Whether the answer that gave it was one to CREATE, which counts as a lookup too."""
        self.flushed = False
        """Whether a close was seen and no write since, so that the last close is likely on its way."""


class Inodes:
    """The table. Touched on the trio loop only, and consistent between any two checkpoints."""

    def __init__(self, recall: Callable[[Inode], None] = lambda inode: None) -> None:
        self._recall = recall
        """Called for an inode whose lease must end."""
        self._next = FIRST_NUMBER
        self._by_number: dict[int, Inode] = {}
        self._by_name: dict[str, Inode] = {}
        self._writings: dict[str, list[Inode]] = {}
        self.handles: dict[int, Handle] = {}
        self._next_handle = 1
        self._touched: set[int] = set()
        self._touched_handles: set[int] = set()
        root = Inode(pyfuse3.ROOT_INODE, "", Attributes(0, 0, 0o040755))
        root.lookups = 1
        self._by_number[root.number] = self._by_name[""] = root

    # For the journal

    def touch(self, inode: Inode) -> None:
        """*inode* changed."""
        self._touched.add(inode.number)

    def changes(self) -> list[Record]:
        """What changed since the last call."""
        if not self._touched and not self._touched_handles:
            return []
        records: list[Record] = []
        for number in self._touched:
            inode = self._by_number.get(number)
            if inode is None:
                records.append(Gone("inode", number))
            else:
                records.append(inode.record(named=self._by_name.get(inode.name) is inode))
        for number in self._touched_handles:
            handle = self.handles.get(number)
            records.append(Gone("handle", number) if handle is None else self._handle_record(number, handle))
        self._touched.clear()
        self._touched_handles.clear()
        return records

    def snapshot(self) -> Iterator[Record]:
        """Everything."""
        self._touched.clear()
        self._touched_handles.clear()
        yield NumbersRecord(self._next, self._next_handle)
        for inode in self._by_number.values():
            yield inode.record(named=self._by_name.get(inode.name) is inode)
        for number, handle in self.handles.items():
            yield self._handle_record(number, handle)

    @staticmethod
    def _handle_record(number: int, handle: Handle) -> HandleRecord:
        return HandleRecord(
            number, handle.inode.number, handle.opener, handle.writable, handle.by_kernel, handle.created
        )

    def restore(self, record: InodeRecord, handles: list[HandleRecord]) -> Inode:
        """Put back what *record* tells of, and its *handles*; what it has open is the caller's business."""
        inode = Inode.of(record)
        self._by_number[inode.number] = inode
        if record.named:
            self._by_name[inode.name] = inode
        for kept in handles:
            handle = Handle(inode, kept.opener, kept.writable, kept.by_kernel, kept.created)
            # A close may have been seen: nobody shall wait long for one that does not come.
            handle.flushed = True
            self._attach(kept.number, handle)
        return inode

    def restore_writing(self, inode: Inode, writing: Writing) -> None:
        """*inode*, put back by restore(), is being written."""
        inode.writing = writing
        if not inode.orphan:
            self._writings.setdefault(inode.name, []).append(inode)

    def restore_published(self, inode: Inode, attributes: Attributes, *, is_current: bool, by_kernel: bool) -> None:
        """What was being written to *inode*, put back by restore(), is published, and may have been replaced since.

        *by_kernel*: its backing file is the block's.
        """
        if inode.orphan or (inode.is_backed and not by_kernel) or not is_current:
            self.detach(inode)
            return
        before = self._by_name.get(inode.name)
        if before is not None and before is not inode:
            self.detach(before)
        inode.attributes = attributes
        self._by_name[inode.name] = inode
        self.touch(inode)

    def restore_numbers(self, record: NumbersRecord) -> None:
        self._next = max(self._next, record.inode)
        self._next_handle = (record.handle - 1) % MOST_HANDLES + 1

    def get(self, number: int) -> Inode:
        """The inode of *number*. Raises FUSEError ESTALE if there is none."""
        try:
            return self._by_number[number]
        except KeyError:
            raise pyfuse3.FUSEError(errno.ESTALE) from None

    def __len__(self) -> int:
        return len(self._by_number)

    def __iter__(self) -> Iterator[Inode]:
        return iter(list(self._by_number.values()))

    def named(self, name: str) -> Inode | None:
        """The inode that stands for the published version of *name*, if the kernel knows one."""
        return self._by_name.get(name)

    def bind(self, name: str, attributes: Attributes) -> Inode:
        """The inode of the published *name* with *attributes*: the one there is, if it is the same version."""
        inode = self._by_name.get(name)
        if inode is not None:
            same_kind = inode.is_directory == attributes.is_directory
            if same_kind and (inode.is_directory or inode.attributes.version == attributes.version):
                inode.attributes = attributes
                return inode
            self.detach(inode)
        inode = self._new(name, attributes)
        self._by_name[name] = inode
        return inode

    def _new(self, name: str, attributes: Attributes) -> Inode:
        inode = Inode(self._next, name, attributes)
        self._next += 1
        self._by_number[inode.number] = inode
        self.touch(inode)
        return inode

    def looked_up(self, inode: Inode, count: int = 1) -> None:
        """The kernel is told of *inode* once more, or was told *count* times."""
        inode.lookups += count
        self.touch(inode)

    def detach(self, inode: Inode) -> None:
        """The name of *inode* is gone, or another's from now on."""
        if self._by_name.get(inode.name) is inode:
            del self._by_name[inode.name]
        self._unlist(inode)
        inode.orphan = True
        self.touch(inode)
        self._recall(inode)
        self._drop_unused(inode)

    def forget(self, number: int, lookups: int) -> None:
        inode = self._by_number.get(number)
        if inode is not None and number != pyfuse3.ROOT_INODE:
            inode.lookups -= lookups
            self.touch(inode)
            if inode.lookups <= 0:
                self._recall(inode)
            self._drop_unused(inode)

    def _drop_unused(self, inode: Inode) -> None:
        if inode.lookups > 0 or inode.handles or inode.writing is not None or inode.lease is not None:
            return
        self._by_number.pop(inode.number, None)
        if self._by_name.get(inode.name) is inode:
            del self._by_name[inode.name]
        self.touch(inode)

    # Blocks being written

    def start_writing(self, name: str, writing: Writing) -> Inode:
        """A new inode for a new version of *name*."""
        published = self._by_name.get(name)
        if published is not None:
            # Once this is published who opens the name must not get that one, and may come before we are told.
            self._recall(published)
        inode = self._new(name, writing.staging.attributes())
        inode.writing = writing
        self._writings.setdefault(name, []).append(inode)
        return inode

    def start_in_place(self, inode: Inode, writing: Writing) -> None:
        """*inode* itself is changed from now on; who does not change it finds the published version on another."""
        inode.writing = writing
        self._recall(inode)
        if self._by_name.get(inode.name) is inode:
            del self._by_name[inode.name]
        if not inode.orphan:
            self._writings.setdefault(inode.name, []).append(inode)
        self.touch(inode)

    def end_writing(self, inode: Inode, *, published: bool) -> None:
        """The last writer of *inode* is gone. If *published*, it stands for its name from now on."""
        writing = inode.writing
        assert writing is not None
        self._unlist(inode)
        inode.writing = None
        self.touch(inode)
        if published and inode.is_backed and not writing.by_kernel:
            # Its readers go on with the old bytes, from the backing file: the new ones need an inode of their own.
            self.detach(inode)
        elif published:
            before = self._by_name.get(inode.name)
            if before is not None and before is not inode:
                self.detach(before)
            self._by_name[inode.name] = inode
        else:
            self.detach(inode)
        writing.settled.set()
        self._drop_unused(inode)

    def _unlist(self, inode: Inode) -> None:
        writers = self._writings.get(inode.name, [])
        if inode in writers:
            writers.remove(inode)
            if not writers:
                del self._writings[inode.name]

    def written(self, name: str) -> list[Inode]:
        """The inodes being written under *name*, oldest first."""
        return self._writings.get(name, [])

    def written_in(self, directory: str) -> Iterator[str]:
        """Names in *directory* itself that are being written."""
        return (name for name in self._writings if parent_of(name) == directory)

    def written_below(self, directory: str) -> Iterator[str]:
        """Names below *directory* that are being written."""
        prefix = directory + "/" if directory else ""
        return (name for name in self._writings if name.startswith(prefix))

    # Names

    def rename(self, inode: Inode, new: str) -> None:
        """*inode* is called *new* from now on; whatever is there is detached by the caller."""
        if self._by_name.get(inode.name) is inode:
            del self._by_name[inode.name]
            self._by_name[new] = inode
        if inode in self._writings.get(inode.name, []):
            self._unlist(inode)
            self._writings.setdefault(new, []).append(inode)
        inode.name = new
        self.touch(inode)

    def rename_below(self, old: str, new: str) -> None:
        """A directory is renamed: so is all below it."""
        prefix = old + "/"
        for inode in [inode for inode in self._by_number.values() if inode.name.startswith(prefix)]:
            self.rename(inode, f"{new}/{inode.name[len(prefix) :]}")

    # Handles

    def open_handle(
        self, inode: Inode, *, opener: int = 0, writable: bool = False, by_kernel: bool = False, created: bool = False
    ) -> int:
        """A new handle, below those of `.ucmfs/`."""
        number = self._next_handle
        while number in self.handles:
            number = number % MOST_HANDLES + 1
        self._next_handle = number % MOST_HANDLES + 1
        self._attach(number, Handle(inode, opener, writable, by_kernel, created))
        return number

    def _attach(self, number: int, handle: Handle) -> None:
        inode = handle.inode
        self.handles[number] = handle
        inode.handles += 1
        inode.writers += handle.writable
        inode.by_kernel += handle.by_kernel
        self._touched_handles.add(number)
        self.touch(inode)

    def close_handle(self, number: int) -> Handle:
        handle = self.handles.pop(number)
        handle.inode.handles -= 1
        handle.inode.writers -= handle.writable
        handle.inode.by_kernel -= handle.by_kernel
        self._touched_handles.add(number)
        self.touch(handle.inode)
        return handle

    def is_flushed(self, inode: Inode) -> bool:
        """Whether everybody who may write to *inode* closed it, as far as close() has told."""
        if inode.writing is not None and inode.writing.closed:
            return True
        return inode.writers > 0 and all(
            handle.flushed for handle in self.handles.values() if handle.inode is inode and handle.writable
        )

    def settle(self, inode: Inode) -> None:
        """*inode* lost its last handle: forget it if the kernel does not know it either."""
        self._drop_unused(inode)


def entry_attributes(number: int, attributes: Attributes, ttl: float) -> pyfuse3.EntryAttributes:
    """*attributes* as pyfuse3 takes them."""
    entry = pyfuse3.EntryAttributes()
    entry.st_ino = number
    entry.entry_timeout = entry.attr_timeout = ttl
    entry.st_mode = attributes.mode
    entry.st_nlink = 2 if attributes.is_directory else 1
    entry.st_uid = attributes.uid
    entry.st_gid = attributes.gid
    entry.st_size = attributes.size
    entry.st_blksize = STAT_BLOCK
    entry.st_blocks = -(-attributes.size // 512)
    entry.st_atime_ns = attributes.atime_ns
    entry.st_mtime_ns = attributes.mtime_ns
    entry.st_ctime_ns = attributes.mtime_ns
    return entry
