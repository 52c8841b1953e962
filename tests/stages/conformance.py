"""The stage contract (ucmfs/stages/base.py) as tests. Subclass StageConformance for a stage of your own:

    class TestMine(StageConformance):
        keeps_xattrs = False

        @asynccontextmanager
        async def make_stage(self, tmp_path):
            stage = Mine(tmp_path)
            await stage.start()
            try:
                yield stage
            finally:
                await stage.stop()

The class attributes say what the stage can do; tests of what it cannot are not collected. Nothing is assumed but
the contract, which leaves open, among others: the offset of a caller's descriptor after read(), and what is in
the target of a read() whose row is an error.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import stat
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any, ClassVar, TypeAlias, cast

import msgspec
import pytest
import trio
import xxhash
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule, run_state_machine_as_test

from ucmfs.block import DIGEST_XATTR, Attributes, Changes
from ucmfs.errors import BlockNotFound, NotABlock, UcmfsError, Unsupported
from ucmfs.stages.base import Entry, Publication, Stage

__all__ = ["StageConformance", "attributes_of", "contents", "contract", "get", "names_in", "publish", "publish_all"]

SIZES = (0, 1, 4095, 4096, 4097, (1 << 20) + 3)
MTIME = 1_700_000_000_123_456_789

Body: TypeAlias = Callable[[Any, Stage], Awaitable[None]]


# Helpers, also for tests of a single stage


def contents(size: int, seed: int = 0) -> bytes:
    """*size* bytes, different for each *seed*, in which no page is like another."""
    words = range(seed, seed + size // 8 + 1)
    return b"".join((word * 0x9E3779B97F4A7C15 % (1 << 64)).to_bytes(8, "little") for word in words)[:size]


def attributes_of(data: bytes, **others: Any) -> Attributes:
    """The attributes, with digest, that *data* is published with unless *others* say differently."""
    xattrs = {DIGEST_XATTR: xxhash.xxh3_128_hexdigest(data).encode()} | dict(others.pop("xattrs", {}))
    values: dict[str, Any] = {"mtime_ns": MTIME, "uid": os.geteuid(), "gid": os.getegid()} | others
    return Attributes(size=len(data), xattrs=xattrs, **values)


@contextlib.contextmanager
def memory_file(data: bytes = b"") -> Iterator[int]:
    """A descriptor open for reading and writing, with *data* in its file."""
    fd = os.memfd_create("conformance", os.MFD_CLOEXEC)
    try:
        os.pwrite(fd, data, 0)
        yield fd
    finally:
        os.close(fd)


async def publish_all(
    stage: Stage, blocks: Mapping[str, bytes], *, durable: bool = False, **attributes: Any
) -> list[UcmfsError | None]:
    """Publish *blocks* in one batch."""
    with contextlib.ExitStack() as stack:
        return await stage.publish(
            [
                Publication(name, stack.enter_context(memory_file(data)), attributes_of(data, **attributes))
                for name, data in blocks.items()
            ],
            durable=durable,
        )


async def publish(stage: Stage, name: str, data: bytes, **attributes: Any) -> None:
    """Publish one block, which must succeed."""
    [error] = await publish_all(stage, {name: data}, **attributes)
    assert error is None


async def get_row(stage: Stage, name: str) -> tuple[bytes, Attributes] | UcmfsError:
    with memory_file() as fd:
        [row] = await stage.read([(name, fd)])
        return row if isinstance(row, UcmfsError) else (whole(fd), row)


async def get(stage: Stage, name: str) -> bytes | None:
    """The bytes of a block as read() gives them, None for a miss."""
    row = await get_row(stage, name)
    if isinstance(row, BlockNotFound):
        return None
    assert not isinstance(row, UcmfsError)
    data, attributes = row
    assert attributes.size == len(data)
    return data


def whole(fd: int) -> bytes:
    return os.pread(fd, os.fstat(fd).st_size + 1, 0)


async def entries_in(stage: Stage, directory: str) -> list[Entry]:
    return [entry async for batch in stage.scan(directory) for entry in batch]


async def names_in(stage: Stage, directory: str = "") -> list[str]:
    """The names that scan() gives, sorted; one given twice is there twice."""
    return sorted(entry.name for entry in await entries_in(stage, directory))


async def blocks_below(stage: Stage, directory: str = "") -> list[str]:
    found: list[str] = []
    for entry in await entries_in(stage, directory):
        name = f"{directory}/{entry.name}" if directory else entry.name
        found += await blocks_below(stage, name) if entry.attributes.is_directory else [name]
    return sorted(found)


def count_fds() -> int:
    return len(os.listdir("/proc/self/fd"))


def contract(**needs: bool) -> Callable[[Body], Callable[[Any, Path], None]]:
    """Make a test of an async method (self, stage), for stages whose class attributes equal *needs*."""

    def decorate(body: Body) -> Callable[[Any, Path], None]:
        def test(self: StageConformance, tmp_path: Path) -> None:
            self.run(tmp_path, lambda stage: body(self, stage))

        test.__name__, test.__qualname__, test.__doc__ = body.__name__, body.__qualname__, body.__doc__
        return needing(**needs)(test)

    return decorate


def needing(**needs: bool) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Mark a test that is for stages whose class attributes equal *needs*."""

    def mark(test: Callable[..., None]) -> Callable[..., None]:
        test.__dict__["needs"] = needs
        return test

    return mark


