"""Measures ucmfs, with passthrough and without, beside the tmpfs that it stands on and, when asked, beside others.

Each figure is taken of all systems in turn. At the end stands what ucmfs is to reach, and whether this run reached it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Callable
from pathlib import Path

import bench_measures as measures
import bench_peers as peers
import bench_relay_memory
import bench_restart
from bench_mounts import Places, end_on_signals, places, ucmfs
from rich.console import Console

from ucmfs import bench
from ucmfs.errors import UcmfsError

IN_MEMORY = {
    # Figures are of the Cache; write-back in the middle of one would measure the disk.
    "write_back_interval": 3600.0,
    "write_back_batch_size": 1_000_000,
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="scripts/bench", description=__doc__)
    parser.add_argument("--peers", action="store_true", help="also rclone, JuiceFS and plain pyfuse3; installs them")
    parser.add_argument("--long", action="store_true", help="also scripts/bench_restart and scripts/bench_relay_memory")
    parser.add_argument("--only", metavar="REGEX", help="take only the figures whose names it is found in")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true", help="for programs")
    arguments = parser.parse_args()
    if arguments.rounds < 1:
        parser.error("--rounds: at least 1")
    end_on_signals()
    notes = Console(stderr=True)
    with notes.status("mounting") as status, places() as place:
        try:
            result = _compare(place, arguments, status.update)
            if arguments.long:
                result["restart"] = bench_restart.run(place, progress=status.update)
                result["relay_memory"] = bench_relay_memory.run(place, progress=status.update)
        except UcmfsError as error:
            sys.exit(f"bench: {error}")
    judged = measures.judge(result)
    if arguments.json:
        print(json.dumps(result | {"measures": measures.as_json(judged)}, indent=2))
    else:
        shown = Console(width=None if sys.stdout.isatty() else 110)
        shown.print(bench.table(result))
        shown.print(measures.table(judged))


if __name__ == "__main__":
    main()
