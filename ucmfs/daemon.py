"""The daemon: one trio program that runs the pipeline, the mount and its control socket, and ends them in order."""

from __future__ import annotations

import logging
import os
import resource
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgspec
import pyfuse3
import trio
import yaml

from ucmfs import system
from ucmfs.config import Section, masked
from ucmfs.control import protocol, server
from ucmfs.errors import ProtocolError, sole_error
from ucmfs.fuse import mounts, wire
from ucmfs.fuse.grants import IDLE
from ucmfs.fuse.journal import Journal, Recalled, read
from ucmfs.fuse.link import Link, why_no_passthrough
from ucmfs.fuse.operations import Operations
from ucmfs.fuse.relay import RESTART
from ucmfs.fuse.virtual import Virtual
from ucmfs.launch import Launch, serve
from ucmfs.pipeline import builder
from ucmfs.pipeline.pipeline import Pipeline
from ucmfs.telemetry import RecentLog, metrics_text

__all__ = ["check", "run"]

log = logging.getLogger("ucmfs.daemon")  # also where this module is run

MIN_TASKS = 10
READ_AHEAD_KB = 4096
"""Four requests: while the reader copies one, others are on their way through the relay and here."""
LAST_REQUESTS = 5.0
"""Seconds for what the kernel asked before it ended the connection."""
LAST_FLUSH = 30.0
"""Seconds that the end of a mount waits for dirty blocks; what is left is found by the next mount."""
_BACKLOG = 128


def check(section: Section) -> None:
    """Check a configuration wholly; nothing is built. Raises ConfigError."""
    builder.check(section)


def run(launch: Launch, link: Link, ready: Callable[[], None]) -> None:
    """Serve the mount of *launch* until it is unmounted; call *ready* once it serves.

    Raises ConfigError or MountError if it cannot start.
    """
    # A descriptor per open block and per staging file: take what there is.
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    recent = RecentLog()
    logging.getLogger("ucmfs").addHandler(recent)
    try:
        mount = _Mount(launch, link, ready, recent)
        trio.run(mount.main)
    except BaseExceptionGroup as group:
        raise sole_error(group) from None
    finally:
        logging.getLogger("ucmfs").removeHandler(recent)


