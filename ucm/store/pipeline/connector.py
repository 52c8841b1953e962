"""The store over a pipeline of stages: UcmPipelineStore, and the registry of pipelines."""

from __future__ import annotations

import atexit
import errno
import os
import resource
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

from ucm.client.blocks import Blocks, close_all
from ucm.client.embedded import EmbeddedBlocks
from ucm.client.mounted import connect
from ucm.client.requests import BlockRows, Layout
from ucm.client.staged import StagedBlock, StagedBlocks, Written
from ucm.client.tasks import Task, Workers
from ucm.client.tensors import read_row, write_row
from ucm.store.ucmstore import UcmKVStoreBase
from ucmfs.config import PipelineOptions, Section, split
from ucmfs.errors import ClientError, ConfigError, InvalidRequest, MountError, StoreClosed, UcmfsError
from ucmfs.pipeline import builder

__all__ = ["UcmPipelineStore", "UcmPipelineStoreBuilder"]

_WORKERS = 8
_INCOMPLETE = 1024
"""Blocks that may wait for more parts; each keeps a descriptor open, so a quarter of the process's limit at most."""
_DUMP_RETRIES = 3
"""How often a dump begins anew because the daemon was replaced in the middle of it."""
_GRACE = 5.0
"""Seconds that the client waits longer than the daemon: the daemon's own deadlines say more about what failed."""


