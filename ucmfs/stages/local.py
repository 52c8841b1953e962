"""What stages over file descriptors share: copying, xattrs, attributes, temporary files, and lending descriptors.

All but lend() are plain blocking functions. Run them in a thread where the storage can be slow; on tmpfs they may
be called directly. They raise the OSError of the system call; the stage turns it into an error about a block.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import logging
import mmap
import os
import secrets
import stat
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeVar

from ucmfs.block import PAGE, Attributes, Changes, pages
from ucmfs.stages.base import Threads

__all__ = [
    "DIRECT_BUFFER",
    "DIRECT_REFUSED",
    "Loan",
    "StagingDirectory",
    "apply_attributes",
    "apply_changes",
    "copy_whole",
    "create_file",
    "lend",
    "make_parents",
    "read_direct",
    "read_xattrs",
    "removed_on_failure",
    "sync_directory",
    "write_direct",
    "write_xattrs",
]

log = logging.getLogger(__name__)

T = TypeVar("T")

DIRECT_BUFFER = 4 << 20
"""Bytes that read_direct() is best given as its buffer."""
DIRECT_REFUSED = frozenset({errno.EINVAL, errno.EOPNOTSUPP})
"""What setting O_DIRECT, or the first transfer, says where the file system does not take it."""

_COPY_REFUSED = frozenset({errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP})
_XATTR_ABSENT = frozenset({errno.ENOTSUP, errno.ENODATA})
_XATTR_TOO_LARGE = frozenset({errno.ENOSPC, errno.E2BIG, errno.ERANGE})
_USER = "user."


# Lending descriptors to threads


class Loan:
    """Duplicates of a caller's descriptors, lent to one call in a thread.

    A thread past its deadline is abandoned, not stopped, and its caller closes the descriptor, whose number may
    then be given to another file. The duplicates belong to the thread: it uses them and never the caller's own.
    """

    def __init__(self, fds: Sequence[int] = ()) -> None:
        self.revoked = False
        """Set once the caller has gone."""
        self._fds: list[int | OSError] = []
        for fd in fds:
            try:
                self._fds.append(os.dup(fd))
            except OSError as error:
                # One bad descriptor is its own row's error.
                self._fds.append(error)

    def fd(self, row: int) -> int:
        """The duplicate of descriptor *row*. Raises OSError if the caller's was not open."""
        found = self._fds[row]
        if isinstance(found, OSError):
            raise found
        return found

    def check(self) -> None:
        """Raise OSError ECANCELED if the caller has gone: call it before each step that others can see."""
        if self.revoked:
            raise OSError(errno.ECANCELED, "the caller has gone")

    def close(self) -> None:
        for fd in self._fds:
            if not isinstance(fd, OSError):
                os.close(fd)
        self._fds.clear()


async def lend(
    threads: Threads,
    call: Callable[[Loan], T],
    fds: Sequence[int] = (),
    *,
    discard: Callable[[T], None] | None = None,
) -> T:
    """Run *call* in *threads* with a loan of *fds*: the one way for a stage to run a call that blocks.

    The duplicates are made before the thread starts and closed when it ends, or here if it never started. A result
    that comes after the caller has gone is given to *discard*. Offsets are shared with the caller's descriptors.
    Raises StageTimeout past the deadline, and whatever *call* raises.
    """
    loan = Loan(fds)
    lock = threading.Lock()
    started = False
    results: list[T] = []

    def work() -> T:
        nonlocal started
        with lock:
            loan.check()
            started = True
        try:
            result = call(loan)
        finally:
            loan.close()
        with lock:
            gone = loan.revoked
            if not gone:
                results.append(result)
        if gone and discard is not None:
            discard(result)
        return result

    try:
        return await threads.run(work)
    except BaseException:
        with lock:
            loan.revoked = True
        if not started:
            loan.close()
        if discard is not None:
            # Made in time, but the deadline or a cancellation overtook it on its way here.
            for result in results:
                discard(result)
        raise


# Bytes


def copy_whole(source: int, target: int, size: int) -> None:
    """Copy the first *size* bytes of *source* to the start of *target*, inside the kernel.

    The offset of *source* neither matters nor moves; that of *target* is left anywhere. Never short: raises OSError,
    EIO where *source* ends early.
    """
    position = 0
    # copy_file_range shares extents or copies on the server where it can; sendfile works across file systems.
    for move in (_copy_range, _send):
        refusal: OSError | None = None
        try:
            while position < size and (moved := move(source, target, position, size - position)):
                position += moved
        except OSError as error:
            if error.errno not in _COPY_REFUSED:
                raise
            refusal = error
        if position >= size:
            return
    raise refusal or _too_short(size)


def _copy_range(source: int, target: int, position: int, count: int) -> int:
    return os.copy_file_range(source, target, count, position, position)


def _send(source: int, target: int, position: int, count: int) -> int:
    os.lseek(target, position, os.SEEK_SET)
    return os.sendfile(target, source, position, count)


