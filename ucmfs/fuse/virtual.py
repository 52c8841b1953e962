"""`.ucmfs/`: what the daemon tells of itself as files, and the socket."""

from __future__ import annotations

import errno
import os
import stat
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping

import pyfuse3

from ucmfs.block import Attributes
from ucmfs.fuse.inodes import entry_attributes

__all__ = ["DIRECTORY_NAME", "Virtual"]

DIRECTORY_NAME = b".ucmfs"
SOCKET_NAME = b"sock"

_DIRECTORY, _SOCKET, _FIRST_FILE = 2, 3, 4
_LAST = 63
_TTL = 3600.0
FIRST_HANDLE = 1 << 31
"""Handles of their own range, that they never meet those of blocks; 32 bits, for the upper half is the relay's."""

Text = Callable[[], Awaitable[bytes]]


class Virtual:
    """The directory's inodes and open files. A file's text is made when it is opened."""

    def __init__(self, files: Mapping[str, Text]) -> None:
        now = time.time_ns()
        self.directory = Attributes(0, now, stat.S_IFDIR | 0o755, os.geteuid(), os.getegid(), now)
        self._names = {name.encode(): number for number, name in enumerate(files, _FIRST_FILE)}
        self._texts = dict(enumerate(files.values(), _FIRST_FILE))
        self._has_socket = False
        self._open: dict[int, tuple[int, bytes | None]] = {}
        """By handle: the file's number and its text, None until somebody reads."""
        self._next = FIRST_HANDLE

    def owns(self, number: int) -> bool:
        return _DIRECTORY <= number <= _LAST

    def lookup(self, parent: int, name: bytes) -> pyfuse3.EntryAttributes:
        if parent == pyfuse3.ROOT_INODE and name == DIRECTORY_NAME:
            return self.attributes(_DIRECTORY)
        if name == SOCKET_NAME and self._has_socket:
            return self.attributes(_SOCKET)
        number = self._names.get(name)
        if number is None:
            raise pyfuse3.FUSEError(errno.ENOENT)
        return self.attributes(number)

    def attributes(self, number: int) -> pyfuse3.EntryAttributes:
        if number == _DIRECTORY:
            attributes = self.directory
        else:
            # Who may connect is decided by who can reach the mount; who may do what, by the blocks' modes.
            mode = stat.S_IFSOCK | 0o666 if number == _SOCKET else stat.S_IFREG | 0o444
            now = time.time_ns()
            attributes = Attributes(0, now, mode, os.geteuid(), os.getegid(), now)
        return entry_attributes(number, attributes, _TTL)

    def adopt_socket(self) -> None:
        """A daemon before this one bound it."""
        self._has_socket = True

    def make_socket(self, name: bytes) -> pyfuse3.EntryAttributes:
        """The daemon binds its socket."""
        if name != SOCKET_NAME:
            raise pyfuse3.FUSEError(errno.EPERM)
        if self._has_socket:
            raise pyfuse3.FUSEError(errno.EEXIST)
        self._has_socket = True
        return self.attributes(_SOCKET)

    def readdir(self, start: int, token: pyfuse3.ReaddirToken) -> None:
        entries = [*self._names.items(), *([(SOCKET_NAME, _SOCKET)] if self._has_socket else [])]
        for position, (name, number) in enumerate(entries[start:], start + 1):
            if not pyfuse3.readdir_reply(token, name, self.attributes(number), position):
                return

    async def open(self, number: int) -> int:
        """Make the text of file *number*; give a handle."""
        try:
            text = await self._texts[number]()
        except KeyError:
            raise pyfuse3.FUSEError(errno.ENXIO) from None
        handle = self._next
        self._next = FIRST_HANDLE | (self._next + 1) % FIRST_HANDLE
        self._open[handle] = (number, text)
        return handle

    def reopen(self, handle: int, number: int) -> None:
        """A daemon before this one opened file *number* as *handle*: what was not read yet is told anew."""
        if number in self._texts:
            self._open[handle] = (number, None)
            self._next = max(self._next, FIRST_HANDLE | (handle + 1) % FIRST_HANDLE)

    def opened(self) -> Iterator[tuple[int, int]]:
        """(handle, number) of each open file."""
        return ((handle, number) for handle, (number, _) in self._open.items())

    def has_open(self, handle: int) -> bool:
        return handle in self._open

    async def read(self, handle: int, offset: int, size: int) -> bytes:
        number, text = self._open[handle]
        if text is None:
            text = await self._texts[number]()
            self._open[handle] = (number, text)
        return text[offset : offset + size]

    def release(self, handle: int) -> bool:
        """Close *handle*; False if it is not one of these."""
        return self._open.pop(handle, None) is not None
