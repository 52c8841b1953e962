"""Blocks as files below one directory or several: all that the Posix stage does, in blocking calls for its threads."""

from __future__ import annotations

import errno
import itertools
import logging
import mmap
import os
import stat
import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from typing import TypeVar

import xxhash

from ucmfs.block import NAME_MAX, PAGE, Attributes, Changes, check_name, child_of, parent_of
from ucmfs.errors import (
    BlockBusy,
    BlockExists,
    BlockNotFound,
    ConfigError,
    InvalidName,
    NotABlock,
    StageError,
    StageFull,
    StageReadOnly,
    UcmfsError,
    from_errno,
    from_os_error,
)
from ucmfs.stages.base import Entry, Publication, Usage
from ucmfs.stages.local import (
    DIRECT_BUFFER,
    DIRECT_REFUSED,
    Loan,
    StagingDirectory,
    apply_attributes,
    apply_changes,
    copy_whole,
    create_file,
    make_parents,
    read_direct,
    read_xattrs,
    removed_on_failure,
    sync_directory,
    write_direct,
    write_xattrs,
)

__all__ = ["OWN_DIRECTORY", "Root", "Roots"]

log = logging.getLogger(__name__)

T = TypeVar("T")

OWN_DIRECTORY = ".ucmfs"
"""Name of the stage's working directory below each root; no block can have it."""
SCAN_BATCH = 1000

_RENAME_TRIES = 3
_MISS = frozenset({errno.ENOENT, errno.ENOTDIR, errno.EACCES, errno.EPERM, errno.ELOOP, errno.ENAMETOOLONG})


class Root:
    """One directory of blocks."""

    def __init__(self, path: str, *, direct: bool) -> None:
        self.path = path
        self.own = f"{path}/{OWN_DIRECTORY}"
        self.aside = f"{self.own}/aside"
        self.staging = StagingDirectory(f"{self.own}/staging")
        self.direct = direct
        self._lock = threading.Lock()

    def at(self, name: str) -> str:
        return f"{self.path}/{name}" if name else self.path

    def refuse_direct(self, error: OSError) -> None:
        """The file system does not take O_DIRECT: do without from now on, and say so once."""
        with self._lock:
            if self.direct:
                log.warning("%s: io_direct is off, for the file system refuses it: %s", self.path, error.strerror)
            self.direct = False


