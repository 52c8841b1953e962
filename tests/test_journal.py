"""What a new daemon is told of the one before."""

from __future__ import annotations

import os

from ucmfs.fuse.journal import Gone, HandleRecord, InodeRecord, Journal, NumbersRecord, Recalled, read


def handle(number: int, inode: int) -> HandleRecord:
    return HandleRecord(number, inode, opener=0, writable=False, by_kernel=False, created=False)


def inode(number: int, name: bytes, *, lookups: int = 1) -> InodeRecord:
    return InodeRecord(number, name, 0, 0, 0o100644, 0, 0, 0, False, True, lookups, 0, 0, None)


def test_the_last_word_on_each_thing_counts() -> None:
    records = [inode(70, b"x"), handle(5, 70), inode(70, b"y", lookups=3), inode(71, b"z"), Gone("inode", 71)]
    recalled = Recalled.of(records)
    assert recalled.inodes == {70: inode(70, b"y", lookups=3)}
    assert recalled.handles == {70: [handle(5, 70)]}


def test_no_number_is_given_twice() -> None:
    """Also not that of something that is gone: a request about it may be asked once more."""
    records = [NumbersRecord(64, 3), inode(90, b"x"), handle(5, 90), Gone("handle", 5), Gone("inode", 90)]
    assert Recalled.of(records).numbers == NumbersRecord(91, 6)
    assert Recalled.of([NumbersRecord(64, 3)]).numbers == NumbersRecord(64, 3)


def test_a_torn_record_is_not_read() -> None:
    kept: list[int] = []
    journal = Journal(lambda fd: kept.append(os.dup(fd)))
    journal.begin([inode(70, b"x"), inode(71, b"y")])
    [fd] = kept
    size = os.fstat(fd).st_size
    journal.write([inode(72, b"z")])
    journal.close()
    for length in range(os.fstat(fd).st_size - 1, size, -1):
        os.ftruncate(fd, length)
        assert [record.number for record in read(fd) if isinstance(record, InodeRecord)] == [70, 71]
    os.close(fd)
