"""What is mounted, as /proc tells it."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

__all__ = ["MOUNTINFO", "Mount", "find_mount"]

MOUNTINFO = Path("/proc/self/mountinfo")


@dataclass(frozen=True)
class Mount:
    """One line of mountinfo."""

    mount_point: Path
    kind: str
    """Type of file system, such as `fuse.ucmfs`."""
    source: str


def _mounts() -> Iterator[Mount]:
    for line in MOUNTINFO.read_bytes().splitlines():
        before, _, after = line.partition(b" - ")
        kind, source = after.split(b" ")[:2]
        yield Mount(Path(_unescape(before.split(b" ")[4])), _unescape(kind), _unescape(source))


def _unescape(field: bytes) -> str:
    return os.fsdecode(re.sub(rb"\\([0-7]{3})", lambda match: bytes([int(match[1], 8)]), field))


def find_mount(path: Path) -> Mount | None:
    """The mount at *path* (absolute, no symbolic links), the uppermost if there are several."""
    found = None
    for candidate in _mounts():
        if candidate.mount_point == path:
            found = candidate
    return found
