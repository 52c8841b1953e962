"""What every layer means by a block: its name, its attributes, its digest."""

from __future__ import annotations

import enum
import mmap
import os
import re
import stat
from collections.abc import Mapping

import msgspec
import xxhash

from ucmfs.errors import InvalidName

__all__ = [
    "DIGEST_XATTR",
    "NAME_MAX",
    "OWN_XATTRS",
    "PAGE",
    "PATH_MAX",
    "Attributes",
    "Changes",
    "State",
    "check_name",
    "child_of",
    "digest_of",
    "looks_like_lock",
    "looks_temporary",
    "pages",
    "parent_of",
]

PAGE = 4096
NAME_MAX = 255
"""Bytes in one component of a name, as on any Linux file system."""
PATH_MAX = 4000
"""Bytes in a whole name; PATH_MAX of Linux less room for the storage directory in front of it."""

OWN_XATTRS = "user.ucmfs."
"""Prefix of the xattrs that ucmfs gives a meaning; all other `user.*` xattrs are the user's."""
DIGEST_XATTR = "user.ucmfs.digest"
"""Where a stage keeps a block's digest: 32 lower-case hex digits, as `xxh128sum` prints them."""


class State(enum.StrEnum):
    """Whether the next persistent stage has the block."""

    DIRTY = "dirty"
    CLEAN = "clean"


class Attributes(msgspec.Struct, frozen=True):
    """What stat tells of a block or a directory. Times in nanoseconds, size in bytes.

    `mode` is the whole st_mode, type bits included. `xattrs` holds the `user.*` xattrs, the digest among
    them, where they were asked for, and None where not.
    """

    size: int
    mtime_ns: int
    mode: int = stat.S_IFREG | 0o644
    uid: int = 0
    gid: int = 0
    atime_ns: int = 0
    xattrs: Mapping[str, bytes] | None = None

    @property
    def is_directory(self) -> bool:
        return stat.S_ISDIR(self.mode)

    @property
    def digest(self) -> str | None:
        """The digest, or None where the stage knows none or xattrs were not asked for."""
        found = (self.xattrs or {}).get(DIGEST_XATTR)
        return None if found is None else found.decode("ascii", "replace")

    @property
    def version(self) -> tuple[int, int]:
        """Equal for equal contents under one name, as far as a stat can tell."""
        return (self.size, self.mtime_ns)

    @classmethod
    def of(cls, found: os.stat_result, xattrs: Mapping[str, bytes] | None = None) -> Attributes:
        return cls(
            found.st_size,
            found.st_mtime_ns,
            found.st_mode,
            found.st_uid,
            found.st_gid,
            found.st_atime_ns,
            xattrs,
        )


class Changes(msgspec.Struct, frozen=True):
    """Attributes to change; None leaves one as it is. In `xattrs`, None as a value removes."""

    mode: int | None = None
    uid: int | None = None
    gid: int | None = None
    atime_ns: int | None = None
    mtime_ns: int | None = None
    xattrs: Mapping[str, bytes | None] = msgspec.field(default_factory=dict)


# The names that real engines write to before they rename (engines.md): x.tmp, .tmpAb12, x.tmp.1234, x_9f3a.tmp.
_TEMPORARY = re.compile(r"(?:\.tmp(?:\.[^/]*)?|(?:^|/)\.tmp[^/]*)$")


def looks_temporary(name: str) -> bool:
    """Whether *name* is one that its writer will rename: such a block is not written back until then."""
    return _TEMPORARY.search(name) is not None


def looks_like_lock(name: str) -> bool:
    """Whether *name* is one that processes lock together: they must all have the same file open."""
    last = name.rpartition("/")[2].lower()
    return last == "lock" or last.endswith((".lock", ".lck"))


def check_name(name: str) -> str:
    """Return *name* if a file below the mount can have it; raise InvalidName, saying why, if not."""
    if not name or name.startswith("/") or name.endswith("/") or "\0" in name:
        raise InvalidName(name, "must be a relative path without a slash at either end")
    try:
        encoded = os.fsencode(name)
    except UnicodeEncodeError as error:
        raise InvalidName(ascii(name), "holds a surrogate that stands for no byte") from error
    if len(encoded) > PATH_MAX:
        raise InvalidName(name[:64] + "...", f"over {PATH_MAX} bytes", code=36)  # ENAMETOOLONG
    for part in encoded.split(b"/"):
        if part in (b"", b".", b".."):
            raise InvalidName(name, "has an empty, '.' or '..' component")
        if len(part) > NAME_MAX:
            raise InvalidName(name, f"a component is over {NAME_MAX} bytes", code=36)
    return name


def parent_of(name: str) -> str:
    """The directory that holds *name*; '' is the root."""
    return name.rpartition("/")[0]


def child_of(directory: str, name: str) -> str:
    """The name of what is called *name* in *directory*; '' is the root."""
    return f"{directory}/{name}" if directory else name


def pages(size: int) -> int:
    """*size* bytes rounded up to whole pages."""
    return -(-size // PAGE) * PAGE


def digest_of(fd: int, size: int) -> str:
    """XXH3-128 of the first *size* bytes of *fd*, canonical hex. Releases the GIL: run it in a thread.

    Raises OSError if *fd* cannot be mapped or read.
    """
    if size == 0:
        return xxhash.xxh3_128_hexdigest(b"")
    with mmap.mmap(fd, size, mmap.MAP_SHARED, mmap.PROT_READ) as mapped:
        mapped.madvise(mmap.MADV_SEQUENTIAL)
        return xxhash.xxh3_128_hexdigest(mapped)
