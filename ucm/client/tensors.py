"""Tensors as plain bytes, without a copy: PyTorch on the CPU, NumPy, and whatever has the buffer protocol."""

from __future__ import annotations

import ctypes
import errno
import os
import pickle
import sys
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from ucmfs.errors import BlockError, InvalidRequest, UcmfsError, from_os_error

__all__ = ["Row", "read_row", "row_of", "write_row"]

_IOV_MAX = 1024
"""Buffers in one preadv or pwritev: UIO_MAXIOV of Linux, which os.sysconf gives as -1 in places."""
_EMPTY = memoryview(b"")


class Row(msgspec.Struct, frozen=True):
    """Row number `index` of a load or a dump: `buffers` laid end to end from byte `offset` of the block.

    `owners` keeps alive what the buffers point into.
    """

    index: int
    offset: int
    nbytes: int
    buffers: list[memoryview]
    owners: Any

    @property
    def end(self) -> int:
        return self.offset + self.nbytes


def row_of(index: int, offset: int, content: Any, *, writable: bool) -> Row:
    """Give *content*, one tensor or a list of them, as a row. Raises InvalidRequest naming the row."""
    parts = content if isinstance(content, list | tuple) else (content,)
    buffers: list[memoryview] = []
    for part in parts:
        try:
            buffer = _bytes_of(part, writable)
        except _Refused as refused:
            where = f"row {index}, tensor {len(buffers)}" if parts is content else f"row {index}"
            raise InvalidRequest(f"{where}: {refused}") from refused.__cause__
        buffers.append(buffer)
    return Row(index, offset, sum(map(len, buffers)), [b for b in buffers if len(b)], content)


class _Refused(Exception):
    """Why an object cannot be moved."""


def _bytes_of(part: Any, writable: bool) -> memoryview:
    # An object can be a tensor only if its library is loaded; a process without torch must not load it here.
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(part, torch.Tensor):
        return _bytes_of_torch(torch, part)
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(part, numpy.ndarray):
        part = _plain_numpy(numpy, part)
    try:
        view = memoryview(part)
    except TypeError as error:
        raise _Refused(
            f"{type(part).__name__} is no tensor; pass a torch tensor on the CPU, a NumPy array or a buffer"
        ) from error
    except (ValueError, BufferError) as error:
        raise _Refused(f"{type(part).__name__} does not give its bytes ({error})") from error
    if not view.c_contiguous:
        raise _Refused("the array is not contiguous; pass numpy.ascontiguousarray(...) or a contiguous slice")
    if writable and view.readonly:
        raise _Refused("the destination is read-only; pass a writable array or buffer")
    return _flat(part, view)


def _flat(part: Any, view: memoryview) -> memoryview:
    """*view* of *part* as bytes."""
    if view.nbytes == 0:
        return _EMPTY
    try:
        return view.cast("B")
    except TypeError as error:
        # A format such as "<H", which ctypes uses: raw() takes any, but of a memoryview it makes a view that crashes
        # the garbage collector of Python 3.11 (gh-77894).
        if isinstance(part, memoryview):
            raise _Refused(f"the view's format is {view.format!r}; pass the object that it is a view of") from error
        return pickle.PickleBuffer(part).raw()


def _bytes_of_torch(torch: Any, tensor: Any) -> memoryview:
    if not tensor.is_cpu:
        raise _Refused(f"the tensor is on {tensor.device}; only CPU tensors can be moved, so pass one from .cpu()")
    if tensor.layout is not torch.strided:
        raise _Refused(f"the tensor's layout is {tensor.layout}; pass a dense one")
    if not tensor.is_contiguous():
        raise _Refused("the tensor is not contiguous; pass tensor.contiguous() or a contiguous slice")
    if tensor.is_conj() or tensor.is_neg():
        raise _Refused("the tensor is a conjugate or negative view; pass .resolve_conj().resolve_neg()")
    nbytes = tensor.nbytes
    if nbytes == 0:
        return _EMPTY
    # By address: the one way that serves every dtype, bfloat16 and float8 among them, and tensors with gradients.
    return memoryview((ctypes.c_char * nbytes).from_address(tensor.data_ptr())).cast("B")


def _plain_numpy(numpy: Any, array: Any) -> Any:
    """*array* as uint8, so that dtypes unknown to the buffer protocol (bfloat16, datetime64) pass too."""
    if array.dtype.hasobject:
        raise _Refused("the array holds Python objects; pass a numeric dtype")
    if not array.flags.c_contiguous or array.size == 0:
        return array if array.size else numpy.empty(0, numpy.uint8)
    return array.reshape(-1).view(numpy.uint8)


def read_row(name: str, fd: int, size: int, row: Row) -> UcmfsError | None:
    """Read *row* from *fd*, block *name* of *size* bytes. A block too short leaves the destination untouched."""
    if row.end > size:
        return BlockError(
            name,
            f"the block holds {size} bytes and the row reads up to {row.end}; was it dumped with this layout?",
            code=errno.EINVAL,
        )
    return _move(os.preadv, name, fd, row)


def write_row(name: str, fd: int, row: Row) -> UcmfsError | None:
    """Write *row* to *fd*, the staging file of block *name*."""
    return _move(os.pwritev, name, fd, row)


def _move(call: Callable[[int, Sequence[Any], int], int], name: str, fd: int, row: Row) -> UcmfsError | None:
    """Move all of *row* by *call*, preadv or pwritev; what stopped it, if not all could be moved."""
    buffers: Sequence[memoryview] = row.buffers
    done = 0
    while done < row.nbytes:
        try:
            moved = call(fd, buffers[:_IOV_MAX], row.offset + done)
        except OSError as error:
            return from_os_error(error, name)
        except ValueError as error:
            return InvalidRequest(f"row {row.index}: its buffer was released before the task was done ({error})")
        if moved == 0:
            return BlockError(name, f"the file ended at byte {row.offset + done}, before byte {row.end} that was asked")
        done += moved
        buffers = _rest(buffers, moved)
    return None


def _rest(buffers: Sequence[memoryview], moved: int) -> list[memoryview]:
    """What is left of *buffers* after *moved* bytes."""
    for index, buffer in enumerate(buffers):
        if moved < len(buffer):
            return [buffer[moved:], *buffers[index + 1 :]]
        moved -= len(buffer)
    return []
