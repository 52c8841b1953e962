"""Blocks that several dumps make up: published whole, once, by whoever brings the last byte."""

from __future__ import annotations

import logging
import os
import random
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.client.faulty_daemon import FaultyDaemon, files_of
from ucm.client.plain import PlainBlocks
from ucm.client.staged import StagedBlock, StagedBlocks, Written
from ucm.client.tensors import row_of, write_row
from ucm.store.pipeline.connector import UcmPipelineStore
from ucm.store.ucmstore import Task
from ucmfs.control import protocol
from ucmfs.control.protocol import Fault, Reply, Request
from ucmfs.errors import BlockError, TaskFailed

SIZE = 1000
CONTENT = random.Random(1).randbytes(SIZE)
BLOCK = b"\xab" * 16


@pytest.fixture
def store(open_store: Callable[..., UcmPipelineStore]) -> UcmPipelineStore:
    return open_store(block_size=SIZE)


def dump(store: UcmPipelineStore, start: int, end: int, content: bytes = CONTENT, block: bytes = BLOCK) -> None:
    store.wait(store.dump([block], [start], [content[start:end]]))


def load(store: UcmPipelineStore, block: bytes = BLOCK) -> bytes:
    back = bytearray(SIZE)
    store.wait(store.load([block], [0], [back]))
    return bytes(back)


def test_visible_with_the_last_byte_and_not_before(store: UcmPipelineStore) -> None:
    for start, end in [(500, 1000), (0, 100), (101, 500), (50, 101)]:
        assert store.lookup([BLOCK]) == [False]
        with pytest.raises(TaskFailed, match=BLOCK.hex()):
            store.wait(store.load([BLOCK], [500], [bytearray(1)]))
        dump(store, start, end)
    assert store.lookup([BLOCK]) == [True]
    assert load(store) == CONTENT


def test_parts_in_one_call_and_the_last_wins(store: UcmPipelineStore) -> None:
    store.wait(store.dump([BLOCK] * 3, [0, 400, 350], [b"x" * 500, CONTENT[400:], CONTENT[350:450]]))
    assert load(store) == b"x" * 350 + CONTENT[350:]


def test_a_part_written_twice_counts_once(store: UcmPipelineStore) -> None:
    dump(store, 0, 600, b"y" * SIZE)
    dump(store, 0, 600)
    assert store.lookup([BLOCK]) == [False]
    dump(store, 600, 1000)
    assert load(store) == CONTENT


def test_a_part_of_a_published_block_begins_a_new_version(store: UcmPipelineStore) -> None:
    dump(store, 0, SIZE)
    dump(store, 0, 999, b"z" * SIZE)
    assert load(store) == CONTENT
    dump(store, 999, SIZE, b"z" * SIZE)
    assert load(store) == b"z" * SIZE


def test_an_empty_part_begins_nothing(store: UcmPipelineStore, written: Callable[[], dict[str, bytes]]) -> None:
    before = written()
    store.wait(store.dump([BLOCK], [SIZE], [b""]))
    assert written() == before
    assert store.lookup([BLOCK]) == [False]


def test_what_is_incomplete_at_close_is_gone(
    store: UcmPipelineStore, written: Callable[[], dict[str, bytes]], open_store: Callable[..., UcmPipelineStore]
) -> None:
    before = written()
    dump(store, 0, 999)
    store.close()
    assert not written().keys() - before.keys()
    assert open_store(block_size=SIZE).lookup([BLOCK]) == [False]


def test_parts_in_random_order_from_many_threads(store: UcmPipelineStore) -> None:
    """Each block is seen whole or not at all, all the time, and is there when the last wait() returns."""
    blocks = [bytes([n]) * 16 for n in range(30)]
    parts = [(block, start) for block in blocks for start in range(0, SIZE, 50)]
    random.Random(7).shuffle(parts)
    left = dict.fromkeys(blocks, SIZE // 50)
    lock, failures, writing = threading.Lock(), list[BaseException](), threading.Event()

    def write(mine: list[tuple[bytes, int]]) -> None:
        try:
            for first in range(0, len(mine), 7):
                group = mine[first : first + 7]
                rows = [CONTENT[start : start + 50] for _, start in group]
                store.wait(store.dump([block for block, _ in group], [start for _, start in group], rows))
                with lock:
                    for block, _ in group:
                        left[block] -= 1
                    done = [block for block, count in left.items() if count == 0]
                assert all(store.lookup(done))
        except BaseException as error:
            failures.append(error)

    def read() -> None:
        try:
            while not writing.is_set():
                there = [block for block, hit in zip(blocks, store.lookup(blocks), strict=True) if hit]
                assert all(load(store, block) == CONTENT for block in there)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=write, args=(parts[turn::6],)) for turn in range(6)]
    reader = threading.Thread(target=read)
    for thread in (*threads, reader):
        thread.start()
    for thread in threads:
        thread.join()
    writing.set()
    reader.join()
    assert not failures
    assert all(load(store, block) == CONTENT for block in blocks)


