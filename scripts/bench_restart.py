"""Kills the daemon of a mount again and again while processes read and write, and checks every byte that they read.

Writers are of two kinds, by turns: A writes x.tmp and renames it to x, B writes x as a whole. Each version of a block
says its number and size; all its bytes follow from its name and number. A read may give any version from the newest
that was complete before it began to the newest that was begun before it ended, whole. Some files stay open for a while
and must read the same again. At the end every block must be there, on the mount and, once it is unmounted, on disk.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import mmap
import multiprocessing
import os
import random
import signal
import struct
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import xxhash
from bench_mounts import Places, Ucmfs, session, ucmfs

__all__ = ["run"]

T = TypeVar("T")

HEADER = struct.Struct("<16sQQ")
"""Digest of the name, number of the version, bytes of the block."""
SIZES = (4 << 10, 128 << 10, 1 << 20, 2 << 20)
SHIFTS = 1 << 20
NAMES = 16
"""Blocks of one writer."""
KEPT = 8
"""Files that a reader keeps open; each is read again when so many were opened after it."""
HANG = 60.0
"""Seconds after which a call that has not come back never will."""
STEP = 0.1
"""Seconds between looks at the clock."""
SHOWN = 10
"""Errors of each process that are shown."""


class Wrong(Exception):
    """A read gave what it must not."""


class Blocks:
    """What is in the blocks."""

    def __init__(self) -> None:
        self._random = random.Random(0).randbytes(max(SIZES) + SHIFTS)

    def content(self, name: str, version: int) -> bytes:
        seed = xxhash.xxh64_intdigest(f"{name} {version}".encode())
        size, shift = SIZES[seed % len(SIZES)], seed // len(SIZES) % SHIFTS
        header = HEADER.pack(xxhash.xxh128_digest(name.encode()), version, size)
        return header + self._random[shift : shift + size - len(header)]

    def check(self, name: str, data: bytes, oldest: int, newest: int) -> None:
        """Raises Wrong if *data* is not a version from *oldest* to *newest* of *name*, whole."""
        if len(data) < HEADER.size:
            raise Wrong(f"{name}: has {len(data)} bytes only")
        _, version, size = HEADER.unpack_from(data)
        if not oldest <= version <= newest:
            raise Wrong(f"{name}: has version {version}, not one from {oldest} to {newest}")
        if data != self.content(name, version):
            raise Wrong(f"{name}: has other bytes than version {version}, {len(data)} of {size}")


class Versions:
    """Which versions of the blocks are begun and which are complete, in memory that the processes share.

    Each block has one writer.
    """

    def __init__(self, path: Path, names: Sequence[str]) -> None:
        self._place = {name: 1 + 2 * number for number, name in enumerate(names)}
        size = 8 * (1 + 2 * len(names))
        with path.open("a+b") as file:
            file.truncate(size)
            self._words = memoryview(mmap.mmap(file.fileno(), size)).cast("Q")

    def begun(self, name: str) -> int:
        return self._words[self._place[name]]

    def complete(self, name: str) -> int:
        return self._words[self._place[name] + 1]

    def begin(self, name: str) -> int:
        self._words[self._place[name]] += 1
        return self.begun(name)

    def end(self, name: str, version: int) -> None:
        self._words[self._place[name] + 1] = version

    @property
    def stopped(self) -> bool:
        """Whether the processes shall end."""
        return bool(self._words[0])

    def stop(self) -> None:
        self._words[0] = 1


@dataclass
class Tally:
    """What one process did and met."""

    calls: int = 0
    reads: int = 0
    writes: int = 0
    errors: int = 0
    wrong: int = 0
    longest_pause: float = 0.0
    """Seconds of the call that took longest."""
    longest_call: str = ""
    messages: list[str] = field(default_factory=list)

    def call(self, act: Callable[..., T], *args: Any) -> T:
        start = time.monotonic()
        try:
            return act(*args)
        finally:
            taken = time.monotonic() - start
            self.calls += 1
            if taken > self.longest_pause:
                self.longest_pause, self.longest_call = taken, act.__name__

    @contextlib.contextmanager
    def noting(self) -> Iterator[None]:
        """Note an error or a wrong read, and go on."""
        try:
            yield
        except OSError as error:
            self.errors += 1
            self.messages.append(str(error))
        except Wrong as error:
            self.wrong += 1
            self.messages.append(str(error))
        del self.messages[SHOWN:]


@dataclass(frozen=True)
class Work:
    """What the processes work on."""

    point: Path
    versions: Path
    names: tuple[str, ...]
    until: float
    """time.monotonic()"""

    def goes_on(self, versions: Versions) -> bool:
        return time.monotonic() < self.until and not versions.stopped


def read_blocks(work: Work, seed: int) -> Tally:
    """Read blocks by chance until the end."""
    tally, blocks, versions = Tally(), Blocks(), Versions(work.versions, work.names)
    chance = random.Random(seed)
    kept: deque[tuple[int, str, bytes]] = deque()

    def read(fd: int) -> bytes:
        data = b""
        while more := tally.call(os.pread, fd, max(SIZES), len(data)):
            data += more
        return data

    def read_again(fd: int, name: str, before: bytes) -> None:
        try:
            if read(fd) != before:
                raise Wrong(f"{name}: an open file has other bytes than before")
        finally:
            tally.call(os.close, fd)

    while work.goes_on(versions):
        with tally.noting():
            name = chance.choice(work.names)
            oldest = versions.complete(name)
            fd = tally.call(os.open, work.point / name, os.O_RDONLY)
            data = b""
            try:
                data = read(fd)
            finally:
                kept.append((fd, name, data))
            blocks.check(name, data, oldest, versions.begun(name))
            tally.reads += 1
        if len(kept) > KEPT:
            with tally.noting():
                read_again(*kept.popleft())
    for each in kept:
        with tally.noting():
            read_again(*each)
    return tally


def write_blocks(work: Work, kind: str, own: Sequence[str]) -> Tally:
    """Write new versions of *own*, one after the other, until the end."""
    tally, blocks, versions = Tally(), Blocks(), Versions(work.versions, work.names)
    turn = 0
    while work.goes_on(versions):
        name = own[turn % len(own)]
        turn += 1
        with tally.noting():
            write(work.point, kind, name, blocks, versions, tally)
    return tally


def write(point: Path, kind: str, name: str, blocks: Blocks, versions: Versions, tally: Tally) -> None:
    """Write the next version of *name* as a writer of *kind* A or B does."""
    version = versions.begin(name)
    left = memoryview(blocks.content(name, version))
    path = point / name
    target = path.with_name(f"{name}.tmp") if kind == "A" else path
    fd = tally.call(os.open, target, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        while left:
            left = left[tally.call(os.write, fd, left) :]
    finally:
        tally.call(os.close, fd)
    if kind == "A":
        tally.call(os.rename, target, path)
    versions.end(name, version)
    tally.writes += 1


def run(
    places: Places,
    *,
    seconds: float = 60.0,
    kill_every: float = 2.0,
    readers: int = 4,
    writers: int = 2,
    progress: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Do it for *seconds*; a *kill_every* of 0 kills nobody. Gives counts, the longest pause in seconds, messages."""
    kinds = {f"{'AB'[number % 2]}{number}": [f"{number}-{n}" for n in range(NAMES)] for number in range(writers)}
    names = tuple(name for own in kinds.values() for name in own)
    blocks, versions = Blocks(), Versions(places.memory / "versions", names)
    at_the_end = Tally()
    restarts = 0
    with ucmfs(places, "restart", cache_buffer_capacity_gb=0.25) as mount, _ended_if_it_hangs(mount, seconds + HANG):
        for kind, own in kinds.items():
            for name in own:
                progress(f"writing {name}")
                write(mount.point, kind[0], name, blocks, versions, Tally())
        work = Work(mount.point, places.memory / "versions", names, time.monotonic() + seconds)
        with ProcessPoolExecutor(readers + writers, multiprocessing.get_context("fork")) as executor:
            try:
                tasks = [executor.submit(read_blocks, work, seed) for seed in range(readers)]
                tasks += [executor.submit(write_blocks, work, kind[0], own) for kind, own in kinds.items()]
                kills = _kill(mount, tasks, work.until, kill_every, progress)
            finally:
                versions.stop()
        tallies = [task.result() for task in tasks]
        progress("checking all blocks")
        _check_all(mount.point, blocks, versions, names, at_the_end)
        if kills:
            restarts = mount.status()["restarts"]
    _check_all(mount.storage, blocks, versions, names, at_the_end)
    tallies.append(at_the_end)
    if restarts < kills:
        at_the_end.errors += 1
        at_the_end.messages.append(f"{kills} daemons were killed, and only {restarts} started again")
    slowest = max(tallies, key=lambda tally: tally.longest_pause)
    return {
        "seconds": seconds,
        "kills": kills,
        **{key: sum(getattr(tally, key) for tally in tallies) for key in ("calls", "reads", "writes")},
        **{key: sum(getattr(tally, key) for tally in tallies) for key in ("errors", "wrong")},
        "longest_pause": slowest.longest_pause,
        "longest_call": slowest.longest_call,
        "messages": [message for tally in tallies for message in tally.messages],
    }


