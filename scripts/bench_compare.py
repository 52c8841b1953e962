"""Measures ucmfs, with passthrough and without, beside the tmpfs that it stands on and, when asked, beside others.

Each figure is taken of all systems in turn. At the end stands what ucmfs is to reach, and whether this run reached it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Callable
from typing import Any

import bench_measures as measures
import bench_peers as peers
import bench_relay_memory
import bench_restart
from bench_mounts import Places, session, ucmfs
from rich.console import Console

from ucmfs import bench

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
    with session("bench") as (place, progress):
        result = _compare(place, arguments, progress)
        if arguments.long:
            result["restart"] = bench_restart.run(place, progress=progress)
            result["relay_memory"] = bench_relay_memory.run(place, progress=progress)
    judged = measures.judge(result)
    if arguments.json:
        print(json.dumps(result | {"measures": measures.as_json(judged)}, indent=2))
    else:
        shown = Console(width=None if sys.stdout.isatty() else 110)
        shown.print(bench.table(result))
        if result["data_path_reason"]:
            shown.print(f"ucmfs is without passthrough here: {result['data_path_reason']}", highlight=False)
        shown.print(measures.table(judged))


def _compare(place: Places, arguments: argparse.Namespace, progress: Callable[[str], None]) -> dict[str, Any]:
    with contextlib.ExitStack() as stack:
        mount = stack.enter_context(ucmfs(place, "passthrough", **IN_MEMORY))
        without = stack.enter_context(ucmfs(place, "without", passthrough=False, **IN_MEMORY))
        systems = {measures.TMPFS: place.memory, measures.UCMFS: mount.point, measures.WITHOUT: without.point}
        settle = {}
        if arguments.peers:
            progress("installing rclone and JuiceFS")
            peers.install()
            systems[measures.PYFUSE3] = stack.enter_context(peers.pyfuse3(place).mounted()).point
            for label, make in (measures.JUICEFS, peers.juicefs), (measures.RCLONE, peers.rclone):
                peer = stack.enter_context(make(place).mounted())
                systems[label], settle[label] = peer.point, peer.settle
        result = bench.measure(systems, settle=settle, rounds=arguments.rounds, only=arguments.only, progress=progress)
        status = mount.status()
        return result | {"data_path": status["data_path"], "data_path_reason": status["data_path_reason"]}


if __name__ == "__main__":
    main()
