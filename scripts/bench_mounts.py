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
from types import FrameType
from typing import Any, NoReturn

import yaml
from rich.console import Console

from ucmfs import mounting
from ucmfs.errors import MountError, UcmfsError

__all__ = ["Places", "Ucmfs", "ignore_signals", "session", "ucmfs", "unmount"]

UCMFS = Path(sys.executable).with_name("ucmfs")
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(frozen=True)
class Places:
    disk: Path
    """For storage: a directory of the temporary directory (TMPDIR)."""
    memory: Path
    """For caches: a directory of /dev/shm."""


@contextlib.contextmanager
def session(script: str) -> Iterator[tuple[Places, Callable[[str], None]]]:
    """Places for one run of *script*, and what shows on a terminal what goes on.

    An error of the project ends the script with its message and status 1, ^C and SIGTERM end it quietly.
    """
    _end_on_signals()
    try:
        with (
            Console(stderr=True).status("mounting") as status,
            tempfile.TemporaryDirectory(prefix="ucmfs-bench.") as disk,
            tempfile.TemporaryDirectory(prefix="ucmfs-bench.", dir="/dev/shm") as memory,
        ):
            yield Places(Path(disk), Path(memory)), status.update
    except UcmfsError as error:
        sys.exit(f"{script}: {error}")


def _end_on_signals() -> None:
    """Let a signal that ends the script do it as an error would; what comes while that cleans up is ignored."""

    def end(number: int, frame: FrameType | None) -> NoReturn:
        ignore_signals()
        sys.exit(128 + number)

    for each in SIGNALS:
        signal.signal(each, end)


def ignore_signals() -> None:
    """For processes whose parent ends them."""
    for each in SIGNALS:
        signal.signal(each, signal.SIG_IGN)


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
        # In a session of its own ^C does not reach it: what it began is ended below.
        done = subprocess.run([UCMFS, "mount", config, mount.point], check=False, start_new_session=True)
        if done.returncode:
            raise MountError("ucmfs mount failed; the reason is above")
        yield mount
    finally:
        if mounting.find_mount(mount.point):
            ended = subprocess.run([UCMFS, "umount", mount.point, "--force"], check=False)
            if ended.returncode:
                unmount(mount.point)


def unmount(point: Path) -> None:
    """Take the mount at *point* away, if there is one, also where it is busy or dead."""
    if mounting.find_mount(point):
        plain = subprocess.run(["fusermount3", "-u", point], stderr=subprocess.DEVNULL, check=False)
        if plain.returncode:
            subprocess.run(["fusermount3", "-u", "-z", point], check=True)