@contextlib.contextmanager
def _ended_if_it_hangs(mount: Ucmfs, seconds: float) -> Iterator[None]:
    """End the mount after *seconds*: then calls that hang, which nothing else can end, fail."""
    watchdog = threading.Timer(seconds, os.kill, (mount.status()["relay_pid"], signal.SIGKILL))
    watchdog.start()
    try:
        yield
    finally:
        watchdog.cancel()


def _kill(
    mount: Ucmfs, tasks: Sequence[Future[Tally]], until: float, every: float, progress: Callable[[str], None]
) -> int:
    """Wait for *tasks*, and *until* then kill the daemon *every* so many seconds, if that is not 0; give how often."""
    kills = 0
    next_kill = time.monotonic() + every
    while wait(tasks, timeout=STEP).not_done:
        now = time.monotonic()
        progress(f"{kills} daemons killed, {max(0.0, until - now):.0f} s to go")
        if every and next_kill <= now < until:
            os.kill(mount.status()["daemon_pid"], signal.SIGKILL)
            kills += 1
            next_kill += every
    return kills


def _check_all(directory: Path, blocks: Blocks, versions: Versions, names: Sequence[str], tally: Tally) -> None:
    """Check that *directory* has the blocks, each in its last version, and no others."""
    for name in names:
        with tally.noting():
            blocks.check(name, (directory / name).read_bytes(), versions.complete(name), versions.begun(name))
    with tally.noting():
        others = {path.name for path in directory.iterdir()} - {*names, ".ucmfs"}
        if others:
            raise Wrong(f"{directory}: nobody wrote {', '.join(sorted(others))}")