class Roots:
    """The directories of a stage as one, in blocking calls. Methods about one name raise OSError; see row().

    *label* is the stage's. *direct*: use O_DIRECT. *capacity* in bytes, None for what the file systems have.
    """

    def __init__(self, label: str, directories: Sequence[str], *, direct: bool, capacity: int | None) -> None:
        self.label = label
        self.roots = tuple(Root(path, direct=direct) for path in directories)
        self.capacity = capacity
        self._orders = tuple((root, *(other for other in self.roots if other is not root)) for root in self.roots)

    def row(self, loan: Loan, name: str, call: Callable[[], T]) -> T | UcmfsError:
        """What *call* about *name* gives, or its error as the row's. Does nothing once the caller has gone."""
        try:
            loan.check()
            return call()
        except UcmfsError as error:
            return error
        except OSError as error:
            return self._error(name, error)

    def _error(self, name: str, error: OSError) -> UcmfsError:
        found: StageError
        match error.errno:
            case errno.ENOSPC | errno.EDQUOT:
                found = StageFull(self.label, f"{name}: {error.strerror}; make room in the storage", code=error.errno)
            case errno.EROFS:
                found = StageReadOnly(self.label, f"{name}: {error.strerror}; mount the storage read-write")
            case _:
                return from_os_error(error, name)
        found.__cause__ = error
        return found

    # The stage as a whole

    def start(self) -> None:
        for root in self.roots:
            try:
                os.makedirs(root.staging.parent, mode=0o755, exist_ok=True)
                os.makedirs(root.aside, mode=0o755, exist_ok=True)
                root.staging.open()
            except OSError as error:
                self.stop()
                raise ConfigError(
                    f"{root.own} cannot be made: {error.strerror}; make {root.path} writable or name another directory",
                    path="storage_backends",
                ) from error

    def stop(self) -> None:
        for root in self.roots:
            try:
                root.staging.close()
            except OSError as error:
                # Storage that has gone takes its temporary files with it; the next start removes others.
                log.warning("%s: temporary files stay: %s", root.own, error.strerror)

    def usage(self) -> Usage:
        total = used = free = 0
        devices: set[int] = set()
        for root in self.roots:
            try:
                device = os.stat(root.path).st_dev
                found = os.statvfs(root.path)
            except OSError as error:
                raise StageError(self.label, f"{root.path}: {error.strerror}; is it mounted?") from error
            if device not in devices:
                devices.add(device)
                total += found.f_blocks * found.f_frsize
                used += (found.f_blocks - found.f_bfree) * found.f_frsize
                free += found.f_bavail * found.f_frsize
        if not total:
            # A file system that does not know, such as ramfs.
            return Usage(self.capacity, 0, self.capacity)
        if self.capacity is None:
            return Usage(total, used, free)
        free = min(free, self.capacity)
        return Usage(self.capacity, self.capacity - free, free)

    def health(self) -> StageError | None:
        for root in self.roots:
            try:
                found = os.statvfs(root.staging.path or root.own)
            except OSError as error:
                return StageError(self.label, f"{root.own} has gone: {error.strerror}; was {root.path} unmounted?")
            if found.f_flag & os.ST_RDONLY:
                return StageReadOnly(self.label, f"{root.path} became read-only; look for errors in the kernel's log")
        return None

    # Finding

    def order(self, name: str) -> tuple[Root, ...]:
        """The roots in the order in which *name* is looked for, its home first."""
        if len(self.roots) == 1:
            return self.roots
        return self._orders[xxhash.xxh3_64_intdigest(os.fsencode(name)) % len(self.roots)]

    def find(self, name: str) -> tuple[Root, os.stat_result] | None:
        """The root that has block or directory *name*, and what stat says."""
        if _is_own(name):
            return None
        if name:
            check_name(name)
        for root in self.order(name):
            found = self._visible(root.at(name))
            if found is not None:
                return root, found
        return None

    def _visible(self, path: str) -> os.stat_result | None:
        """What stat says of a block or directory at *path*; None for anything else that may be there."""
        try:
            found = os.lstat(path)
            if stat.S_ISDIR(found.st_mode):
                return found
            if stat.S_ISLNK(found.st_mode):
                found = os.stat(path)
        except OSError as error:
            if error.errno not in _MISS:
                log.warning("%s: %s counts as a miss: %s", self.label, path, error.strerror)
            return None
        if not stat.S_ISREG(found.st_mode):
            return None
        if found.st_mode & 0o444 != 0o444 and not os.access(path, os.R_OK, effective_ids=True):
            return None
        return found

    def lookup(self, name: str, xattrs: bool) -> Attributes | None:
        try:
            found = self.find(name)
            if found is None:
                return None
            root, status = found
            return Attributes.of(status, read_xattrs(root.at(name)) if xattrs else None)
        except OSError:
            # A name that no file can have, or a file that went or was shut in between.
            return None

    def scan(self, directory: str) -> Generator[Sequence[Entry], None, None]:
        """The entries of *directory* in batches that are never empty."""
        try:
            if self.find(directory) is None:
                return
        except InvalidName:
            return
        for root in self.roots:
            path = root.at(directory)
            if not _is_directory(path):
                continue
            try:
                entries = os.scandir(path)
            except OSError as error:
                if error.errno not in _MISS:
                    raise
                continue
            with entries:
                while batch := list(itertools.islice(entries, SCAN_BATCH)):
                    rows = [row for entry in batch if (row := self._entry(root, directory, entry)) is not None]
                    if rows:
                        yield rows

    def _entry(self, root: Root, directory: str, entry: os.DirEntry[str]) -> Entry | None:
        name = child_of(directory, entry.name)
        if _is_own(name):
            return None
        found = self._visible(entry.path)
        if found is None:
            return None
        for other in self.order(name):
            if other is root:
                break
            if self._visible(other.at(name)) is not None:
                return None
        return Entry(entry.name, Attributes.of(found))

    # Reading

    def open(self, name: str) -> int:
        return self._open(name)[1]

    def _open(self, name: str) -> tuple[Root, int]:
        found = self.find(name)
        if found is None:
            raise BlockNotFound(name)
        root, status = found
        if stat.S_ISDIR(status.st_mode):
            raise NotABlock(name, "it is a directory")
        return root, os.open(root.at(name), os.O_RDONLY | os.O_CLOEXEC)

    def read_rows(self, targets: Sequence[tuple[str, int]], loan: Loan) -> list[Attributes | UcmfsError]:
        with ExitStack() as stack:
            buffer: mmap.mmap | None = None
            if any(root.direct for root in self.roots):
                # One for the whole batch: its pages are made only once.
                buffer = stack.enter_context(mmap.mmap(-1, DIRECT_BUFFER))

            def read(row: int) -> Attributes:
                return self.read(targets[row][0], loan.fd(row), buffer)

            return [self.row(loan, name, partial(read, row)) for row, (name, _) in enumerate(targets)]

    def read(self, name: str, target: int, buffer: mmap.mmap | None) -> Attributes:
        for last in (False, True):
            root, source = self._open(name)
            try:
                before = os.fstat(source)
                os.ftruncate(target, before.st_size)
                failure: OSError | None = None
                try:
                    size = before.st_size
                    direct = None if buffer is None else partial(read_direct, source, target, size, buffer)
                    self._copy(root, source, target, size, direct)
                except OSError as error:
                    # It may have failed because the file was cut short meanwhile.
                    failure = error
                attributes = Attributes.of(before, read_xattrs(source))
                if Attributes.of(os.fstat(source)).version == attributes.version:
                    if failure is not None:
                        raise failure
                    return attributes
            finally:
                os.close(source)
            if last:
                break
        raise BlockBusy(name, "another program writes to the file while it is read; try again later")

    def _copy(self, root: Root, source: int, target: int, size: int, direct: Callable[[], None] | None) -> None:
        """Copy with *direct*, where *root* takes O_DIRECT, else through the page cache."""
        if root.direct and direct is not None:
            try:
                direct()
                return
            except OSError as error:
                if error.errno not in DIRECT_REFUSED:
                    raise
                root.refuse_direct(error)
        copy_whole(source, target, size)

    # Publishing

    def publish_rows(self, durable: bool, items: Sequence[Publication], loan: Loan) -> list[UcmfsError | None]:
        def publish(row: int) -> set[str]:
            return self.publish(items[row], loan.fd(row), loan, durable)

        changed = [self.row(loan, item.name, partial(publish, row)) for row, item in enumerate(items)]
        answers = [answer if isinstance(answer, UcmfsError) else None for answer in changed]
        if durable:
            # Each directory once, however many of the batch's blocks are in it.
            for path in set().union(*(answer for answer in changed if not isinstance(answer, UcmfsError))):
                try:
                    sync_directory(path)
                except OSError as error:
                    for row, answer in enumerate(changed):
                        if not isinstance(answer, UcmfsError) and path in answer:
                            answers[row] = self._error(items[row].name, error)
        return answers

    def publish(self, item: Publication, source: int, loan: Loan, durable: bool) -> set[str]:
        """Publish *item*; give the directories that gained an entry."""
        name = _writable(item.name)
        home, *others = self.order(name)
        self._check_replaceable(name)
        temporary = home.staging.new_path()
        try:
            with removed_on_failure(temporary):
                with create_file(temporary) as target:
                    # Before the bytes, for it may refuse; after the file is made, which fails if the storage is gone.
                    changed = self._make_parents(home, name)
                    size = item.attributes.size
                    direct = partial(write_direct, source, target, size) if size >= PAGE else None
                    self._copy(home, source, target, size, direct)
                    apply_attributes(target, item.attributes)
                    if durable:
                        # Mode, times and xattrs reach the journal before the rename, and sync_directory() syncs that.
                        os.fdatasync(target)
                loan.check()
                changed |= self._move_into(temporary, home, name)
        except BlockNotFound:
            raise
        except FileNotFoundError as error:
            raise StageError(self.label, f"{home.own} has gone; was {home.path} unmounted?") from error
        for other in others:
            self._unlink_block(other.at(name))
        return changed

    def _move_into(self, path: str, root: Root, name: str) -> set[str]:
        """Rename *path* to block or directory *name* of *root*; give the directories that gained an entry."""
        target = root.at(name)
        changed = {os.path.dirname(target)}
        for _ in range(_RENAME_TRIES):
            with suppress(FileNotFoundError):
                os.rename(path, target)
                return changed
            # Another call may have removed the directory since it was made, empty as it was.
            changed |= self._make_parents(root, name)
        os.rename(path, target)
        return changed

    def _make_parents(self, root: Root, name: str) -> set[str]:
        """Make the directories that *name* needs in *root*; give those that gained an entry."""
        path = root.at(name)
        if os.path.isdir(os.path.dirname(path)):
            return set()
        parent = parent_of(name)
        while parent:
            found = self.find(parent)
            if found is not None and not stat.S_ISDIR(found[1].st_mode):
                raise from_errno(errno.ENOTDIR, name, f"{parent} is a block, not a directory")
            parent = parent_of(parent)
        return set(make_parents(path, root.path))

    def _check_replaceable(self, name: str) -> None:
        """Raise NotABlock where any root has something under *name* that a block must not replace."""
        for root in self.roots:
            try:
                found = os.lstat(root.at(name))
            except (FileNotFoundError, NotADirectoryError):
                continue
            if stat.S_ISDIR(found.st_mode):
                raise NotABlock(name, "there is a directory of that name")
            if not stat.S_ISREG(found.st_mode) and self._visible(root.at(name)) is None:
                raise NotABlock(name, f"{root.at(name)} is not a regular file; remove it yourself")

    def _unlink_block(self, path: str) -> bool:
        found = self._visible(path)
        if found is None or stat.S_ISDIR(found.st_mode):
            return False
        try:
            os.unlink(path)
        except FileNotFoundError:
            return False
        return True

    # Changing

    def remove(self, name: str) -> bool:
        found = self.find(name)
        if found is None:
            return False
        if stat.S_ISDIR(found[1].st_mode):
            raise NotABlock(name, "it is a directory")
        # All of them, or an old copy would come to light.
        return sum(self._unlink_block(root.at(name)) for root in self.roots) > 0

    def rename(self, old: str, new: str) -> bool:
        found = self.find(old)
        if found is None:
            return False
        root, status = found
        _writable(new)
        if old == new:
            return True
        try:
            if stat.S_ISDIR(status.st_mode):
                self._rename_directory(old, new)
                return True
            self._check_replaceable(new)
            self._make_parents(root, new)
            self._move_into(root.at(old), root, new)
        except BlockNotFound:
            raise
        except FileNotFoundError:
            # Removed meanwhile.
            return False
        for other in self.roots:
            if other is not root:
                self._unlink_block(other.at(new))
                self._unlink_block(other.at(old))
        return True

    def _rename_directory(self, old: str, new: str) -> None:
        if not old or new.startswith(old + "/"):
            raise InvalidName(new, "lies inside the directory that it would name")
        # Before any root changes, see that none will refuse.
        for root in self.roots:
            path = root.at(new)
            if _is_directory(path):
                _check_empty(path, new)
            elif os.path.lexists(path):
                raise from_errno(errno.ENOTDIR, new, "there is a file of that name")
        for root in self._having_directory(old):
            self._make_parents(root, new)
            self._move_into(root.at(old), root, new)

    def update(self, name: str, changes: Changes) -> bool:
        found = self.find(name)
        if found is None:
            return False
        root, status = found
        roots = self._having_directory(name) if stat.S_ISDIR(status.st_mode) else [root]
        for root in roots:
            apply_changes(root.at(name), changes)
        return True

    def make_directory(self, name: str, attributes: Attributes) -> None:
        if not name:
            return
        _writable(name)
        found = self.find(name)
        if found is not None:
            if stat.S_ISDIR(found[1].st_mode):
                return
            raise BlockExists(name, "there is a block of that name")
        for root in self.roots:
            self._make_parents(root, name)
            path = root.at(name)
            try:
                os.mkdir(path)
            except FileExistsError:
                if _is_directory(path):
                    continue
                raise
            write_xattrs(path, attributes.xattrs or {})
            with suppress(PermissionError):
                os.chown(path, attributes.uid, attributes.gid)
            os.chmod(path, stat.S_IMODE(attributes.mode))

    def remove_directory(self, name: str) -> bool:
        found = self.find(check_name(name))
        if found is None or not stat.S_ISDIR(found[1].st_mode):
            return False
        having = self._having_directory(name)
        for root in having:
            _check_empty(root.at(name), name)
        for root in having:
            os.rmdir(root.at(name))
        return True

    def _having_directory(self, name: str) -> list[Root]:
        return [root for root in self.roots if _is_directory(root.at(name))]

    def set_aside(self, name: str) -> None:
        escaped = name.replace("%", "%25").replace("/", "%2F")
        if len(os.fsencode(escaped)) > NAME_MAX - 16:
            # Too long for one component with a number after it.
            escaped = f"{os.fsdecode(os.fsencode(escaped)[:200])}~{xxhash.xxh3_64_hexdigest(os.fsencode(name))}"
        for root in self.roots:
            path = root.at(check_name(name))
            found = None if _is_own(name) else self._visible(path)
            if found is None or stat.S_ISDIR(found.st_mode):
                continue
            for number in itertools.count(1):
                kept = f"{root.aside}/{escaped}.{number}"
                try:
                    os.close(os.open(kept, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
                except FileExistsError:
                    continue
                try:
                    os.rename(path, kept)
                except OSError:
                    os.unlink(kept)
                    raise
                log.warning("%s: the copy of %s does not match its digest; it is kept as %s", self.label, name, kept)
                break


def _is_own(name: str) -> bool:
    return name == OWN_DIRECTORY or name.startswith(OWN_DIRECTORY + "/")


def _writable(name: str) -> str:
    """Return *name* if it can be given to a block or directory; raise InvalidName if not."""
    if _is_own(name):
        raise InvalidName(name, f"{OWN_DIRECTORY} belongs to the stage itself")
    return check_name(name)


def _is_directory(path: str) -> bool:
    try:
        return stat.S_ISDIR(os.lstat(path).st_mode)
    except OSError:
        return False


def _check_empty(path: str, name: str) -> None:
    """Raise BlockError ENOTEMPTY if there is anything in directory *path*."""
    with os.scandir(path) as entries:
        if next(entries, None) is not None:
            raise from_errno(errno.ENOTEMPTY, name, "the directory is not empty")