def _too_short(size: int) -> OSError:
    return OSError(errno.EIO, f"the source has fewer than the {size} bytes that were promised")


def write_direct(source: int, target: int, size: int) -> None:
    """Copy the first *size* bytes of *source* to the start of *target*, past the page cache.

    The device reads the pages of *source* where they are. A partial last page goes through the page cache. *target*
    is left without O_DIRECT. Raises OSError: one of DIRECT_REFUSED where its file system does not take O_DIRECT.
    """
    if size == 0:
        return
    try:
        mapped = mmap.mmap(source, size, mmap.MAP_SHARED, mmap.PROT_READ)
    except ValueError as error:
        raise _too_short(size) from error
    with mapped, memoryview(mapped) as view:
        whole = size - size % PAGE
        with _direct(target):
            _write_all(target, view, 0, whole)
        _write_all(target, view, whole, size)


def read_direct(source: int, target: int, size: int, buffer: mmap.mmap) -> None:
    """Copy the first *size* bytes of *source*, past the page cache, to the start of *target* through *buffer*.

    *buffer* is a mapping, and so page-aligned; its size is that of one transfer. *source* is left without O_DIRECT.
    Raises OSError as write_direct() does.
    """
    position = 0
    with _direct(source), memoryview(buffer) as view:
        while position < size:
            # Whole pages are asked for to the end: O_DIRECT takes no less, and the file's end makes it short.
            with view[: min(len(view), pages(size - position))] as window:
                got = min(os.preadv(source, [window], position), size - position)
                if got == 0:
                    raise _too_short(size)
                written = 0
                while written < got:
                    with window[written:got] as piece:
                        written += os.pwrite(target, piece, position + written)
            position += got


@contextlib.contextmanager
def _direct(fd: int) -> Iterator[None]:
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    fcntl.fcntl(fd, fcntl.F_SETFL, flags | os.O_DIRECT)
    try:
        yield
    finally:
        fcntl.fcntl(fd, fcntl.F_SETFL, flags)


def _write_all(target: int, view: memoryview, position: int, end: int) -> None:
    while position < end:
        with view[position:end] as piece:
            position += os.pwrite(target, piece, position)


# Attributes


def read_xattrs(target: int | str) -> dict[str, bytes]:
    """The `user.*` xattrs of a descriptor or path; none where the file system keeps none."""
    try:
        names = os.listxattr(target)
    except OSError as error:
        if error.errno in _XATTR_ABSENT:
            return {}
        raise
    found: dict[str, bytes] = {}
    for name in names:
        if name.startswith(_USER):
            try:
                found[name] = os.getxattr(target, name)
            except OSError as error:
                # ENODATA: removed since it was listed.
                if error.errno not in _XATTR_ABSENT:
                    raise
    return found


def write_xattrs(target: int | str, changes: Mapping[str, bytes | None]) -> None:
    """Set `user.*` xattrs of a descriptor or path; None as a value removes. Others than `user.*` are passed over.

    A file system that keeps no xattrs is no error: the block goes without. Raises OSError for anything else.
    """
    for name, value in changes.items():
        if not name.startswith(_USER):
            continue
        try:
            if value is None:
                os.removexattr(target, name)
            else:
                os.setxattr(target, name, value)
        except OSError as error:
            if error.errno not in _XATTR_ABSENT:
                raise


def apply_changes(target: int | str, changes: Changes) -> None:
    """Change attributes of a descriptor or path. Raises OSError at the first that is refused."""
    # xattrs first, for they need write permission; chmod after chown, which clears the set-id bits; times last.
    write_xattrs(target, changes.xattrs)
    if changes.uid is not None or changes.gid is not None:
        os.chown(target, _or_keep(changes.uid), _or_keep(changes.gid))
    if changes.mode is not None:
        os.chmod(target, stat.S_IMODE(changes.mode))
    if changes.atime_ns is not None or changes.mtime_ns is not None:
        now = os.stat(target)
        atime = now.st_atime_ns if changes.atime_ns is None else changes.atime_ns
        mtime = now.st_mtime_ns if changes.mtime_ns is None else changes.mtime_ns
        os.utime(target, ns=(atime, mtime))


def apply_attributes(fd: int, attributes: Attributes) -> None:
    """Give a new file the xattrs, owner, mode and times of *attributes*, as far as the file system can keep them.

    The owner is left where this process may not give files away. An xattr that is too large for the file system is
    dropped with a warning: the block without it is worth more than no block.
    """
    for name, value in (attributes.xattrs or {}).items():
        try:
            write_xattrs(fd, {name: value})
        except OSError as error:
            # ext4 says ENOSPC for an xattr over a page, as for a full disk.
            if error.errno not in _XATTR_TOO_LARGE or (error.errno == errno.ENOSPC and _is_full(fd)):
                raise
            log.warning("xattr %s of %d bytes is not kept: %s", name, len(value), error.strerror)
    with contextlib.suppress(PermissionError):
        os.chown(fd, attributes.uid, attributes.gid)
    os.chmod(fd, stat.S_IMODE(attributes.mode))
    os.utime(fd, ns=(attributes.atime_ns or attributes.mtime_ns, attributes.mtime_ns))


