"""The store end to end, the same in every place."""

from __future__ import annotations

import hashlib
import os
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from tests.client.faulty_daemon import FaultyDaemon, files_of
from ucm.store.cache.connector import UcmCacheStore
from ucm.store.pipeline.connector import UcmPipelineStore, UcmPipelineStoreBuilder
from ucm.store.posix.connector import UcmPosixStore
from ucmfs.control import protocol
from ucmfs.errors import BlockError, BlockNotFound, ClientError, StoreClosed, TaskFailed
from ucmfs.stages.base import Stage


def ids(count: int, start: int = 0) -> list[bytes]:
    return [hashlib.sha256(str(n).encode()).digest()[:16] for n in range(start, start + count)]


def test_tensors_come_back_bit_for_bit(store: UcmPipelineStore) -> None:
    """A block of a model: keys and values of each layer, laid end to end."""
    blocks = ids(24)
    source = [[torch.randn(2, 16, 64).to(torch.bfloat16) for _ in range(8)] for _ in blocks]
    store.wait(store.dump(blocks, [0] * len(blocks), source))
    assert store.lookup(blocks) == [True] * len(blocks)
    target = [[torch.zeros(2, 16, 64, dtype=torch.bfloat16) for _ in row] for row in source]
    task = store.load(blocks, [0] * len(blocks), target)
    store.wait(task)
    assert store.check(task)
    for row, back in zip(source, target, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(row, back, strict=True))


def test_rows_of_one_block_and_parts_of_a_block(store: UcmPipelineStore) -> None:
    one, two = ids(2)
    store.wait(store.dump([one, two, one, one], [4, 0, 0, 10], [b"efghij", numpy.arange(3), b"abcd", b""]))
    middle, head, numbers = bytearray(3), [bytearray(1), bytearray(2)], numpy.zeros(3, dtype=int)
    store.wait(store.load([one, two, one], [5, 0, 0], [middle, numbers, head]))
    assert middle == b"fgh"
    assert head == [b"a", b"bc"]
    assert numbers.tolist() == [0, 1, 2]


def test_lookup_on_prefix(store: UcmPipelineStore) -> None:
    blocks = ids(6)
    there = [blocks[n] for n in (0, 1, 2, 4)]
    store.wait(store.dump(there, [0] * 4, [b"x"] * 4))
    assert store.lookup(blocks) == [True, True, True, False, True, False]
    assert store.lookup_on_prefix(blocks) == 2
    assert store.lookup_on_prefix(blocks[:2]) == 1
    assert store.lookup_on_prefix(blocks[3:]) == -1
    assert store.lookup_on_prefix([]) == -1


def test_a_missing_block_fails_its_rows_only(store: UcmPipelineStore) -> None:
    one, missing, two = ids(3)
    store.wait(store.dump([one, two], [0, 0], [b"one", b"two"]))
    rows = [bytearray(b"...") for _ in range(4)]
    task = store.load([one, missing, two, missing], [0, 0, 0, 1], rows)
    outcomes = []
    for _ in range(2):
        with pytest.raises(TaskFailed, match=missing.hex()) as failed:
            store.wait(task)
        outcomes.append([(row, type(error)) for row, error in failed.value.rows])
        assert all(isinstance(error, BlockError) and missing.hex() in error.name for _, error in failed.value.rows)
    assert outcomes == [[(1, BlockNotFound), (3, BlockNotFound)]] * 2
    assert rows == [b"one", b"...", b"two", b"..."]
    assert store.check(task)


def test_a_short_block_fails_and_leaves_the_destination(store: UcmPipelineStore) -> None:
    [block] = ids(1)
    store.wait(store.dump([block], [0], [b"12345"]))
    inside, across = bytearray(2), bytearray(b"..")
    with pytest.raises(TaskFailed, match=rf"row 1: .*{block.hex()}: the block holds 5 bytes") as failed:
        store.wait(store.load([block, block], [3, 4], [inside, across]))
    assert [row for row, _ in failed.value.rows] == [1]
    assert [inside, across] == [b"45", b".."]


def test_a_block_shorter_than_block_size_is_a_miss(open_store: Callable[..., UcmPipelineStore]) -> None:
    [block] = ids(1)
    store = open_store()
    store.wait(store.dump([block], [0], [b"12345"]))
    assert store.lookup([block]) == [True]
    store.close()
    config_of_same_place = open_store(block_size=8)
    assert config_of_same_place.lookup([block]) == [False]


@pytest.mark.parametrize(
    ("digits", "name"), [(0, "abcdef0123456789"), (2, "ab/abcdef0123456789"), (3, "abc/abcdef0123456789")]
)
def test_the_name_of_a_file(tmp_path: Path, digits: int, name: str) -> None:
    with UcmPipelineStore({"mount_point": str(tmp_path), "data_dir_shard_bytes": digits}) as store:
        store.wait(store.dump([bytes.fromhex("abcdef0123456789")], [0], [b"data"]))
    assert files_of(tmp_path) == {name: b"data"}


