"""Tensors as bytes: what is taken, without a copy, and what is refused with its row."""

from __future__ import annotations

import array
import ctypes
import gc
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ucm.client import tensors
from ucm.client.tensors import read_row, row_of, write_row
from ucmfs.errors import BlockError, InvalidRequest

DTYPES = [
    torch.bfloat16,
    torch.float16,
    torch.float32,
    torch.float64,
    torch.float8_e4m3fn,
    torch.int8,
    torch.int64,
    torch.bool,
    torch.complex64,
]


@pytest.fixture
def fd() -> Iterator[int]:
    with tempfile.TemporaryFile() as file:
        yield file.fileno()


def bytes_of(part: Any) -> bytes:
    return b"".join(row_of(0, 0, part, writable=False).buffers)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_torch_of_every_kind_is_moved_in_place(dtype: torch.dtype, fd: int) -> None:
    raw = torch.randint(0, 2, (6, 64), dtype=torch.uint8)
    source = raw.view(dtype)
    target = torch.zeros_like(source)
    assert write_row("b", fd, row_of(0, 8, source, writable=False)) is None
    assert read_row("b", fd, 8 + 384, row_of(0, 8, target, writable=True)) is None
    assert torch.equal(target.view(torch.uint8), raw)


def test_a_contiguous_slice_moves_its_own_bytes_only(fd: int) -> None:
    whole = torch.arange(40, dtype=torch.int32).reshape(4, 10)
    os.pwrite(fd, numpy.full(10, -1, numpy.int32).tobytes(), 0)
    assert bytes_of(whole[2]) == whole.numpy()[2].tobytes()
    assert read_row("b", fd, 40, row_of(0, 0, whole[1], writable=True)) is None
    assert whole[1].tolist() == [-1] * 10
    assert whole[0].tolist() == list(range(10))
    assert whole[2].tolist() == list(range(20, 30))


def test_a_parameter_that_takes_gradients_can_be_moved() -> None:
    parameter = torch.nn.Parameter(torch.ones(4))
    assert bytes_of(parameter) == torch.ones(4).numpy().tobytes()


