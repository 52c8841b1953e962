"""The few FUSE messages that are touched on their way (include/uapi/linux/fuse.h, little endian).

Imported by the relay, which imports next to nothing: only the standard library's struct may be needed here.
"""

from __future__ import annotations

import struct

__all__ = [
    "CREATE",
    "ENTRY_OUT_SIZE",
    "FOPEN_DIRECT_IO",
    "FOPEN_KEEP_CACHE",
    "FOPEN_NOFLUSH",
    "FOPEN_PASSTHROUGH",
    "INIT",
    "INIT_EXT",
    "INIT_FLAGS",
    "INIT_FLAGS2",
    "INIT_IN",
    "INIT_OUT_SIZE",
    "INIT_PASSTHROUGH2",
    "INIT_STACK_DEPTH",
    "IN_HEADER",
    "OPEN",
    "OPEN_IN",
    "OPEN_OUT",
    "OUT_HEADER",
    "error_reply",
]

OPEN, INIT, CREATE = 14, 26, 35

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
INIT_EXT = 1 << 30
INIT_PASSTHROUGH2 = 1 << (37 - 32)

OPEN_IN = struct.Struct("<II")
"""flags, open_flags"""
OPEN_OUT = struct.Struct("<QIi")
"""fh, open_flags, backing_id"""
ENTRY_OUT_SIZE = 128
FOPEN_DIRECT_IO, FOPEN_KEEP_CACHE, FOPEN_NOFLUSH, FOPEN_PASSTHROUGH = 1 << 0, 1 << 1, 1 << 5, 1 << 7


def error_reply(unique: int, errno: int) -> bytes:
    """The reply that fails request *unique*."""
    return OUT_HEADER.pack(OUT_HEADER.size, -errno, unique)