def test_a_dump_replaces_a_block(store: UcmPipelineStore) -> None:
    [block] = ids(1)
    for content in (b"the first", b"second"):
        store.wait(store.dump([block], [0], [content]))
    back = bytearray(6)
    store.wait(store.load([block], [0], [back]))
    assert back == b"second"
    with pytest.raises(TaskFailed, match="holds 6 bytes"):
        store.wait(store.load([block], [0], [bytearray(9)]))


def test_empty_requests_are_done_at_once(store: UcmPipelineStore) -> None:
    for task in (store.load([], [], []), store.dump([], [], [])):
        assert store.check(task)
        store.wait(task)
    assert store.lookup([]) == []
    store.prefetch([])


def test_requests_larger_than_a_packet(open_store: Callable[..., UcmPipelineStore]) -> None:
    """More names than a request may have, and longer ones than a socket sends at once."""
    store = open_store(data_dir_shard_bytes=8)
    blocks = [hashlib.sha512(str(n).encode()).digest() + bytes(36) for n in range(2500)]
    store.wait(store.dump(blocks, [0] * len(blocks), [block[:8] for block in blocks]))
    assert store.lookup_on_prefix(blocks) == len(blocks) - 1
    store.prefetch(blocks)
    back = [bytearray(8) for _ in blocks]
    store.wait(store.load(blocks, [0] * len(blocks), back))
    assert back == [block[:8] for block in blocks]


def test_many_threads_at_once(store: UcmPipelineStore) -> None:
    failures: list[BaseException] = []

    def work(turn: int) -> None:
        try:
            blocks = ids(20, start=turn * 20)
            rows = [block * 512 for block in blocks]
            store.wait(store.dump(blocks, [0] * 20, rows))
            assert store.lookup_on_prefix(blocks) == 19
            back = [bytearray(8192) for _ in blocks]
            store.wait(store.load(blocks, [0] * 20, back))
            assert back == rows
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(turn,)) for turn in range(24)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_small_blocks_share_a_request(daemon: FaultyDaemon) -> None:
    blocks = ids(60)
    with UcmPipelineStore({"mount_point": str(daemon.root)}) as store:
        store.wait(store.dump(blocks, [0] * 60, blocks))
        store.wait(store.load(blocks, [0] * 60, [bytearray(16) for _ in blocks]))
    assert [daemon.count(kind) for kind in (protocol.Create, protocol.Publish, protocol.Open)] == [1, 1, 1]


def test_stats_count_what_moved(store: UcmPipelineStore) -> None:
    one, missing = ids(2)
    store.wait(store.dump([one], [0], [b"12345"]))
    store.wait(store.load([one, one], [0, 1], [bytearray(5), bytearray(2)]))
    with pytest.raises(TaskFailed):
        store.wait(store.load([missing], [0], [bytearray(1)]))
    assert store.get_stats()["client"] == {
        "dump_rows": 1,
        "dump_bytes": 5,
        "load_rows": 2,
        "load_bytes": 7,
        "failed_rows": 1,
    }


def test_stats_of_the_pipeline_are_there(daemon: FaultyDaemon) -> None:
    with UcmPipelineStore({"mount_point": str(daemon.root)}) as store:
        assert store.get_stats()["pipeline"] == "test"


def test_close_ends_everything_and_may_be_repeated(store: UcmPipelineStore) -> None:
    blocks = ids(8)
    dumped = store.dump(blocks, [0] * 8, [b"x" * 100_000] * 8)
    store.close()
    store.close()
    assert store.check(dumped)
    store.wait(dumped)
    calls: list[Callable[[], Any]] = [
        lambda: store.lookup(blocks),
        lambda: store.lookup_on_prefix(blocks),
        lambda: store.load(blocks, [0] * 8, [bytearray(1)] * 8),
        lambda: store.dump(blocks, [0] * 8, [b"x"] * 8),
        lambda: store.prefetch(blocks),
        lambda: store.get_stats(),
    ]
    for call in calls:
        with pytest.raises(StoreClosed):
            call()


def test_close_while_others_use_the_store(open_store: Callable[..., UcmPipelineStore]) -> None:
    """Every call ends, with its result or StoreClosed."""
    store, started = open_store(), threading.Barrier(7)
    unexpected: list[BaseException] = []

    def use(turn: int) -> None:
        blocks = ids(4, start=turn * 4)
        started.wait()
        try:
            while True:
                store.wait(store.dump(blocks, [0] * 4, [b"x" * 5000] * 4))
                assert store.lookup_on_prefix(blocks) == 3
        except StoreClosed:
            pass
        except TaskFailed as failed:
            if not all(isinstance(error.__cause__, StoreClosed) for _, error in failed.rows):
                unexpected.append(failed)
        except BaseException as error:
            unexpected.append(error)

    threads = [threading.Thread(target=use, args=(turn,)) for turn in range(6)]
    for thread in threads:
        thread.start()
    started.wait()
    store.close()
    for thread in threads:
        thread.join()
    assert not unexpected