def _is_full(fd: int) -> bool:
    room = os.fstatvfs(fd)
    # No blocks at all: it does not count them.
    return room.f_blocks > 0 and room.f_bavail == 0


def _or_keep(owner: int | None) -> int:
    return -1 if owner is None else owner


# Files that are not published yet


@contextlib.contextmanager
def create_file(path: str) -> Iterator[int]:
    """Create *path*, for this user alone, and give it open for reading and writing; closed at the end.

    Closing is part of writing: NFS reports there what could not be stored. Rename only after. Raises OSError.
    """
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        yield fd
    finally:
        os.close(fd)


@contextlib.contextmanager
def removed_on_failure(path: str) -> Iterator[None]:
    """Remove the temporary file *path*, if it is there, should the body fail."""
    try:
        yield
    except BaseException:
        # The error that brought us here tells more; a file left behind goes at the next start.
        with contextlib.suppress(OSError):
            os.unlink(path)
        raise


def make_parents(path: str, root: str) -> list[str]:
    """Make the directories missing between *root* and *path*; give those that gained an entry.

    *root* itself is never made: where it is gone, so is the storage that was mounted there. Raises OSError, ENOTDIR
    where one of them is a file.
    """
    missing: list[str] = []
    parent = os.path.dirname(path)
    while parent != root and not os.path.isdir(parent):
        missing.append(parent)
        parent = os.path.dirname(parent)
    for directory in reversed(missing):
        try:
            os.mkdir(directory)
        except FileExistsError as error:
            # Fine where another thread was first.
            if not os.path.isdir(directory):
                raise NotADirectoryError(errno.ENOTDIR, "a component of its path is a file", directory) from error
    return [os.path.dirname(directory) for directory in missing]


def sync_directory(path: str) -> None:
    """Make the entries of directory *path* survive a power cut. Raises OSError."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


class StagingDirectory:
    """A directory for this process's temporary files, below one that processes of several machines may share.

    Each has its own, `<pid>-<token>`, with a locked file in it; one whose lock is free was left by a process that
    died and is removed by the next that opens.
    """

    LOCK = "lock"

    def __init__(self, parent: str) -> None:
        self.parent = parent
        self.path: str | None = None
        self._lock: int | None = None
        self._serial = itertools.count()

    def open(self) -> None:
        """Make this process's directory and remove those of the dead. Raises OSError."""
        while self._lock is None:
            path = f"{self.parent}/{os.getpid()}-{secrets.token_hex(8)}"
            os.mkdir(path, 0o700)
            # None: another process swept it away before it was locked.
            self._lock = self._take(path, create=True)
            self.path = path
        self._sweep()

    def new_path(self) -> str:
        """A path that no file has yet. Raises OSError ESHUTDOWN where the directory is not open."""
        if self.path is None:
            raise OSError(errno.ESHUTDOWN, "the stage is not started")
        return f"{self.path}/{next(self._serial)}"

    def close(self) -> None:
        """Remove this process's directory with all that is in it."""
        path, lock = self.path, self._lock
        self.path = self._lock = None
        if path is None or lock is None:
            return
        try:
            self._empty(path)
        finally:
            os.close(lock)

    def _sweep(self) -> None:
        with os.scandir(self.parent) as entries:
            others = [entry.path for entry in entries if entry.is_dir(follow_symlinks=False)]
        for path in others:
            if path == self.path:
                continue
            try:
                lock = self._take(path, create=False)
                if lock is None:
                    continue
                try:
                    self._empty(path)
                finally:
                    os.close(lock)
            except OSError as error:
                log.warning("%s: temporary files left by a dead process stay: %s", path, error.strerror)

    def _take(self, path: str, *, create: bool) -> int | None:
        """Lock directory *path*; None if it is taken or has gone."""
        try:
            lock = os.open(f"{path}/{self.LOCK}", os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT if create else 0), 0o600)
        except FileNotFoundError:
            if not create:
                # Its owner died, or is, between making it and locking it; only an empty one can be that.
                with contextlib.suppress(OSError):
                    os.rmdir(path)
            return None
        try:
            # An owner waits: a sweeper that holds the lock removes the directory, and that shows right below.
            fcntl.flock(lock, fcntl.LOCK_EX | (0 if create else fcntl.LOCK_NB))
            if os.path.samestat(os.fstat(lock), os.stat(f"{path}/{self.LOCK}")):
                return lock
        except (BlockingIOError, FileNotFoundError):
            pass
        except OSError:
            os.close(lock)
            raise
        os.close(lock)
        return None

    def _empty(self, path: str) -> None:
        with os.scandir(path) as entries:
            leftovers = [entry.path for entry in entries if entry.name != self.LOCK]
        for leftover in leftovers:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(leftover)
        # The lock last, so that a sweep that is cut short is taken up again.
        os.unlink(f"{path}/{self.LOCK}")
        os.rmdir(path)
