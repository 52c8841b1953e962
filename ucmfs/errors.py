"""Every error of the project, one tree, each an OSError with the errno that a file call would give.

UcmfsError
├── ConfigError              EINVAL     the configuration, or what it names, cannot be used
├── MountError               EIO        the mount cannot be made, reached or ended
├── ProtocolError            EPROTO     a message of .ucmfs/sock that cannot be understood
├── BlockError                          one block; carries its name
│   ├── BlockNotFound        ENOENT     (also FileNotFoundError)
│   ├── BlockExists          EEXIST     (also FileExistsError)
│   ├── BlockBusy            EBUSY      still open where it must not be
│   ├── BlockDenied          EACCES     (also PermissionError)
│   ├── BlockCorrupt         EBADMSG    the bytes do not match the digest
│   ├── NotABlock            EISDIR     a directory, or something else that is no regular file
│   └── InvalidName          EINVAL     a name that no file can have
├── StageError               EIO        a stage failed as a whole; carries the stage's label
│   ├── StageTimeout         ETIMEDOUT  the deadline passed
│   ├── StageFull            ENOSPC     no room, or none within the deadline
│   ├── StageReadOnly        EROFS      the stage takes no writes
│   └── Unsupported          EOPNOTSUPP the stage cannot do that
└── ClientError                         the Python client
    ├── InvalidRequest       EINVAL     (also ValueError) refused before any byte moved
    ├── StoreClosed          EBADF      used after close()
    └── TaskFailed           EIO        rows of a task failed; carries them

A message says what, where and what to do. The cause is chained.
"""

from __future__ import annotations

import errno as _errno
import os
from collections.abc import Sequence

__all__ = [
    "BlockBusy",
    "BlockCorrupt",
    "BlockDenied",
    "BlockError",
    "BlockExists",
    "BlockNotFound",
    "ClientError",
    "ConfigError",
    "InvalidName",
    "InvalidRequest",
    "MountError",
    "NotABlock",
    "ProtocolError",
    "StageError",
    "StageFull",
    "StageReadOnly",
    "StageTimeout",
    "StoreClosed",
    "TaskFailed",
    "UcmfsError",
    "Unsupported",
    "from_errno",
    "from_os_error",
    "sole_error",
]


class UcmfsError(OSError):
    """Base of all errors of ucmfs. `errno` is what a file call would report."""

    code: int = _errno.EIO

    def __init__(self, message: str, *, code: int | None = None) -> None:
        super().__init__(self.code if code is None else code, message)

    @property
    def message(self) -> str:
        return str(self.strerror)

    def __str__(self) -> str:
        return self.message


class ConfigError(UcmfsError):
    """A key, value or named resource cannot be used: `path` is the key's path, `reason` why."""

    code = _errno.EINVAL

    def __init__(self, message: str, *, path: str | None = None) -> None:
        super().__init__(f"{path}: {message}" if path else message)
        self.path = path
        self.reason = message


class MountError(UcmfsError):
    """The mount cannot be made, reached or ended."""


class ProtocolError(UcmfsError):
    """A message of `.ucmfs/sock` cannot be understood."""

    code = _errno.EPROTO


class BlockError(UcmfsError):
    """Something about one block. `name` is its path below the mount."""

    summary = "failed"

    def __init__(self, name: str, message: str | None = None, *, code: int | None = None) -> None:
        super().__init__(f"{name}: {message or self.summary}", code=code)
        self.name = name


class BlockNotFound(BlockError, FileNotFoundError):
    code = _errno.ENOENT
    summary = "no such block"


class BlockExists(BlockError, FileExistsError):
    code = _errno.EEXIST
    summary = "the block exists"


class BlockBusy(BlockError):
    code = _errno.EBUSY
    summary = "the block is open"


class BlockDenied(BlockError, PermissionError):
    code = _errno.EACCES
    summary = "permission denied by the block's mode"


class BlockCorrupt(BlockError):
    code = _errno.EBADMSG
    summary = "the bytes do not match the block's digest"


class NotABlock(BlockError):
    code = _errno.EISDIR
    summary = "not a regular file"


class InvalidName(BlockError):
    code = _errno.EINVAL
    summary = "not a name that a file can have"


class StageError(UcmfsError):
    """A stage failed. `stage` is its label, such as `Posix`."""

    def __init__(self, stage: str, message: str, *, code: int | None = None) -> None:
        super().__init__(f"{stage}: {message}", code=code)
        self.stage = stage


class StageTimeout(StageError, TimeoutError):
    code = _errno.ETIMEDOUT


class StageFull(StageError):
    code = _errno.ENOSPC


class StageReadOnly(StageError):
    code = _errno.EROFS


class Unsupported(StageError):
    code = _errno.EOPNOTSUPP


class ClientError(UcmfsError):
    """The Python client."""


class InvalidRequest(ClientError, ValueError):
    """Refused before any byte moved. The message names the row."""

    code = _errno.EINVAL


class StoreClosed(ClientError):
    code = _errno.EBADF

    def __init__(self) -> None:
        super().__init__("the store is closed; make a new one")


class TaskFailed(ClientError):
    """Rows of a task failed. `rows` holds (row, error) pairs in row order; the first is the cause."""

    def __init__(self, rows: Sequence[tuple[int, UcmfsError]]) -> None:
        row, first = rows[0]
        more = f" (and {len(rows) - 1} more)" if len(rows) > 1 else ""
        super().__init__(f"row {row}: {first}{more}", code=first.errno)
        self.rows = tuple(rows)


_BY_ERRNO: dict[int, type[BlockError]] = {
    kind.code: kind for kind in (BlockNotFound, BlockExists, BlockBusy, BlockDenied, BlockCorrupt, NotABlock)
}
_BY_ERRNO[_errno.EPERM] = BlockDenied
_BY_ERRNO[_errno.ENOTDIR] = BlockNotFound


def from_errno(code: int, name: str, message: str | None = None) -> BlockError:
    """Give the error about block *name* that stands for errno *code*."""
    kind = _BY_ERRNO.get(code)
    if kind is None:
        return BlockError(name, message or os.strerror(code), code=code)
    return kind(name, message, code=code)


def from_os_error(error: OSError, name: str) -> BlockError:
    """Give *error*, raised by a file call about block *name*, as one of this tree, with it as the cause."""
    if isinstance(error, BlockError):
        return error
    found = from_errno(error.errno or _errno.EIO, name, str(error.strerror or error))
    found.__cause__ = error
    return found


def sole_error(error: BaseException) -> BaseException:
    """What nurseries wrapped into *error*: the one exception in its groups, or *error* if there are several."""
    while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    return error