def test_no_descriptor_or_thread_is_left(open_store: Callable[..., UcmPipelineStore], tmp_path: Path) -> None:
    threads, fds = set(threading.enumerate()), len(os.listdir("/proc/self/fd"))
    store = open_store(block_size=4096)
    for turn in range(60):
        blocks = ids(10, start=turn * 10)
        store.wait(store.dump(blocks, [0] * 10, [b"x" * (4096 - turn % 2)] * 10))
        if turn % 2:
            store.wait(store.dump(blocks, [4095] * 10, [b"x"] * 10))
        with pytest.raises(TaskFailed):
            store.wait(store.load([*blocks, b"missing"], [0] * 11, [bytearray(4096) for _ in range(11)]))
    store.close()
    assert len(os.listdir("/proc/self/fd")) <= fds + 16  # what the test's own daemon holds until it is stopped
    assert {t for t in threading.enumerate() if not t.name.startswith(("faulty-daemon", "Trio"))} <= threads


def test_what_the_process_dumps_is_on_disk_after_close(tmp_path: Path, cache_dir: Path) -> None:
    [block] = ids(1)
    config = {"storage_backends": str(tmp_path), "cache_dir": str(cache_dir), "cache_buffer_capacity_gb": 0.01}
    with UcmPipelineStore(config) as store:
        store.wait(store.dump([block], [0], [b"kept"]))
    assert (tmp_path / f"{block.hex()[:3]}/{block.hex()}").read_bytes() == b"kept"
    with UcmPosixStore(config) as store:
        back = bytearray(4)
        store.wait(store.load([block], [0], [back]))
        assert back == b"kept"


def test_a_store_of_memory_only(cache_dir: Path) -> None:
    [block] = ids(1)
    with UcmCacheStore({"cache_dir": str(cache_dir), "cache_buffer_capacity_gb": 0.01}) as store:
        store.wait(store.dump([block], [0], [b"kept"]))
        assert store.lookup([block]) == [True]


def test_a_working_set_larger_than_the_cache(tmp_path: Path, cache_dir: Path) -> None:
    blocks = ids(64)
    rows = [block * 4096 for block in blocks]
    config = {
        "storage_backends": str(tmp_path),
        "cache_dir": str(cache_dir),
        "block_size": 65536,
        "buffer_number": 16,
    }
    with UcmPipelineStore(config) as store:
        store.wait(store.dump(blocks, [0] * 64, rows))
        back = [bytearray(65536) for _ in blocks]
        store.wait(store.load(blocks, [0] * 64, back))
        assert back == rows
        stats = store.get_stats()
        assert stats["eviction_count"] > 0
        assert stats["stages"][0]["used"] <= 16 * 65536


def test_a_registered_pipeline_runs_in_the_process(cache_dir: Path) -> None:
    built: list[Any] = []

    def build(section: Any) -> list[Stage]:
        built.append(section)
        return []

    UcmPipelineStoreBuilder.register("Cache|OfTheTest", build)
    config = {"store_pipeline": "Cache|OfTheTest", "cache_dir": str(cache_dir), "cache_buffer_capacity_gb": 0.01}
    with UcmPipelineStore(config) as store:
        store.wait(store.dump([b"id"], [0], [b"data"]))
        assert store.lookup([b"id"]) == [True]
    assert len(built) == 1


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_lookup_of_a_forked_child_is_refused(store: UcmPipelineStore) -> None:
    store.wait(store.dump([b"id"], [0], [b"data"]))
    task = store.load([b"id"], [0], [bytearray(4)])
    child = os.fork()
    if child == 0:
        outcome = 1
        try:
            for call in (lambda: store.lookup([b"id"]), lambda: store.wait(task), lambda: store.check(task)):
                with pytest.raises(ClientError, match="fork"):
                    call()
            store.close()
            outcome = 0
        finally:
            os._exit(outcome)
    assert os.waitpid(child, 0)[1] == 0
    store.wait(task)
    assert store.lookup([b"id"]) == [True]


def test_a_failed_task_does_not_keep_the_tensors(store: UcmPipelineStore) -> None:
    """Not even until the next garbage collection: they are large."""
    array = numpy.zeros(1000)
    alive = weakref.ref(array)
    task = store.load([b"missing"], [0], [array])
    with pytest.raises(TaskFailed) as failed:
        store.wait(task)
    kept = failed.value.rows
    del array, failed
    store.close()  # the worker that had it is gone
    assert alive() is None
    assert kept[0][0] == 0