class _Mount:
    """What belongs to one mount. The nursery of main() owns every task; see ucmfs/DESIGN.md for the order of ends."""

    def __init__(self, launch: Launch, link: Link, ready: Callable[[], None], recent: RecentLog) -> None:
        self._mount_point = Path(launch.mount_point)
        self._options = launch.options
        self._link = link
        self._ready = ready
        self._started = time.time()
        section = launch.section
        self._pipeline: Pipeline = builder.build(section, mount_point=launch.mount_point)
        config = yaml.safe_dump(masked(section), sort_keys=False)

        async def text(value: str) -> bytes:
            return value.encode()

        self._virtual = Virtual(
            {
                "stats": self._stats_text,
                "stats.json": self._stats_json,
                "metrics": self._metrics,
                "config.yaml": lambda: text(config),
                "log": lambda: text(recent.text()),
            }
        )
        self._operations = Operations(self._pipeline, self._virtual, link.send_between, link.ask_leases)
        self._grants = self._operations.grants
        self._listener: socket.socket | None = None
        self._no_passthrough = (
            why_no_passthrough() if self._pipeline.options.passthrough else "passthrough is switched off"
        )
        self._fuse_scope = trio.CancelScope()
        self._answered = trio.Event()
        self._answered.set()

    async def main(self) -> None:
        journal = self._link.kept("journal")
        recalled = None if journal is None else Recalled.of(read(journal))
        if recalled is not None:
            self._pipeline.cache.wanted = recalled.files()
        async with self._pipeline.running():
            await self._mount(recalled)
            try:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._serve_fuse, nursery.cancel_scope)
                    await nursery.start(self._heed_signals)
                    nursery.start_soon(self._link.listen, self._end, self._grants.heard, self._grants.synced)
                    nursery.start_soon(self._recall_idle)
                    nursery.start_soon(self._operations.finish_closed)
                    await self._listen()
                    assert self._listener is not None
                    hooks = server.Hooks(
                        self._operations.changed_elsewhere,
                        self._operations.take_back,
                        self._unmount,
                        lambda: self._answered.set(),
                        self._restart,
                        self._stats,
                    )
                    nursery.start_soon(server.serve_listener, self._pipeline, self._listener, hooks)
                    nursery.start_soon(self._watch_mount)
                    log.info("serving %s at %s", self._pipeline.description, self._mount_point)
                    self._link.ready(self._pipeline.options.daemon_hang_timeout)
                    self._ready()
            finally:
                self._close_socket()
                # It writes to what is closed now.
                self._grants.close()
                pyfuse3.close(unmount=False)
                self._operations.close_all()
                with trio.CancelScope(shield=True):
                    await self._last_flush()

    # Start

    async def _mount(self, recalled: Recalled | None) -> None:
        if self._no_passthrough is None:
            self._operations.backing = self._link.backing
            if self._write_refusal is not None:
                log.info("%s; writes go through the daemon", self._write_refusal)
        else:
            log.info("%s; bytes go through the daemon", self._no_passthrough)
        if recalled is not None:
            await self._operations.recover(recalled, self._link.handles, self._link.leased, self._link.repeated)
            log.info("took over from the daemon before, with %d open files", len(self._operations.inodes.handles))
        self._operations.begin(Journal(partial(self._link.keep, "journal")))
        pyfuse3.init(self._operations, self._link.messages, set())
        self._read_ahead()

    def _read_ahead(self) -> None:
        """Where the daemon serves reads, have the kernel ask for several requests at a time."""
        try:
            Path(f"/sys/class/bdi/{self._link.device}/read_ahead_kb").write_text(f"{READ_AHEAD_KB}\n")
        except OSError as error:
            log.debug("read_ahead_kb stays as it is: %s", error)

    async def _serve_fuse(self, scope: trio.CancelScope) -> None:
        try:
            with self._fuse_scope:
                await pyfuse3.main(min_tasks=MIN_TASKS)
        except* OSError:
            # The end of its socket, behind the last request: the mount is over, or the relay is gone.
            pass
        finally:
            with trio.move_on_after(1) as grace:
                grace.shield = True
                await self._answered.wait()
            scope.cancel()

    def _end(self, relay_gone: bool) -> None:
        """The kernel ended the connection, or the relay is gone."""
        if relay_gone:
            log.error("the relay (pid %d) is gone, and the mount with it", self._link.relay)
            mounts.take_away(self._mount_point, self._link.device)
        self._grants.close()
        # What was asked before the end is done first.
        self._fuse_scope.deadline = trio.current_time() + (0 if relay_gone else LAST_REQUESTS)

    async def _recall_idle(self) -> None:
        while True:
            await trio.sleep(IDLE / 2)
            self._grants.recall_idle()

    async def _listen(self) -> None:
        """Have the socket: an earlier daemon's, or a new one."""
        inherited = self._link.kept("listener")
        if inherited is not None:
            self._virtual.adopt_socket()
            self._listener = socket.socket(fileno=inherited)
            return
        await trio.to_thread.run_sync(self._bind)
        assert self._listener is not None
        if "ro" in self._options and os.geteuid() == 0:
            await trio.to_thread.run_sync(mounts.make_read_only, self._mount_point, self._options)
        self._link.keep("listener", self._listener.fileno())

    def _bind(self) -> None:
        """Bind `.ucmfs/sock` through the mount itself: the kernel asks this daemon to make the node.

        A bound socket holds the mount it was bound through, which would keep the user from unmounting it. So it goes
        through a private copy of the mount that nobody sees, where the kernel lets us make one.
        """
        try:
            root = system.open_tree(str(self._mount_point))
        except OSError as error:
            log.info("no private copy of the mount (%s): unmount with `ucmfs umount`", error.strerror)
            root = os.open(self._mount_point, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener = listener
        try:
            listener.bind(f"/proc/self/fd/{root}/.ucmfs/sock")
        finally:
            os.close(root)
        listener.listen(_BACKLOG)
        listener.setblocking(False)

    def _restart(self, request: protocol.Restart) -> Callable[[], None]:
        if request.relay != wire.VERSION:
            raise ProtocolError(
                f"the mount's relay speaks version {wire.VERSION}, the installed one {request.relay}; "
                "unmount, and mount again"
            )

        def end() -> None:
            log.info("restarting")
            logging.shutdown()
            # As if it were killed: whatever is under way is taken up by the next daemon.
            os._exit(RESTART)

        return end

    # End

    def _close_socket(self) -> None:
        if self._listener is not None:
            self._listener.close()
            self._listener = None
            self._link.drop("listener")

    async def _watch_mount(self) -> None:
        """When the user unmounts, let go of our own copy of the mount: then the kernel ends the connection."""
        with open("/proc/self/mountinfo", "rb") as mountinfo:  # noqa: ASYNC230 - procfs does not block
            poll = select.poll()
            poll.register(mountinfo, select.POLLPRI | select.POLLERR)
            limiter = trio.CapacityLimiter(1)
            while True:
                mountinfo.seek(0)
                if not any(line.split()[2].decode() == self._link.device for line in mountinfo):
                    break
                await trio.to_thread.run_sync(poll.poll, abandon_on_cancel=True, limiter=limiter)
        log.info("%s was unmounted", self._mount_point)
        self._close_socket()

    async def _heed_signals(self, task_status: trio.TaskStatus[None]) -> None:
        with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
            task_status.started()
            async for number in signals:
                log.info("%s: writing back and unmounting", signal.Signals(number).name)
                answer = await self._unmount(protocol.Unmount(timeout=LAST_FLUSH, force=True))
                self._answered.set()
                if answer["error"]:
                    log.error("%s", answer["error"])

    async def _unmount(self, request: protocol.Unmount) -> dict[str, Any]:
        """Write everything back, then end the mount unless something is left or has files open."""
        flushed = await self._pipeline.flush(timeout=request.timeout)
        if flushed.left and not request.force:
            error = None if flushed.error is not None else "not written back in time"
            return server.flushed_result(flushed, error)
        self._answered = trio.Event()
        failed = await trio.to_thread.run_sync(self._umount, request.force)
        return server.flushed_result(flushed, failed)

    def _umount(self, force: bool) -> str | None:
        """Take the mount away; None, or why it stays."""
        if os.geteuid() == 0:
            try:
                system.umount(str(self._mount_point), lazy=force)
            except OSError as error:
                return f"{self._mount_point}: {error.strerror}; close the files that are open on it"
            return None
        if self._operations.inodes.handles and not force:
            return f"{self._mount_point}: close the files that are open on it"
        # Without a private copy of the mount, the connections of the socket hold it: only a lazy unmount succeeds.
        self._close_socket()
        done = subprocess.run(
            ["fusermount3", "-u", "-z", str(self._mount_point)],
            capture_output=True,
            text=True,
            check=False,
        )
        return None if done.returncode == 0 else done.stderr.strip()

    async def _last_flush(self) -> None:
        flushed = await self._pipeline.flush(timeout=LAST_FLUSH)
        if flushed.left:
            log.error(
                "%d blocks are not written back (%s); they stay in %s for the next mount",
                len(flushed.left),
                flushed.error or "out of time",
                self._pipeline.cache.directory,
            )

    # What `.ucmfs` shows

    @property
    def _refusal(self) -> str | None:
        """Why reads go through the daemon; None where the kernel serves them."""
        return self._no_passthrough or self._link.backing.refusal

    @property
    def _write_refusal(self) -> str | None:
        """The same of writes."""
        return self._refusal or self._pipeline.ahead.refusal

    async def _stats(self) -> dict[str, Any]:
        await self._grants.sync()
        return {
            "version": version("ucmfs"),
            "pid": os.getpid(),
            "mount_point": str(self._mount_point),
            "uptime_s": round(time.time() - self._started, 3),
            "inodes": len(self._operations.inodes),
            "open_files": len(self._operations.inodes.handles) + self._grants.opens,
            "leases": len(self._grants),
            "listed_directories": self._grants.listed,
            "data_path": "daemon" if self._refusal else "passthrough",
            "data_path_reason": self._refusal,
            "write_path": "daemon" if self._write_refusal else "passthrough",
            "write_path_reason": self._write_refusal,
            "daemon_pid": os.getpid(),
            "relay_pid": self._link.relay,
            "restarts": self._link.starts,
            **await self._pipeline.stats(),
        }

    async def _stats_json(self) -> bytes:
        return msgspec.json.format(msgspec.json.encode(await self._stats()), indent=2) + b"\n"

    async def _stats_text(self) -> bytes:
        lines = []
        for key, value in (await self._stats()).items():
            if key == "stages":
                for stage in value:
                    figures = " ".join(f"{name}={figure}" for name, figure in stage.items() if name != "label")
                    lines.append(f"stage {stage['label']}: {figures}")
            elif key == "errors":
                lines.extend(f"error {kind}: {count}" for kind, count in value.items())
            else:
                lines.append(f"{key}: {value}")
        return "".join(f"{line}\n" for line in lines).encode()

    async def _metrics(self) -> bytes:
        return metrics_text(await self._stats())


if __name__ == "__main__":
    serve(run, sys.argv[1:])
