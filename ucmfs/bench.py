"""How fast directories are beside each other, such as a mount and the tmpfs that it stands on, in one run.

Figure by figure: in each round each figure is taken of all systems, one directly after the other and each round in
another order, so that what else the machine does meets them alike. Shown are medians over the rounds; a ratio is the
median of the ratios to the first system in the same round. Files are written once before a write is timed, so that all
find memory that was used a moment ago. Every read is compared with what was written, outside of
the time taken.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table

from ucmfs.errors import ConfigError, UcmfsError

__all__ = ["SIZES", "THREADS", "measure", "ratio", "table"]

KIB, MIB = 1 << 10, 1 << 20
SIZES = (128 * KIB, MIB, 8 * MIB, 32 * MIB)
THREADS = (1, 4)
BYTES = 64 * MIB
"""Bytes of the files of one figure; at least one file a thread, at most MOST_FILES."""
MOST_FILES = 512
NAMES = 200
"""Names of one figure of latency."""
READ_BYTES = 8 * MIB
"""Bytes that are read before they are compared, at least one file a thread."""
SHIFT = 4 * KIB
"""Each file of a figure has other bytes: the same random ones, from so much further on than the one before."""
RATES = ("write", "first read", "reread")
"""What the names of figures in bytes per second begin with; all others are in seconds."""

Settle = Callable[[], None]
Steps = Iterator[float | None]


@dataclass(frozen=True)
class _Case:
    """Figures that need the same files."""

    keys: tuple[str | None, ...]
    """The figures in their order; None for a step that prepares."""
    begin: Callable[[Path, Settle], Steps]
    """Takes the figures of a directory, again and again, as they are asked for."""


def measure(
    systems: Mapping[str, Path],
    *,
    settle: Mapping[str, Settle] | None = None,
    sizes: Sequence[int] = SIZES,
    threads: Sequence[int] = THREADS,
    rounds: int = 3,
    listed: int = 10_000,
    only: str | None = None,
    progress: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Measure the directories of *systems*, by label; the first is what the others are compared with.

    Figures are bytes per second for "write", "first read" and "reread", seconds for the rest. With *only*, a regular
    expression, those whose names it is found in. *settle* has what a system needs before it is read for the first
    time: called after its files were written, outside of the time taken, it waits until nothing of that goes on in
    the background and makes the system's own caches cold. The kernel's pages of a written file are dropped anyway.

    Raises ConfigError if *only* selects nothing, UcmfsError if a read gives other bytes than were written.
    """
    chosen = _chosen(only)
    cases = [case for case in _cases(sizes, threads, listed) if any(key and chosen(key) for key in case.keys)]
    if not cases:
        raise ConfigError(f"no figure has {only} in its name", path="--only")
    labels = list(systems)
    samples: dict[str, dict[str, list[float]]] = {label: {} for label in labels}
    with contextlib.ExitStack() as stack:
        works = {label: stack.enter_context(_working_directory(systems[label])) for label in labels}
        settles = {label: (settle or {}).get(label, lambda: None) for label in labels}
        running = [(case, {label: case.begin(works[label], settles[label]) for label in labels}) for case in cases]
        for turn in range(rounds):
            order = labels[turn % len(labels) :] + labels[: turn % len(labels)]
            for case, steps in running:
                for key in case.keys:
                    for label in order:
                        progress(f"round {turn + 1} of {rounds}, {key or 'preparing'}: {label}")
                        figure = next(steps[label])
                        if key and figure is not None and chosen(key):
                            samples[label].setdefault(key, []).append(figure)
    result: dict[str, Any] = {
        "rounds": rounds,
        "systems": {
            label: {key: {"median": statistics.median(figures), "samples": figures} for key, figures in keys.items()}
            for label, keys in samples.items()
        },
    }
    for label, figures in result["systems"].items():
        for key, figure in figures.items():
            figure["ratio"] = ratio(result, (label, key), (labels[0], key))
    return result


