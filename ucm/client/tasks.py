"""Tasks, and the threads that carry them out."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from ucm.client.blocks import about
from ucm.client.requests import BlockRows
from ucmfs.errors import ClientError, StoreClosed, TaskFailed, UcmfsError

__all__ = ["Task", "Work", "Workers"]

log = logging.getLogger(__name__)

Work = Callable[[Sequence[BlockRows]], Mapping[int, UcmfsError]]
"""Moves the bytes of some blocks; gives the errors by row number."""

_QUEUE = 1024
"""Pieces that wait for a worker, over all tasks; who submits more waits for a place."""
_LEAST_BYTES, _MOST_BYTES = 1 << 20, 8 << 20
_MOST_BLOCKS = 64
"""A piece is a batch to the daemon and a turn of one worker. Small blocks share one, large ones are spread out; and
it is small enough that all workers together hold few descriptors and little room in the Cache."""


class Task:
    """A load or a dump under way. A handle for wait() and check() of the store that gave it."""

    def __init__(self, pieces: int) -> None:
        self._lock = threading.Lock()
        self._left = pieces
        self._errors: dict[int, UcmfsError] = {}
        self._done = threading.Event()
        if pieces == 0:
            self._done.set()

    def done(self) -> bool:
        return self._done.is_set()

    def result(self) -> None:
        """Wait until done. Raises TaskFailed, each time anew, if rows failed."""
        self._done.wait()
        if self._errors:
            raise TaskFailed(sorted(self._errors.items()))

    def finish(self, errors: Mapping[int, UcmfsError]) -> None:
        """One piece is done, but for *errors* by row number."""
        with self._lock:
            self._errors.update(errors)
            self._left -= 1
            if self._left == 0:
                self._done.set()


class Workers:
    """A bounded pool of threads with a bounded queue."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._executor = ThreadPoolExecutor(limit, thread_name_prefix="ucm-store")
        self._places = threading.BoundedSemaphore(_QUEUE)

    def start(self, blocks: Sequence[BlockRows], work: Work) -> Task:
        """Do *work* on *blocks*, in pieces. Waits while the queue is full."""
        pieces = _pieces(blocks, self._limit)
        task = Task(len(pieces))
        for piece in pieces:
            self._places.acquire()
            try:
                self._executor.submit(self._run, task, piece, work)
            except RuntimeError:  # shut down meanwhile
                self._places.release()
                task.finish(_all_rows(piece, StoreClosed()))
        return task

    def _run(self, task: Task, piece: Sequence[BlockRows], work: Work) -> None:
        try:
            errors = work(piece)
        except UcmfsError as error:
            errors = _all_rows(piece, error)
        except BaseException as error:
            # A task must end whatever happens, or its waiter never does.
            log.exception("unexpected error while moving %d blocks", len(piece))
            unexpected = ClientError(f"unexpected {type(error).__name__}: {error}")
            unexpected.__cause__ = error
            errors = _all_rows(piece, unexpected)
        for failure in errors.values():
            _let_go(failure)
        self._places.release()
        task.finish(errors)

    def close(self) -> None:
        """Let running tasks end, and the threads with them."""
        self._executor.shutdown(wait=True)


def _pieces(blocks: Sequence[BlockRows], workers: int) -> list[list[BlockRows]]:
    share = min(max(sum(block.nbytes for block in blocks) // workers, _LEAST_BYTES), _MOST_BYTES)
    pieces: list[list[BlockRows]] = []
    room = 0
    for block in blocks:
        if not pieces or room <= 0 or len(pieces[-1]) == _MOST_BLOCKS:
            pieces.append([])
            room = share
        pieces[-1].append(block)
        room -= block.nbytes
    return pieces


def _let_go(error: BaseException) -> None:
    """Drop the tracebacks: their frames hold the caller's tensors, and would as long as anyone keeps the error."""
    chained: BaseException | None = error
    while chained is not None:
        chained.__traceback__ = None
        chained = chained.__cause__ or chained.__context__


def _all_rows(blocks: Sequence[BlockRows], error: UcmfsError) -> dict[int, UcmfsError]:
    return {row.index: about(block.name, error) for block in blocks for row in block.rows}