class UcmPipelineStore(UcmKVStoreBase):
    """Blocks over the stages that *config* describes; the methods are documented in UcmKVStoreBase.

    *config* has the keys of a configuration file's `ucm_connector_config`. With `mount_point` the store works over
    that mount, or over plain files if no daemon answers there; without, the pipeline runs in this process. With
    `block_size` (bytes) the parts of a block may come in several dumps, and the block becomes visible with the last;
    without, the rows of one dump are the whole block. Close it, or use it as a context manager. A store does not
    survive a fork: make one in the child.

    Raises ConfigError, StageError if a stage cannot start, MountError if the daemon does not answer in time.
    """

    store_pipeline: ClassVar[str | None] = None
    """The pipeline of a single-stage connector; None where the configuration says it."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        section = self._section(config)
        options = _options(section)
        timeout = max(options.timeout_ms / 1000, options.write_back_deadline) + _GRACE
        self._pid = os.getpid()
        self._layout = Layout(options.data_dir_shard_bytes, options.block_size)
        self._blocks: Blocks = (
            EmbeddedBlocks(section, timeout=timeout)
            if options.mount_point is None
            else connect(options.mount_point, timeout=timeout)
        )
        self._staged = StagedBlocks(self._blocks, _incomplete_limit())
        self._workers = Workers(_WORKERS)
        self._counters = dict.fromkeys(("load_rows", "load_bytes", "dump_rows", "dump_bytes", "failed_rows"), 0)
        self._counting = threading.Lock()
        self._closing = threading.Lock()
        self._closed = False
        atexit.register(self.close)

    def lookup(self, block_ids: Sequence[bytes]) -> list[bool]:
        self._check_open()
        whole = self._layout.block_size or 0
        sizes = self._blocks.lookup(self._layout.names(block_ids))
        return [size is not None and size >= whole for size in sizes]

    def lookup_on_prefix(self, block_ids: Sequence[bytes]) -> int:
        hits = self.lookup(block_ids)
        return (hits.index(False) if False in hits else len(hits)) - 1

    def load(self, block_ids: Sequence[bytes], offset: Sequence[int], dst_tensor: Sequence[Any]) -> Task:
        self._check_open()
        return self._workers.start(self._layout.load(block_ids, offset, dst_tensor), self._load)

    def dump(self, block_ids: Sequence[bytes], offset: Sequence[int], src_tensor: Sequence[Any]) -> Task:
        self._check_open()
        return self._workers.start(self._layout.dump(block_ids, offset, src_tensor), self._dump)

    def wait(self, task: Task) -> None:
        self._check_task(task)
        task.result()

    def check(self, task: Task) -> bool:
        self._check_task(task)
        return task.done()

    def prefetch(self, block_ids: Sequence[bytes]) -> None:
        self._check_open()
        self._blocks.prefetch(self._layout.names(block_ids))

    def get_stats(self) -> dict[str, Any]:
        self._check_open()
        with self._counting:
            client = dict(self._counters)
        return {**self._blocks.stats(), "client": client}

    def close(self) -> None:
        """Also raises StageError if the pipeline of this process could not write its dirty blocks back."""
        if os.getpid() != self._pid:
            return  # the threads and the connections are the parent's
        with self._closing:
            if self._closed:
                return
            self._closed = True
            atexit.unregister(self.close)
            self._workers.close()
            self._staged.close()
            self._blocks.close()

    def _section(self, config: Mapping[str, Any]) -> Section:
        section = Section.of(config)
        if self.store_pipeline is None:
            return section
        given = section.values.get("store_pipeline", self.store_pipeline)
        if given != self.store_pipeline:
            raise section.refusal(
                "store_pipeline",
                f"{type(self).__name__} is always {self.store_pipeline}, given {given}; use UcmPipelineStore",
            )
        return replace(section, values={**section.values, "store_pipeline": self.store_pipeline})

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise ClientError(
                f"the store was made in process {self._pid} and does not survive a fork; make one in this process"
            )

    def _check_open(self) -> None:
        self._check_process()
        if self._closed:
            raise StoreClosed

    def _check_task(self, task: Task) -> None:
        self._check_process()
        if not isinstance(task, Task):
            raise InvalidRequest(f"a task of load() or dump() is needed, given {type(task).__name__}")

    # What the workers do

    def _load(self, blocks: Sequence[BlockRows]) -> dict[int, UcmfsError]:
        errors: dict[int, UcmfsError] = {}
        opened = self._blocks.open([block.name for block in blocks])
        try:
            for block, fd in zip(blocks, opened, strict=True):
                if isinstance(fd, UcmfsError):
                    errors.update((row.index, fd) for row in block.rows)
                    continue
                size = os.fstat(fd).st_size
                for row in block.rows:
                    error = read_row(block.name, fd, size, row)
                    if error is not None:
                        errors[row.index] = error
        finally:
            close_all([fd for fd in opened if isinstance(fd, int)])
        self._count("load", blocks, errors)
        return errors

    def _dump(self, blocks: Sequence[BlockRows]) -> dict[int, UcmfsError]:
        errors: dict[int, UcmfsError] = {}
        size = self._layout.block_size
        left = blocks
        retries = _DUMP_RETRIES
        while left:
            wanted = [(block.name, size or block.end) for block in left]
            entered = list(zip(left, self._staged.enter(wanted, join=size is not None), strict=True))
            parts = [(block, staged) for block, staged in entered if isinstance(staged, StagedBlock)]
            written = [Written(staged, block.rows, _write(block, staged)) for block, staged in parts]
            left = []
            for (block, _), error in zip(parts, self._staged.leave(written), strict=True):
                if error is None:
                    continue
                if retries and _is_lost(error) and block.nbytes == (size or block.end):
                    left.append(block)  # with the daemon, and all of it is here
                else:
                    errors.update((row.index, error) for row in block.rows)
            retries -= bool(left)
            for block, refusal in entered:
                if isinstance(refusal, StagedBlock):
                    continue
                if refusal.errno == errno.ENOSPC and parts:
                    left.append(block)  # what was published just now can be evicted for it
                else:
                    errors.update((row.index, refusal) for row in block.rows)
        self._count("dump", blocks, errors)
        return errors

    def _count(self, what: str, blocks: Sequence[BlockRows], errors: Mapping[int, UcmfsError]) -> None:
        moved = [row.nbytes for block in blocks for row in block.rows if row.index not in errors]
        with self._counting:
            self._counters[f"{what}_rows"] += len(moved)
            self._counters[f"{what}_bytes"] += sum(moved)
            self._counters["failed_rows"] += len(errors)


class UcmPipelineStoreBuilder:
    """The pipelines that are registered whole, by the text that `store_pipeline` then has."""

    @staticmethod
    def register(name: str, build: builder.Build) -> None:
        """Let *build* make the stages of pipeline *name*. Raises ConfigError if the name is taken."""
        try:
            builder.registry.register(name, build)
        except ValueError as error:
            raise ConfigError(f"{error}; choose another name", path="store_pipeline") from error

    @staticmethod
    def get(name: str) -> builder.Build | None:
        """What was registered as *name*."""
        return builder.registry.get(name)


def _options(section: Section) -> PipelineOptions:
    """The keys that belong to no stage, after a check of all. Over a mount, the stages' keys may be left out."""
    if section.values.get("mount_point") is not None and section.values.keys() <= PipelineOptions.model_fields.keys():
        return split(section, [], {})[0]
    return builder.check(section)[0]


def _incomplete_limit() -> int:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _INCOMPLETE if soft == resource.RLIM_INFINITY else min(_INCOMPLETE, soft // 4)


def _is_lost(error: UcmfsError) -> bool:
    """Whether the daemon went away, and the staging file with it."""
    return isinstance(error.__cause__, MountError) and error.errno in (errno.ECONNRESET, errno.EPIPE)


def _write(block: BlockRows, staged: StagedBlock) -> UcmfsError | None:
    fd = staged.created().fd
    for row in block.rows:
        error = write_row(block.name, fd, row)
        if error is not None:
            return error
    return None
