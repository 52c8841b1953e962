"""What callers ask, checked whole before a byte moves."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from ucm.client.tensors import Row, row_of
from ucmfs.errors import InvalidRequest

__all__ = ["BlockRows", "Layout"]

_ID_MAX = 100
"""Bytes of a block id: in hex it must be a file name, with room for a temporary one."""


class BlockRows(msgspec.Struct, frozen=True):
    """All rows of one request that concern block `name`, in row order."""

    name: str
    rows: list[Row]

    @property
    def nbytes(self) -> int:
        return sum(row.nbytes for row in self.rows)

    @property
    def end(self) -> int:
        return max(row.end for row in self.rows)


class Layout(msgspec.Struct, frozen=True):
    """How ids become names, and how large blocks are.

    `shard_digits` hex digits of the id name the directory, 0 for none. `block_size` is in bytes; None where blocks
    are as long as what is dumped. All methods raise InvalidRequest naming the row.
    """

    shard_digits: int
    block_size: int | None

    def names(self, block_ids: Iterable[bytes]) -> list[str]:
        return [self._name(row, block_id) for row, block_id in enumerate(_listed("block_ids", block_ids))]

    def load(self, block_ids: Iterable[bytes], offset: Iterable[int], dst: Sequence[Any]) -> list[BlockRows]:
        return self._rows(block_ids, offset, "dst_tensor", dst, writable=True)

    def dump(self, block_ids: Iterable[bytes], offset: Iterable[int], src: Sequence[Any]) -> list[BlockRows]:
        blocks = self._rows(block_ids, offset, "src_tensor", src, writable=False)
        if self.block_size is not None:
            return [block for block in blocks if block.nbytes]
        for block in blocks:
            _check_whole(block)
        return blocks

    def _name(self, row: int, block_id: object) -> str:
        if not isinstance(block_id, bytes):
            raise InvalidRequest(f"row {row}: a block id must be bytes, given {type(block_id).__name__}")
        if not 1 <= len(block_id) <= _ID_MAX:
            raise InvalidRequest(f"row {row}: a block id has 1 to {_ID_MAX} bytes, given {len(block_id)}")
        digits = block_id.hex()
        return f"{digits[: self.shard_digits]}/{digits}" if self.shard_digits else digits

    def _rows(
        self, block_ids: Iterable[bytes], offset: Iterable[int], what: str, tensors: Sequence[Any], *, writable: bool
    ) -> list[BlockRows]:
        names = self.names(block_ids)
        offsets = _listed("offset", offset)
        if not isinstance(tensors, list | tuple):
            raise InvalidRequest(f"{what} must be a list with one entry per row, given {type(tensors).__name__}")
        if not len(names) == len(offsets) == len(tensors):
            raise InvalidRequest(
                f"row {min(len(names), len(offsets), len(tensors))}: block_ids has {len(names)} entries, offset "
                f"{len(offsets)} and {what} {len(tensors)}; give one of each per row"
            )
        blocks: dict[str, BlockRows] = {}
        for index, (name, at, content) in enumerate(zip(names, offsets, tensors, strict=True)):
            row = row_of(index, _offset(index, at), content, writable=writable)
            if self.block_size is not None and row.end > self.block_size:
                raise InvalidRequest(
                    f"row {index}: {row.nbytes} bytes at offset {row.offset} pass the end of the block, "
                    f"which has block_size {self.block_size}"
                )
            blocks.setdefault(name, BlockRows(name, [])).rows.append(row)
        return list(blocks.values())


def _listed(what: str, values: Iterable[Any]) -> list[Any]:
    try:
        return list(values)
    except TypeError as error:
        raise InvalidRequest(f"{what} must be a list with one entry per row, given {type(values).__name__}") from error


def _offset(index: int, value: Any) -> int:
    try:
        offset = operator.index(value)
    except TypeError as error:
        raise InvalidRequest(f"row {index}: the offset must be an integer, given {type(value).__name__}") from error
    if offset < 0:
        raise InvalidRequest(f"row {index}: the offset is {offset}; it counts bytes from the block's start")
    return offset


def _check_whole(block: BlockRows) -> None:
    """Without block_size nothing else says when a block is complete: the rows of one call are the block."""
    end = 0
    for row in sorted(block.rows, key=lambda row: (row.offset, row.end)):
        if row.offset != end:
            raise InvalidRequest(
                f"row {row.index}: begins at byte {row.offset} of {block.name} where byte {end} is next; without "
                "block_size in the configuration the rows of one dump must make up the whole block"
            )
        end = row.end
