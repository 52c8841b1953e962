"""Makes the mounts that scripts/bench measures, and takes them away again."""

from __future__ import annotations

import argparse
import contextlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import yaml
from rich.console import Console

from ucmfs import bench

UCMFS = Path(sys.executable).with_name("ucmfs")


@contextlib.contextmanager
def mounted(root: Path, label: str, **keys: object) -> Iterator[Path]:
    """A mount of Cache|Posix below *root* with a Cache of 1 GiB."""
    place = root / label
    point, storage = place / "mnt", place / "posix"
    for directory in (point, storage):
        directory.mkdir(parents=True)
    config = place / "config.yaml"
    config.write_text(
        yaml.safe_dump(
            {
                "store_pipeline": "Cache|Posix",
                "cache_buffer_capacity_gb": 1.0,
                "storage_backends": str(storage),
                "log_file": str(place / "log"),
                # Figures are of the Cache; write-back in the middle of one would measure the disk.
                "write_back_interval": 3600.0,
                "write_back_batch_size": 1_000_000,
                **keys,
            }
        )
    )
    subprocess.run([UCMFS, "mount", config, point], check=True)
    try:
        yield point
    finally:
        subprocess.run([UCMFS, "umount", point, "--force"], check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    progress = Console(stderr=True)
    with (
        tempfile.TemporaryDirectory(prefix="ucmfs-bench.") as disk,
        tempfile.TemporaryDirectory(prefix="ucmfs-bench.", dir="/dev/shm") as memory,
        mounted(Path(disk), "passthrough") as by_kernel,
        mounted(Path(disk), "daemon", passthrough=False) as by_daemon,
    ):
        result = bench.measure(
            {"tmpfs": Path(memory), "passthrough": by_kernel, "without": by_daemon},
            rounds=arguments.rounds,
            progress=lambda text: progress.print(text),
        )
    if arguments.json:
        print(json.dumps(result, indent=2))
    else:
        Console(width=None if sys.stdout.isatty() else 100).print(bench.table(result))


if __name__ == "__main__":
    main()
