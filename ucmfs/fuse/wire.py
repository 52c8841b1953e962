"""What goes between kernel, relay and daemon: the few FUSE messages that are looked into, and the side channel.

FUSE messages are those of include/uapi/linux/fuse.h, little endian. Imported by the relay, which imports next to
nothing: only the standard library may be needed here.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Iterable, Iterator
from zlib import crc32

VERSION = 2
"""Of what relay and daemon say to each other: a daemon that replaces another finds the relay of the first."""

# FUSE

LOOKUP, FORGET, GETATTR, SETATTR, SYMLINK, MKNOD, MKDIR, UNLINK, RMDIR, RENAME, LINK = 1, 2, 3, 4, 6, *range(8, 14)
OPEN, READ, WRITE, STATFS, RELEASE, FSYNC, GETXATTR, REMOVEXATTR, FLUSH, INIT = *range(14, 19), 20, 22, 24, 25, 26
CREATE, INTERRUPT, DESTROY, IOCTL, BATCH_FORGET, RENAME2 = 35, 36, 38, 39, 42, 45

UNANSWERED = frozenset({FORGET, BATCH_FORGET})
"""Opcodes that get no reply."""
ONCE = frozenset({MKNOD, MKDIR, UNLINK, RMDIR, RENAME, RENAME2, REMOVEXATTR})
"""Opcodes whose second time would fail: the daemon has to know that it is the second."""

CHANGES = frozenset({SYMLINK, MKNOD, MKDIR, UNLINK, RMDIR, RENAME, LINK, CREATE, RENAME2})
"""Opcodes that make names or take them away."""

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
NODE = struct.Struct("<Q")
"""What fuse_entry_out begins with; also what RENAME has before its names."""
_ENTRY_OUT = struct.Struct("<QQQQII6Q10I")
"""nodeid, generation, entry_valid, attr_valid, entry_valid_nsec, attr_valid_nsec; fuse_attr: ino, size, blocks, atime,
mtime, ctime, atimensec, mtimensec, ctimensec, mode, nlink, uid, gid, rdev, blksize, flags"""
_ATTR = 40
"""Offset of fuse_attr in it."""
_ATTR_OUT = struct.Struct("<QII")
"""attr_valid, attr_valid_nsec, dummy; then fuse_attr"""
_FORGET = struct.Struct("<Q")
"""nlookup"""
_BATCH_FORGET = struct.Struct("<II")
"""count, dummy; then count times:"""
_FORGET_ONE = struct.Struct("<QQ")
"""nodeid, nlookup"""
FOPEN_DIRECT_IO, FOPEN_KEEP_CACHE, FOPEN_NOFLUSH, FOPEN_PASSTHROUGH = 1 << 0, 1 << 1, 1 << 5, 1 << 7

GETXATTR_NAME = 8
"""Offset of the name behind the header."""
XATTRS = b"user."
"""What the names of the xattrs begin with that there are."""

RELEASE_IN = FLUSH_IN = struct.Struct("<Q")
"""fh, and more"""
OUR_HALF = 0xFFFFFFFF
"""Of a file handle: the daemon's number. The upper half is the backing id, or 0."""
KILLED, FLUSHED = 1 << 63, 1 << 62
"""Set in the file handle: KILLED of a FLUSH whose process a signal ends, FLUSHED of a RELEASE that is the FLUSH before
it too, and then may have KILLED. No handle that the daemon gives has them."""
MOST_BACKING = (1 << 30) - 1
"""The largest backing id that leaves room for that."""


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

# Leases and names. These messages go between the daemon's replies, so that they keep their place among them.

LEASES_UNIQUE = (1 << 64) - 1
GRANT, RECALL, LIST, GONE = 1, 2, 3, 4
"""In the place of a reply's error. LIST tells which names a directory has, GONE that one is no more."""
LEASE = struct.Struct("<QI")
"""node, backing id (of no meaning in RECALL)"""
_NAMED = struct.Struct("<Q128s")
"""Behind that in GRANT: directory, fuse_entry_out; then the name. May be left out."""
_LISTED = struct.Struct("<Qd128s")
"""directory, until when (of CLOCK_MONOTONIC), its fuse_entry_out; then CRC-32 of the names, sorted, 4 bytes each"""
_REPORTED = struct.Struct("<QIIIB")
"""node, opens since the last report, handles that are open, lookups that are the daemon's to count from now on, whether
the lease is recalled"""
MOST_REPORTED = 200
"""Rows in one report."""

Reported = tuple[int, int, int, int, bool]

Named = tuple[int, bytes, bytes]
"""Directory, name and fuse_entry_out of a leased inode."""


def lease_message(kind: int, node: int, backing: int = 0, named: Named | None = None) -> bytes:
    body = LEASE.pack(node, backing)
    if named is not None:
        directory, name, entry = named
        body += _NAMED.pack(directory, entry) + name
    return OUT_HEADER.pack(OUT_HEADER.size + len(body), kind, LEASES_UNIQUE) + body


def unpack_named(message: bytes | memoryview) -> Named | None:
    """What lease_message() was given as *named*. Raises ValueError if it is not that."""
    start = OUT_HEADER.size + LEASE.size
    if len(message) == start:
        return None
    if len(message) <= start + _NAMED.size:
        raise ValueError
    directory, entry = _NAMED.unpack_from(message, start)
    return directory, bytes(message[start + _NAMED.size :]), entry


