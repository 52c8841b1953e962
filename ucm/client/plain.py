"""Blocks as files of any directory, with no daemon: temporary name, then rename."""

from __future__ import annotations

import logging
import os
import stat
import uuid
from collections.abc import Sequence
from typing import Any

from ucm.client.blocks import Blocks, Staging
from ucmfs.block import parent_of
from ucmfs.errors import NotABlock, StoreClosed, UcmfsError, from_os_error

__all__ = ["PlainBlocks"]

log = logging.getLogger(__name__)


class PlainBlocks(Blocks):
    """The files below directory *root*. The token of a staging file is its temporary name."""

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self._root = os.path.abspath(root)
        self._closed = False

    def lookup(self, names: Sequence[str]) -> list[int | None]:
        self._check()
        return [self._size(name) for name in names]

    def open(self, names: Sequence[str]) -> list[int | UcmfsError]:
        self._check()
        return [self._open(name) for name in names]

    def create(self, names: Sequence[str], size: int) -> list[Staging | UcmfsError]:
        # No room is set aside: many file systems cannot, and a write that finds none says so.
        self._check()
        return [self._create(name) for name in names]

    def publish(self, stagings: Sequence[Staging]) -> list[UcmfsError | None]:
        return [self._publish(staging) for staging in stagings]

    def discard(self, stagings: Sequence[Staging]) -> None:
        for staging in stagings:
            try:
                os.close(staging.fd)
            except OSError as error:
                log.debug("%s: closing failed: %s", staging.token, error)
            self._remove(staging)

    def prefetch(self, names: Sequence[str]) -> None:
        for opened in self.open(names):
            if isinstance(opened, int):
                try:
                    os.posix_fadvise(opened, 0, 0, os.POSIX_FADV_WILLNEED)
                finally:
                    os.close(opened)

    def stats(self) -> dict[str, Any]:
        self._check()
        return {}

    def close(self) -> None:
        self._closed = True

    def _check(self) -> None:
        if self._closed:
            raise StoreClosed

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"

    def _size(self, name: str) -> int | None:
        try:
            found = os.stat(self._path(name))
        except OSError:
            return None  # an answer may always be a miss; open tells why
        return found.st_size if stat.S_ISREG(found.st_mode) else None

    def _open(self, name: str) -> int | UcmfsError:
        try:
            # O_NONBLOCK: the open of a FIFO must not wait for a writer.
            fd = os.open(self._path(name), os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as error:
            return from_os_error(error, name)
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            os.close(fd)
            return NotABlock(name)
        return fd

    def _create(self, name: str) -> Staging | UcmfsError:
        path = self._path(f"{parent_of(name)}/.{uuid.uuid4().hex}.tmp")
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        try:
            try:
                fd = os.open(path, flags, 0o644)
            except FileNotFoundError:
                os.makedirs(os.path.dirname(path), exist_ok=True)
                fd = os.open(path, flags, 0o644)
        except OSError as error:
            return from_os_error(error, name)
        return Staging(name, fd, path)

    def _publish(self, staging: Staging) -> UcmfsError | None:
        try:
            os.close(staging.fd)  # NFS tells here that there was no room
            os.rename(staging.token, self._path(staging.name))
        except OSError as error:
            self._remove(staging)
            return from_os_error(error, staging.name)
        return None

    def _remove(self, staging: Staging) -> None:
        try:
            os.unlink(staging.token)
        except OSError as error:
            log.warning("%s: cannot remove a temporary file: %s", staging.token, error.strerror)
