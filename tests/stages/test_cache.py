from __future__ import annotations

import os
import stat
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from tests.memory import remove_cache
from tests.stages.conformance import StageConformance, get, publish, publish_all
from ucmfs.block import PAGE, pages
from ucmfs.config import machine_memory
from ucmfs.errors import BlockBusy, ConfigError, StageFull
from ucmfs.pipeline.eviction import Lru
from ucmfs.stages.base import Stage
from ucmfs.stages.cache import Cache, Cached, CacheOptions, OpenBlock, Staging

MIB = 1 << 20


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[str]:
    path = f"/dev/shm/ucmfs-test-{os.getpid()}-{tmp_path.name}"
    yield path
    remove_cache(path)


def run(directory: str, test: Callable[[Cache], Awaitable[None]], *, capacity: int = MIB, **options: Any) -> None:
    async def main() -> None:
        cache = Cache(directory, capacity, Lru(), **options)
        await cache.start()
        try:
            await test(cache)
        finally:
            await cache.stop()

    trio.run(main)


def put(cache: Cache, name: str, data: bytes, *, dirty: bool = False) -> Cached:
    staging = cache.stage_file()
    os.pwrite(staging.fd, data, 0)
    block = cache.commit(staging, name, dirty=dirty)
    os.close(staging.fd)
    return block


def taken(directory: str) -> int:
    """Bytes that the files of the layout take, each counted once."""
    found: dict[int, int] = {}
    for parent, _, names in os.walk(directory):
        for name in names:
            status = os.lstat(os.path.join(parent, name))
            found[status.st_ino] = status.st_blocks * 512
    return sum(found.values())


class TestCache(StageConformance):
    @pytest.fixture(autouse=True)
    def _directory(self, directory: str) -> None:
        self.directory = directory

    @asynccontextmanager
    async def make_stage(self, tmp_path: Path) -> AsyncIterator[Stage]:
        cache = Cache(f"{self.directory}/{tmp_path.name}", 256 * MIB, Lru())
        await cache.start()
        try:
            yield cache
        finally:
            await cache.stop()


def test_it_refuses_what_does_not_fit(directory: str) -> None:
    async def test(cache: Cache) -> None:
        await publish(cache, "a", bytes(MIB - PAGE))
        assert cache.used == MIB - PAGE
        [error] = await publish_all(cache, {"b": bytes(PAGE + 1)})
        assert isinstance(error, StageFull)
        assert cache.used == taken(directory) == MIB - PAGE
        [error] = await publish_all(cache, {"b": bytes(PAGE)})
        assert error is None

    run(directory, test)


def test_it_finds_everything_again(directory: str) -> None:
    async def first(cache: Cache) -> None:
        put(cache, "d/clean", b"1")
        put(cache, "d/dirty", b"22", dirty=True)
        cache.set_pinned(put(cache, "pinned", b"333"), True)
        cache.stage_file()

    async def second(cache: Cache) -> None:
        assert {name: (block.attributes.size, block.dirty, block.pinned) for name, block in cache.blocks.items()} == {
            "d/clean": (1, False, False),
            "d/dirty": (2, True, False),
            "pinned": (3, False, True),
        }
        assert (cache.dirty_blocks, cache.used) == (1, 3 * PAGE)
        assert os.listdir(f"{directory}/staging") == []
        with pytest.raises(BlockBusy, match="pinned"):
            cache.evict(cache.blocks["pinned"])

    run(directory, first)
    run(directory, second)


def test_a_smaller_capacity_evicts_the_oldest_at_start(directory: str) -> None:
    async def first(cache: Cache) -> None:
        for number in range(4):
            block = put(cache, f"{number}", bytes(200 << 10))
            os.utime(f"{directory}/clean/{block.name}", ns=(number, number))
        put(cache, "dirty", bytes(PAGE), dirty=True)

    async def second(cache: Cache) -> None:
        assert sorted(cache.blocks) == ["3", "dirty"]

    run(directory, first)
    run(directory, second, capacity=300 << 10)


