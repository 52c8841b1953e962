"""Backing files: which file the kernel reads and writes by itself for an inode (kernel 6.9 and later)."""

from __future__ import annotations

import fcntl
import logging
import struct
from collections.abc import Set

__all__ = ["Backing"]

log = logging.getLogger(__name__)

MOST_LOST = 64
"""A handler opens one, and the journal knows of it when the handler is done."""

_IOC_WRITE = 1


def _iow(kind: int, number: int, size: int) -> int:
    return _IOC_WRITE << 30 | size << 16 | kind << 8 | number


_BACKING_MAP = struct.Struct("<iIQ")
"""fd, flags, padding"""
_BACKING_OPEN = _iow(229, 1, _BACKING_MAP.size)
_BACKING_CLOSE = _iow(229, 2, 4)


class Backing:
    """Registers files with the connection of *fuse*, a descriptor of /dev/fuse. Backing ids are positive numbers."""

    def __init__(self, fuse: int) -> None:
        self._fuse = fuse
        self.refusal: str | None = None
        """Why the kernel took no file so far; None while it takes them."""

    def open(self, fd: int) -> int:
        """A backing id for the file behind *fd*, which may be closed then; 0 if the kernel does not take it."""
        if self.refusal is not None:
            return 0
        try:
            # Given a mutable buffer, ioctl() gives what the system call returned.
            return int(fcntl.ioctl(self._fuse, _BACKING_OPEN, bytearray(_BACKING_MAP.pack(fd, 0, 0))))
        except OSError as error:
            self.refusal = f"the kernel does not take backing files ({error.strerror})"
            log.warning("no passthrough: %s; bytes go through the daemon", self.refusal)
            return 0

    def close_lost(self, fd: int, known: Set[int]) -> None:
        """Let go of the backing ids that a daemon opened just before it died, and that nothing is *known* of.

        The kernel numbers them one after the other, and *fd* (any file that it takes) gets the next number.
        """
        last = self.open(fd)
        for number in range(max(1, last - MOST_LOST), last + 1):
            if number not in known:
                self.close(number)

    def close(self, number: int) -> None:
        """Let go of backing id *number*; opens that use it keep the file."""
        try:
            fcntl.ioctl(self._fuse, _BACKING_CLOSE, struct.pack("<I", number))
        except OSError as error:
            log.debug("backing id %d: %s", number, error)
