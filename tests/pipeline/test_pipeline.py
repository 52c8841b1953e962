"""The pipeline over real directories, with levers to hold and break the stage below."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing

from tests.memory import remove_cache
from tests.pipeline.faulty import Faulty, flip_a_byte
from ucmfs.block import Changes, check_name, looks_like_lock, looks_temporary
from ucmfs.config import PipelineOptions
from ucmfs.errors import (
    BlockBusy,
    BlockCorrupt,
    BlockNotFound,
    InvalidName,
    StageError,
    StageFull,
    StageTimeout,
    UcmfsError,
)
from ucmfs.pipeline.eviction import Lru
from ucmfs.pipeline.pipeline import Pipeline
from ucmfs.stages.cache import Cache

KIB = 1 << 10
MIB = 1 << 20


class Rig:
    """A Cache of 1 MiB over stages that tests can break."""

    def __init__(self, tmp_path: Path, *, stages: int = 1, capacity: int = MIB, **options: Any) -> None:
        self.roots = [tmp_path / f"stage{number}" for number in range(stages)]
        for root in self.roots:
            root.mkdir(exist_ok=True)
        self.below = [Faulty(str(root), f"Below{number}") for number, root in enumerate(self.roots)]
        self.directory = Path(f"/dev/shm/ucmfs-test-{os.getpid()}-pipeline-{tmp_path.name}")
        self.cache = Cache(str(self.directory), capacity, Lru())
        self.pipeline = Pipeline("Cache|Faulty", self.cache, self.below, PipelineOptions(**options))

    async def put(self, name: str, data: bytes) -> None:
        staging = await self.pipeline.create()
        try:
            await self.pipeline.write(staging, 0, data)
            self.pipeline.publish(staging, name)
        except BaseException:
            self.cache.abandon(staging)
            raise
        os.close(staging.fd)

    async def get(self, name: str) -> bytes:
        block = await self.pipeline.open(name)
        try:
            return os.pread(block.fd, block.attributes.size + 1, 0)
        finally:
            block.close()

    def run(self, test: Callable[[], Awaitable[None]], *, timeout: float = 30) -> None:
        async def main() -> None:
            with trio.fail_after(timeout):
                async with self.pipeline.running():
                    await test()

        trio.run(main)


@pytest.fixture
def make_rig(tmp_path: Path) -> Iterator[Callable[..., Rig]]:
    rigs: list[Rig] = []

    def make(**options: Any) -> Rig:
        rigs.append(Rig(tmp_path, **options))
        return rigs[-1]

    yield make
    for rig in rigs:
        remove_cache(rig.directory)


async def until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110 - files and counters have no events
        await trio.sleep(0.001)


def test_one_fill_however_many_ask(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig()
    data = os.urandom(100 * KIB)
    (rig.roots[0] / "x").write_bytes(data)

    async def test() -> None:
        below = rig.below[0]
        below.gate = trio.Event()
        got: list[bytes] = []

        async def read() -> None:
            got.append(await rig.get("x"))

        async with trio.open_nursery() as nursery:
            for _ in range(50):
                nursery.start_soon(read)
            await until(lambda: rig.pipeline.counters.fills_joined == 49)
            below.gate.set()
        assert got == [data] * 50
        assert below.calls["read"] == 1
        assert rig.pipeline.counters.fills == 1

    rig.run(test)


def test_a_reader_that_goes_away_does_not_end_the_fill_of_others(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig()
    (rig.roots[0] / "x").write_bytes(b"data")

    async def test() -> None:
        below = rig.below[0]
        below.gate = trio.Event()
        got: list[bytes] = []

        async def read() -> None:
            got.append(await rig.get("x"))

        async with trio.open_nursery() as nursery:
            with trio.CancelScope() as first:
                nursery.start_soon(read)
                async with trio.open_nursery() as inner:
                    inner.start_soon(rig.get, "x")
                    await until(lambda: below.waiting == 1)
                    first.cancel()
            below.gate.set()
        assert got == [b"data"]

    rig.run(test)


def test_a_block_published_in_mid_fill_wins(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig()
    (rig.roots[0] / "x").write_bytes(b"old")

    async def test() -> None:
        below = rig.below[0]
        below.gate = trio.Event()
        got: list[bytes] = []

        async def read() -> None:
            got.append(await rig.get("x"))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(read)
            await until(lambda: below.waiting == 1)
            await rig.put("x", b"new")
            below.gate.set()
        assert got == [b"new"]
        assert await rig.get("x") == b"new"

    rig.run(test)


def test_a_block_removed_in_mid_fill_is_a_miss(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig()
    (rig.roots[0] / "x").write_bytes(b"old")

    async def test() -> None:
        below = rig.below[0]
        below.gate = trio.Event()
        outcomes: list[str] = []

        async def read() -> None:
            try:
                outcomes.append((await rig.get("x")).decode())
            except BlockNotFound:
                outcomes.append("miss")

        async with trio.open_nursery() as nursery:
            nursery.start_soon(read)
            await until(lambda: below.waiting == 1)
            nursery.start_soon(rig.pipeline.remove, "x")
            await until(lambda: below.waiting == 2)
            below.gate.set()
        assert outcomes == ["miss"]
        assert await rig.pipeline.lookup(["x"]) == [None]
        assert rig.cache.used == 0

    rig.run(test)


def test_a_block_filled_in_mid_removal_does_not_stay(
    make_rig: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = make_rig()
    (rig.roots[0] / "x").write_bytes(b"data")
    [stage] = rig.below

    async def test() -> None:
        begun, go_on, remove = trio.Event(), trio.Event(), stage.remove

        async def slowly(names: Sequence[str]) -> list[bool | UcmfsError]:
            begun.set()
            await go_on.wait()
            return await remove(names)

        monkeypatch.setattr(stage, "remove", slowly)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(rig.pipeline.remove, "x")
            await begun.wait()
            assert await rig.get("x") == b"data"
            go_on.set()
        with pytest.raises(BlockNotFound):
            await rig.get("x")
        assert rig.cache.used == 0

    rig.run(test)


def test_a_rotten_copy_is_a_miss_and_set_aside(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig()

    async def test() -> None:
        await rig.put("d/x", os.urandom(50 * KIB))
        assert not (await rig.pipeline.flush()).left
        rig.pipeline.evict("d/x")
        flip_a_byte(rig.roots[0] / "d/x")
        with pytest.raises(BlockNotFound) as caught:
            await rig.get("d/x")
        assert isinstance(caught.value.__cause__, BlockCorrupt)
        assert rig.pipeline.counters.corrupt == 1
        assert await rig.pipeline.lookup(["d/x"]) == [None]
        assert not (rig.roots[0] / "d/x").exists()
        assert len(list((rig.roots[0] / ".ucmfs/aside").iterdir())) == 1

    rig.run(test)


def test_a_deeper_stage_replaces_a_rotten_copy(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(stages=2)
    data = os.urandom(50 * KIB)

    async def test() -> None:
        await rig.put("x", data)
        assert not (await rig.pipeline.flush()).left
        assert [(root / "x").read_bytes() for root in rig.roots] == [data, data]
        rig.pipeline.evict("x")
        flip_a_byte(rig.roots[0] / "x")
        assert await rig.get("x") == data
        await until((rig.roots[0] / "x").exists)
        assert (rig.roots[0] / "x").read_bytes() == data

    rig.run(test)


def test_three_stages_fill_upwards(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(stages=3)
    (rig.roots[2] / "x").write_bytes(b"deep")

    async def test() -> None:
        assert await rig.get("x") == b"deep"
        await until(lambda: all((root / "x").exists() for root in rig.roots))
        location = await rig.pipeline.locate("x")
        assert location is not None
        assert location.stages == ["Cache", "Below0", "Below1", "Below2"]

    rig.run(test)


def test_least_recently_used_goes_first(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig()

    async def test() -> None:
        for number in range(4):
            await rig.put(f"{number}", bytes(200 * KIB))
        assert not (await rig.pipeline.flush()).left
        await rig.get("0")
        await rig.put("4", bytes(500 * KIB))
        assert sorted(rig.cache.blocks) == ["0", "3", "4"]
        assert rig.pipeline.room.evictions == 2

    rig.run(test)


def test_pinned_open_and_dirty_blocks_stay(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(write_back_interval=3600, write_back_deadline=0.2)

    async def test() -> None:
        await rig.put("pinned", bytes(200 * KIB))
        await rig.put("open", bytes(200 * KIB))
        assert not (await rig.pipeline.flush()).left
        await rig.pipeline.pin("pinned", True)
        held = await rig.pipeline.open("open")
        rig.below[0].down = StageError("Below0", "is away")
        await rig.put("dirty", bytes(200 * KIB))
        with pytest.raises(StageFull):
            await rig.put("more", bytes(800 * KIB))
        assert sorted(rig.cache.blocks) == ["dirty", "open", "pinned"]
        for name, reason in (("pinned", "pinned"), ("open", "open"), ("dirty", "dirty")):
            with pytest.raises(BlockBusy, match=reason):
                rig.pipeline.evict(name)
        held.close()
        await rig.pipeline.pin("pinned", False)
        await rig.put("more", bytes(800 * KIB))
        assert sorted(rig.cache.blocks) == ["dirty", "more"]

    rig.run(test)


def test_an_open_block_that_is_replaced_counts_until_closed(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig()

    async def test() -> None:
        await rig.put("x", b"1" * 400 * KIB)
        held = await rig.pipeline.open("x")
        await rig.put("x", b"2" * 400 * KIB)
        assert rig.cache.used == 800 * KIB
        assert os.pread(held.fd, 1, 0) == b"1"
        held.close()
        assert rig.cache.used == 400 * KIB
        assert os.listdir(rig.directory / "trash") == []

    rig.run(test)


def test_a_lent_descriptor_keeps_its_block(make_rig: Callable[..., Rig]) -> None:
    """A client's descriptor holds pages: the block is not evicted under it, and counted if it is replaced."""
    rig = make_rig(write_back_deadline=0.2)

    async def test() -> None:
        await rig.put("x", b"1" * 400 * KIB)
        assert not (await rig.pipeline.flush()).left
        lent = await rig.pipeline.open("x", lend=True)
        theirs = os.dup(lent.fd)
        lent.close()
        with pytest.raises(BlockBusy, match="open"):
            rig.pipeline.evict("x")
        with pytest.raises(StageFull):
            await rig.put("y", bytes(800 * KIB))
        await rig.pipeline.remove("x")
        assert rig.cache.used == 400 * KIB
        os.close(theirs)
        await rig.put("y", bytes(800 * KIB))
        assert rig.cache.used == 800 * KIB

    rig.run(test)


