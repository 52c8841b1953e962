"""Mounts for the bench scripts, in temporary places. All of it is taken away again, whatever ends the script."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console

from ucmfs import mounting
from ucmfs.errors import MountError, UcmfsError

__all__ = ["Places", "Ucmfs", "run", "session", "ucmfs", "unmount"]

UCMFS = Path(sys.executable).with_name("ucmfs")


@dataclass(frozen=True)
class Places:
    disk: Path
    """For storage: a directory of the temporary directory (TMPDIR)."""
    memory: Path
    """For caches: a directory of /dev/shm."""


@contextlib.contextmanager
def session(script: str) -> Iterator[tuple[Places, Callable[[str], None]]]:
    """Places for one run of *script*, and what to call before each step: it shows on a terminal what that is.

    After ^C or SIGTERM that call ends the script, quietly. A signal is never heeded anywhere else: in the middle of
    an open it would leave a file open, and the mount busy. An error of the project ends the script with its message.
    """
    received: list[int] = []
    for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(each, lambda number, frame: received.append(number))

    def progress(text: str) -> None:
        if received:
            sys.exit(128 + received[0])
        status.update(text)

    try:
        with (
            Console(stderr=True).status("mounting") as status,
            tempfile.TemporaryDirectory(prefix="ucmfs-bench.") as disk,
            tempfile.TemporaryDirectory(prefix="ucmfs-bench.", dir="/dev/shm") as memory,
        ):
            yield Places(Path(disk), Path(memory)), progress
    except UcmfsError as error:
        sys.exit(f"{script}: {error}")


def run(*command: str | Path) -> bool:
    """Run *command*, whose errors are shown; give whether it succeeded. ^C does not reach it."""
    return subprocess.run(command, stdin=subprocess.DEVNULL, start_new_session=True, check=False).returncode == 0


@dataclass(frozen=True)
class Ucmfs:
    """A mount of Cache|Posix."""

    point: Path
    storage: Path

    def status(self) -> dict[str, Any]:
        """What `ucmfs status --json` shows. Waits for the next daemon where there is none."""
        status: dict[str, Any] = json.loads((self.point / ".ucmfs/stats.json").read_text())
        return status


@contextlib.contextmanager
def ucmfs(places: Places, label: str, **keys: object) -> Iterator[Ucmfs]:
    """A mount with a Cache of 1 GiB, unless *keys* of the configuration say otherwise. Raises MountError."""
    place = places.disk / label
    mount = Ucmfs(place / "mnt", place / "posix")
    for directory in (mount.point, mount.storage):
        directory.mkdir(parents=True)
    config = place / "config.yaml"
    defaults = {
        "store_pipeline": "Cache|Posix",
        "cache_buffer_capacity_gb": 1.0,
        "cache_dir": str(places.memory / label),
        "storage_backends": str(mount.storage),
        "log_file": str(place / "log"),
    }
    config.write_text(yaml.safe_dump(defaults | keys))
    try:
        if not run(UCMFS, "mount", config, mount.point):
            raise MountError("ucmfs mount failed; the reason is above")
        yield mount
    finally:
        if mounting.find_mount(mount.point) and not run(UCMFS, "umount", mount.point, "--force"):
            unmount(mount.point)
        # The cache's own tmpfs stays, for the next mount.
        unmount(places.memory / label)


def unmount(point: Path) -> None:
    """Take the mount at *point* away, if there is one, also where it is dead."""
    found = mounting.find_mount(point)
    if found is not None and found.kind == "tmpfs":
        run("umount", point)
    elif found is not None and not run("fusermount3", "-u", point):
        run("fusermount3", "-u", "-z", point)