def list_message(directory: int, until: float, entry: bytes, names: Iterable[bytes]) -> bytes:
    codes = array("I", sorted(map(crc32, names))).tobytes()
    size = OUT_HEADER.size + _LISTED.size + len(codes)
    return OUT_HEADER.pack(size, LIST, LEASES_UNIQUE) + _LISTED.pack(directory, until, entry) + codes


def unpack_list(message: bytes | memoryview) -> tuple[int, float, bytes, array[int]]:
    """(directory, until, entry, CRC-32 of the names) from what list_message() made. Raises ValueError if it is none."""
    start = OUT_HEADER.size + _LISTED.size
    if len(message) < start or (len(message) - start) % 4:
        raise ValueError
    directory, until, entry = _LISTED.unpack_from(message, OUT_HEADER.size)
    codes = array("I")
    codes.frombytes(message[start:])
    return directory, until, entry, codes


def gone_message(directory: int, name: bytes) -> bytes:
    size = OUT_HEADER.size + NODE.size + len(name)
    return OUT_HEADER.pack(size, GONE, LEASES_UNIQUE) + NODE.pack(directory) + name


def unpack_gone(message: bytes | memoryview) -> tuple[int, bytes]:
    """(directory, name) from what gone_message() made. Raises ValueError if it is not that."""
    start = OUT_HEADER.size + NODE.size
    if len(message) <= start:
        raise ValueError
    return NODE.unpack_from(message, OUT_HEADER.size)[0], bytes(message[start:])


def pack_entry(
    node: int,
    ttl: float,
    attributes_ttl: float,
    *,
    size: int,
    times: tuple[int, int, int],
    mode: int,
    links: int,
    uid: int,
    gid: int,
    block: int,
) -> bytes:
    """fuse_entry_out. The name is to be believed *ttl* seconds, the attributes *attributes_ttl*.

    *times* are those of access, of change of bytes and of change of the inode, in nanoseconds.
    """
    seconds, attributes_seconds = int(ttl), int(attributes_ttl)
    rest, attributes_rest = (int(life % 1 * 1e9) for life in (ttl, attributes_ttl))
    whole, parts = ([time // 10**9 for time in times], [time % 10**9 for time in times])
    blocks = -(-size // 512)
    return _ENTRY_OUT.pack(
        *(node, 0, seconds, attributes_seconds, rest, attributes_rest, node, size, blocks),
        *(*whole, *parts, mode, links, uid, gid, 0, block, 0),
    )


def pack_report(rows: Iterable[Reported]) -> bytes:
    return bytes([KIND_REPORT]) + b"".join(_REPORTED.pack(*row) for row in rows)


def unpack_report(packet: bytes) -> list[Reported]:
    return [(*counts, bool(recalled)) for *counts, recalled in _REPORTED.iter_unpack(packet[1:])]


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


def attributes_of(entry: bytes) -> bytes:
    """fuse_attr_out, as fuse_entry_out has them."""
    _, _, _, valid, _, valid_nsec, *_ = _ENTRY_OUT.unpack(entry)
    return _ATTR_OUT.pack(valid, valid_nsec, 0) + entry[_ATTR:]


def forgotten(request: bytes | memoryview) -> list[tuple[int, int]]:
    """(node, count) of what a FORGET or BATCH_FORGET tells."""
    _, opcode, _, node, *_ = IN_HEADER.unpack_from(request)
    if opcode == FORGET:
        return [(node, _FORGET.unpack_from(request, IN_HEADER.size)[0])]
    rows = IN_HEADER.size + _BATCH_FORGET.size
    return list(_FORGET_ONE.iter_unpack(request[rows:]))


def pack_forget(request: bytes | memoryview, rows: list[tuple[int, int]]) -> bytes | None:
    """*request* (FORGET or BATCH_FORGET), but telling *rows*; None for no rows."""
    if not rows:
        return None
    _, opcode, unique, *rest = IN_HEADER.unpack_from(request)
    if opcode == FORGET:
        body = _FORGET.pack(rows[0][1])
    else:
        body = _BATCH_FORGET.pack(len(rows), 0) + b"".join(_FORGET_ONE.pack(*row) for row in rows)
    return IN_HEADER.pack(IN_HEADER.size + len(body), opcode, unique, *rest) + body


def names_changed(request: bytes | memoryview) -> Iterator[tuple[int, bytes]]:
    """(directory, name) of what a request of CHANGES makes or takes away."""
    _, opcode, _, node, *_ = IN_HEADER.unpack_from(request)
    names = names_in(request)
    yield node, names[0]
    if opcode in (RENAME, RENAME2):
        yield NODE.unpack_from(request, IN_HEADER.size)[0], names[1]


def names_in(request: bytes | memoryview) -> tuple[bytes, ...]:
    """The names that a request of ONCE or CHANGES holds."""
    _, opcode, *_ = IN_HEADER.unpack_from(request)
    before = {MKNOD: 16, MKDIR: 8, RENAME: 8, RENAME2: 16, LINK: 8, CREATE: 16}.get(opcode, 0)
    return tuple(bytes(request[IN_HEADER.size + before :]).split(b"\0")[:-1])