def test_writers_wait_for_room_and_get_it(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(write_back_interval=3600)

    async def test() -> None:
        below = rig.below[0]
        below.gate = trio.Event()
        most = 0

        async def write(number: int) -> None:
            await rig.put(f"{number}", bytes([number]) * 300 * KIB)

        async with trio.open_nursery() as nursery:
            for number in range(12):
                nursery.start_soon(write, number)
            await until(lambda: below.waiting > 0)
            most = rig.cache.used
            below.gate.set()
        assert most <= MIB
        assert rig.cache.used <= MIB
        assert not (await rig.pipeline.flush()).left
        for number in range(12):
            assert await rig.get(f"{number}") == bytes([number]) * 300 * KIB

    rig.run(test)


def test_a_writer_without_room_gets_enospc_at_the_deadline(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(write_back_deadline=0.1)

    async def test() -> None:
        rig.below[0].down = StageTimeout("Below0", "no answer within 1 s")
        await rig.put("x", bytes(700 * KIB))
        with pytest.raises(StageFull, match="716800 bytes wait"):
            await rig.put("y", bytes(700 * KIB))
        assert rig.cache.used == 700 * KIB
        with pytest.raises(StageFull, match="does not fit"):
            await rig.put("z", bytes(2 * MIB))

    rig.run(test)


def test_what_a_stage_refuses_stays_dirty_and_is_tried_again(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(write_back_interval=0.01)

    async def test() -> None:
        below = rig.below[0]
        below.fail = lambda method, name: StageFull("Below0", "full") if name == "bad" else None
        await rig.put("bad", b"1")
        await rig.put("good", b"2")
        flushed = await rig.pipeline.flush()
        assert flushed.left == ["bad"]
        assert isinstance(flushed.error, StageFull)
        assert (rig.roots[0] / "good").read_bytes() == b"2"
        assert await rig.get("bad") == b"1"
        below.fail = lambda method, name: None
        await until((rig.roots[0] / "bad").exists)
        assert not (await rig.pipeline.flush()).left

    rig.run(test)


def test_a_block_replaced_in_mid_write_back_stays_dirty(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(write_back_interval=0.01)

    async def test() -> None:
        below = rig.below[0]
        below.gate = trio.Event()
        await rig.put("x", b"old")
        await until(lambda: below.waiting == 1)
        await rig.put("x", b"new")
        below.gate.set()
        assert not (await rig.pipeline.flush()).left
        assert (rig.roots[0] / "x").read_bytes() == b"new"

    rig.run(test)


@pytest.mark.parametrize("looked_for", [False, True])
def test_a_block_removed_in_mid_write_back_does_not_come_back(make_rig: Callable[..., Rig], looked_for: bool) -> None:
    rig = make_rig(write_back_interval=0.01)

    async def test() -> None:
        below = rig.below[0]
        below.gate = trio.Event()
        if looked_for:
            # As the kernel does before it creates a file: no stage has it, that much is known.
            await rig.pipeline.lookup(["x"])
        await rig.put("x", b"data")
        await until(lambda: below.waiting == 1)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(rig.pipeline.remove, "x")
            await trio.testing.wait_all_tasks_blocked()
            below.gate.set()
        async with rig.pipeline.write_back.batches:
            pass  # the one that was under way is over
        assert not (rig.roots[0] / "x").exists()
        assert await rig.pipeline.lookup(["x"]) == [None]

    rig.run(test)


@pytest.mark.parametrize("looked_for", [False, True])
def test_a_block_renamed_in_mid_write_back_has_one_name_below(make_rig: Callable[..., Rig], looked_for: bool) -> None:
    rig = make_rig(write_back_interval=0.01)

    async def test() -> None:
        below = rig.below[0]
        below.gate = trio.Event()
        if looked_for:
            # As the kernel does before it creates a file: no stage has it, that much is known.
            await rig.pipeline.lookup(["x"])
        await rig.put("x", b"data")
        await until(lambda: below.waiting == 1)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(rig.pipeline.rename, "x", "y")
            await trio.testing.wait_all_tasks_blocked()
            below.gate.set()
        assert not (await rig.pipeline.flush()).left
        assert sorted(os.listdir(rig.roots[0])) == [".ucmfs", "y"]
        assert await rig.get("y") == b"data"

    rig.run(test)


@pytest.mark.parametrize("below", [True, False])
def test_a_block_renamed_twice_leaves_nothing_behind(make_rig: Callable[..., Rig], below: bool) -> None:
    """Also where the first time it replaces a block that nothing is below of, and it has an older version below."""
    rig = make_rig()

    async def test() -> None:
        if below:
            await rig.put("x", b"old")
            await rig.pipeline.flush()
        for name in ("x", "y"):
            await rig.pipeline.lookup([name])
            await rig.put(name, name.encode())
        await rig.pipeline.rename("x", "y")
        await rig.pipeline.rename("y", "z")
        assert await rig.get("z") == b"x"
        assert await rig.pipeline.lookup(["x", "y"]) == [None, None]
        await rig.pipeline.flush()
        assert sorted(os.listdir(rig.roots[0])) == [".ucmfs", "z"]

    rig.run(test)


def test_a_changed_mode_in_mid_write_back_goes_down_too(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(write_back_interval=0.01)

    async def test() -> None:
        below = rig.below[0]
        below.gate = trio.Event()
        await rig.put("x", b"data")
        await until(lambda: below.waiting == 1)
        await rig.pipeline.update("x", Changes(mode=0o600))
        below.gate.set()
        assert not (await rig.pipeline.flush()).left
        assert (rig.roots[0] / "x").stat().st_mode & 0o777 == 0o600

    rig.run(test)


def test_a_stage_that_is_away_makes_misses(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(consistency_ttl=0)

    async def test() -> None:
        (rig.roots[0] / "x").write_bytes(b"data")
        rig.below[0].down = StageTimeout("Below0", "no answer")
        assert await rig.pipeline.lookup(["x"]) == [None]
        with pytest.raises(StageTimeout):
            await rig.get("x")
        await rig.put("y", b"mine")
        assert await rig.get("y") == b"mine"
        rig.below[0].down = None
        assert await rig.get("x") == b"data"

    rig.run(test)


@pytest.mark.parametrize(
    "name", ["", "/a", "a/", "a//b", "../a", "a/./b", "a\0b", "\ud800", "n" * 256, "a/" * 2100 + "b"]
)
def test_names_that_no_file_can_have(name: str) -> None:
    with pytest.raises(InvalidName):
        check_name(name)


def test_what_does_not_fit_is_read_where_it_is_not_cached(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig()
    (rig.roots[0] / "big").write_bytes(bytes(3 * MIB))

    async def test() -> None:
        with pytest.raises(StageFull, match="no local stage"):
            await rig.get("big")
        assert rig.cache.used == 0

    rig.run(test)


@pytest.mark.parametrize("name", ["x.lock", "d/LOCK", "lock", "a.lck"])
def test_names_that_look_like_locks(name: str) -> None:
    assert looks_like_lock(name)


@pytest.mark.parametrize("name", ["block", "d/block", "lock/x", "x.locked", "xlock"])
def test_names_that_only_end_like_locks(name: str) -> None:
    assert not looks_like_lock(name)


@pytest.mark.parametrize("name", ["k.tmp", "d/.tmpAb3x9Q", ".tmp", "k.tmp.1234", "k_9f3a.tmp", ".1f-2e.tmp"])
def test_names_that_look_temporary(name: str) -> None:
    assert looks_temporary(name)


@pytest.mark.parametrize("name", ["k", "tmp", "k.tmpx", ".tmp/x", "x.tmp.d/y", "template", "a.tmp/b"])
def test_names_that_only_remind_of_temporary_ones(name: str) -> None:
    assert not looks_temporary(name)
