"""The Cache's memory: a tmpfs of its own, with huge pages, where this process may mount one.

Beside what huge pages save, its size is the Cache's capacity, so that the kernel keeps the bound also where it writes
blocks by itself.
"""

from __future__ import annotations

import fcntl
import logging
import os
from pathlib import Path

from ucmfs import system
from ucmfs.mountinfo import find_mount

__all__ = ["is_own", "mount_own", "resize", "take_away"]

log = logging.getLogger(__name__)

SOURCE = "ucmfs-cache"
"""How the mount is called in `df`, and known again."""

_FLAGS = 2 | 4 | 8  # nosuid, nodev, noexec
_REMOUNT = 32
_HUGE = ",huge=within_size"


def is_own(directory: str) -> bool:
    """Whether a tmpfs of ours is mounted at *directory*."""
    found = find_mount(Path(os.path.realpath(directory)))
    return found is not None and (found.kind, found.source) == ("tmpfs", SOURCE)


def mount_own(directory: str, size: int) -> str | None:
    """Have *directory*, which is there, be a tmpfs of at least *size* bytes that is ours alone; None, or why it is not.

    What an earlier process mounted there is kept, with all that is in it. A directory that has files, or is a mount of
    somebody else's, stays as it is. Safe against other processes that do the same.
    """
    if os.geteuid() != 0:
        return "a tmpfs of its own needs root"
    while True:
        fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            if os.path.samestat(os.fstat(fd), os.stat(directory)):
                return _mount_own(directory, size)
            # Somebody mounted over it meanwhile.
        finally:
            os.close(fd)


def _mount_own(directory: str, size: int) -> str | None:
    if is_own(directory):
        if _size(directory) < size:
            resize(directory, size)
        return None
    if os.path.ismount(directory):
        return f"{directory} is a mount that is not ucmfs's"
    if os.listdir(directory):
        return f"{directory} has files from before"
    data = f"size={size},mode=0700"
    try:
        try:
            system.mount(SOURCE, directory, "tmpfs", _FLAGS, data + _HUGE)
        except OSError as error:
            log.info("no huge pages for the cache: %s", error.strerror)
            system.mount(SOURCE, directory, "tmpfs", _FLAGS, data)
    except OSError as error:
        return f"the kernel refuses a tmpfs ({error.strerror})"
    return None


def _size(directory: str) -> int:
    found = os.statvfs(directory)
    return found.f_blocks * found.f_frsize


def resize(directory: str, size: int) -> bool:
    """Have our tmpfs at *directory* be *size* bytes large; False if it holds more than that."""
    if _size(directory) == size:
        return True
    try:
        system.mount(None, directory, None, _FLAGS | _REMOUNT, f"size={size}")
    except OSError as error:
        log.warning("%s cannot be resized to %d bytes: %s", directory, size, error.strerror)
        return False
    return True


def take_away(directory: str) -> None:
    """Unmount our tmpfs at *directory*, with what is in it; remove the directory. Raises OSError if it is in use."""
    system.umount(directory)
    os.rmdir(directory)