class StageConformance:
    """Base of the tests of one stage. See the module's text."""

    keeps: ClassVar[bool] = True
    """Whether blocks stay. False for a stage that takes all and remembers none."""
    local: ClassVar[bool] = True
    """Whether open() gives descriptors."""
    keeps_xattrs: ClassVar[bool] = True
    """Whether `user.*` xattrs stay with a block."""
    keeps_modes: ClassVar[bool] = True
    """Whether the mode stays with a block, and update() changes it."""
    has_directories: ClassVar[bool] = True
    """Whether a directory exists with nothing in it, and a block cannot have its name."""
    takes_any_bytes: ClassVar[bool] = True
    """Whether a name may be bytes that are not UTF-8."""
    patience: ClassVar[float] = 60.0
    """Seconds after which a test is taken to hang."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        for name in dir(cls):
            needs: Mapping[str, bool] = getattr(getattr(cls, name), "needs", {})
            if any(getattr(cls, key) != value for key, value in needs.items()):
                setattr(cls, name, None)

    def make_stage(self, tmp_path: Path) -> AbstractAsyncContextManager[Stage]:
        """Give a started stage over the storage that *tmp_path* stands for; stop it in the end.

        A second one on the same *tmp_path*, after the first has stopped, must find what the first left.
        """
        raise NotImplementedError

    def run(self, tmp_path: Path, body: Callable[[Stage], Awaitable[None]]) -> None:
        """Run *body* with a stage of make_stage()."""

        async def main() -> None:
            with trio.fail_after(self.patience):
                async with self.make_stage(tmp_path) as stage:
                    await body(stage)

        trio.run(main)

    # What holds for every stage

    @contract()
    async def test_the_class_says_what_it_is(self, stage: Stage) -> None:
        assert stage.local == self.local
        assert stage.label

    @contract()
    async def test_the_root_is_a_directory(self, stage: Stage) -> None:
        [root] = await stage.lookup([""])
        assert root is not None
        assert root.is_directory

    @contract()
    async def test_an_empty_batch_gives_nothing(self, stage: Stage) -> None:
        assert await stage.lookup([]) == []
        assert await stage.read([]) == []
        assert await stage.publish([]) == []
        assert await stage.remove([]) == []
        assert await stage.rename([]) == []

    @contract()
    async def test_what_is_not_there_is_a_miss_everywhere(self, stage: Stage) -> None:
        assert await stage.lookup(["none", "no/such/block"], xattrs=True) == [None, None]
        assert isinstance(await get_row(stage, "none"), BlockNotFound)
        assert await stage.remove(["none", "no/such"]) == [False, False]
        assert await stage.rename([("none", "other"), ("no/such", "other")]) == [False, False]
        assert await stage.update("none", Changes(mode=0o600)) is False
        assert await stage.remove_directory("none") is False
        assert await names_in(stage, "none") == []
        assert await names_in(stage) == []
        await stage.set_aside("none")

    @contract()
    async def test_a_name_that_no_file_can_have_is_a_miss(self, stage: Stage) -> None:
        names = ["n" * 256, "a//b", "../up", "/absolute", "nul\0"]
        assert await stage.lookup(names) == [None] * len(names)
        for name in names:
            assert isinstance(await get_row(stage, name), UcmfsError)

    @contract()
    async def test_usage_adds_up(self, stage: Stage) -> None:
        await publish(stage, "block", contents(5000))
        usage = await stage.usage()
        assert usage.used >= 0
        if usage.free is not None:
            assert usage.free >= 0
        if usage.capacity is not None:
            assert 0 < usage.capacity >= max(usage.used, usage.free or 0)
        if usage.blocks is not None:
            assert usage.blocks == (1 if self.keeps else 0)

    @contract()
    async def test_it_is_healthy(self, stage: Stage) -> None:
        assert await stage.health() is None

    @contract()
    async def test_the_callers_descriptors_stay_open_and_its_own_are_closed(self, stage: Stage) -> None:
        data = contents(10_000)

        async def use_all() -> None:
            with memory_file(data) as source, memory_file() as target:
                os.lseek(source, 7, os.SEEK_SET)
                await stage.publish([Publication("d/block", source, attributes_of(data))], durable=True)
                await stage.publish([Publication("bad", -1, attributes_of(data))])
                await stage.publish([Publication("n" * 300, source, attributes_of(data))])
                await stage.read([("d/block", target), ("none", target)])
                await stage.lookup(["d/block", "none"], xattrs=True)
                await stage.usage()
                await names_in(stage, "d")
                if self.local:
                    for row in await stage.open(["d/block", "none"]):
                        if isinstance(row, int):
                            os.close(row)
                await stage.rename([("d/block", "e/block")])
                await stage.remove(["e/block"])
                assert os.lseek(source, 0, os.SEEK_CUR) == 7
                assert whole(source) == data
                assert os.fstat(target).st_size in (0, len(data))

        # What is opened once and kept, such as a connection, is no leak.
        await use_all()
        before, rounds = count_fds(), 10
        for _ in range(rounds):
            await use_all()
        assert count_fds() < before + rounds

    @contract(keeps=False)
    async def test_it_forgets(self, stage: Stage) -> None:
        assert await publish_all(stage, {"a": b"1", "d/b": b"2"}, durable=True) == [None, None]
        assert not stage.persistent
        assert await stage.lookup(["a", "d/b"]) == [None, None]
        assert await get(stage, "a") is None
        assert await names_in(stage) == []

    # Blocks

    @contract(keeps=True)
    async def test_blocks_of_every_size_come_back_whole(self, stage: Stage) -> None:
        blocks = {f"sizes/{size}": contents(size, seed=size) for size in SIZES}
        assert await publish_all(stage, blocks) == [None] * len(blocks)
        for name, data in blocks.items():
            assert await get(stage, name) == data
        found = await stage.lookup(list(blocks))
        assert [row and row.size for row in found] == list(SIZES)
        assert all(row is not None and stat.S_ISREG(row.mode) for row in found)

    @contract(keeps=True)
    async def test_durable_blocks_come_back_too(self, stage: Stage) -> None:
        blocks = {f"deep/er/{n}": contents(9_000, seed=n) for n in range(5)}
        assert await publish_all(stage, blocks, durable=True) == [None] * 5
        assert [await get(stage, name) for name in blocks] == list(blocks.values())

    @contract(keeps=True)
    async def test_only_the_promised_bytes_of_the_source_are_taken(self, stage: Stage) -> None:
        with memory_file(contents(9_000)) as source:
            attributes = attributes_of(contents(9_000)[:5_000])
            assert await stage.publish([Publication("block", source, attributes)]) == [None]
        assert await get(stage, "block") == contents(9_000)[:5_000]

    @contract(keeps=True)
    async def test_a_source_that_is_too_short_publishes_nothing(self, stage: Stage) -> None:
        with memory_file(contents(5_000)) as source:
            [error] = await stage.publish([Publication("block", source, attributes_of(contents(9_000)))])
        assert isinstance(error, UcmfsError)
        assert await stage.lookup(["block"]) == [None]
        assert await names_in(stage) == []

    @contract(keeps=True, local=True)
    async def test_open_gives_read_only_descriptors_of_the_callers_own(self, stage: Stage) -> None:
        await publish_all(stage, {"a": b"first", "d/b": b"second"})
        rows = await stage.open(["d/b", "none", "a", "a"])
        assert isinstance(rows[1], BlockNotFound)
        fds = [row for row in rows if isinstance(row, int)]
        assert [whole(fd) for fd in fds] == [b"second", b"first", b"first"]
        for fd in fds:
            assert not os.get_inheritable(fd)
            with pytest.raises(OSError, match="Bad file descriptor"):
                os.pwrite(fd, b"x", 0)
            os.close(fd)
        assert await get(stage, "a") == b"first"

    @contract(keeps=True, local=True)
    async def test_an_open_descriptor_keeps_what_was_opened(self, stage: Stage) -> None:
        await publish(stage, "block", b"old")
        [fd] = await stage.open(["block"])
        assert isinstance(fd, int)
        await publish(stage, "block", b"newer")
        assert whole(fd) == b"old"
        await stage.remove(["block"])
        assert whole(fd) == b"old"
        os.close(fd)

    @contract(local=False)
    async def test_a_stage_without_descriptors_says_so(self, stage: Stage) -> None:
        with pytest.raises(Unsupported):
            await stage.open(["block"])

    @contract(keeps=True)
    async def test_results_stand_in_the_order_of_the_names(self, stage: Stage) -> None:
        blocks = {f"{n % 7}/{n}": contents(n + 1, seed=n) for n in range(40)}
        await publish_all(stage, blocks)
        asked = [name for pair in zip(reversed(blocks), (f"miss/{n}" for n in range(40)), strict=True) for name in pair]
        found = await stage.lookup(asked)
        assert [row and row.size for row in found] == [len(blocks[n]) if n in blocks else None for n in asked]
        with contextlib.ExitStack() as stack:
            fds = [stack.enter_context(memory_file()) for _ in asked]
            rows = await stage.read(list(zip(asked, fds, strict=True)))
            for name, fd, row in zip(asked, fds, rows, strict=True):
                if name in blocks:
                    assert isinstance(row, Attributes)
                    assert whole(fd) == blocks[name]
                else:
                    assert isinstance(row, BlockNotFound)
                    assert row.name == name
        removed = await stage.remove(asked)
        assert removed == [name in blocks for name in asked]

    @contract(keeps=True)
    async def test_a_batch_may_be_large(self, stage: Stage) -> None:
        blocks = {f"{n % 16:x}/{n:04}": contents(100 + n, seed=n) for n in range(300)}
        assert await publish_all(stage, blocks) == [None] * 300
        assert [row and row.size for row in await stage.lookup(list(blocks))] == [len(d) for d in blocks.values()]
        with contextlib.ExitStack() as stack:
            fds = [stack.enter_context(memory_file()) for _ in blocks]
            rows = await stage.read(list(zip(blocks, fds, strict=True)))
            assert not [row for row in rows if isinstance(row, UcmfsError)]
            assert [whole(fd) for fd in fds] == list(blocks.values())
        assert await stage.remove(list(blocks)) == [True] * 300

    @contract(keeps=True)
    async def test_an_error_in_one_row_does_not_stop_the_others(self, stage: Stage) -> None:
        with memory_file(b"good") as source:
            good = attributes_of(b"good")
            bad = msgspec.structs.replace(good, size=1 << 16)
            rows = await stage.publish(
                [
                    Publication("a", source, good),
                    Publication("closed", 1 << 20, good),
                    Publication("n" * 256, source, good),
                    Publication("b", source, good),
                    Publication("short", source, bad),
                    Publication("c/d", source, good),
                ]
            )
        assert [isinstance(row, UcmfsError) for row in rows] == [False, True, True, False, True, False]
        assert await blocks_below(stage) == ["a", "b", "c/d"]
        with memory_file() as first, memory_file() as second:
            answers = await stage.read([("a", first), ("none", second), ("b", 1 << 20), ("n" * 256, second)])
            assert [isinstance(row, UcmfsError) for row in answers] == [False, True, True, True]
            assert whole(first) == b"good"
        renamed = await stage.rename([("a", "n" * 256), ("none", "x"), ("b", "y")])
        assert isinstance(renamed[0], UcmfsError)
        assert renamed[1:] == [False, True]
        assert await blocks_below(stage) == ["a", "c/d", "y"]

    @contract(keeps=True)
    async def test_a_name_that_is_too_long_says_so(self, stage: Stage) -> None:
        for name in ("n" * 256, "d/" + "n" * 256, "/".join(["n" * 250] * 20)):
            [error] = await publish_all(stage, {name: b"x"})
            assert isinstance(error, UcmfsError)
            assert error.errno == errno.ENAMETOOLONG

    @contract(keeps=True)
    async def test_names_may_be_whatever_a_file_may_have(self, stage: Stage) -> None:
        names = ["n" * 255, "é中文🙂", "white space\n", "-rf", "%2F%", "*?[a]", "a/b/c/d/e", "d/.hidden", "x.tmp"]
        if self.takes_any_bytes:
            names += [os.fsdecode(b"\xff\xfe/latin\xe9"), os.fsdecode(b"\x80" * 255)]
        blocks = {name: os.fsencode(name) for name in names}
        assert await publish_all(stage, blocks) == [None] * len(blocks)
        for name, data in blocks.items():
            assert await get(stage, name) == data
        assert await blocks_below(stage) == sorted(names)
        assert await stage.remove(names) == [True] * len(names)

    @contract(keeps=True)
    async def test_publish_replaces_and_may_be_repeated(self, stage: Stage) -> None:
        await publish(stage, "block", contents(9_000))
        for _ in range(2):
            await publish(stage, "block", contents(3, seed=1))
            assert await get(stage, "block") == contents(3, seed=1)
        assert await names_in(stage) == ["block"]

    @contract(keeps=True)
    async def test_a_reader_sees_one_version_or_the_other(self, stage: Stage) -> None:
        versions = [contents(300_000, seed=1), contents(150_001, seed=2)]
        digests = [attributes_of(data).digest for data in versions]
        await publish(stage, "block", versions[0])
        done = trio.Event()

        async def replace() -> None:
            for data in versions * 30:
                await publish(stage, "block", data)
                await trio.lowlevel.checkpoint()
            done.set()

        async def look(once: Callable[[], Awaitable[None]]) -> None:
            while True:
                ended = done.is_set()
                await once()
                await trio.lowlevel.checkpoint()
                if ended:
                    return

        async def read() -> None:
            row = await get_row(stage, "block")
            assert not isinstance(row, UcmfsError)
            data, attributes = row
            assert data in versions
            assert attributes.size == len(data)
            if self.keeps_xattrs:
                assert attributes.digest == digests[versions.index(data)]

        async def open_and_read() -> None:
            [fd] = await stage.open(["block"])
            assert isinstance(fd, int)
            try:
                assert whole(fd) in versions
            finally:
                os.close(fd)

        async def find() -> None:
            [row] = await stage.lookup(["block"])
            assert row is not None
            assert row.size in [len(data) for data in versions]
            assert await names_in(stage) == ["block"]

        async with trio.open_nursery() as nursery:
            nursery.start_soon(replace)
            nursery.start_soon(look, read)
            nursery.start_soon(look, read)
            nursery.start_soon(look, find)
            if self.local:
                nursery.start_soon(look, open_and_read)

    @needing(keeps=True)
    def test_blocks_outlive_the_stage(self, tmp_path: Path) -> None:
        blocks = {f"d/{n}": contents(5_000, seed=n) for n in range(10)}

        async def before(stage: Stage) -> None:
            await publish_all(stage, blocks)

        async def after(stage: Stage) -> None:
            assert [await get(stage, name) for name in blocks] == list(blocks.values())
            assert await blocks_below(stage) == sorted(blocks)

        self.run(tmp_path, before)
        self.run(tmp_path, after)

    @contract(keeps=True)
    async def test_set_aside_takes_a_block_out_of_sight(self, stage: Stage) -> None:
        await publish_all(stage, {"d/bad": b"bad", "d/good": b"good"})
        await stage.set_aside("d/bad")
        assert await stage.lookup(["d/bad", "d/good"]) != [None, None]
        assert await get(stage, "d/bad") is None
        assert await blocks_below(stage) == ["d/good"]
        await publish(stage, "d/bad", b"mended")
        assert await get(stage, "d/bad") == b"mended"

    # Attributes

    @contract(keeps=True)
    async def test_the_version_survives(self, stage: Stage) -> None:
        given = attributes_of(b"data")
        await publish(stage, "block", b"data")
        [found] = await stage.lookup(["block"])
        row = await get_row(stage, "block")
        [entry] = await entries_in(stage, "")
        assert found is not None
        assert not isinstance(row, UcmfsError)
        assert found.version == row[1].version == entry.attributes.version == given.version

    @contract(keeps=True, keeps_xattrs=True)
    async def test_digest_and_xattrs_stay_with_the_block(self, stage: Stage) -> None:
        given = attributes_of(b"data", xattrs={"user.mine": b"\0\xff value", "user.empty": b""})
        await publish(stage, "block", b"data", xattrs=given.xattrs)
        await publish(stage, "plain", b"data")
        [found, without] = await stage.lookup(["block", "plain"], xattrs=True)
        row = await get_row(stage, "block")
        assert found is not None
        assert without is not None
        assert not isinstance(row, UcmfsError)
        assert found.xattrs == row[1].xattrs == given.xattrs
        assert found.digest == xxhash.xxh3_128_hexdigest(b"data")
        assert without.xattrs == attributes_of(b"data").xattrs
        assert await stage.rename([("block", "d/moved")]) == [True]
        [moved] = await stage.lookup(["d/moved"], xattrs=True)
        assert moved is not None
        assert moved.xattrs == given.xattrs

    @contract(keeps=True, keeps_xattrs=True)
    async def test_xattrs_do_not_outlive_the_version_that_they_came_with(self, stage: Stage) -> None:
        await publish(stage, "block", b"old", xattrs={"user.mine": b"old"})
        await publish(stage, "block", b"new")
        [found] = await stage.lookup(["block"], xattrs=True)
        assert found is not None
        assert found.xattrs == attributes_of(b"new").xattrs

    @contract(keeps=True, keeps_xattrs=False)
    async def test_a_stage_without_xattrs_takes_blocks_that_have_some(self, stage: Stage) -> None:
        await publish(stage, "block", b"data", xattrs={"user.mine": b"1"})
        [found] = await stage.lookup(["block"], xattrs=True)
        assert found is not None
        assert not found.xattrs
        assert await get(stage, "block") == b"data"

    @contract(keeps=True, keeps_modes=True)
    async def test_the_mode_stays_with_the_block(self, stage: Stage) -> None:
        modes = [0o644, 0o600, 0o777]
        for mode in modes:
            await publish(stage, f"{mode:o}", b"data", mode=stat.S_IFREG | mode)
        found = await stage.lookup([f"{mode:o}" for mode in modes])
        assert [row and row.mode for row in found] == [stat.S_IFREG | mode for mode in modes]

    @contract(keeps=True)
    async def test_update_changes_the_times_alone(self, stage: Stage) -> None:
        await publish(stage, "block", b"data")
        assert await stage.update("block", Changes(mtime_ns=MTIME + 1_000_000_007)) is True
        [found] = await stage.lookup(["block"])
        assert found is not None
        assert found.version == (4, MTIME + 1_000_000_007)
        assert await stage.update("block", Changes(atime_ns=MTIME + 5_000_000_000)) is True
        [found] = await stage.lookup(["block"])
        assert found is not None
        assert found.mtime_ns == MTIME + 1_000_000_007
        assert await get(stage, "block") == b"data"

    @contract(keeps=True, keeps_modes=True)
    async def test_update_changes_the_mode_alone(self, stage: Stage) -> None:
        await publish(stage, "block", b"data")
        assert await stage.update("block", Changes(mode=0o640)) is True
        [found] = await stage.lookup(["block"])
        assert found is not None
        assert found.mode == stat.S_IFREG | 0o640
        assert found.mtime_ns == MTIME

    @contract(keeps=True, keeps_xattrs=True)
    async def test_update_sets_and_removes_xattrs(self, stage: Stage) -> None:
        await publish(stage, "block", b"data", xattrs={"user.a": b"1", "user.b": b"2"})
        assert await stage.update("block", Changes(xattrs={"user.a": b"3", "user.b": None, "user.c": b"4"})) is True
        [found] = await stage.lookup(["block"], xattrs=True)
        assert found is not None
        assert found.xattrs == attributes_of(b"data", xattrs={"user.a": b"3", "user.c": b"4"}).xattrs

    # Rename

    @contract(keeps=True)
    async def test_rename_replaces_a_block(self, stage: Stage) -> None:
        await publish_all(stage, {"a": b"from", "d/b": b"to", "c": b"other"})
        assert await stage.rename([("a", "d/b"), ("c", "new/place/c")]) == [True, True]
        assert await stage.lookup(["a", "c"]) == [None, None]
        assert await get(stage, "d/b") == b"from"
        assert await get(stage, "new/place/c") == b"other"
        assert await blocks_below(stage) == ["d/b", "new/place/c"]

    @contract(keeps=True)
    async def test_rename_to_its_own_name_changes_nothing(self, stage: Stage) -> None:
        await publish(stage, "block", b"data")
        assert await stage.rename([("block", "block")]) == [True]
        assert await get(stage, "block") == b"data"

    @contract(keeps=True)
    async def test_renames_of_one_batch_go_in_order(self, stage: Stage) -> None:
        await publish_all(stage, {"a": b"1", "b": b"2"})
        assert await stage.rename([("a", "t"), ("b", "a"), ("t", "b"), ("t", "x")]) == [True, True, True, False]
        assert [await get(stage, name) for name in ("a", "b")] == [b"2", b"1"]

    # Directories

    @contract(keeps=True)
    async def test_scan_gives_blocks_and_directories_with_their_attributes(self, stage: Stage) -> None:
        await publish_all(stage, {"a": b"1", "d/b": b"22", "d/e/c": b"333"})
        entries = {entry.name: entry.attributes for entry in await entries_in(stage, "")}
        assert sorted(entries) == ["a", "d"]
        assert entries["a"].size == 1
        assert not entries["a"].is_directory
        assert entries["d"].is_directory
        assert await names_in(stage, "d") == ["b", "e"]
        assert await names_in(stage, "d/e") == ["c"]
        assert await names_in(stage, "a") == []
        [directory] = await stage.lookup(["d"])
        assert directory is not None
        assert directory.is_directory

    @contract(keeps=True)
    async def test_scan_streams(self, stage: Stage) -> None:
        names = [f"{n:05}" for n in range(3000)]
        for start in range(0, len(names), 500):
            blocks = {f"many/{name}": b"x" for name in names[start : start + 500]}
            assert await publish_all(stage, blocks) == [None] * len(blocks)
        batches = [[entry.name for entry in batch] async for batch in stage.scan("many")]
        assert sorted(itertools.chain.from_iterable(batches)) == names
        assert max(len(batch) for batch in batches) < len(names)

    @contract(keeps=True)
    async def test_a_scan_may_be_left_early(self, stage: Stage) -> None:
        await publish_all(stage, {f"d/{n}": b"x" for n in range(10)})
        before = count_fds()
        for _ in range(10):
            scan: AsyncIterator[Sequence[Entry]] = stage.scan("d")
            assert await anext(scan)
            if hasattr(scan, "aclose"):
                await scan.aclose()
        assert count_fds() < before + 10

    @contract(keeps=True, has_directories=True)
    async def test_directories_are_made_with_their_parents_and_removed(self, stage: Stage) -> None:
        attributes = Attributes(0, MTIME, stat.S_IFDIR | 0o750, os.geteuid(), os.getegid())
        for _ in range(2):
            assert await stage.make_directory("a/b/c", attributes) is None
        [made] = await stage.lookup(["a/b/c"])
        assert made is not None
        assert made.is_directory
        if self.keeps_modes:
            assert made.mode == stat.S_IFDIR | 0o750
        assert await names_in(stage, "a/b") == ["c"]
        assert await names_in(stage, "a/b/c") == []
        full = await stage.remove_directory("a")
        assert isinstance(full, UcmfsError)
        assert full.errno == errno.ENOTEMPTY
        assert [await stage.remove_directory(name) for name in ("a/b/c", "a/b", "a", "a")] == [True, True, True, False]
        assert await names_in(stage) == []

    @contract(keeps=True, has_directories=True)
    async def test_a_directory_that_holds_blocks_is_not_removed(self, stage: Stage) -> None:
        await publish_all(stage, {f"d/{n}": b"data" for n in range(8)})
        error = await stage.remove_directory("d")
        assert isinstance(error, UcmfsError)
        assert error.errno == errno.ENOTEMPTY
        assert await names_in(stage, "d") == [f"{n}" for n in range(8)]

    @contract(keeps=True, has_directories=True, keeps_modes=True)
    async def test_a_directory_can_be_updated(self, stage: Stage) -> None:
        await stage.make_directory("d", Attributes(0, 0, stat.S_IFDIR | 0o755, os.geteuid(), os.getegid()))
        assert await stage.update("d", Changes(mode=0o700, mtime_ns=MTIME)) is True
        [found] = await stage.lookup(["d"])
        assert found is not None
        assert (found.mode, found.mtime_ns) == (stat.S_IFDIR | 0o700, MTIME)

    @contract(keeps=True, has_directories=True)
    async def test_a_directory_is_renamed_with_all_in_it(self, stage: Stage) -> None:
        blocks = {f"d/{n % 3}/{n}": contents(100, seed=n) for n in range(12)}
        await publish_all(stage, blocks)
        assert await stage.rename([("d", "x/y")]) == [True]
        assert await stage.lookup(["d", *blocks]) == [None] * 13
        moved = {"x/y" + name[1:]: data for name, data in blocks.items()}
        assert [await get(stage, name) for name in moved] == list(moved.values())
        assert await blocks_below(stage) == sorted(moved)

    @contract(keeps=True, has_directories=True)
    async def test_a_directory_is_not_renamed_over_blocks(self, stage: Stage) -> None:
        blocks = {"d/a": b"1", "e/b": b"2", "f": b"3"}
        await publish_all(stage, blocks)
        rows = await stage.rename([("d", "e"), ("d", "f"), ("d", "d/inside")])
        assert all(isinstance(row, UcmfsError) for row in rows)
        assert await blocks_below(stage) == sorted(blocks)
        assert [await get(stage, name) for name in blocks] == list(blocks.values())

    @contract(keeps=True, has_directories=True)
    async def test_a_block_never_takes_the_place_of_a_directory(self, stage: Stage) -> None:
        await publish_all(stage, {"d/block": b"data", "other": b"other"})
        [published, good] = await publish_all(stage, {"d": b"x", "good": b"x"})
        assert isinstance(published, NotABlock)
        assert good is None
        [renamed] = await stage.rename([("other", "d")])
        assert isinstance(renamed, UcmfsError)
        [removed] = await stage.remove(["d"])
        assert removed is not True
        assert isinstance(await get_row(stage, "d"), UcmfsError)
        if self.local:
            [opened] = await stage.open(["d"])
            assert isinstance(opened, UcmfsError)
        assert await blocks_below(stage) == ["d/block", "good", "other"]

    @contract(keeps=True, has_directories=True)
    async def test_a_directory_never_takes_the_place_of_a_block(self, stage: Stage) -> None:
        await publish(stage, "block", b"data")
        [below] = await publish_all(stage, {"block/below": b"x"})
        assert isinstance(below, UcmfsError)
        assert below.errno == errno.ENOTDIR
        for name in ("block", "block/below"):
            assert isinstance(await stage.make_directory(name, attributes_of(b"")), UcmfsError)
        assert await stage.lookup(["block/below"]) == [None]
        assert await stage.remove_directory("block") is not True
        assert await get(stage, "block") == b"data"

    # Any sequence of operations

    @needing(keeps=True)
    def test_it_does_what_a_dictionary_does(self, tmp_path: Path) -> None:
        """Any sequence of publish, remove and rename leaves what it leaves in a dictionary."""
        places = (tmp_path / f"example{n}" for n in itertools.count())

        def machine() -> _Model:
            place = next(places)
            place.mkdir()
            return _Model(lambda body: self.run(place, body))

        run_state_machine_as_test(
            # Any callable that gives a machine will do, whatever its annotation says.
            cast(type[RuleBasedStateMachine], machine),
            settings=settings(
                max_examples=15,
                stateful_step_count=20,
                deadline=None,
                database=None,
                suppress_health_check=list(HealthCheck),
            ),
        )


_POOL = ("a", "b", "d/a", "d/b", "d/e/a", "f/a")
_NAMES = st.sampled_from(_POOL)
_DATA = st.builds(contents, st.sampled_from([0, 1, 100, 4096, 9_000]), st.integers(0, 5))


class _Model(RuleBasedStateMachine):
    """Collects steps, and runs them all at the end with one stage: a stage lives within one trio.run()."""

    def __init__(self, run: Callable[[Callable[[Stage], Awaitable[None]]], None]) -> None:
        super().__init__()
        self.run = run
        self.steps: list[Callable[[Stage, dict[str, bytes]], Awaitable[None]]] = []

    @rule(blocks=st.dictionaries(_NAMES, _DATA, min_size=1, max_size=6))
    def publish(self, blocks: dict[str, bytes]) -> None:
        async def step(stage: Stage, model: dict[str, bytes]) -> None:
            assert await publish_all(stage, blocks) == [None] * len(blocks)
            model |= blocks

        self.steps.append(step)

    @rule(names=st.lists(_NAMES, max_size=4))
    def remove(self, names: list[str]) -> None:
        async def step(stage: Stage, model: dict[str, bytes]) -> None:
            assert await stage.remove(names) == [model.pop(name, None) is not None for name in names]

        self.steps.append(step)

    @rule(pairs=st.lists(st.tuples(_NAMES, _NAMES), max_size=4))
    def rename(self, pairs: list[tuple[str, str]]) -> None:
        async def step(stage: Stage, model: dict[str, bytes]) -> None:
            expected = []
            for old, new in pairs:
                expected.append(old in model)
                if old in model:
                    model[new] = model.pop(old)
            assert await stage.rename(pairs) == expected

        self.steps.append(step)

    @rule(name=_NAMES)
    def set_aside(self, name: str) -> None:
        async def step(stage: Stage, model: dict[str, bytes]) -> None:
            await stage.set_aside(name)
            model.pop(name, None)

        self.steps.append(step)

    def teardown(self) -> None:
        async def all_steps(stage: Stage) -> None:
            model: dict[str, bytes] = {}
            for step in self.steps:
                await step(stage, model)
                found = await stage.lookup(_POOL)
                assert [row and row.size for row in found] == [len(model[n]) if n in model else None for n in _POOL]
                assert {name: data for name in _POOL if (data := await get(stage, name)) is not None} == model
                assert await blocks_below(stage) == sorted(model)

        self.run(all_steps)
