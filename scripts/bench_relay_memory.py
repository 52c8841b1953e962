"""Sends many requests through a mount and watches what memory its relay has, which must not grow with them."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from bench_mounts import Places, session, ucmfs

__all__ = ["run"]

THREADS = 4
EVERY = 50_000
"""Requests between two looks at the relay's memory."""
BATCH = 500
"""Requests of a thread between two looks for a signal."""
BLOCK_EVERY = 100
"""Of so many turns of a thread one writes a block, reads and removes it; the others ask for a name that is missing."""


def run(
    places: Places, *, requests: int = 1_000_000, progress: Callable[[str], None] = lambda text: None
) -> dict[str, Any]:
    """Send at least *requests*. Gives the relay's resident memory in MiB: at each look, least, most and growth.

    Growth is from the first look, after EVERY requests, to the most that was seen.
    """
    seen: list[tuple[int, float]] = []
    with ucmfs(places, "relay") as mount, ThreadPoolExecutor(THREADS) as executor:
        relay = mount.status()["relay_pid"]
        sent = 0
        while sent < requests:
            progress(f"{sent:,} of {requests:,} requests, the relay has {_resident(relay):.1f} MiB")
            sent += sum(executor.map(partial(_send, mount.point, sent), range(THREADS)))
            if sent >= EVERY * (len(seen) + 1) or sent >= requests:
                seen.append((sent, _resident(relay)))
    memory = [mib for _, mib in seen]
    return {
        "requests": sent,
        "seen": [{"requests": sent, "mib": mib} for sent, mib in seen],
        "least_mib": min(memory),
        "most_mib": max(memory),
        "growth_mib": max(memory) - memory[0],
    }


def _send(point: Path, sent: int, thread: int) -> int:
    """Send some requests; give how many at least. *sent* makes their names new."""
    count = 0
    for number in range(BATCH):
        path = f"{point}/{sent}-{thread}-{number}"
        if number % BLOCK_EVERY:
            with contextlib.suppress(FileNotFoundError):
                os.stat(path)
            count += 1
        else:
            Path(path).write_bytes(b"block")
            Path(path).read_bytes()
            os.unlink(path)
            # CREATE, WRITE, FLUSH, RELEASE, OPEN, READ, RELEASE, UNLINK; the relay answers some, the kernel none.
            count += 8
    return count


def _resident(pid: int) -> float:
    status = Path(f"/proc/{pid}/status").read_text()
    [kib] = re.findall(r"^VmRSS:\s+(\d+) kB$", status, re.MULTILINE)
    return int(kib) / 1024


def main() -> None:
    parser = argparse.ArgumentParser(prog="scripts/bench_relay_memory", description=__doc__)
    parser.add_argument("requests", type=int, nargs="?", default=1_000_000)
    parser.add_argument("--json", action="store_true", help="for programs")
    arguments = parser.parse_args()
    if arguments.requests < 1:
        parser.error("requests: at least 1")
    with session("bench_relay_memory") as (place, progress):
        result = run(place, requests=arguments.requests, progress=progress)
    if arguments.json:
        print(json.dumps(result, indent=2))
    else:
        for look in result["seen"]:
            print("{requests:>12,} requests  {mib:5.1f} MiB".format(**look))
        print("least {least_mib:.1f} MiB, most {most_mib:.1f} MiB, growth {growth_mib:.1f} MiB".format(**result))


if __name__ == "__main__":
    main()