def ratio(result: Mapping[str, Any], over: tuple[str, str], under: tuple[str, str]) -> float | None:
    """The median of the ratios, round by round, of two figures of measure(), each given by system and name.

    None if one of them was not taken.
    """
    systems: Mapping[str, Mapping[str, Mapping[str, Sequence[float]]]] = result["systems"]
    found = [systems.get(label, {}).get(key) for label, key in (over, under)]
    samples = [figure["samples"] for figure in found if figure]
    return statistics.median(a / b for a, b in zip(*samples, strict=True)) if len(samples) == 2 else None


def table(result: Mapping[str, Any]) -> Table:
    """*result* of measure() for people: GB/s or microseconds, and the ratio to the first system."""
    systems: Mapping[str, Mapping[str, Mapping[str, float]]] = result["systems"]
    first = next(iter(systems))
    shown = Table(
        title=f"medians of {result['rounds']} rounds; in brackets the ratio to {first}", box=box.SIMPLE_HEAD, padding=0
    )
    shown.add_column("size x threads", no_wrap=True)
    shown.add_column("", no_wrap=True)
    for label in systems:
        shown.add_column(label, justify="right", min_width=6)
    was_rate = None
    for key in systems[first]:
        rate = key.startswith(RATES)
        if was_rate and not rate:
            shown.add_section()
        was_rate = rate
        figures = [systems[label][key] for label in systems]
        cells = [_three_digits(figure["median"] / 1e9 if rate else figure["median"] * 1e6) for figure in figures]
        ratios = [f"({_three_digits(figure['ratio'])})" for figure in figures[1:]]
        shown.add_row(
            key,
            "GB/s" if rate else "us",
            cells[0],
            *(f"{cell} {bracket:>7}" for cell, bracket in zip(cells[1:], ratios, strict=True)),
        )
    return shown