RANGES = st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20)).filter(lambda r: r[0] < r[1]), max_size=12)


@given(RANGES)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_any_parts_against_a_model(tmp_path: Path, ranges: list[tuple[int, int]]) -> None:
    """The n-th part writes bytes of value n; a set and a bytearray say what must be visible after each."""
    visible: bytes | None = None
    draft, covered = bytearray(20), set[int]()
    block = os.urandom(16)
    with UcmPipelineStore({"mount_point": str(tmp_path), "block_size": 20}) as store:
        for value, (start, end) in enumerate(ranges):
            part = bytes([value]) * (end - start)
            store.wait(store.dump([block], [start], [part]))
            draft[start:end] = part
            covered |= set(range(start, end))
            if len(covered) == 20:
                visible, covered = bytes(draft), set()
            assert store.lookup([block]) == [visible is not None]
            if visible is not None:
                back = bytearray(20)
                store.wait(store.load([block], [0], [back]))
                assert back == visible


# Failures


def test_a_failed_part_drops_the_block_and_a_later_dump_begins_again(daemon: FaultyDaemon) -> None:
    with UcmPipelineStore({"mount_point": str(daemon.root), "block_size": SIZE}) as store:
        dump(store, 0, 600)
        daemon.fail = lambda request: (
            Reply(rows=[None], faults={0: Fault(5, "disk on fire")}) if isinstance(request, protocol.Publish) else None
        )
        with pytest.raises(TaskFailed, match=rf"row 0: .*{BLOCK.hex()}: disk on fire"):
            dump(store, 600, SIZE)
        daemon.fail = lambda request: None
        assert not daemon.stagings
        dump(store, 600, SIZE)
        assert store.lookup([BLOCK]) == [False]
        dump(store, 0, 600)
        assert load(store) == CONTENT


@pytest.fixture
def staged(tmp_path: Path) -> StagedBlocks:
    return StagedBlocks(PlainBlocks(tmp_path), limit=3)


def enter(staged: StagedBlocks, name: str) -> StagedBlock:
    [block] = staged.enter([(name, 4)], join=True)
    assert isinstance(block, StagedBlock)
    return block


def write(block: StagedBlock, start: int, content: bytes, error: BlockError | None = None) -> Written:
    row = row_of(0, start, content, writable=False)
    assert write_row(block.name, block.created().fd, row) is None
    return Written(block, [row], error)


def test_a_complete_block_waits_for_its_last_writer(staged: StagedBlocks, tmp_path: Path) -> None:
    """Bytes may be rewritten while others complete the block: it is published once nobody writes to it."""
    first, second = enter(staged, "b"), enter(staged, "b")
    assert first is second
    assert staged.leave([write(first, 0, b"abcd")]) == [None]
    assert "b" not in files_of(tmp_path)
    third = enter(staged, "b")
    assert third is second
    assert staged.leave([write(second, 0, b"AB"), write(third, 3, b"D")]) == [None, None]
    assert files_of(tmp_path) == {"b": b"ABcD"}


@pytest.mark.parametrize("failed_last", [False, True])
def test_all_writers_of_a_block_hear_of_a_failed_part(staged: StagedBlocks, tmp_path: Path, failed_last: bool) -> None:
    good, bad = enter(staged, "b"), enter(staged, "b")
    failure = BlockError("b", "no room", code=28)
    if failed_last:
        assert staged.leave([write(good, 0, b"ab")]) == [None]
        assert staged.leave([write(bad, 2, b"cd", failure)]) == [failure]
    else:
        assert staged.leave([write(bad, 2, b"cd", failure)]) == [failure]
        again = enter(staged, "b")
        assert again is not good
        [told] = staged.leave([write(good, 0, b"abcd")])
        assert isinstance(told, BlockError)
        assert "another part" in str(told)
        assert told.errno == 28
        assert staged.leave([write(again, 0, b"ABCD")]) == [None]
    assert files_of(tmp_path) == ({} if failed_last else {"b": b"ABCD"})


