"""Misses that are known from listings: none is older than the ttl, and none denies what this mount did."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, cast

import pytest
import trio
import trio.testing

from tests.pipeline.test_pipeline import Rig, until
from ucmfs.block import Attributes
from ucmfs.errors import StageError
from ucmfs.pipeline import listing
from ucmfs.pipeline.listing import Listings
from ucmfs.stages.base import Entry, Stage

TTL = 1.0
FILE = Attributes(1, 1)


class Names:
    """A stage of names only."""

    def __init__(self, *names: str) -> None:
        self.names = set(names)
        self.scans = 0
        self.gate = trio.Event()
        self.gate.set()
        self.down = False

    async def scan(self, directory: str) -> AsyncIterator[Sequence[Entry]]:
        self.scans += 1
        if self.down:
            raise StageError("Names", "away")
        prefix = directory + "/" if directory else ""
        found = sorted(name.removeprefix(prefix) for name in self.names if name.startswith(prefix))
        yield [Entry(name, FILE) for name in found[: len(found) // 2]]
        await self.gate.wait()
        yield [Entry(name, FILE) for name in found[len(found) // 2 :]]


def run(test: Callable[[Listings, Names], Awaitable[None]], *names: str, stages: int = 1) -> None:
    """Run *test* with a clock that stands still until all wait for it."""

    async def main() -> None:
        below = [Names(*names) for _ in range(stages)]
        listings = Listings(cast(list[Stage], below), TTL)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(listings.run)
            await test(listings, below[-1])
            nursery.cancel_scope.cancel()

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))


async def ask_for(listings: Listings, *names: str) -> None:
    """Miss *names*, and let the task do what it wants to."""
    for name in names:
        listings.missed(name)
    await trio.testing.wait_all_tasks_blocked()


def test_what_is_in_no_listing_is_missing() -> None:
    async def test(listings: Listings, below: Names) -> None:
        await ask_for(listings, "d/1")
        assert below.scans == 0  # one alone is not worth it
        assert not listings.misses("d/1")
        await ask_for(listings, "d/2")
        assert below.scans == 1
        assert [listings.misses(f"d/{name}") for name in ("1", "2", "3", "x", "y")] == [True, True, True, False, False]
        assert not listings.misses("1")
        assert not listings.misses("")

    run(test, "d/x", "d/y")


def test_a_listing_is_believed_for_the_ttl_from_its_begin() -> None:
    async def test(listings: Listings, below: Names) -> None:
        below.gate = trio.Event()
        await ask_for(listings, "1", "2")
        await trio.sleep(TTL / 8)
        below.gate.set()
        await trio.testing.wait_all_tasks_blocked()
        assert listings.misses("1")
        below.down = True  # it cannot be renewed
        await trio.sleep(TTL / 4)
        assert listings.misses("1")
        await trio.sleep(TTL * 5 / 8)
        assert not listings.misses("1")

    run(test)


def test_it_is_renewed_while_somebody_asks() -> None:
    async def test(listings: Listings, below: Names) -> None:
        await ask_for(listings, "1", "2")
        for _ in range(40):
            assert listings.misses("1")
            await trio.sleep(TTL / 8)
        scans = below.scans
        assert scans >= 5
        await trio.sleep(TTL * 5)
        assert below.scans <= scans + 1
        assert not listings.misses("1")

    run(test)


def test_what_this_mount_changed_is_asked_for() -> None:
    async def test(listings: Listings, below: Names) -> None:
        await ask_for(listings, "1", "2")
        listings.forget("1")
        await trio.sleep(TTL / 8)
        assert not listings.misses("1")
        assert listings.misses("2")
        below.gate = trio.Event()
        await trio.sleep(TTL / 2)  # a listing is under way that does not have it
        listings.forget("2")
        below.gate.set()
        await trio.testing.wait_all_tasks_blocked()
        assert below.scans == 2
        assert not listings.misses("2")
        assert listings.misses("3")

    run(test)


def test_a_renamed_directory_ends_them_all() -> None:
    async def test(listings: Listings, below: Names) -> None:
        await ask_for(listings, "1", "2")
        below.gate = trio.Event()
        await ask_for(listings, "d/1", "d/2")
        listings.forget_all()
        below.gate.set()
        await trio.testing.wait_all_tasks_blocked()
        assert not listings.misses("1")
        assert not listings.misses("d/1")

    run(test)


@pytest.mark.parametrize("why", ["large", "slow", "away"])
def test_what_is_not_worth_it_is_not_tried_for_a_while(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listing, "MOST_NAMES", 3)

    async def test(listings: Listings, below: Names) -> None:
        if why == "slow":
            below.names.clear()
            below.gate = trio.Event()
        below.down = why == "away"
        await ask_for(listings, "1", "2")
        await trio.sleep(TTL / 2)
        below.gate.set()
        await ask_for(listings, "1", "2")
        assert not listings.misses("1")
        assert below.scans == 1
        below.names.clear()
        below.down = False
        await trio.sleep(listing.REFUSED)
        await ask_for(listings, "1", "2")
        assert listings.misses("1")

    run(test, "a", "b", "c", "d")


def test_every_stage_is_listed() -> None:
    async def test(listings: Listings, below: Names) -> None:
        below.names.add("deep")
        await ask_for(listings, "1", "2")
        assert not listings.misses("deep")
        assert listings.misses("1")

    run(test, stages=3)


@pytest.mark.parametrize("seed", range(20))
def test_at_random_beside_an_outside_writer(seed: int) -> None:
    """A miss is right at some moment of the last ttl; what this mount put there is never one."""
    chance = random.Random(seed)
    names = [f"{directory}{name}" for directory in ("", "d/") for name in "abcd"]
    never = ["0", "1", "2", "d/0"]

    async def test(listings: Listings, below: Names) -> None:
        absent = dict.fromkeys(names, 0.0)
        mine: set[str] = set()
        misses = 0
        for _ in range(400):
            name, other = chance.choice(names), chance.choice(never)
            now = trio.current_time()
            absent.update((each, now) for each in names if each not in below.names)
            match chance.choice(["ask", "ask", "ask", "ask", "theirs", "mine", "gone", "wait"]):
                case "ask":
                    if listings.misses(other):
                        misses += 1
                    else:
                        listings.missed(other)
                    if listings.misses(name):
                        assert name not in mine
                        assert now - absent[name] <= TTL
                    elif name not in below.names:
                        listings.missed(name)
                case "theirs":
                    below.names.add(name)
                case "mine":
                    below.names.add(name)
                    listings.forget(name)
                    mine.add(name)
                case "gone":
                    below.names.discard(name)
                    listings.forget(name)
                    mine.discard(name)
                case "wait":
                    below.gate = trio.Event()
                    await trio.sleep(chance.choice([0, TTL / 16, TTL / 3]))
                    below.gate.set()
                    await trio.testing.wait_all_tasks_blocked()
        assert misses

    run(test)


def test_the_pipeline_asks_no_stage(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(tmp_path, consistency_ttl=60)
    (rig.roots[0] / "there").write_bytes(b"data")
    asked: list[str] = []
    lookup = rig.below[0].lookup

    async def counting(names: Sequence[str], *, xattrs: bool = False) -> list[Attributes | None]:
        asked.extend(names)
        return await lookup(names, xattrs=xattrs)

    async def test() -> None:
        monkeypatch.setattr(rig.below[0], "lookup", counting)
        await rig.pipeline.lookup(["1", "2"])
        await until(lambda: rig.pipeline.known.get("3") == (True, None))
        asked.clear()
        assert await rig.pipeline.lookup([f"new{number}" for number in range(100)]) == [None] * 100
        assert not asked
        [found] = await rig.pipeline.lookup(["there"])
        assert found is not None
        assert asked == ["there"]
        await rig.put("new1", b"data")
        assert not (await rig.pipeline.flush()).left
        rig.pipeline.evict("new1")
        assert await rig.get("new1") == b"data"
        await rig.pipeline.remove("new1")
        assert await rig.pipeline.lookup(["new1"]) == [None]

    rig.run(test)
