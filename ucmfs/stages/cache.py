"""The Cache stage: one tmpfs file per block, and all of its state in the layout.

    <cache_dir>/lock              held while a daemon or a process uses the directory
    <cache_dir>/dirty/<name>      blocks that the next persistent stage does not have yet
    <cache_dir>/clean/<name>      blocks that it has; every directory of the mount that is known here
    <cache_dir>/staging/<n>       blocks being written or filled: nobody sees them
    <cache_dir>/trash/<n>         blocks replaced, removed or evicted while something had them open

A block becomes visible by rename out of staging/ and clean by rename out of dirty/, so a process that starts
after a crash finds every block, and every dirty one, without a log. In memory there is an index of the same;
only this process changes the directory, so the index answers without a system call.

Nothing in this module waits: tmpfs does not block, and every method runs to its end on the trio loop between
two checkpoints. That is what makes each of them atomic (ucmfs/DESIGN.md).

Bytes are counted as tmpfs allocates them, in pages, staging and trash included. `used` never exceeds
`capacity`: room is reserved before a byte is written, and a block that anything still has open, be it a process
that got a descriptor over the socket, keeps its pages and is counted until it is closed. The kernel knows who has
it open: a write lease (fcntl F_SETLEASE) is granted only on a file that nobody else has open.
"""

from __future__ import annotations

import fcntl
import itertools
import logging
import os
import shutil
import signal
import stat
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, ClassVar, Protocol, Self

import msgspec
import pydantic
import trio

from ucmfs.block import OWN_XATTRS, Attributes, Changes, check_name, child_of, pages, parent_of
from ucmfs.config import Options, machine_memory
from ucmfs.errors import (
    BlockBusy,
    BlockNotFound,
    ConfigError,
    NotABlock,
    StageFull,
    UcmfsError,
    from_errno,
    from_os_error,
)
from ucmfs.stages import tmpfs
from ucmfs.stages.base import Entry, Publication, Stage, Usage
from ucmfs.stages.local import apply_changes, copy_whole, read_xattrs, write_xattrs

__all__ = ["Cache", "CacheOptions", "Cached", "EvictionOrder", "OpenBlock", "Staging"]

log = logging.getLogger(__name__)

GIB = 1 << 30
USUAL_BLOCK = 2 << 20
PIN_XATTR = OWN_XATTRS + "pin"
SCAN_BATCH = 1024


class CacheOptions(Options):
    """Keys of the Cache stage."""

    buffer_number: int | None = pydantic.Field(None, gt=0)
    """Capacity as a number of blocks of `block_size` bytes (2 MiB where that is not set)."""
    cache_buffer_capacity_gb: float | None = pydantic.Field(None, gt=0)
    """Capacity in GiB; a fraction is welcome. Default: a quarter of the machine's memory."""
    cache_dir: str | None = None
    """A directory on a tmpfs. Default: one of /dev/shm named after the mount point. Where root may, it becomes a tmpfs
    of its own."""

    @pydantic.model_validator(mode="after")
    def _one_capacity(self) -> Self:
        if self.buffer_number is not None and self.cache_buffer_capacity_gb is not None:
            raise ValueError("buffer_number and cache_buffer_capacity_gb both say the capacity; give one of them")
        return self

    def capacity(self, block_size: int | None) -> int:
        """The bound in bytes. Raises ConfigError if it cannot be or is more than the machine's memory."""
        memory = machine_memory()
        key = "cache_buffer_capacity_gb"
        if self.buffer_number is not None:
            key = "buffer_number"
            wanted = self.buffer_number * pages(block_size or USUAL_BLOCK)
        elif self.cache_buffer_capacity_gb is not None:
            wanted = int(self.cache_buffer_capacity_gb * GIB)
        else:
            wanted = memory // 4
        if wanted > memory:
            raise ConfigError(
                f"asks for {wanted / GIB:.1f} GiB, the machine has {memory / GIB:.1f} GiB; give less", path=key
            )
        if wanted < pages(1):
            raise ConfigError("is less than one page of memory; give more", path=key)
        return wanted