def test_one_process_at_a_time(directory: str) -> None:
    async def test(cache: Cache) -> None:
        with pytest.raises(ConfigError, match="in use by another process"):
            await Cache(directory, MIB, Lru()).start()

    run(directory, test)


def test_a_temporary_directory_goes_unless_something_is_dirty(directory: str) -> None:
    async def clean(cache: Cache) -> None:
        put(cache, "x", b"1")

    async def dirty(cache: Cache) -> None:
        put(cache, "x", b"1", dirty=True)

    run(directory, clean, temporary=True)
    assert not os.path.exists(directory)
    run(directory, dirty, temporary=True)
    assert os.path.exists(f"{directory}/dirty/x")


def test_a_file_system_that_is_too_small(directory: str) -> None:
    """Where the Cache has none of its own."""
    size = os.statvfs("/dev/shm").f_blocks * os.statvfs("/dev/shm").f_frsize
    os.makedirs(f"{directory}/before")

    async def test() -> None:
        with pytest.raises(ConfigError, match="lower the capacity"):
            await Cache(directory, size + PAGE, Lru(), temporary=True).start()

    trio.run(test)


@pytest.mark.parametrize(
    ("keys", "block_size", "expected"),
    [
        (
            {
                "buffer_number": 8,
            },
            1000,
            8 * PAGE,
        ),
        ({"buffer_number": 8}, None, 16 * MIB),
        ({"cache_buffer_capacity_gb": 0.5}, None, 512 * MIB),
        ({}, None, machine_memory() // 4),
    ],
)
def test_capacity(keys: dict[str, Any], block_size: int | None, expected: int) -> None:
    assert CacheOptions(**keys).capacity(block_size) == expected


@pytest.mark.parametrize("keys", [{"cache_buffer_capacity_gb": 1e-9}, {"cache_buffer_capacity_gb": 1e6}])
def test_capacities_that_cannot_be(keys: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"give (less|more)"):
        CacheOptions(**keys).capacity(None)


class Model(RuleBasedStateMachine):
    """The Cache against a dictionary: what is there, what it takes, what may leave.

    Blocks are replaced, removed, renamed and evicted while open; descriptors are lent as the socket lends them.
    """

    names = st.sampled_from(["a", "b", "d/c", "d/e"])

    def __init__(self) -> None:
        super().__init__()
        self.directory = f"/dev/shm/ucmfs-test-{os.getpid()}-model"
        remove_cache(self.directory)
        self.cache = Cache(self.directory, MIB, Lru())
        trio.run(self.cache.start)
        self.model: dict[str, bytes] = {}
        self.dirty: set[str] = set()
        self.pinned: set[str] = set()
        self.open: list[tuple[OpenBlock, bytes]] = []
        self.lent: list[tuple[int, bytes]] = []
        self.stagings: list[Staging] = []
        self.serial = 0

    def content(self, size: int) -> bytes:
        self.serial += 1
        return self.serial.to_bytes(4, "little") * (size // 4)

    @rule(name=names, size=st.integers(1, 10), dirty=st.booleans())
    def publish(self, name: str, size: int, dirty: bool) -> None:
        data = self.content(size * 3000)
        if pages(len(data)) > self.cache.free:
            return
        put(self.cache, name, data, dirty=dirty)
        self.model[name] = data
        (self.dirty.add if dirty else self.dirty.discard)(name)

    @rule(name=names)
    def remove(self, name: str) -> None:
        assert (self.cache.drop(name) is not None) == (name in self.model)
        self._forget(name)

    def _forget(self, name: str) -> None:
        self.model.pop(name, None)
        self.dirty.discard(name)
        self.pinned.discard(name)

    @rule(old=names, new=names)
    def rename(self, old: str, new: str) -> None:
        moved = self.cache.move(old, new)
        assert (moved is not None) == (old in self.model)
        if moved is None or old == new:
            return
        flags = [(kept, old in kept) for kept in (self.dirty, self.pinned)]
        data = self.model[old]
        self._forget(old)
        self._forget(new)
        self.model[new] = data
        for kept, was in flags:
            if was:
                kept.add(new)

    @rule(name=names)
    def mark_clean(self, name: str) -> None:
        if name in self.dirty:
            self.cache.mark_clean(self.cache.blocks[name])
            self.dirty.discard(name)

    @rule(name=names, on=st.booleans())
    def pin(self, name: str, on: bool) -> None:
        if name in self.model:
            self.cache.set_pinned(self.cache.blocks[name], on)
            (self.pinned.add if on else self.pinned.discard)(name)

    @rule(name=names, lend=st.booleans())
    def open_block(self, name: str, lend: bool) -> None:
        if name not in self.model:
            return
        block = self.cache.blocks[name]
        opened = self.cache.open_block(block)
        if lend:
            block.lent = True
            self.lent.append((os.dup(opened.fd), self.model[name]))
            opened.close()
        else:
            self.open.append((opened, self.model[name]))

    @precondition(lambda self: self.open)
    @rule()
    def close_block(self) -> None:
        opened, data = self.open.pop(0)
        assert os.pread(opened.fd, MIB, 0) == data
        opened.close()

    @precondition(lambda self: self.lent)
    @rule()
    def close_lent(self) -> None:
        fd, data = self.lent.pop(0)
        assert os.pread(fd, MIB, 0) == data
        os.close(fd)
        self.cache.reclaim()

    @rule()
    def evict_one(self) -> None:
        before = set(self.cache.blocks)
        evicted = self.cache.evict_one()
        gone = before - set(self.cache.blocks)
        assert len(gone) == evicted
        for name in gone:
            assert name not in self.dirty
            assert name not in self.pinned
            held = [data for _, data in [*self.open, *self.lent]]
            assert self.model[name] not in held
            self._forget(name)

    @rule()
    def stage(self) -> None:
        if self.cache.free >= 4 * PAGE:
            staging = self.cache.stage_file()
            os.pwrite(staging.fd, bytes(3 * PAGE + 1), 0)
            staging.settle()
            self.stagings.append(staging)

    @precondition(lambda self: self.stagings)
    @rule()
    def abandon(self) -> None:
        self.cache.abandon(self.stagings.pop())

    @rule()
    def restart(self) -> None:
        if self.open or self.lent or self.stagings:
            return
        trio.run(self.cache.stop)
        self.cache = Cache(self.directory, MIB, Lru())
        trio.run(self.cache.start)

    @invariant()
    def agrees(self) -> None:
        assert {name: trio.run(get, self.cache, name) for name in self.cache.blocks} == self.model
        assert {name for name, block in self.cache.blocks.items() if block.dirty} == self.dirty
        assert {name for name, block in self.cache.blocks.items() if block.pinned} == self.pinned
        assert self.cache.dirty_blocks == len(self.dirty)
        assert self.cache.used == taken(self.directory)
        assert self.cache.used <= self.cache.capacity

    def teardown(self) -> None:
        for opened, _ in self.open:
            opened.close()
        for fd, _ in self.lent:
            os.close(fd)
        for staging in self.stagings:
            self.cache.abandon(staging)
        self.cache.reclaim()
        for name in list(self.cache.blocks):
            self.cache.drop(name)
        assert self.cache.used == taken(self.directory) == 0
        trio.run(self.cache.stop)
        remove_cache(self.directory)


def test_against_a_model() -> None:
    run_state_machine_as_test(
        Model,
        settings=settings(
            max_examples=60, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
        ),
    )


def test_the_modes_of_files_are_the_blocks_modes(directory: str) -> None:
    async def test(cache: Cache) -> None:
        await publish(cache, "x", b"1", mode=stat.S_IFREG | 0o604)
        [found] = await cache.lookup(["x"])
        assert found is not None
        assert stat.S_IMODE(found.mode) == 0o604

    run(directory, test)
