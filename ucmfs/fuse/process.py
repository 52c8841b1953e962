"""What /proc says of a process that opened or closes a file: which process it is, and whether it is being killed.

Imported by the relay: only the standard library may be needed here.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress

__all__ = ["being_killed", "lineage", "process_of"]

# Fields of /proc/<pid>/stat after the command, counted from the third (proc(5)).
_STATE, _PARENT, _FLAGS, _THREADS, _EXIT_CODE = 0, 1, 6, 17, 49
_PF_EXITING = 0x4
_MOST_ANCESTORS = 32


def process_of(pid: int) -> int:
    """The process (thread group) that thread *pid* belongs to; 0 where /proc does not say.

    FUSE gives the thread that asks, as seen from the daemon's pid namespace: 0 if it is not seen from there.
    """
    if not pid:
        return 0
    with suppress(OSError):
        # There is one of a process, not of another of its threads; and it takes a fifth of the time of what follows.
        os.close(os.pidfd_open(pid))
        return pid
    try:
        with open(f"/proc/{pid}/status", "rb") as status:
            for line in status:
                if line.startswith(b"Tgid:"):
                    return int(line[5:])
    except (OSError, ValueError):
        pass
    return 0


def _stat(pid: int) -> list[bytes] | None:
    try:
        # A file object takes twice the time, and every close() waits for this.
        fd = os.open(f"/proc/{pid}/stat", os.O_RDONLY | os.O_CLOEXEC)
        try:
            return os.read(fd, 4096).rpartition(b")")[2].split()
        finally:
            os.close(fd)
    except OSError:
        return None


def lineage(pid: int) -> Iterator[int]:
    """The process of thread *pid*, then its ancestors."""
    process = process_of(pid)
    for _ in range(_MOST_ANCESTORS):
        if process <= 1:
            return
        yield process
        fields = _stat(process)
        process = int(fields[_PARENT]) if fields else 0


def being_killed(process: int) -> bool:
    """Whether *process* is closing its files because a signal ends it.

    The kernel closes the files of a dying process while it is still in /proc with PF_EXITING set and the signal in
    the low 7 bits of its exit code. A zombie closed them before; but a zombie with threads left is a leader whose
    last thread may be closing them now. Where /proc does not say, the answer is no.
    """
    fields = _stat(process) if process else None
    if not fields or len(fields) <= _EXIT_CODE:
        return False
    if not int(fields[_FLAGS]) & _PF_EXITING or not int(fields[_EXIT_CODE]) & 0x7F:
        return False
    return fields[_STATE] != b"Z" or int(fields[_THREADS]) > 1