class Cached:
    """One published version of a block in the Cache. A new version is a new object."""

    __slots__ = (
        "attributes",
        "below",
        "charge",
        "dirty",
        "file",
        "lent",
        "name",
        "opens",
        "pinned",
        "retired",
        "revision",
    )

    def __init__(
        self, name: str, attributes: Attributes, charge: int, file: int, *, dirty: bool, pinned: bool = False
    ) -> None:
        self.name = name
        self.file = file
        """The number of its inode on the tmpfs, which no other file ever has."""
        self.attributes = attributes
        self.charge = charge
        self.dirty = dirty
        self.pinned = pinned
        self.opens = 0
        """Descriptors that this process holds."""
        self.lent = False
        """Whether a descriptor was ever given to another process."""
        self.below: bool | None = None
        """Whether a lower stage has something under this name; None where nobody looked."""
        self.revision = 0
        """Counts changes of attributes, so that write-back sees that one came between."""
        self.retired: str | None = None
        """Its path in trash/, once it was replaced, removed or evicted while open."""


class EvictionOrder(Protocol):
    """Which of the blocks that may be evicted goes first. Holds exactly the blocks that may."""

    def add(self, block: Cached) -> None:
        """*block* may be evicted from now on; it was just used."""

    def discard(self, block: Cached) -> None:
        """*block* may not be evicted (any more)."""

    def first(self) -> Cached | None:
        """The block to evict next, or None."""

    def __len__(self) -> int: ...


class OpenBlock:
    """A descriptor of a published block, and what it was when opened. Close it once."""

    __slots__ = ("_close", "attributes", "fd", "file", "stage")

    def __init__(
        self,
        fd: int,
        attributes: Attributes,
        stage: str,
        close: Callable[[int], None] = os.close,
        *,
        file: int = 0,
    ) -> None:
        self.fd = fd
        self.attributes = attributes
        self.stage = stage
        self.file = file
        """The number of the file's inode in the Cache; 0 where another stage has it."""
        self._close = close

    def close(self) -> None:
        self._close(self.fd)


class Staging:
    """A block being written: a file that nobody else sees, and the room reserved for it.

    `floor` bytes stay reserved whatever was written; `pending` are reserved for writes under way. `fd` is read-only
    where only others write.
    """

    __slots__ = ("_cache", "charge", "fd", "file", "floor", "path", "pending")

    def __init__(self, cache: Cache, fd: int, path: str) -> None:
        self._cache = cache
        self.fd = fd
        self.path = path
        self.file = os.fstat(fd).st_ino
        self.charge = 0
        self.floor = 0
        self.pending = 0

    def settle(self) -> None:
        """Count what the file really takes, after a write or a truncation."""
        charge = max(os.fstat(self.fd).st_blocks * 512, self.floor) + self.pending
        self._cache.count(charge - self.charge)
        self.charge = charge

    def attributes(self) -> Attributes:
        return Attributes.of(os.fstat(self.fd))

    def truncate(self, size: int) -> None:
        """Make the file *size* bytes long. Pages beyond that, also allocated ahead, are freed."""
        with self._cache.freeing(self.path):
            os.truncate(self.path, size)
        self.settle()

    def reopen(self, *, writable: bool) -> None:
        """Have another descriptor: a read-only one where others write, so that is_writable() tells of them alone."""
        fd = os.open(self.path, (os.O_RDWR if writable else os.O_RDONLY) | os.O_CLOEXEC)
        os.close(self.fd)
        self.fd = fd

    def is_writable(self) -> bool:
        """Whether anybody has the file open for writing, or mapped so: also we, unless our descriptor is read-only."""
        try:
            fcntl.fcntl(self.fd, _F_SETSIG, signal.SIGURG)
            fcntl.fcntl(self.fd, fcntl.F_SETLEASE, fcntl.F_RDLCK)
        except BlockingIOError:
            return True
        fcntl.fcntl(self.fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)
        return False

    def trim(self) -> None:
        """Free pages that were allocated ahead and not written."""
        found = os.fstat(self.fd)
        if found.st_blocks * 512 > pages(found.st_size):
            self.truncate(found.st_size)
            os.utime(self.fd, ns=(found.st_atime_ns, found.st_mtime_ns))