@pytest.mark.parametrize(
    ("part", "raw"),
    [
        (numpy.arange(6, dtype=numpy.float32).reshape(2, 3), numpy.arange(6, dtype=numpy.float32).tobytes()),
        (numpy.array(7, dtype=">i4"), b"\0\0\0\7"),
        (numpy.array(["2026-01-01"], dtype="datetime64[D]"), numpy.array([20454], dtype=numpy.int64).tobytes()),
        (numpy.zeros((0, 5)), b""),
        (torch.zeros(0, 3), b""),
        (torch.tensor(3, dtype=torch.int16), b"\3\0"),
        (b"abc", b"abc"),
        (bytearray(b"abc"), b"abc"),
        (memoryview(b"abcdef")[2:5], b"cde"),
        (array.array("d", [1.0]), array.array("d", [1.0]).tobytes()),
        ((ctypes.c_uint16 * 2)(1, 2), b"\1\0\2\0"),
        ([], b""),
        ([b"ab", bytearray(b""), numpy.frombuffer(b"cd", numpy.uint8)], b"abcd"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_whatever_gives_its_bytes_is_taken(part: Any, raw: bytes) -> None:
    row = row_of(0, 3, part, writable=False)
    assert b"".join(row.buffers) == raw
    assert (row.nbytes, row.end) == (len(raw), 3 + len(raw))


@pytest.mark.parametrize(
    "part",
    [torch.zeros(8), numpy.zeros(8), bytearray(8), [torch.zeros(2), numpy.zeros(2)]],
    ids=["torch", "numpy", "bytearray", "list"],
)
def test_buffers_are_the_memory_itself(part: Any) -> None:
    for buffer in row_of(0, 0, part, writable=True).buffers:
        buffer[0] = 255
    assert 255 in bytes_of(part)


READ_ONLY = numpy.zeros(4)
READ_ONLY.flags.writeable = False


@pytest.mark.parametrize(
    ("part", "reason"),
    [
        (torch.zeros(4, 4).t(), "not contiguous"),
        (torch.zeros(4, 4)[:, 1], "not contiguous"),
        (torch.zeros(1).expand(5), "not contiguous"),
        (torch.zeros(4, device="meta"), "on meta"),
        (torch.zeros(4, 4).to_sparse(), "layout"),
        (torch.zeros(4, dtype=torch.complex64).conj(), "conjugate"),
        (torch.zeros(4, dtype=torch.complex64).conj().imag, "conjugate or negative|not contiguous"),
        (numpy.zeros((4, 4)).T, "not contiguous"),
        (numpy.zeros(8)[::2], "not contiguous"),
        (numpy.array([object()]), "Python objects"),
        (memoryview(bytearray(8))[::2], "not contiguous"),
        (READ_ONLY, "read-only"),
        (b"abc", "read-only"),
        (numpy.frombuffer(b"abcd", numpy.uint8), "read-only"),
        ("text", "str is no tensor"),
        (7, "int is no tensor"),
        (None, "NoneType is no tensor"),
        ([[bytearray(1)]], "list is no tensor"),
    ],
    ids=str,
)
def test_what_cannot_be_a_destination_is_refused_with_its_row(part: Any, reason: str) -> None:
    with pytest.raises(InvalidRequest, match=rf"row 5.*({reason})"):
        row_of(5, 0, part, writable=True)


def test_a_refused_tensor_of_a_list_is_named() -> None:
    with pytest.raises(InvalidRequest, match=r"row 2, tensor 1: .*contiguous"):
        row_of(2, 0, [torch.zeros(2), torch.zeros(2, 2).t()], writable=False)


def test_more_buffers_than_one_call_takes(fd: int) -> None:
    parts = [bytes([n % 251]) * (n % 5) for n in range(3000)]
    whole = b"".join(parts)
    assert write_row("b", fd, row_of(0, 2, parts, writable=False)) is None
    assert os.pread(fd, 1 << 20, 2) == whole
    targets = [bytearray(len(part)) for part in parts]
    assert read_row("b", fd, 2 + len(whole), row_of(0, 2, targets, writable=True)) is None
    assert targets == parts


@given(st.lists(st.binary(max_size=9), max_size=12), st.lists(st.integers(1, 7), min_size=1), st.integers(0, 9))
def test_short_results_are_continued(parts: list[bytes], steps: list[int], offset: int) -> None:
    """The kernel may move less than asked at any time; here it does, always."""
    turn = iter(steps * 200)

    def short(call: Any) -> Any:
        def stingy(fd: int, buffers: Any, at: int) -> int:
            left, few = next(turn), []
            for buffer in buffers:
                few.append(buffer[:left])
                left -= len(few[-1])
                if not left:
                    break
            return int(call(fd, few, at))

        return stingy

    with tempfile.TemporaryFile() as file:
        source = row_of(0, offset, parts, writable=False)
        assert tensors._move(short(os.pwritev), "b", file.fileno(), source) is None
        assert os.pread(file.fileno(), 1 << 16, offset) == b"".join(parts)
        targets = [bytearray(len(part)) for part in parts]
        target = row_of(0, offset, targets, writable=True)
        assert tensors._move(short(os.preadv), "b", file.fileno(), target) is None
        assert targets == parts


def test_a_block_too_short_is_an_error_and_touches_nothing(fd: int) -> None:
    os.pwrite(fd, b"x" * 10, 0)
    target = bytearray(b"-" * 8)
    error = read_row("the/block", fd, 10, row_of(0, 4, target, writable=True))
    assert isinstance(error, BlockError)
    assert "the/block" in str(error)
    assert "10 bytes" in str(error)
    assert target == b"-" * 8


def test_a_block_that_ends_while_it_is_read_is_an_error(fd: int) -> None:
    os.pwrite(fd, b"x" * 10, 0)
    error = read_row("the/block", fd, 20, row_of(0, 0, bytearray(20), writable=True))
    assert isinstance(error, BlockError)
    assert "byte 10" in str(error)


def test_an_error_of_the_kernel_names_the_block() -> None:
    fd = os.open("/dev/full", os.O_WRONLY)
    try:
        error = write_row("the/block", fd, row_of(0, 0, b"x", writable=False))
    finally:
        os.close(fd)
    assert isinstance(error, BlockError)
    assert (error.errno, error.name) == (28, "the/block")


def test_a_buffer_released_during_the_task_is_an_error(fd: int) -> None:
    view = memoryview(bytearray(4))
    row = row_of(3, 0, b"", writable=False)
    row.buffers.append(view)
    view.release()
    error = write_row("b", fd, tensors.Row(3, 0, 4, [view], None))
    assert isinstance(error, InvalidRequest)
    assert "row 3" in str(error)


def test_neither_torch_nor_numpy_is_imported_for_those_who_have_no_tensors() -> None:
    code = (
        "import sys, ucm.store.pipeline.connector, ucm.client.tensors as t;"
        "t.row_of(0, 0, bytearray(4), writable=True);"
        "sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.zeros(9),
        lambda: numpy.zeros(9),
        lambda: bytearray(9),
        lambda: memoryview(bytearray(9)),
        lambda: array.array("d", [1.0]),
        lambda: (ctypes.c_uint16 * 2)(),
    ],
    ids=["torch", "numpy", "bytearray", "memoryview", "array", "ctypes"],
)
def test_rows_in_a_reference_cycle_are_collected(make: Any) -> None:
    """Python 3.11 crashes when it collects a cycle with a memoryview that is a view of another one's exporter."""
    for _ in range(3):
        cycle: list[Any] = [row_of(0, 0, make(), writable=True)]
        cycle.append(cycle)
        del cycle
        gc.collect()
