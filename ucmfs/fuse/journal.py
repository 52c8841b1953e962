"""What the kernel was told, kept where the daemon's death leaves it: in a file in memory that the relay holds.

A log of records, each the whole state of one thing (an inode, a handle, ...); the last one of a number counts. A
handler's records are written before its answer is sent, so a new daemon knows at least what the kernel knows. Who
starts writes a snapshot into a new file, and again when the log has become much longer than that.

Not in the Cache's directory: there it would take room from the blocks, and outlive the mount that it tells of.

A record is its length (u32, little endian) and MessagePack. Torn by a crash, the last one tells of something that
had no answer yet.
"""

from __future__ import annotations

import os
import struct
from collections import Counter
from collections.abc import Callable, Iterable, Iterator

import msgspec

__all__ = [
    "Gone",
    "HandleRecord",
    "InodeRecord",
    "Journal",
    "ListingRecord",
    "NumbersRecord",
    "Recalled",
    "Record",
    "VirtualRecord",
    "WritingRecord",
    "read",
]

LEAST_COMPACTED = 1 << 20
"""Bytes of a log that is never too long."""
MOST_TIMES = 4
"""How many times as long as its snapshot a log may be."""

_LENGTH = struct.Struct("<I")


class WritingRecord(msgspec.Struct, frozen=True, array_like=True):
    """See inodes.Writing. `file` is the number of the staging file's inode on the tmpfs.

    What has a default is not in the journals of older versions.
    """

    file: int
    openers: list[int]
    in_place: bool
    claimed: bool
    killed: bool
    failed: list[tuple[int, int]]
    by_kernel: bool = False
    doubtful: bool = False
    closed: bool = False


class InodeRecord(msgspec.Struct, frozen=True, array_like=True, tag="inode"):
    """See inodes.Inode. Names are bytes, for they need not be text.

    `named`: it stands for the published version of its name. `file` is the number of the block's inode on the
    tmpfs, 0 where a lower stage has the block open or nobody has.
    """

    number: int
    name: bytes
    size: int
    mtime_ns: int
    mode: int
    uid: int
    gid: int
    atime_ns: int
    orphan: bool
    named: bool
    lookups: int
    backing: int
    file: int
    writing: WritingRecord | None


class HandleRecord(msgspec.Struct, frozen=True, array_like=True, tag="handle"):
    """See inodes.Handle. `created`: the answer that gives it counts as a lookup too."""

    number: int
    inode: int
    opener: int
    writable: bool
    by_kernel: bool
    created: bool


class ListingRecord(msgspec.Struct, frozen=True, array_like=True, tag="listing"):
    """An open directory."""

    number: int
    inode: int


class VirtualRecord(msgspec.Struct, frozen=True, array_like=True, tag="virtual"):
    """An open file of `.ucmfs/`."""

    number: int
    inode: int


class NumbersRecord(msgspec.Struct, frozen=True, array_like=True, tag="numbers"):
    """The next numbers to give; what is in no record any more may still be known to the kernel's callers."""

    inode: int
    handle: int


class Gone(msgspec.Struct, frozen=True, array_like=True, tag="gone"):
    """What the record of *kind* told of is over."""

    kind: str
    number: int


Record = InodeRecord | HandleRecord | ListingRecord | VirtualRecord | NumbersRecord | Gone


class Recalled(msgspec.Struct):
    """What a journal comes to."""

    numbers: NumbersRecord
    """The next that were never given."""
    inodes: dict[int, InodeRecord]
    handles: dict[int, list[HandleRecord]]
    """By the inode's number."""
    listings: dict[int, ListingRecord]
    virtuals: dict[int, VirtualRecord]

    @classmethod
    def of(cls, records: Iterable[Record]) -> Recalled:
        """The last word of *records* on each thing."""
        by_kind: dict[str, dict[int, Record]] = {}
        highest: Counter[str] = Counter()
        for record in records:
            match record:
                case NumbersRecord(inode, handle):
                    highest |= Counter(inode=inode - 1, handle=handle - 1)
                case Gone(kind, number):
                    # Somebody may still ask for what had it.
                    highest[kind] = max(highest[kind], number)
                    by_kind.get(kind, {}).pop(number, None)
                case _:
                    kind = str(record.__struct_config__.tag)
                    highest[kind] = max(highest[kind], record.number)
                    by_kind.setdefault(kind, {})[record.number] = record
        numbers = NumbersRecord(highest["inode"] + 1, highest["handle"] + 1)
        recalled = cls(numbers, {}, {}, {}, {})
        for kept in (record for records_ in by_kind.values() for record in records_.values()):
            match kept:
                case InodeRecord():
                    recalled.inodes[kept.number] = kept
                case HandleRecord():
                    recalled.handles.setdefault(kept.inode, []).append(kept)
                case ListingRecord():
                    recalled.listings[kept.number] = kept
                case VirtualRecord():
                    recalled.virtuals[kept.number] = kept
        return recalled

    def files(self) -> frozenset[int]:
        """The inodes, on the tmpfs, of files that are open or being written."""
        files = {record.file for record in self.inodes.values()}
        files |= {record.writing.file for record in self.inodes.values() if record.writing is not None}
        return frozenset(files - {0})


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Record)


def read(fd: int) -> Iterator[Record]:
    """The records in the file behind *fd*, in order, up to one that was torn."""
    data = os.pread(fd, os.fstat(fd).st_size, 0)
    at = 0
    while at + _LENGTH.size <= len(data):
        (length,) = _LENGTH.unpack_from(data, at)
        at += _LENGTH.size
        if at + length > len(data):
            return
        try:
            yield _decoder.decode(data[at : at + length])
        except msgspec.MsgspecError:
            return
        at += length


class Journal:
    """The log of this daemon. *keep* has a descriptor kept for the next one, in place of what it kept before."""

    def __init__(self, keep: Callable[[int], None]) -> None:
        self._keep = keep
        self._fd: int | None = None
        self._size = 0
        self._most = 0

    def begin(self, snapshot: Iterable[Record]) -> None:
        """Replace the log by *snapshot*, and go on from there."""
        self.close()
        self._fd = os.memfd_create("journal", os.MFD_CLOEXEC)
        self._size = 0
        self.write(snapshot)
        self._most = max(LEAST_COMPACTED, MOST_TIMES * self._size)
        # Until here a daemon that takes over finds the log before.
        self._keep(self._fd)

    def write(self, records: Iterable[Record]) -> None:
        """Put *records* at the end. Never waits."""
        assert self._fd is not None
        data = bytearray()
        for record in records:
            encoded = _encoder.encode(record)
            data += _LENGTH.pack(len(encoded))
            data += encoded
        view = memoryview(data)
        while view:
            done = os.pwrite(self._fd, view, self._size)
            self._size += done
            view = view[done:]

    @property
    def is_long(self) -> bool:
        """Whether it is time for a new snapshot."""
        return self._size > self._most

    def close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None