class Cache(Stage):
    """Blocks in memory. See the module's text for the layout and the invariants."""

    local: ClassVar[bool] = True
    persistent: ClassVar[bool] = False
    options = CacheOptions

    def __init__(
        self, directory: str, capacity: int, order: EvictionOrder, *, temporary: bool = False, label: str = "Cache"
    ) -> None:
        super().__init__(label)
        self.directory = directory
        self.capacity = capacity
        self.used = 0
        self.order = order
        self.temporary = temporary
        """Whether the directory is this process's alone and goes when it stops with nothing dirty in it."""
        self.blocks: dict[str, Cached] = {}
        self.dirty_blocks = 0
        self.dirty_bytes = 0
        self.on_freed: Callable[[], None] = lambda: None
        """Called when bytes became free or a block became evictable."""
        self.on_full: Callable[[], None] | None = None
        """Set while others write staging files by themselves. Called when pages are freed of which there may have been
        none before: then a write may have failed, and nothing else tells of it."""
        self._dirty = f"{directory}/dirty"
        self._clean = f"{directory}/clean"
        self._staging = f"{directory}/staging"
        self._trash = f"{directory}/trash"
        self._serial = itertools.count()
        self._retired: set[Cached] = set()
        self.wanted: frozenset[int] = frozenset()
        """To be set before the start: the inodes of files in staging/ and trash/ that the mount still needs."""
        self._leftovers: dict[int, str] = {}
        """Staging files of an earlier process that are wanted, by inode."""
        self.lock: int | None = None
        """A descriptor of the file that is locked, from start to stop."""
        self.unbounded: str | None = "it is not started"
        """Why the kernel does not keep the bound. None where it does: on a tmpfs of its own, as large as `capacity`."""
        self.was_full = False
        """Whether the tmpfs was full at the start."""

    # Start and stop

    async def start(self) -> None:
        """Take the directory and find what is in it. Raises ConfigError where it cannot be used."""
        await trio.to_thread.run_sync(self._recover)

    async def stop(self) -> None:
        self.reclaim()
        if self.lock is None:
            return
        is_over = not self.dirty_blocks if self.temporary else not (self.blocks or self._retired)
        is_own = tmpfs.is_own(self.directory)
        if is_over and self.temporary and not is_own:
            await trio.to_thread.run_sync(shutil.rmtree, self.directory, True)
        os.close(self.lock)
        self.lock = None
        if is_over and is_own:
            try:
                await trio.to_thread.run_sync(tmpfs.take_away, self.directory)
            except OSError as error:
                log.info("%s stays: %s", self.directory, error.strerror)

    def _recover(self) -> None:
        try:
            os.makedirs(self.directory, mode=0o700, exist_ok=True)
            self.unbounded = tmpfs.mount_own(self.directory, self.capacity)
            for directory in (self._dirty, self._clean, self._staging, self._trash):
                os.makedirs(directory, mode=0o755, exist_ok=True)
            os.chmod(self.directory, 0o700)
            self.lock = os.open(f"{self.directory}/lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise ConfigError(f"{self.directory}: {error.strerror}", path="cache_dir") from error
        try:
            fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(self.lock)
            self.lock = None
            raise ConfigError(
                f"{self.directory} is in use by another process; stop it or name another directory", path="cache_dir"
            ) from error
        room = os.statvfs(self.directory)
        if room.f_blocks * room.f_frsize < self.capacity:
            raise ConfigError(
                f"{self.directory} is on a file system of {room.f_blocks * room.f_frsize / GIB:.2f} GiB, less than the "
                f"cache's {self.capacity / GIB:.2f} GiB; lower the capacity or give the file system more",
                path="cache_dir",
            )
        self.was_full = not self.bytes_left()
        self.on_full = self._was_full
        self._sort_leftovers()
        found = [*self._walk(self._clean, dirty=False), *self._walk(self._dirty, dirty=True)]
        found.sort(key=lambda block: max(block.attributes.mtime_ns, block.attributes.atime_ns))
        for block in found:
            other = self.blocks.get(block.name)
            if other is not None:
                # A crash between the two steps of commit(): the dirty one is the newer.
                old = other if block.dirty else block
                self._unlink(self._path(old))
                if old is block:
                    continue
                self._drop(old)
                self.used -= old.charge
            self._admit(block)
            self.used += block.charge
        while self.used > self.capacity and self.evict_one():
            pass
        self.on_full = None
        if self.unbounded is None and not tmpfs.resize(self.directory, self.capacity):
            self.unbounded = "it holds more than its capacity"

    def _was_full(self) -> None:
        self.was_full = True

    def _sort_leftovers(self) -> None:
        """What an earlier process left in staging/ and trash/ goes, unless it is wanted or open somewhere."""
        highest = -1
        for entry in os.scandir(self._staging):
            if entry.inode() in self.wanted:
                self._leftovers[entry.inode()] = entry.path
                highest = max(highest, int(entry.name))
            else:
                self._unlink(entry.path)
        for entry in os.scandir(self._trash):
            found = entry.stat()
            if found.st_ino not in self.wanted and not _open_elsewhere(entry.path):
                self._unlink(entry.path)
                continue
            block = Cached(entry.name, Attributes.of(found), found.st_blocks * 512, found.st_ino, dirty=False)
            block.retired, block.lent = entry.path, True
            self._retired.add(block)
            self.used += block.charge
            highest = max(highest, int(entry.name))
        self._serial = itertools.count(highest + 1)

    def _walk(self, tree: str, *, dirty: bool) -> Iterator[Cached]:
        directories = [tree]
        while directories:
            with os.scandir(directories.pop()) as entries:
                for entry in entries:
                    if entry.is_dir(follow_symlinks=False):
                        directories.append(entry.path)
                    elif entry.is_file(follow_symlinks=False):
                        found = entry.stat(follow_symlinks=False)
                        pinned = PIN_XATTR in read_xattrs(entry.path)
                        name = entry.path[len(tree) + 1 :]
                        charge = found.st_blocks * 512
                        block = Cached(name, Attributes.of(found), charge, found.st_ino, dirty=dirty, pinned=pinned)
                        # The earlier process may have lent it.
                        block.lent = True
                        yield block

    # Bytes

    def count(self, delta: int) -> None:
        """Add *delta* bytes to what is used."""
        self.used += delta
        if delta < 0:
            self.on_freed()

    @property
    def free(self) -> int:
        return self.capacity - self.used

    def bytes_left(self) -> int:
        """What the tmpfs has to give; 0 if a write may have failed since anything was freed."""
        found = os.statvfs(self.directory)
        return found.f_bfree * found.f_frsize

    @contextmanager
    def freeing(self, path: str) -> Iterator[None]:
        """Around what frees pages of the file at *path*, if there is one.

        Others only take pages. So if more is left afterwards than the file had, it was not full before.
        """
        if self.on_full is None:
            yield
            return
        before = _stat(path)
        yield
        if before is None or self.on_full is None:
            return
        after = _stat(path)
        kept = after.st_blocks if after is not None and after.st_ino == before.st_ino else 0
        if self.bytes_left() <= (before.st_blocks - kept) * 512:
            self.on_full()

    def _unlink(self, path: str) -> None:
        with self.freeing(path):
            os.unlink(path)

    # Writing

    def stage_file(self, attributes: Attributes | None = None) -> Staging:
        """Give an empty staging file. Only mode and owner of *attributes* count."""
        path = f"{self._staging}/{next(self._serial)}"
        mode = stat.S_IMODE(attributes.mode) if attributes is not None else 0o644
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        os.fchmod(fd, mode)
        if attributes is not None and (attributes.uid, attributes.gid) != (os.geteuid(), os.getegid()):
            with suppress(PermissionError):
                os.fchown(fd, attributes.uid, attributes.gid)
        return Staging(self, fd, path)

    def commit(self, staging: Staging, name: str, *, dirty: bool, attributes: Attributes | None = None) -> Cached:
        """Publish *staging* under *name*, in place of what was there. The descriptor stays the caller's.

        With *attributes*, times and xattrs are taken from it, else the file keeps its own. Raises NotABlock if
        there is a directory under the name, BlockNotFound if a component of it is a block.
        """
        check_name(name)
        if os.path.isdir(f"{self._clean}/{name}"):
            raise NotABlock(name, "there is a directory of that name")
        if attributes is not None:
            write_xattrs(staging.fd, attributes.xattrs or {})
            os.utime(staging.fd, ns=(attributes.atime_ns, attributes.mtime_ns))
        staging.floor = 0
        staging.trim()
        staging.settle()
        block = Cached(name, staging.attributes(), staging.charge, staging.file, dirty=dirty)
        if attributes is not None and os.geteuid() != 0:
            # The file could not be given to its owner; the index knows it all the same.
            block.attributes = _merge(block.attributes, Changes(uid=attributes.uid, gid=attributes.gid))
        self._make_parents(name)
        old = self.blocks.get(name)
        if old is not None:
            block.pinned, block.below = old.pinned, old.below
            self._retire(old, keep_path=old.dirty == dirty)
        if block.pinned:
            write_xattrs(staging.fd, {PIN_XATTR: b"1"})
        with self.freeing(self._path(block)):
            os.rename(staging.path, self._path(block))
        self._admit(block)
        return block

    def abandon(self, staging: Staging) -> None:
        """Forget *staging*, close its descriptor and free its room."""
        with self.freeing(staging.path):
            with suppress(FileNotFoundError):
                os.unlink(staging.path)
            os.close(staging.fd)
        self.count(-staging.charge)
        staging.charge = 0

    def mark_clean(self, block: Cached) -> None:
        """The next persistent stage has *block* now."""
        source = self._path(block)
        self._forget_dirty(block)
        os.rename(source, self._path(block))
        self._shelve(block)

    # Reading

    def open_block(self, block: Cached) -> OpenBlock:
        """A read-only descriptor of *block*, which is not evicted while it is open. Counts as a use."""
        fd = os.open(self._path(block), os.O_RDONLY | os.O_CLOEXEC)
        self.adopt(block)
        return OpenBlock(fd, block.attributes, self.label, lambda fd: self.close_descriptor(block, fd), file=block.file)

    def adopt(self, block: Cached) -> None:
        """Count one more descriptor of this process on *block*."""
        block.opens += 1
        if block.opens == 1:
            self.order.discard(block)

    def release(self, block: Cached) -> None:
        """The counterpart of adopt(), once the descriptor is closed."""
        block.opens -= 1
        if block.opens:
            return
        if block.retired is not None:
            self.reclaim()
        else:
            self._shelve(block)

    def close_descriptor(self, block: Cached, fd: int) -> None:
        """Close *fd*, a descriptor of *block* that was counted with adopt()."""
        os.close(fd)
        self.release(block)

    # What an earlier process had open

    def by_file(self) -> dict[int, Cached]:
        """The blocks, retired ones too, by the number of their inode."""
        return {block.file: block for block in (*self.blocks.values(), *self._retired)}

    def reopen_staging(self, file: int, *, writable: bool = True) -> Staging | None:
        """The wanted staging file with inode *file*, if it is (still) one."""
        path = self._leftovers.pop(file, None)
        if path is None:
            return None
        staging = Staging(self, os.open(path, (os.O_RDWR if writable else os.O_RDONLY) | os.O_CLOEXEC), path)
        staging.settle()
        return staging

    def drop_leftovers(self) -> None:
        """Everything wanted was reopened: what is left of an earlier process goes."""
        for path in self._leftovers.values():
            self._unlink(path)
        self._leftovers.clear()
        self.reclaim()

    # Leaving

    def evict(self, block: Cached) -> None:
        """Drop *block*. Raises BlockBusy if it is dirty, pinned or open."""
        reason = "dirty" if block.dirty else "pinned" if block.pinned else "open" if self._in_use(block) else None
        if reason is not None:
            raise BlockBusy(block.name, f"it is {reason}")
        self._retire(block)

    def evict_one(self) -> bool:
        """Evict the first block that the order gives and that nobody has open; False if there is none."""
        for _ in range(len(self.order)):
            victim = self.order.first()
            if victim is None:
                break
            if not victim.lent or not self._in_use(victim):
                self._retire(victim)
                return True
            self._shelve(victim)
        return False

    def drop(self, name: str) -> Cached | None:
        """Remove block *name*; give what it was."""
        block = self.blocks.get(name)
        if block is not None:
            self._retire(block)
        return block

    def move(self, old: str, new: str) -> Cached | None:
        """Rename block *old*, in place of a block at *new*; None where there was none."""
        block = self.blocks.get(old)
        if block is None:
            return None
        check_name(new)
        if os.path.isdir(f"{self._clean}/{new}"):
            raise NotABlock(new, "there is a directory of that name")
        if old == new:
            return block
        self._make_parents(new)
        there = self.blocks.get(new)
        # Where something may be below under the old name, it is renamed there too.
        block.below = there.below if there is not None and block.below is False else None
        if there is not None:
            self._retire(there, keep_path=there.dirty == block.dirty)
        source = self._path(block)
        del self.blocks[old]
        self.order.discard(block)
        block.name = new
        with self.freeing(self._path(block)):
            os.rename(source, self._path(block))
        self.blocks[new] = block
        self._shelve(block)
        return block

    def move_directory(self, old: str, new: str) -> bool:
        """Rename a directory with all below it, in place of an empty one; False where there was none.

        Raises NotABlock where *new* is a block, BlockError ENOTEMPTY where it is not empty.
        """
        if not os.path.isdir(f"{self._clean}/{old}"):
            return False
        check_name(new)
        self._make_parents(new)
        try:
            if os.path.isdir(f"{self._dirty}/{new}"):
                os.rmdir(f"{self._dirty}/{new}")
            os.rename(f"{self._clean}/{old}", f"{self._clean}/{new}")
            if os.path.isdir(f"{self._dirty}/{old}"):
                os.rename(f"{self._dirty}/{old}", f"{self._dirty}/{new}")
        except OSError as error:
            raise from_os_error(error, new) from error
        prefix = old + "/"
        for name in [name for name in self.blocks if name.startswith(prefix)]:
            block = self.blocks.pop(name)
            self.order.discard(block)
            block.name = f"{new}/{name[len(prefix) :]}"
            self.blocks[block.name] = block
            self._shelve(block)
        return True

    def set_pinned(self, block: Cached, on: bool) -> None:
        """Keep *block* from eviction, or let it go."""
        if on != block.pinned:
            write_xattrs(self._path(block), {PIN_XATTR: b"1" if on else None})
        block.pinned = on
        self._shelve(block)

    def change(self, block: Cached, changes: Changes) -> None:
        """Change attributes of *block*."""
        try:
            apply_changes(self._path(block), changes)
        except OSError as error:
            raise from_os_error(error, block.name) from error
        block.attributes = _merge(block.attributes, changes)
        block.revision += 1

    def xattrs(self, block: Cached) -> dict[str, bytes]:
        """The `user.*` xattrs of *block*, the digest among them where it is known."""
        found = read_xattrs(self._path(block))
        found.pop(PIN_XATTR, None)
        return found

    # The stage contract

    async def lookup(self, names: Sequence[str], *, xattrs: bool = False) -> list[Attributes | None]:
        return [self.find(name, xattrs=xattrs) for name in names]

    def find(self, name: str, *, xattrs: bool = False) -> Attributes | None:
        """What lookup() says of one name."""
        block = self.blocks.get(name)
        if block is None:
            return self.directory_attributes(name)
        if not xattrs:
            return block.attributes
        return msgspec.structs.replace(block.attributes, xattrs=self.xattrs(block))

    def directory_attributes(self, name: str) -> Attributes | None:
        """Attributes of directory *name* ('' is the root), None where the Cache does not know it."""
        try:
            found = os.stat(f"{self._clean}/{name}")
        except (OSError, ValueError):
            return None
        return Attributes.of(found) if stat.S_ISDIR(found.st_mode) else None

    async def open(self, names: Sequence[str]) -> list[int | UcmfsError]:
        return [self._open_row(name) for name in names]

    def _open_row(self, name: str) -> int | UcmfsError:
        block = self.blocks.get(name)
        if block is None:
            return BlockNotFound(name)
        block.lent = True
        return os.open(self._path(block), os.O_RDONLY | os.O_CLOEXEC)

    async def read(self, targets: Sequence[tuple[str, int]]) -> list[Attributes | UcmfsError]:
        return [self._read_row(name, fd) for name, fd in targets]

    def _read_row(self, name: str, fd: int) -> Attributes | UcmfsError:
        block = self.blocks.get(name)
        if block is None:
            return BlockNotFound(name)
        source = self.open_block(block)
        try:
            copy_whole(source.fd, fd, block.attributes.size)
            return msgspec.structs.replace(block.attributes, xattrs=self.xattrs(block))
        except OSError as error:
            return from_os_error(error, name)
        finally:
            source.close()

    async def publish(self, items: Sequence[Publication], *, durable: bool = False) -> list[UcmfsError | None]:
        return [self._publish_row(item) for item in items]

    def _publish_row(self, item: Publication) -> UcmfsError | None:
        size = item.attributes.size
        try:
            check_name(item.name)
            if pages(size) > self.free:
                return StageFull(self.label, f"{item.name}: no room for {size} bytes")
            staging = self.stage_file(item.attributes)
        except UcmfsError as error:
            return error
        try:
            copy_whole(item.fd, staging.fd, size)
            self.commit(staging, item.name, dirty=False, attributes=item.attributes)
        except OSError as error:
            self.abandon(staging)
            return error if isinstance(error, UcmfsError) else from_os_error(error, item.name)
        os.close(staging.fd)
        return None

    async def remove(self, names: Sequence[str]) -> list[bool | UcmfsError]:
        return [self.drop(name) is not None for name in names]

    async def scan(self, directory: str) -> AsyncIterator[Sequence[Entry]]:
        for tree in (self._clean, self._dirty):
            try:
                entries = os.scandir(f"{tree}/{directory}" if directory else tree)
            except (OSError, ValueError):
                continue
            with entries:
                while batch := list(itertools.islice(entries, SCAN_BATCH)):
                    yield [row for entry in batch if (row := self._entry(tree, directory, entry)) is not None]

    def _entry(self, tree: str, directory: str, entry: os.DirEntry[str]) -> Entry | None:
        if entry.is_dir(follow_symlinks=False):
            # Directories stand in both trees; clean/ has them all.
            if tree == self._dirty:
                return None
            with suppress(FileNotFoundError):
                return Entry(entry.name, Attributes.of(entry.stat(follow_symlinks=False)))
            return None
        block = self.blocks.get(child_of(directory, entry.name))
        # A block that became clean in mid-scan would be met twice.
        if block is None or block.dirty != (tree == self._dirty):
            return None
        return Entry(entry.name, block.attributes)

    def names_in(self, directory: str, most: int) -> set[str] | None:
        """The names in *directory*; None if they are more than *most*."""
        names: set[str] = set()
        for tree in (self._clean, self._dirty):
            with suppress(OSError, ValueError), os.scandir(f"{tree}/{directory}" if directory else tree) as entries:
                names.update(entry.name for entry in itertools.islice(entries, most + 1))
                if len(names) > most:
                    return None
        return names

    async def rename(self, pairs: Sequence[tuple[str, str]]) -> list[bool | UcmfsError]:
        return [self._rename_row(old, new) for old, new in pairs]

    def _rename_row(self, old: str, new: str) -> bool | UcmfsError:
        try:
            return self.move(old, new) is not None or self.move_directory(old, new)
        except UcmfsError as error:
            return error

    async def update(self, name: str, changes: Changes) -> bool | UcmfsError:
        block = self.blocks.get(name)
        try:
            if block is not None:
                self.change(block, changes)
            elif self.directory_attributes(name) is not None:
                self.change_directory(name, changes)
            else:
                return False
        except UcmfsError as error:
            return error
        return True

    def change_directory(self, name: str, changes: Changes) -> None:
        try:
            apply_changes(f"{self._clean}/{name}", changes)
        except OSError as error:
            raise from_os_error(error, name) from error

    async def make_directory(self, name: str, attributes: Attributes) -> UcmfsError | None:
        try:
            self.add_directory(name, attributes)
        except UcmfsError as error:
            return error
        return None

    def add_directory(self, name: str, attributes: Attributes) -> None:
        """Make a directory and its parents; to have it already is success."""
        check_name(name)
        path = f"{self._clean}/{name}"
        if name in self.blocks:
            raise from_errno(17, name, "there is a block of that name")  # EEXIST
        if os.path.isdir(path):
            return
        self._make_parents(name)
        os.mkdir(path)
        self.change_directory(name, Changes(mode=stat.S_IMODE(attributes.mode), uid=attributes.uid, gid=attributes.gid))

    async def remove_directory(self, name: str) -> bool | UcmfsError:
        try:
            return self.drop_directory(name)
        except UcmfsError as error:
            return error

    def drop_directory(self, name: str) -> bool:
        """Remove an empty directory; False where there was none. Raises BlockError ENOTEMPTY."""
        if self.directory_attributes(name) is None:
            return False
        try:
            # dirty/ first: it never has a directory that clean/ has not.
            with suppress(FileNotFoundError):
                os.rmdir(f"{self._dirty}/{name}")
            os.rmdir(f"{self._clean}/{name}")
        except OSError as error:
            raise from_os_error(error, name) from error
        return True

    async def usage(self) -> Usage:
        return Usage(self.capacity, self.used, self.free, len(self.blocks))

    async def set_aside(self, name: str) -> None:
        self.drop(name)

    # State changes; each keeps index, order, counters and layout in step

    def _path(self, block: Cached) -> str:
        if block.retired is not None:
            return block.retired
        return f"{self._dirty if block.dirty else self._clean}/{block.name}"

    def _make_parents(self, name: str) -> None:
        parent = parent_of(name)
        if os.path.isdir(f"{self._dirty}/{parent}") and os.path.isdir(f"{self._clean}/{parent}"):
            return
        while parent:
            if parent in self.blocks:
                raise from_errno(20, name, f"{parent} is a block, not a directory")  # ENOTDIR
            parent = parent_of(parent)
        parent = parent_of(name)
        os.makedirs(f"{self._clean}/{parent}", exist_ok=True)
        os.makedirs(f"{self._dirty}/{parent}", exist_ok=True)

    def _admit(self, block: Cached) -> None:
        self.blocks[block.name] = block
        if block.dirty:
            self.dirty_blocks += 1
            self.dirty_bytes += block.charge
        self._shelve(block)

    def _forget_dirty(self, block: Cached) -> None:
        if block.dirty:
            block.dirty = False
            self.dirty_blocks -= 1
            self.dirty_bytes -= block.charge

    def _drop(self, block: Cached) -> None:
        """Take *block* out of the index; its file is the caller's business."""
        if self.blocks.get(block.name) is block:
            del self.blocks[block.name]
        self.order.discard(block)
        self._forget_dirty(block)

    def _shelve(self, block: Cached) -> None:
        """Put *block* where it belongs in the order of eviction, as just used."""
        self.order.discard(block)
        if not block.dirty and not block.pinned and not block.opens:
            self.order.add(block)
            self.on_freed()

    def _in_use(self, block: Cached) -> bool:
        return block.opens > 0 or (block.lent and _open_elsewhere(self._path(block)))

    def _retire(self, block: Cached, *, keep_path: bool = False) -> None:
        """Take *block* away. Pages that something still has open stay counted until it is closed.

        With *keep_path*, its file stays for a rename to replace, so that a crash leaves the old or the new.
        """
        path = self._path(block)
        busy = self._in_use(block)
        if busy:
            retired = f"{self._trash}/{next(self._serial)}"
            os.link(path, retired)
        if not keep_path:
            self._unlink(path)
        self._drop(block)
        if busy:
            block.retired = retired
            self._retired.add(block)
        else:
            self.count(-block.charge)

    def reclaim(self) -> None:
        """Free retired blocks that nobody has open any more, also not a process that they were lent to."""
        for block in [block for block in self._retired if not self._in_use(block)]:
            self._unlink(self._path(block))
            self._retired.discard(block)
            self.count(-block.charge)

    def age(self) -> float:
        """Seconds since the oldest dirty block was written; 0 where none is dirty."""
        times = [block.attributes.mtime_ns for block in self.blocks.values() if block.dirty]
        return max(0.0, time.time() - min(times) / 1e9) if times else 0.0


def _stat(path: str) -> os.stat_result | None:
    try:
        return os.stat(path)
    except FileNotFoundError:
        return None


def _merge(attributes: Attributes, changes: Changes) -> Attributes:
    given = {
        name: value for name in ("mtime_ns", "uid", "gid", "atime_ns") if (value := getattr(changes, name)) is not None
    }
    if changes.mode is not None:
        given["mode"] = stat.S_IFMT(attributes.mode) | stat.S_IMODE(changes.mode)
    return msgspec.structs.replace(attributes, **given)


def _open_elsewhere(path: str) -> bool:
    """Whether any process has the file at *path* open or mapped, this one included."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        # Were the lease broken in the moment that we hold it, the kernel would send SIGIO, which ends a process;
        # SIGURG does nothing.
        fcntl.fcntl(fd, _F_SETSIG, signal.SIGURG)
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_WRLCK)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


_F_SETSIG: Any = 10  # not in the fcntl module; value of Linux on all architectures
