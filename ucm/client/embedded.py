"""Blocks of a pipeline that runs in this process, in a thread of its own.

The thread runs trio; clients talk to it over socket pairs, in the protocol of `.ucmfs/sock`. So the code on both
sides is the mount's, and a block's bytes move through descriptors here too.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import logging
import socket
import threading
from collections.abc import Iterator

import trio

from ucm.client.mounted import SocketBlocks
from ucmfs.config import Section
from ucmfs.control import server
from ucmfs.control.connection import Connection
from ucmfs.errors import MountError, StageError, UcmfsError
from ucmfs.pipeline import builder

__all__ = ["EmbeddedBlocks"]

log = logging.getLogger(__name__)

_EXIT_POLL = 0.5
"""Seconds between looks at whether the process is ending."""


class EmbeddedBlocks(SocketBlocks):
    """The blocks of the pipeline that *section* describes. *timeout* (seconds) bounds each exchange with it.

    Raises ConfigError or StageError if a stage cannot start.
    """

    def __init__(self, section: Section, *, timeout: float | None = None) -> None:
        host = _Host(section)
        super().__init__(lambda: Connection(host.connect(), timeout=timeout))
        self._host = host

    def close(self) -> None:
        """Also stop the pipeline. Raises StageError if dirty blocks could not be written back."""
        super().close()
        self._host.stop()


class _Host:
    """The thread, and the pipeline in it."""

    def __init__(self, section: Section) -> None:
        self._section = section
        self._started: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._ended: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._token: trio.lowlevel.TrioToken
        self._connections: trio.Nursery
        # Not a daemon thread, and no atexit: when those have their turn, Python starts no threads any more (3.12),
        # and writing back needs some. So the thread watches for the end of the main thread.
        self._thread = threading.Thread(target=self._main, name="ucmfs-pipeline")
        self._thread.start()
        self._started.result()

    def connect(self) -> socket.socket:
        """The client's end of a new connection. Raises MountError if the pipeline has ended."""
        client, served = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            # Returns at once: the first request waits in the socket until the task runs.
            self._token.run_sync_soon(self._accept, served)
        except trio.RunFinishedError as error:
            client.close()
            served.close()
            raise MountError("the pipeline in this process has ended; its log says why") from error
        return client

    def stop(self) -> None:
        """Stop the pipeline and wait for the thread. Raises what the pipeline raised. May be repeated."""
        with contextlib.suppress(trio.RunFinishedError):
            self._token.run_sync_soon(self._connections.cancel_scope.cancel)
        self._thread.join()
        self._ended.result()

    def _main(self) -> None:
        try:
            trio.run(self._run)
        except BaseException as error:
            cause = _cause(error)
            if self._started.done():
                log.error("the pipeline in this process ended: %s", cause, exc_info=error)
                self._ended.set_exception(cause)
            else:
                self._started.set_exception(cause)
        else:
            self._ended.set_result(None)

    async def _run(self) -> None:
        self._pipeline = builder.build(self._section)
        async with self._pipeline.running():
            async with trio.open_nursery() as self._connections:
                self._token = trio.lowlevel.current_trio_token()
                self._started.set_result(None)
                while threading.main_thread().is_alive():  # noqa: ASYNC110 - its end gives no event
                    await trio.sleep(_EXIT_POLL)
                self._connections.cancel_scope.cancel()
            flushed = await self._pipeline.flush()
        if flushed.left:
            raise StageError(
                self._pipeline.description,
                f"{len(flushed.left)} dirty blocks, {flushed.left[0]} the first, could not be written back "
                f"({flushed.error}); they are kept in {self._pipeline.cache.directory}",
            ) from flushed.error

    def _accept(self, served: socket.socket) -> None:
        if self._connections.cancel_scope.cancel_called:
            served.close()
        else:
            self._connections.start_soon(self._serve, served)

    async def _serve(self, served: socket.socket) -> None:
        with served:
            try:
                await server.serve(self._pipeline, served)
            except Exception:
                # One client's trouble must not end the pipeline of the others.
                log.exception("a connection to the pipeline in this process failed")


def _cause(error: BaseException) -> UcmfsError:
    """The project's error in what trio raised, which may be a group; any other error as the cause of one."""
    for leaf in _leaves(error):
        if isinstance(leaf, UcmfsError):
            return leaf
    unknown = StageError("pipeline", f"ended by an unexpected error: {error!r}")
    unknown.__cause__ = error
    return unknown


def _leaves(error: BaseException) -> Iterator[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            yield from _leaves(inner)
    else:
        yield error
