"""How fast a mount is beside the tmpfs that it stands on, in one run.

Each round measures one system after the other, so that what else the machine does meets them alike; shown are medians
over the rounds and their ratio to the first system. Every read is compared with what was written, outside of the time
taken.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from rich.table import Table

from ucmfs.errors import UcmfsError

__all__ = ["SIZES", "THREADS", "measure", "table"]

KIB, MIB = 1 << 10, 1 << 20
SIZES = (128 * KIB, MIB, 8 * MIB, 32 * MIB)
THREADS = (1, 4)
BYTES = 64 * MIB
"""Bytes of the files of one figure; at least one file a thread, at most MOST_FILES."""
MOST_FILES = 512
NAMES = 200
"""Names of one figure of latency."""

Figures = dict[str, float]


def measure(
    systems: Mapping[str, Path],
    *,
    sizes: Sequence[int] = SIZES,
    threads: Sequence[int] = THREADS,
    rounds: int = 3,
    listed: int = 10_000,
    progress: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Measure the directories of *systems*, by label; the first is what the others are compared with.

    Figures are bytes per second for "write", "first read" and "reread", seconds for the rest. Raises UcmfsError if a
    read gives other bytes than were written.
    """
    found: dict[str, dict[str, list[float]]] = {label: {} for label in systems}
    for turn in range(rounds):
        for label, directory in systems.items():
            progress(f"round {turn + 1} of {rounds}: {label}")
            with _working_directory(directory) as work:
                for key, figure in _round(work, sizes, threads, listed).items():
                    found[label].setdefault(key, []).append(figure)
    first = next(iter(systems))
    medians = {label: {key: statistics.median(all_) for key, all_ in keys.items()} for label, keys in found.items()}
    return {
        "rounds": rounds,
        "systems": {
            label: {key: {"median": median, "ratio": median / medians[first][key]} for key, median in figures.items()}
            for label, figures in medians.items()
        },
    }


def table(result: Mapping[str, Any]) -> Table:
    """*result* of measure() for people: GB/s or microseconds, and the ratio to the first system."""
    systems: Mapping[str, Mapping[str, Mapping[str, float]]] = result["systems"]
    shown = Table(title=f"medians of {result['rounds']} rounds; in brackets the ratio to the first column")
    shown.add_column("size x threads", no_wrap=True)
    for label in systems:
        shown.add_column(label, justify="right", no_wrap=True)
    first = next(iter(systems.values()))
    for key in first:
        cells = []
        for figures in systems.values():
            median, ratio = figures[key]["median"], figures[key]["ratio"]
            text = f"{median / 1e9:.2f} GB/s" if _is_rate(key) else f"{median * 1e6:.1f} us"
            cells.append(f"{text} ({ratio:.2f})")
        shown.add_row(key, *cells)
    return shown


def _is_rate(key: str) -> bool:
    return key.startswith(("write", "first read", "reread"))


@contextlib.contextmanager
def _working_directory(parent: Path) -> Iterator[Path]:
    work = parent / f"bench-{secrets.token_hex(6)}"
    work.mkdir()
    try:
        yield work
    finally:
        for path in work.rglob("*"):
            if path.is_file():
                path.unlink()
        for path in sorted(work.rglob("*"), reverse=True):
            path.rmdir()
        work.rmdir()


def _round(work: Path, sizes: Sequence[int], threads: Sequence[int], listed: int) -> Figures:
    figures: Figures = {}
    for size in sizes:
        data = secrets.token_bytes(size)
        for count in threads:
            where = f"{_size(size)} x {count}"
            files = max(count, min(BYTES // size, MOST_FILES))
            names = [str(work / f"{size}-{count}-{number}") for number in range(files)]
            total = size * len(names)
            figures[f"write {where}"] = total / _timed(names, count, partial(_write, data))
            for kind in ("first read", "reread"):
                figures[f"{kind} {where}"] = total / _timed_reads(names, count, data)
            for name in names:
                os.unlink(name)
    figures |= _latencies(work)
    figures[f"readdir of {listed:,}"] = _listing(work, listed)
    return figures


def _size(size: int) -> str:
    return f"{size // MIB} MiB" if size >= MIB else f"{size // KIB} KiB"


def _write(data: bytes, name: str) -> None:
    fd = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        view = memoryview(data)
        while view:
            view = view[os.write(fd, view) :]
    finally:
        os.close(fd)


def _timed(names: Sequence[str], threads: int, act: Callable[[str], None]) -> float:
    """Seconds until *act* is done with all *names*, shared out over *threads*."""
    failures: list[BaseException] = []

    def work(share: Sequence[str]) -> None:
        try:
            for name in share:
                act(name)
        except BaseException as error:
            failures.append(error)

    workers = [threading.Thread(target=work, args=(names[number::threads],)) for number in range(threads)]
    start = time.perf_counter()
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    taken = time.perf_counter() - start
    if failures:
        raise failures[0]
    return taken


def _timed_reads(names: Sequence[str], threads: int, data: bytes) -> float:
    """Seconds to read all *names*; what was read is compared after each, in time that does not count."""
    local = threading.local()
    lost = [0.0] * threads
    turns = iter(range(threads))

    def read(name: str) -> None:
        if not hasattr(local, "buffer"):
            local.buffer, local.turn = bytearray(len(data)), next(turns)
        fd = os.open(name, os.O_RDONLY)
        try:
            done = 0
            while done < len(data) and (got := os.preadv(fd, [memoryview(local.buffer)[done:]], done)):
                done += got
        finally:
            os.close(fd)
        start = time.perf_counter()
        if done != len(data) or local.buffer != data:
            raise UcmfsError(f"{name}: other bytes were read than written")
        lost[local.turn] += time.perf_counter() - start

    taken = _timed(names, threads, read)
    return taken - sum(lost) / threads


def _latencies(work: Path) -> Figures:
    present = [str(work / f"present-{number}") for number in range(NAMES)]
    for name in present:
        _write(b"x" * 4096, name)
    missing = [str(work / f"missing-{number}") for number in range(NAMES)]

    def stat_present(name: str) -> None:
        os.stat(name)

    def stat_missing(name: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.stat(name)

    def open_close(name: str) -> None:
        os.close(os.open(name, os.O_RDONLY))

    figures = {
        "open+close": _each(present, open_close),
        "open+close again": _each(present, open_close),
        "stat of a present name": _each(present, stat_present),
        "stat of a missing name": _each(missing, stat_missing),
        "stat of a missing name again": _each(missing, stat_missing),
    }
    for name in present:
        os.unlink(name)
    return figures


def _each(names: Sequence[str], act: Callable[[str], None]) -> float:
    """Median seconds of *act* on one name."""
    taken = []
    for name in names:
        start = time.perf_counter()
        act(name)
        taken.append(time.perf_counter() - start)
    return statistics.median(taken)


def _listing(work: Path, count: int) -> float:
    directory = work / "listed"
    directory.mkdir()
    for number in range(count):
        os.close(os.open(directory / str(number), os.O_WRONLY | os.O_CREAT, 0o600))
    start = time.perf_counter()
    with os.scandir(directory) as entries:
        seen = sum(1 for _ in entries)
    taken = time.perf_counter() - start
    if seen != count:
        raise UcmfsError(f"{directory}: {seen} names are listed instead of {count}")
    return taken
