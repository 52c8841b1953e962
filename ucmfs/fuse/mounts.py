"""The system calls about mounts that Python has no names for (mount(2), umount2(2), open_tree(2)). They need root."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

from ucmfs.errors import MountError

__all__ = ["FLAGS", "make_read_only", "mount_fuse", "private_copy", "umount"]

FLAGS = {
    "rw": 0,
    "ro": 1,
    "nosuid": 2,
    "nodev": 4,
    "noexec": 8,
    "sync": 16,
    "async": 0,
    "dirsync": 128,
    "atime": 0,
    "noatime": 1024,
    "nodiratime": 2048,
}
"""Mount options that are flags of mount(2), with their values."""

_libc = ctypes.CDLL(None, use_errno=True)
_NOSUID_NODEV = 2 | 4
_REMOUNT_BIND = 32 | 4096
_MNT_DETACH, _UMOUNT_NOFOLLOW = 2, 8
_SYS_OPEN_TREE, _OPEN_TREE_CLONE, _AT_FDCWD = 428, 1, -100


def _mount(
    source: bytes | None, target: Path, kind: bytes | None, options: frozenset[str], more: int, data: str
) -> None:
    flags = _NOSUID_NODEV | more
    for option in options:
        flags |= FLAGS.get(option, 0)
    if _libc.mount(source, os.fsencode(target), kind, ctypes.c_ulong(flags), os.fsencode(data)) != 0:
        code = ctypes.get_errno()
        raise MountError(
            f"{target}: the kernel refuses the mount: {os.strerror(code)}; options {','.join(sorted(options))}",
            code=code,
        )


def mount_fuse(fuse: int, target: Path, options: frozenset[str]) -> None:
    """Mount the connection of *fuse*, a descriptor of /dev/fuse, for all users. Raises MountError."""
    data = f"fd={fuse},rootmode=40000,user_id={os.geteuid()},group_id={os.getegid()},default_permissions,allow_other"
    _mount(b"ucmfs", target, b"fuse.ucmfs", options, 0, data)


def make_read_only(target: Path, options: frozenset[str]) -> None:
    """Make the mount at *target*, which has *options*, read-only; copies of it stay as they are. Raises MountError."""
    _mount(None, target, None, options | {"ro"}, _REMOUNT_BIND, "")


def private_copy(target: Path) -> int:
    """A descriptor of a copy of the mount at *target* that nobody else sees. Raises OSError."""
    root: int = _libc.syscall(_SYS_OPEN_TREE, _AT_FDCWD, os.fsencode(target), _OPEN_TREE_CLONE | os.O_CLOEXEC)
    if root < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), os.fspath(target))
    return root


def umount(target: Path, *, lazy: bool) -> None:
    """Unmount *target*; *lazy*, also with files open on it. Raises OSError."""
    if _libc.umount2(os.fsencode(target), _UMOUNT_NOFOLLOW | (_MNT_DETACH if lazy else 0)) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), os.fspath(target))
