"""The system calls that Python has no names for. Each raises OSError, with what it was about as the file name."""

from __future__ import annotations

import ctypes
import os

__all__ = ["mount", "open_tree", "preallocate", "umount"]

_libc = ctypes.CDLL(None, use_errno=True)
_UMOUNT_NOFOLLOW, _MNT_DETACH = 8, 2
_SYS_OPEN_TREE, _OPEN_TREE_CLONE, _AT_FDCWD = 428, 1, -100
_FALLOC_FL_KEEP_SIZE = 1


def _check(result: int, what: str | bytes | int) -> int:
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), what)
    return result


def mount(source: str | None, target: str, kind: str | None, flags: int, data: str) -> None:
    """mount(2)."""
    encoded = [None if text is None else os.fsencode(text) for text in (source, target, kind)]
    _check(_libc.mount(*encoded, ctypes.c_ulong(flags), os.fsencode(data)), target)


def umount(target: str, *, lazy: bool = False) -> None:
    """umount2(2), of no symbolic link; *lazy*, also with files open on it."""
    _check(_libc.umount2(os.fsencode(target), _UMOUNT_NOFOLLOW | (_MNT_DETACH if lazy else 0)), target)


def open_tree(target: str) -> int:
    """A descriptor of a copy of the mount at *target* that nobody else sees."""
    root = _libc.syscall(_SYS_OPEN_TREE, _AT_FDCWD, os.fsencode(target), _OPEN_TREE_CLONE | os.O_CLOEXEC)
    return _check(root, target)


def preallocate(fd: int, size: int) -> None:
    """Give the file behind *fd* its pages up to *size* bytes; it does not become longer, and holes stay holes."""
    _check(_libc.fallocate(fd, _FALLOC_FL_KEEP_SIZE, ctypes.c_long(0), ctypes.c_long(size)), fd)
