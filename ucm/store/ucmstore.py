"""The interface of a KV block store, as engines program against it."""

from __future__ import annotations

import abc
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self

from ucm.client.tasks import Task

__all__ = ["Task", "UcmKVStoreBase"]


class UcmKVStoreBase(abc.ABC):
    """Blocks of KV cache under their ids.

    Ids are bytes, 1 to 100 of them. Offsets and sizes are bytes. Any thread may call any method. Errors are those
    of ucmfs.errors; InvalidRequest (also a ValueError) means that nothing was read, written or created.
    """

    @abc.abstractmethod
    def lookup(self, block_ids: Sequence[bytes]) -> list[bool]:
        """Whether each block is there, whole."""

    @abc.abstractmethod
    def lookup_on_prefix(self, block_ids: Sequence[bytes]) -> int:
        """Index of the last block of the unbroken run of hits from the start; -1 if the first is a miss."""

    @abc.abstractmethod
    def load(self, block_ids: Sequence[bytes], offset: Sequence[int], dst_tensor: Sequence[Any]) -> Task:
        """Read into tensors. Row i reads block i from offset i into dst_tensor[i]: a tensor, or a list laid end to end.

        The tensors are the store's until the task is done. A missing block fails its own rows, no others.
        """

    @abc.abstractmethod
    def dump(self, block_ids: Sequence[bytes], offset: Sequence[int], src_tensor: Sequence[Any]) -> Task:
        """Write from tensors; rows as for load(). The tensors may not change until the task is done.

        A block becomes visible when it is complete, never in part.
        """

    @abc.abstractmethod
    def wait(self, task: Task) -> None:
        """Return when *task* is done; what it dumped and completed is then visible.

        Raises TaskFailed, whose `rows` name the rows and blocks that failed. May be called again: same outcome.
        """

    @abc.abstractmethod
    def check(self, task: Task) -> bool:
        """Whether *task* is done, without waiting. Its outcome comes from wait()."""

    @abc.abstractmethod
    def prefetch(self, block_ids: Sequence[bytes]) -> None:
        """Ask that blocks be brought into the first stage. Does not wait, and a miss is no error."""

    @abc.abstractmethod
    def get_stats(self) -> dict[str, Any]:
        """Counters of the pipeline, and under "client" this store's own."""

    @abc.abstractmethod
    def close(self) -> None:
        """Wait for running tasks, drop incomplete blocks and let go of everything. May be repeated.

        Later calls raise StoreClosed, except wait() and check() of earlier tasks.
        """

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