def main() -> None:
    parser = argparse.ArgumentParser(prog="scripts/bench_restart", description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--kill-every", type=float, default=2.0, metavar="SECONDS", help="0 for never")
    parser.add_argument("--readers", type=int, default=4)
    parser.add_argument("--writers", type=int, default=2)
    parser.add_argument("--json", action="store_true", help="for programs")
    arguments = parser.parse_args()
    with session("bench_restart") as (place, progress):
        result = run(
            place,
            seconds=arguments.seconds,
            kill_every=arguments.kill_every,
            readers=arguments.readers,
            writers=arguments.writers,
            progress=progress,
        )
    if arguments.json:
        print(json.dumps(result, indent=2))
    else:
        print(
            f"{result['seconds']:g} s, {arguments.readers} readers, {arguments.writers} writers\n"
            f"daemons killed  {result['kills']:,}\n"
            f"blocks read     {result['reads']:,}\n"
            f"blocks written  {result['writes']:,}\n"
            f"calls           {result['calls']:,}\n"
            f"errors          {result['errors']:,}\n"
            f"wrong reads     {result['wrong']:,}\n"
            f"longest call    {result['longest_pause']:.3f} s ({result['longest_call']})"
        )
        for message in result["messages"]:
            print(f"bench_restart: {message}", file=sys.stderr)
    sys.exit(1 if result["errors"] or result["wrong"] else 0)


if __name__ == "__main__":
    main()