def _three_digits(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def _chosen(only: str | None) -> Callable[[str], bool]:
    try:
        pattern = re.compile(only or "")
    except re.error as error:
        raise ConfigError(f"{only} is no regular expression: {error}", path="--only") from error
    return lambda key: pattern.search(key) is not None


@contextlib.contextmanager
def _working_directory(parent: Path) -> Iterator[Path]:
    work = parent / f"bench-{secrets.token_hex(6)}"
    work.mkdir()
    try:
        yield work
    finally:
        shutil.rmtree(work)


def _cases(sizes: Sequence[int], threads: Sequence[int], listed: int) -> Iterator[_Case]:
    random = memoryview(secrets.token_bytes(max(sizes) + MOST_FILES * SHIFT))
    for size in sizes:
        for count in threads:
            write, first, again = (f"{kind} {_size(size)} x {count}" for kind in RATES)
            yield _Case((write, None, first, again), partial(_transfers, size=size, threads=count, random=random))
    yield _Case(
        (None, "open+close", "open+close again", "stat present", "stat missing", "stat missing again"), _latencies
    )
    yield _Case((None, f"readdir of {listed:,}"), partial(_listing, count=listed))


def _size(size: int) -> str:
    return f"{size // MIB} MiB" if size >= MIB else f"{size // KIB} KiB"


# Bytes


def _transfers(work: Path, settle: Settle, *, size: int, threads: int, random: memoryview) -> Steps:
    count = max(threads, min(BYTES // size, MOST_FILES))
    files = {
        str(work / f"{size}-{threads}-{number}"): random[number * SHIFT : number * SHIFT + size]
        for number in range(count)
    }
    total = size * count
    while True:
        # A virtual machine may have to be given memory that it did not use just before, which takes long.
        for name, data in files.items():
            _write(name, data)
        for name in files:
            os.unlink(name)
        yield total / _timed([partial(_write, name, data) for name, data in files.items()], threads)
        settle()
        yield None
        yield total / _timed_reads(files, threads)
        seconds = _timed_reads(files, threads)
        for name in files:
            os.unlink(name)
        yield total / seconds


def _timed(acts: Sequence[Callable[[], float]], threads: int) -> float:
    """Seconds until all *acts* are done, shared out over *threads*, less the seconds that they give."""
    start = 0.0

    def begin() -> None:
        nonlocal start
        start = time.perf_counter()

    barrier = threading.Barrier(threads, action=begin)

    def work(share: Sequence[Callable[[], float]]) -> float:
        barrier.wait()
        not_counted = sum(act() for act in share)
        return time.perf_counter() - not_counted

    with ThreadPoolExecutor(threads) as executor:
        try:
            ends = list(executor.map(work, (acts[number::threads] for number in range(threads))))
        finally:
            # Nobody may go on waiting where a signal came before all had begun.
            barrier.abort()
    return max(ends) - start


def _write(name: str, data: memoryview) -> float:
    """Write a file; give the seconds that it took to drop its pages, so that the first read is one of the system."""
    fd = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        left = data
        while left:
            left = left[os.write(fd, left) :]
        start = time.perf_counter()
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        return time.perf_counter() - start
    finally:
        os.close(fd)


def _timed_reads(files: Mapping[str, memoryview], threads: int) -> float:
    """Seconds to read all *files*, some at a time into the same buffers, which are compared in between."""
    seconds = 0.0
    size = len(next(iter(files.values())))
    buffers = [bytearray(b"?") * size for _ in range(max(threads, READ_BYTES // size))]
    left = iter(files.items())
    while some := list(islice(left, len(buffers))):
        filled = [(name, data, buffer) for (name, data), buffer in zip(some, buffers, strict=False)]
        seconds += _timed([partial(_read, name, buffer) for name, _, buffer in filled], threads)
        for name, data, buffer in filled:
            # In this order: a memoryview compares item by item.
            if buffer != data:
                raise UcmfsError(f"{name}: other bytes were read than written")
    return seconds


def _read(name: str, buffer: bytearray) -> float:
    fd = os.open(name, os.O_RDONLY)
    try:
        done, size = 0, len(buffer)
        with memoryview(buffer) as view:
            while done < size and (got := os.preadv(fd, [view[done:]], done)):
                done += got
    finally:
        os.close(fd)
    return 0.0


# Names


def _latencies(work: Path, settle: Settle) -> Steps:
    turn = 0
    while True:
        turn += 1
        present, missing = ([str(work / f"{kind}-{turn}-{n}") for n in range(NAMES)] for kind in ("present", "missing"))
        for name in present:
            _write(name, memoryview(bytes(4 * KIB)))
        settle()
        yield None
        for _ in range(2):
            for name in present:
                # An open shall not depend on how long ago the kernel was told of the name.
                os.stat(name)
            yield _each(present, _open_and_close)
        yield _each(present, os.stat)
        yield _each(missing, _stat_missing)
        seconds = _each(missing, _stat_missing)
        for name in present:
            os.unlink(name)
        yield seconds


def _open_and_close(name: str) -> None:
    os.close(os.open(name, os.O_RDONLY))


def _stat_missing(name: str) -> None:
    try:
        os.stat(name)
    except FileNotFoundError:
        return
    raise UcmfsError(f"{name}: is there, and nobody made it")


def _each(names: Sequence[str], act: Callable[[str], object]) -> float:
    """Median seconds of *act* on one name."""
    taken = []
    for name in names:
        start = time.perf_counter()
        act(name)
        taken.append(time.perf_counter() - start)
    return statistics.median(taken)


def _listing(work: Path, settle: Settle, *, count: int) -> Steps:
    directory = work / "listed"
    directory.mkdir()
    for number in range(count):
        os.close(os.open(directory / str(number), os.O_WRONLY | os.O_CREAT, 0o600))
    settle()
    while True:
        yield None
        start = time.perf_counter()
        with os.scandir(directory) as entries:
            seen = sum(1 for _ in entries)
        taken = time.perf_counter() - start
        if seen != count:
            raise UcmfsError(f"{directory}: {seen} names are listed instead of {count}")
        yield taken