def test_the_oldest_idle_block_is_dropped_past_the_limit(
    staged: StagedBlocks, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    busy = enter(staged, "busy")
    for name in ("old", "new"):
        staged.leave([write(enter(staged, name), 0, name[:1].encode())])
    with caplog.at_level(logging.WARNING):
        staged.leave([write(enter(staged, "newest"), 0, b"n")])
    assert [record.message.split(":")[0] for record in caplog.records] == ["old"]
    assert len(files_of(tmp_path)) == 3
    assert staged.leave([write(busy, 0, b"busy")]) == [None]
    assert staged.leave([write(enter(staged, "new"), 1, b"ewn")]) == [None]
    assert staged.leave([write(enter(staged, "old"), 1, b"ldo")]) == [None]  # its first byte went with the drop
    staged.close()
    assert files_of(tmp_path) == {"busy": b"busy", "new": b"newn"}


def test_only_rows_that_found_no_room_are_tried_again(daemon: FaultyDaemon) -> None:
    """A batch larger than the Cache goes through in turns: what is published makes room for the rest."""
    daemon.room = 3
    blocks = [bytes([n]) for n in range(10)]
    with UcmPipelineStore({"mount_point": str(daemon.root)}) as store:
        store.wait(store.dump(blocks, [0] * 10, [block * 9 for block in blocks]))
        assert store.lookup_on_prefix(blocks) == 9
        assert daemon.count(protocol.Create) == 4
        daemon.room = 0
        with pytest.raises(TaskFailed, match=r"row 0: .*no room") as failed:
            store.wait(store.dump(blocks, [0] * 10, blocks))
        assert [row for row, _ in failed.value.rows] == list(range(10))
        assert failed.value.errno == 28


def test_what_waits_for_room_does_not_keep_others_from_making_it(daemon: FaultyDaemon) -> None:
    """Publishing goes over the connection that created: nothing may wait for room on that one meanwhile."""
    daemon.room, daemon.patience = 2, 5.0
    one, two, three = b"one", b"two", b"three"
    waiting = threading.Event()
    with UcmPipelineStore({"mount_point": str(daemon.root), "block_size": 8}) as store:
        store.wait(store.dump([one, two], [0, 0], [b"1234", b"1234"]))
        daemon.fail = lambda request: waiting.set() if isinstance(request, protocol.Create) else None
        late = store.dump([three], [0], [b"12345678"])
        waiting.wait()
        store.wait(store.dump([one], [4], [b"5678"]))
        store.wait(late)
        assert store.lookup([one, two, three]) == [True, False, True]


def test_no_room_for_some_rows_fails_those(daemon: FaultyDaemon) -> None:
    def only_three(request: Request) -> Reply | None:
        if isinstance(request, protocol.Create) and request.names[0].endswith("03"):
            return Reply(rows=[None] * 7, faults={row: Fault(28, "full") for row in range(7)})
        return None

    daemon.room, daemon.fail = 3, only_three
    blocks = [bytes([n]) for n in range(10)]
    with UcmPipelineStore({"mount_point": str(daemon.root)}) as store:
        with pytest.raises(TaskFailed) as failed:
            store.wait(store.dump(blocks, [0] * 10, blocks))
        assert [row for row, _ in failed.value.rows] == list(range(3, 10))
        assert store.lookup(blocks) == [True] * 3 + [False] * 7


def test_two_dumps_of_whole_blocks_do_not_mix(daemon: FaultyDaemon) -> None:
    """Without block_size each dump has a staging file of its own, also under one name at the same time."""
    both, tasks = threading.Event(), list[Task]()
    with UcmPipelineStore({"mount_point": str(daemon.root)}) as twice:

        def overlap(request: Request) -> None:
            if not isinstance(request, protocol.Create):
                return
            if daemon.count(protocol.Create) == 1:
                tasks.append(twice.dump([BLOCK], [0], [b"longer"]))
                both.wait(timeout=5)  # so that dumps that wrongly share one file fail the test instead of hanging it
            else:
                both.set()

        daemon.fail = overlap
        twice.wait(twice.dump([BLOCK], [0], [b"four"]))
        twice.wait(tasks[0])
        assert twice.lookup([BLOCK]) == [True]
    assert daemon.count(protocol.Create) == 2
    assert list(files_of(daemon.root).values()) in ([b"four"], [b"longer"])
