"""A real mount for tests. What the commands do is called in this process: to start one takes most of a second."""

from __future__ import annotations

import json
import os
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from tests.memory import remove_cache
from ucmfs import mounting
from ucmfs.config import load
from ucmfs.control import protocol
from ucmfs.control.connection import Connection

UCMFS = str(Path(sys.executable).with_name("ucmfs"))


class Mounted:
    """A mount point with its configuration, storage and log below one temporary directory.

    The end of a test looks into the daemon's log: a warning, an error or a traceback that the test did not announce
    with expect() fails it.
    """

    def __init__(self, root: Path, config: dict[str, Any] | None = None) -> None:
        self.root = root
        self.point = root / "mnt"
        self.storage = root / "posix"
        self.cache = Path(f"/dev/shm/ucmfs-test-{os.getpid()}-{root.name}")
        self.log = root / "daemon.log"
        self.config_file = root / "config.yaml"
        self.point.mkdir()
        self.storage.mkdir()
        self.config: dict[str, Any] = {
            "store_pipeline": "Cache|Posix",
            "cache_buffer_capacity_gb": 0.125,
            "cache_dir": str(self.cache),
            "storage_backends": str(self.storage),
            "log_file": str(self.log),
            **(config or {}),
        }
        if "Posix" not in self.config["store_pipeline"]:
            del self.config["storage_backends"]
        self._expected: list[str] = []

    def __truediv__(self, name: str) -> Path:
        return self.point / name

    def ucmfs(
        self, *arguments: str | Path, check: bool = True, timeout: float = 60
    ) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            [UCMFS, *map(str, arguments)], capture_output=True, text=True, timeout=timeout, check=False
        )
        if check and done.returncode:
            raise AssertionError(f"ucmfs {arguments} gave {done.returncode}: {done.stdout}{done.stderr}")
        return done

    def write_config(self) -> None:
        self.config_file.write_text(
            yaml.safe_dump(
                {"ucm_connectors": [{"ucm_connector_name": "UcmPipelineStore", "ucm_connector_config": self.config}]}
            )
        )

    def mount(self, options: str = "", *, daemon: Sequence[str] = mounting.DAEMON) -> None:
        """Mount with *options* as for -o; *daemon* is the command that the relay starts."""
        self.write_config()
        mounting.mount(load(self.config_file), self.point, frozenset(options.split(",")) - {""}, daemon=daemon)

    def umount(self) -> None:
        mounting.unmount(self.point)

    def ask(self, request: protocol.Request) -> protocol.Reply:
        """What the daemon answers on its socket."""
        with Connection.to_mount(self.point, timeout=60) as connection:
            return connection.request(request)

    def status(self) -> dict[str, Any]:
        status: dict[str, Any] = self.ask(protocol.Stats()).result
        return status

    def stats(self) -> dict[str, Any]:
        stats: dict[str, Any] = json.loads((self.point / ".ucmfs/stats.json").read_text())
        return stats

    def flush(self) -> None:
        answer = self.ask(protocol.Flush(timeout=60)).result
        assert not answer["left"], answer

    def lookup(self, *names: str) -> list[bool]:
        """What the socket says, which knows of published blocks only."""
        return [size is not None for size in self.ask(protocol.Lookup(list(names))).rows]

    def kill_all(self, *, clear: bool = True, status: dict[str, Any] | None = None) -> None:
        """SIGKILL for relay and daemon; wait until they are gone, and with *clear* take the dead mount away.

        With *status*, asked for before, nothing comes before the signal.
        """
        status = status or self.status()
        relay, daemon = (os.pidfd_open(status[key]) for key in ("relay_pid", "daemon_pid"))
        # Neither may see the other die: one would start another, the other end the mount in order.
        signal.pidfd_send_signal(relay, signal.SIGSTOP)
        for process in (daemon, relay):
            signal.pidfd_send_signal(process, signal.SIGKILL)
            self.wait_exit(process)
        if clear:
            subprocess.run(["umount", "-l", str(self.point)], check=True)

    def kill_daemon(self) -> None:
        """SIGKILL for the daemon; wait until another serves."""
        self.expect("was ended by SIGKILL; starting another")
        pid = self.status()["daemon_pid"]
        os.kill(pid, signal.SIGKILL)
        self.wait_for_daemon(pid)

    def wait_for_daemon(self, before: int) -> None:
        """Wait until another daemon than *before* answers."""
        deadline = time.monotonic() + 60
        while json.loads((self.point / ".ucmfs/stats.json").read_text())["daemon_pid"] == before:
            assert time.monotonic() < deadline

    @staticmethod
    def wait_exit(pidfd: int) -> None:
        """Wait until the process is gone; closes the descriptor."""
        assert select.select([pidfd], [], [], 60)[0], "the daemon does not end"
        os.close(pidfd)

    @property
    def is_mounted(self) -> bool:
        return str(self.point) in Path("/proc/self/mountinfo").read_text()

    def expect(self, *patterns: str) -> None:
        """Lines of the log that match one of *patterns* are part of the test."""
        self._expected.extend(patterns)

    def unexpected(self) -> Sequence[str]:
        if not self.log.exists():
            return []
        bad = re.compile(r"\b(WARNING|ERROR|CRITICAL)\b|^Traceback")
        return [
            line
            for line in self.log.read_text().splitlines()
            if bad.search(line) and not any(re.search(pattern, line) for pattern in self._expected)
        ]

    def end(self) -> None:
        """Unmount, whatever state it is in, and remove what is in memory."""
        try:
            if self.is_mounted:
                self.umount()
        finally:
            if self.is_mounted:
                subprocess.run(["umount", "-l", str(self.point)], check=False)
            remove_cache(self.cache)
        assert not self.unexpected(), f"unexpected in the daemon's log: {self.unexpected()}"
