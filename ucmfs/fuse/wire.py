"""What goes between kernel, relay and daemon: the few FUSE messages that are looked into, and the side channel.

FUSE messages are those of include/uapi/linux/fuse.h, little endian. Imported by the relay, which imports next to
nothing: only the standard library's struct may be needed here.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator

VERSION = 1
"""Of what relay and daemon say to each other: a daemon that replaces another finds the relay of the first."""

# FUSE

GETATTR, FORGET, SETATTR, MKNOD, MKDIR, UNLINK, RMDIR, RENAME = 3, 2, 4, 8, 9, 10, 11, 12
OPEN, READ, WRITE, RELEASE, FSYNC, GETXATTR, REMOVEXATTR, INIT, CREATE = 14, 15, 16, 18, 20, 22, 24, 26, 35
INTERRUPT, DESTROY, BATCH_FORGET, RENAME2 = 36, 38, 42, 45

UNANSWERED = frozenset({FORGET, BATCH_FORGET})
"""Opcodes that get no reply."""
ONCE = frozenset({MKNOD, MKDIR, UNLINK, RMDIR, RENAME, RENAME2, REMOVEXATTR})
"""Opcodes whose second time would fail: the daemon has to know that it is the second."""

IN_HEADER = struct.Struct("<IIQQIIIHH")
"""len, opcode, unique, nodeid, uid, gid, pid, total_extlen, padding"""
OUT_HEADER = struct.Struct("<IiQ")
"""len, error, unique; a notification has unique 0"""

INIT_IN = struct.Struct("<IIIII")
"""major, minor, max_readahead, flags, flags2"""
INIT_OUT_SIZE = 64
INIT_FLAGS = struct.Struct("<I")
"""At offset 12 of fuse_init_out; flags2 is at 32, max_stack_depth at 36."""
INIT_FLAGS2, INIT_STACK_DEPTH = 32, 36
INIT_MAX_WRITE = struct.Struct("<I")
"""At offset 20: the most bytes of a WRITE."""
INIT_MAX_PAGES = struct.Struct("<H")
"""At offset 28: the most pages of 4 KiB of a request."""
INIT_EXT = 1 << 30
INIT_AUTO_INVAL_DATA, INIT_EXPLICIT_INVAL_DATA = 1 << 12, 1 << 25
INIT_HANDLE_KILLPRIV_V2 = 1 << 28
INIT_PASSTHROUGH2 = 1 << (37 - 32)

OPEN_IN = struct.Struct("<II")
"""flags, open_flags"""
OPEN_OUT = struct.Struct("<QIi")
"""fh, open_flags, backing_id"""
ENTRY_OUT_SIZE = 128
FOPEN_DIRECT_IO, FOPEN_KEEP_CACHE, FOPEN_NOFLUSH, FOPEN_PASSTHROUGH = 1 << 0, 1 << 1, 1 << 5, 1 << 7

GETXATTR_NAME = 8
"""Offset of the name behind the header."""
XATTRS = b"user."
"""What the names of the xattrs begin with that there are."""

RELEASE_IN = struct.Struct("<Q")
"""fh, and more"""
OUR_HALF = 0xFFFFFFFF
"""Of a file handle: the daemon's number. The upper half is the backing id, or 0."""


def error_reply(unique: int, errno: int) -> bytes:
    """The reply that fails request *unique*."""
    return OUT_HEADER.pack(OUT_HEADER.size, -errno, unique)


# The side channel: one packet each, the kind in its first byte

READY = struct.Struct("<Bd")
"""From the daemon: it serves. Kind, and the seconds without an answer after which it hangs."""
KIND_READY, KIND_PING, KIND_PONG, KIND_ENDED, KIND_KEEP, KIND_DROP, KIND_SYNC, KIND_SYNCED, KIND_REPORT = range(9)
"""PING, ENDED (the kernel ended the connection), SYNCED and REPORT (of leases) are from the relay, the others from the
daemon. KEEP comes with a descriptor that the next daemon inherits, under the name that follows the kind (one of KEPT);
DROP closes it. SYNC asks for all that the daemon was not told of leases yet, and for SYNCED after it."""
KEPT = frozenset({"listener", "journal"})

# Leases. GRANT and RECALL go between the daemon's replies, so that they keep their place among them.

LEASES_UNIQUE = (1 << 64) - 1
GRANT, RECALL = 1, 2
"""In the place of a reply's error."""
LEASE = struct.Struct("<QI")
"""node, backing id (of no meaning in RECALL)"""
_REPORTED = struct.Struct("<QIIB")
"""node, opens since the last report, handles that are open, whether the lease is recalled"""
MOST_REPORTED = 200
"""Rows in one report."""

Reported = tuple[int, int, int, bool]


def lease_message(kind: int, node: int, backing: int = 0) -> bytes:
    return OUT_HEADER.pack(OUT_HEADER.size + LEASE.size, kind, LEASES_UNIQUE) + LEASE.pack(node, backing)


def pack_report(rows: Iterable[Reported]) -> bytes:
    return bytes([KIND_REPORT]) + b"".join(_REPORTED.pack(*row) for row in rows)


def unpack_report(packet: bytes) -> list[Reported]:
    return [(node, hits, opens, bool(recalled)) for node, hits, opens, recalled in _REPORTED.iter_unpack(packet[1:])]


# What a new daemon is told of the one before


def pack_known(starts: int, handles: Iterable[int], leases: Iterable[Reported], requests: Iterable[bytes]) -> bytes:
    """For a daemon that replaces another: which handles the kernel has, what was opened under leases, which requests
    of ONCE are asked again."""
    numbers = list(handles)
    leased = b"".join(_REPORTED.pack(*row) for row in leases)
    parts = [struct.pack(f"<III{len(numbers)}I", starts, len(numbers), len(leased), *numbers), leased]
    for request in requests:
        parts += [struct.pack("<I", len(request)), request]
    return b"".join(parts)


def unpack_known(data: bytes) -> tuple[int, set[int], list[Reported], list[bytes]]:
    """(number of daemons before, handles, leases, requests) from what pack_known() made."""
    starts, count, leased = struct.unpack_from("<III", data)
    handles = struct.unpack_from(f"<{count}I", data, 12)
    at = 12 + 4 * count
    leases = unpack_report(b"\0" + data[at : at + leased])
    return starts, set(handles), leases, list(_requests(data, at + leased))


def _requests(data: bytes, at: int) -> Iterator[bytes]:
    while at < len(data):
        (length,) = struct.unpack_from("<I", data, at)
        yield data[at + 4 : at + 4 + length]
        at += 4 + length


def names_in(request: bytes) -> tuple[bytes, ...]:
    """The names that a request of ONCE holds."""
    _, opcode, *_ = IN_HEADER.unpack_from(request)
    before = {MKNOD: 16, MKDIR: 8, RENAME: 8, RENAME2: 16}.get(opcode, 0)
    return tuple(request[IN_HEADER.size + before :].split(b"\0")[:-1])
