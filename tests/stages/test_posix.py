from __future__ import annotations

import errno
import os
import shutil
import socket
import stat
import subprocess
import sys
import tempfile
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import pydantic
import pytest
import trio
import xxhash

from tests.stages.conformance import (
    MTIME,
    StageConformance,
    attributes_of,
    contents,
    count_fds,
    get,
    get_row,
    memory_file,
    names_in,
    publish,
    publish_all,
    whole,
)
from ucmfs.block import Attributes, Changes
from ucmfs.config import Options
from ucmfs.errors import (
    BlockBusy,
    BlockError,
    BlockNotFound,
    ConfigError,
    InvalidName,
    NotABlock,
    StageError,
    StageFull,
    StageReadOnly,
    StageTimeout,
)
from ucmfs.stages import local, roots
from ucmfs.stages.base import Publication, Stage
from ucmfs.stages.posix import Posix, PosixOptions

NOBODY = 65534
NO_PATIENCE = 0.01
PATIENCE = 60.0
"""Seconds after which a test is taken to hang."""


def command(*words: str) -> None:
    subprocess.run(words, check=True)


@contextmanager
def mounted(kind: str, where: Path, options: str = "rw") -> Iterator[Path]:
    where.mkdir(parents=True, exist_ok=True)
    command("mount", "-t", kind, "-o", options, kind, str(where))
    try:
        yield where
    finally:
        command("umount", str(where))


@asynccontextmanager
async def posix(*directories: Path, timeout: float = 30.0, **options: Any) -> AsyncIterator[Posix]:
    """A started Posix over *directories*, which are made if they are missing."""
    for directory in directories:
        directory.mkdir(parents=True, exist_ok=True)
    backends = [str(directory) for directory in directories]
    stage = Posix(PosixOptions.model_validate({"storage_backends": backends} | options), timeout=timeout)
    await stage.start()
    try:
        yield stage
    finally:
        await stage.stop()


def run(body: Callable[[Posix], Awaitable[None]], *directories: Path, **options: Any) -> None:
    """Run *body* with posix() over *directories*."""

    async def main() -> None:
        with trio.fail_after(PATIENCE):
            async with posix(*directories, **options) as stage:
                await body(stage)

    trio.run(main)


def blocks_of(root: Path) -> list[str]:
    """The files below *root* that are not the stage's own."""
    found = (path.relative_to(root) for path in root.rglob("*") if not path.is_dir())
    return sorted(str(path) for path in found if path.parts[0] != ".ucmfs")


def staged(root: Path) -> list[str]:
    """The temporary files below *root*."""
    return [path.name for path in (root / ".ucmfs" / "staging").rglob("*") if path.is_file() and path.name != "lock"]


def home_of(name: str, count: int) -> int:
    """The number of the root that a name belongs to, as documented."""
    return xxhash.xxh3_64_intdigest(os.fsencode(name)) % count


def name_at(number: int, count: int = 2, prefix: str = "block") -> str:
    """A name whose home is root *number* of *count*."""
    return next(name for n in range(1000) if home_of(name := f"{prefix}{n}", count) == number)


# Conformance


class TestOneRoot(StageConformance):
    @asynccontextmanager
    async def make_stage(self, tmp_path: Path) -> AsyncIterator[Stage]:
        async with posix(tmp_path / "root") as stage:
            yield stage


class TestThreeRoots(StageConformance):
    @asynccontextmanager
    async def make_stage(self, tmp_path: Path) -> AsyncIterator[Stage]:
        async with posix(tmp_path / "a", tmp_path / "b", tmp_path / "c") as stage:
            yield stage


class TestDirect(StageConformance):
    @asynccontextmanager
    async def make_stage(self, tmp_path: Path) -> AsyncIterator[Stage]:
        async with posix(tmp_path / "root", io_direct=True) as stage:
            yield stage


# Options


def refusal(**values: Any) -> str:
    with pytest.raises(pydantic.ValidationError) as caught:
        PosixOptions.model_validate(values)
    return str(caught.value)


def test_directories_may_be_one_string_or_a_list(tmp_path: Path) -> None:
    assert issubclass(Posix.options, Options)
    a, b = tmp_path / "a", tmp_path / "b"
    a.mkdir()
    b.mkdir()
    for given in (f"{a}:{b}", [str(a), str(b)], f"{a}/:{b}"):
        assert PosixOptions.model_validate({"storage_backends": given}).storage_backends == (str(a), str(b))
    assert PosixOptions.model_validate({"storage_backends": str(a)}).storage_backends == (str(a),)


def test_directories_that_cannot_be_used_are_refused_with_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "dir" / "inside").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "dir")
    assert "at least one" in refusal(storage_backends="")
    assert "at least one" in refusal(storage_backends=[])
    assert f"make it (mkdir -p {tmp_path}/none)" in refusal(storage_backends=f"{tmp_path}/none")
    assert "is not a directory" in refusal(storage_backends=f"{tmp_path}/file")
    assert "name it once" in refusal(storage_backends=f"{tmp_path}/dir:{tmp_path}/dir")
    assert "name it once" in refusal(storage_backends=[f"{tmp_path}/dir", f"{tmp_path}/link"])
    assert "one inside the other" in refusal(storage_backends=[f"{tmp_path}/dir", f"{tmp_path}/dir/inside"])
    assert "one inside the other" in refusal(storage_backends=[f"{tmp_path}/dir/inside", f"{tmp_path}/dir"])
    assert "storage_backends" in refusal(storage_backends=7)
    assert "storage_backends" in refusal()
    assert "posix_capacity_gb" in refusal(storage_backends=f"{tmp_path}/dir", posix_capacity_gb=0)


@pytest.mark.mount
def test_a_directory_that_is_not_writable_is_refused(tmp_path: Path) -> None:
    with mounted("tmpfs", tmp_path / "root", "ro") as root:
        assert "is not writable; mount it read-write" in refusal(storage_backends=str(root))


@pytest.mark.mount
def test_storage_that_became_read_only_before_the_start_is_a_config_error(tmp_path: Path) -> None:
    with mounted("tmpfs", tmp_path / "root") as root:
        (tmp_path / "good").mkdir()
        backends = [str(tmp_path / "good"), str(root)]
        stage = Posix(PosixOptions.model_validate({"storage_backends": backends}), timeout=30)
        command("mount", "-o", "remount,ro", str(root))
        with pytest.raises(ConfigError, match="cannot be made: Read-only"):
            trio.run(stage.start)
        # The root that could be made ready is let go.
        assert list((tmp_path / "good" / ".ucmfs" / "staging").iterdir()) == []


# One directory, with what other programs put there


def test_an_existing_directory_is_read_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "3ab").mkdir()
    (tmp_path / "3ab" / "3abfff").write_bytes(b"old")
    (tmp_path / "flat").write_bytes(b"flat")

    async def body(stage: Posix) -> None:
        assert await names_in(stage) == ["3ab", "flat"]
        assert await get(stage, "3ab/3abfff") == b"old"
        [found] = await stage.lookup(["flat"], xattrs=True)
        assert found is not None
        assert found.digest is None
        assert found.xattrs == {}
        assert found.mtime_ns == (tmp_path / "flat").stat().st_mtime_ns

    run(body, tmp_path)


def test_what_is_published_is_a_plain_file(tmp_path: Path) -> None:
    data = contents(10_000)

    async def body(stage: Posix) -> None:
        await publish(stage, "3ab/block", data, mode=stat.S_IFREG | 0o640, uid=12, gid=34)

    run(body, tmp_path)
    path = tmp_path / "3ab" / "block"
    assert path.read_bytes() == data
    found = path.stat()
    assert (found.st_mode, found.st_uid, found.st_gid, found.st_mtime_ns) == (stat.S_IFREG | 0o640, 12, 34, MTIME)
    assert os.getxattr(path, "user.ucmfs.digest").decode() == xxhash.xxh3_128_hexdigest(data)
    assert blocks_of(tmp_path) == ["3ab/block"]


def test_foreign_objects_are_not_seen_and_not_touched(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "dangling").symlink_to(tmp_path / "nothing")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    (tmp_path / "below").mkdir()
    (tmp_path / "below" / "block").write_bytes(b"data")
    (tmp_path / "elsewhere").symlink_to(tmp_path / "below")
    (tmp_path / "good").write_bytes(b"good")
    (tmp_path / "linked").symlink_to(tmp_path / "good")
    foreign = ["fifo", "socket", "dangling", "loop", "elsewhere"]
    before = count_fds()
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(tmp_path / "socket"))

    async def body(stage: Posix) -> None:
        assert await names_in(stage) == ["below", "good", "linked"]
        found = await stage.lookup([*foreign, "linked"], xattrs=True)
        assert found[:-1] == [None] * 5
        assert found[-1] is not None
        assert found[-1].size == 4
        opened = await stage.open([*foreign, "good"])
        assert all(isinstance(row, BlockNotFound) for row in opened[:-1])
        assert isinstance(opened[-1], int)
        os.close(opened[-1])
        for name in foreign:
            assert isinstance(await get_row(stage, name), BlockNotFound)
            await stage.set_aside(name)
        assert await get(stage, "linked") == b"good"
        assert await stage.remove(foreign) == [False] * 5
        assert await stage.rename([(name, "other") for name in foreign]) == [False] * 5
        rows = await publish_all(stage, dict.fromkeys([*foreign, "new"], b"data"))
        assert all(isinstance(row, NotABlock) for row in rows[:-1])
        assert rows[-1] is None
        [renamed] = await stage.rename([("new", "fifo")])
        assert isinstance(renamed, NotABlock)
        full = await stage.remove_directory("below")
        assert isinstance(full, BlockError)

    run(body, tmp_path)
    assert all(os.path.lexists(tmp_path / name) for name in foreign)
    assert stat.S_ISFIFO((tmp_path / "fifo").stat().st_mode)
    assert count_fds() == before


def test_the_working_directory_is_nobodys_business(tmp_path: Path) -> None:
    async def body(stage: Posix) -> None:
        own = [".ucmfs", ".ucmfs/staging", ".ucmfs/aside/x"]
        (tmp_path / ".ucmfs" / "aside" / "x").touch()
        assert await names_in(stage) == []
        assert await names_in(stage, ".ucmfs") == []
        assert await names_in(stage, ".ucmfs/aside") == []
        assert await stage.lookup(own) == [None] * 3
        assert all(isinstance(row, BlockNotFound) for row in await stage.open(own))
        assert await stage.remove(own) == [False] * 3
        assert await stage.remove_directory(".ucmfs/aside") is False
        assert await stage.update(".ucmfs", Changes(mode=0)) is False
        await publish_all(stage, {"block": b"data", ".ucmfsx": b"fine", "d/.ucmfs": b"fine"})
        assert all(isinstance(row, InvalidName) for row in await publish_all(stage, dict.fromkeys(own, b"")))
        [kept] = await stage.rename([("block", ".ucmfs/aside/x")])
        assert isinstance(kept, InvalidName)
        assert isinstance(await stage.make_directory(".ucmfs/mine", attributes_of(b"")), InvalidName)
        assert await names_in(stage) == [".ucmfsx", "block", "d"]
        assert await names_in(stage, "d") == [".ucmfs"]

    run(body, tmp_path)


@pytest.fixture
def as_nobody() -> Iterator[Path]:
    """A directory of user nobody; the test runs as that user."""
    directory = Path(tempfile.mkdtemp(dir="/tmp"))
    os.chown(directory, NOBODY, NOBODY)
    (directory / "unreadable").write_bytes(b"secret")
    (directory / "unreadable").chmod(0o600)
    os.setegid(NOBODY)
    os.seteuid(NOBODY)
    try:
        yield directory
    finally:
        os.seteuid(0)
        os.setegid(0)
        shutil.rmtree(directory)


def test_without_root_unreadable_files_are_not_seen_and_owners_not_given(as_nobody: Path) -> None:
    async def body(stage: Posix) -> None:
        rows = await publish_all(stage, {"mine": b"data"}, uid=0, gid=0, mode=stat.S_IFREG | 0o400)
        assert rows == [None]
        found = await stage.lookup(["unreadable", "mine"], xattrs=True)
        assert found[0] is None
        assert found[1] is not None
        assert (found[1].uid, found[1].mode) == (NOBODY, stat.S_IFREG | 0o400)
        assert found[1].digest == attributes_of(b"data").digest
        assert await names_in(stage) == ["mine"]
        assert await get(stage, "unreadable") is None
        assert await stage.remove(["unreadable"]) == [False]
        refused = await stage.update("mine", Changes(uid=0))
        assert isinstance(refused, PermissionError)
        assert await stage.make_directory("d", Attributes(0, 0, stat.S_IFDIR | 0o755)) is None

    run(body, as_nobody)


def test_an_unreadable_directory_lists_nothing_and_stops_nothing(as_nobody: Path) -> None:
    (as_nobody / "shut").mkdir(0o000)

    async def body(stage: Posix) -> None:
        assert await names_in(stage) == ["shut"]
        assert await names_in(stage, "shut") == []
        assert await stage.lookup(["shut/block", "shut"]) == [None, (await stage.lookup(["shut"]))[0]]
        [denied, good] = await publish_all(stage, {"shut/block": b"x", "block": b"x"})
        assert isinstance(denied, PermissionError)
        assert good is None

    run(body, as_nobody)


def test_set_aside_keeps_every_corrupt_copy(tmp_path: Path) -> None:
    long_name = "d/" + "%" * 255

    async def body(stage: Posix) -> None:
        for data in (b"first", b"second"):
            await publish_all(stage, {"d/a%b": data, long_name: data})
            await stage.set_aside("d/a%b")
            await stage.set_aside(long_name)
        assert await names_in(stage, "d") == []

    run(body, tmp_path)
    aside = tmp_path / ".ucmfs" / "aside"
    assert (aside / "d%2Fa%25b.1").read_bytes() == b"first"
    assert (aside / "d%2Fa%25b.2").read_bytes() == b"second"
    assert sorted(path.read_bytes() for path in aside.iterdir()) == [b"first", b"first", b"second", b"second"]


# Several directories


def test_a_block_lies_where_the_hash_of_its_name_says(tmp_path: Path) -> None:
    places = [tmp_path / "0", tmp_path / "1", tmp_path / "2"]
    names = [f"{n % 5}/block{n}" for n in range(40)]

    async def body(stage: Posix) -> None:
        await publish_all(stage, {name: name.encode() for name in names})

    run(body, *places)
    for number, place in enumerate(places):
        expected = sorted(name for name in names if home_of(name, 3) == number)
        assert expected
        assert blocks_of(place) == expected


def test_blocks_are_found_after_a_root_was_added(tmp_path: Path) -> None:
    first, second = tmp_path / "0", tmp_path / "1"
    blocks = {f"d/{n}": contents(50, seed=n) for n in range(30)}

    async def fill(stage: Posix) -> None:
        await publish_all(stage, blocks)

    async def use(stage: Posix) -> None:
        assert [await get(stage, name) for name in blocks] == list(blocks.values())
        assert await names_in(stage, "d") == sorted(name[2:] for name in blocks)
        for fd, data in zip(await stage.open(list(blocks)), blocks.values(), strict=True):
            assert isinstance(fd, int)
            assert whole(fd) == data
            os.close(fd)
        # Written again, they move home and leave no old copy behind.
        again = dict.fromkeys(blocks, b"again")
        assert await publish_all(stage, again) == [None] * len(again)
        assert await names_in(stage, "d") == sorted(name[2:] for name in blocks)
        assert len(blocks_of(first)) + len(blocks_of(second)) == len(blocks)
        assert await stage.remove(list(blocks)) == [True] * len(blocks)

    run(fill, first)
    assert any(home_of(name, 2) == 1 for name in blocks)
    run(use, first, second)
    assert blocks_of(first) == blocks_of(second) == []


def test_a_copy_that_is_out_of_date_never_comes_to_light(tmp_path: Path) -> None:
    places = [tmp_path / "0", tmp_path / "1"]
    names = [name_at(1, prefix=prefix) for prefix in "abcd"]

    async def body(stage: Posix) -> None:
        await publish_all(stage, dict.fromkeys(names, b"new"))
        for name in names:
            (places[0] / name).write_bytes(b"out of date")
        removed, aside, renamed, replaced = names
        assert await get(stage, removed) == b"new"
        assert await names_in(stage) == sorted(names)
        await stage.remove([removed])
        await stage.set_aside(aside)
        await publish(stage, "source", b"source")
        assert await stage.rename([(renamed, "elsewhere"), ("source", replaced)]) == [True, True]
        assert await stage.lookup([removed, aside, renamed]) == [None] * 3
        assert await get(stage, "elsewhere") == b"new"
        assert await get(stage, replaced) == b"source"
        assert await names_in(stage) == sorted(["elsewhere", replaced])

    run(body, *places)
    assert sum(len(blocks_of(place)) for place in places) == 2


@pytest.mark.parametrize("source", [0, 1])
@pytest.mark.parametrize("target", [0, 1])
def test_rename_across_homes_replaces_what_is_there(tmp_path: Path, source: int, target: int) -> None:
    places = [tmp_path / "0", tmp_path / "1"]
    old, new = name_at(source, prefix="old"), name_at(target, prefix="new")

    async def body(stage: Posix) -> None:
        await publish_all(stage, {old: b"moved", new: b"replaced"})
        assert await stage.rename([(old, new)]) == [True]
        assert await get(stage, new) == b"moved"
        assert await names_in(stage) == [new]

    run(body, *places)
    assert [blocks_of(place) for place in places].count([new]) == 1


def test_directories_of_several_roots_are_one(tmp_path: Path) -> None:
    places = [tmp_path / "0", tmp_path / "1"]
    for place in places:
        place.mkdir()
        (place / "both").mkdir()
    (places[1] / "second").mkdir()
    directory = Attributes(0, 0, stat.S_IFDIR | 0o711)

    async def body(stage: Posix) -> None:
        assert await names_in(stage) == ["both", "second"]
        assert await stage.update("both", Changes(mode=0o700)) is True
        assert [stat.S_IMODE((place / "both").stat().st_mode) for place in places] == [0o700, 0o700]
        assert await stage.make_directory("new", directory) is None
        assert [stat.S_IMODE((place / "new").stat().st_mode) for place in places] == [0o711, 0o711]
        (places[1] / "both" / "stray").write_bytes(b"x")
        full = await stage.remove_directory("both")
        assert isinstance(full, BlockError)
        assert full.errno == errno.ENOTEMPTY
        assert (places[0] / "both").is_dir()
        assert await stage.rename([("both", "second")]) == [True]
        assert await names_in(stage, "second") == ["stray"]
        assert await names_in(stage) == ["new", "second"]
        assert await stage.remove_directory("new") is True
        assert await stage.lookup(["both", "new"]) == [None, None]

    run(body, *places)


@pytest.mark.parametrize("number", [0, 1])
def test_a_name_is_a_block_or_a_directory_whichever_root_has_it(tmp_path: Path, number: int) -> None:
    places = [tmp_path / "0", tmp_path / "1"]
    name = name_at(number)
    below = next(f"{name}/{n}" for n in range(100) if home_of(f"{name}/{n}", 2) != number)

    async def body(stage: Posix) -> None:
        await publish(stage, below, b"x")
        [error] = await publish_all(stage, {name: b"x"})
        assert isinstance(error, NotABlock)
        assert await stage.remove([below]) == [True]
        assert await stage.remove_directory(name) is True
        await publish(stage, name, b"x")
        [error] = await publish_all(stage, {below: b"x"})
        assert error is not None
        assert error.errno == errno.ENOTDIR

    run(body, *places)


# Full, gone and hung


@pytest.mark.mount
@pytest.mark.parametrize("io_direct", [False, True])
def test_a_full_disk_fails_only_the_blocks_that_do_not_fit(tmp_path: Path, io_direct: bool) -> None:
    small, large = contents(10_000), contents(4 << 20)

    async def body(stage: Posix) -> None:
        await publish_all(stage, {"large": small})
        blocks = {"a": small, "large": large, "d/too": large, "b": small}
        rows = await publish_all(stage, blocks)
        assert rows[0] is None
        assert rows[3] is None
        for name, row in zip(["large", "d/too"], rows[1:3], strict=True):
            assert isinstance(row, StageFull)
            assert row.errno == errno.ENOSPC
            assert name in str(row)
            assert isinstance(row.__cause__, OSError)
        # Not an error only: what was there is there still, and nothing of the failure remains.
        assert await get(stage, "large") == small
        assert await stage.lookup(["d/too"]) == [None]
        assert staged(root) == []
        assert await stage.remove(["a", "b", "large"]) == [True] * 3
        await publish(stage, "after", contents(1 << 20))

    with mounted("tmpfs", tmp_path / "root", "size=2m") as root:
        run(body, root, io_direct=io_direct)


def test_storage_that_became_read_only_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As after an error of the disk; injected, for the kernel does not remount under an open lock."""

    def refuse(path: str) -> Any:
        raise OSError(errno.EROFS, "Read-only file system", path)

    class ReadOnly:
        f_flag = os.ST_RDONLY

    async def body(stage: Posix) -> None:
        assert await stage.health() is None
        monkeypatch.setattr(roots, "create_file", refuse)
        monkeypatch.setattr(os, "statvfs", lambda path: ReadOnly)
        [row] = await publish_all(stage, {"new": b"data"})
        assert isinstance(row, StageReadOnly)
        assert isinstance(await stage.health(), StageReadOnly)

    run(body, tmp_path)


@pytest.mark.mount
def test_nothing_is_written_below_a_mount_point_whose_storage_is_gone(tmp_path: Path) -> None:
    root = tmp_path / "root"

    async def main() -> None:
        with ExitStack() as stack:
            stack.enter_context(mounted("tmpfs", root))
            async with posix(root) as stage:
                # A lazy unmount, for the stage has its lock open there.
                command("umount", "-l", str(root))
                try:
                    [row] = await publish_all(stage, {"d/block": b"data"})
                    assert isinstance(row, StageError)
                    assert "unmounted?" in str(row)
                    assert isinstance(await stage.health(), StageError)
                    assert await stage.lookup(["d/block"]) == [None]
                    assert list(root.iterdir()) == []
                finally:
                    command("mount", "-t", "tmpfs", "tmpfs", str(root))

    trio.run(main)


def test_a_root_that_was_deleted_makes_usage_an_error(tmp_path: Path) -> None:
    async def body(stage: Posix) -> None:
        shutil.rmtree(tmp_path / "root")
        with pytest.raises(StageError, match="is it mounted"):
            await stage.usage()
        assert await stage.health() is not None
        assert await stage.lookup(["block", ""]) == [None, None]

    run(body, tmp_path / "root")


def test_a_publication_past_its_deadline_never_becomes_visible(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    let_go, ended = threading.Event(), threading.Event()
    real = local.removed_on_failure

    def blocking_copy(source: int, target: int, size: int) -> None:
        let_go.wait()
        local.copy_whole(source, target, size)

    @contextmanager
    def watched(path: str) -> Iterator[None]:
        try:
            with real(path):
                yield
        finally:
            ended.set()

    async def main() -> None:
        async with posix(tmp_path, timeout=30) as quick:
            await publish(quick, "block", b"before")
        async with posix(tmp_path, timeout=NO_PATIENCE) as stage:
            monkeypatch.setattr(roots, "removed_on_failure", watched)
            monkeypatch.setattr(roots, "copy_whole", blocking_copy)
            with pytest.raises(StageTimeout):
                await publish_all(stage, {"block": b"late"})
            let_go.set()
            await trio.to_thread.run_sync(ended.wait)
            assert staged(tmp_path) == []
        assert (tmp_path / "block").read_bytes() == b"before"

    trio.run(main)


def test_a_hang_in_one_part_of_a_large_batch_ends_all_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    let_go = threading.Event()

    def blocking_copy(source: int, target: int, size: int) -> None:
        if size == 13:
            let_go.wait()
        local.copy_whole(source, target, size)

    async def main() -> None:
        async with posix(tmp_path, timeout=0.5) as stage:
            monkeypatch.setattr(roots, "copy_whole", blocking_copy)
            with pytest.raises(StageTimeout, match="Posix"):
                await publish_all(stage, {f"{n}": b"x" * n for n in range(40)})
            # Its other threads serve on.
            assert await stage.lookup(["none"]) == [None]
            let_go.set()

    trio.run(main)


def test_descriptors_opened_too_late_are_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "block").write_bytes(b"data")
    let_go = threading.Event()
    opened: list[int] = []
    real = roots.Roots.open

    def slow(self: roots.Roots, name: str) -> int:
        fd = real(self, name)
        opened.append(fd)
        let_go.wait()
        return fd

    def closed() -> bool:
        try:
            os.fstat(opened[0])
        except OSError:
            return True
        return False

    async def main() -> None:
        async with posix(tmp_path) as stage:
            monkeypatch.setattr(roots.Roots, "open", slow)
            with trio.CancelScope() as scope:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(stage.open, ["block"])
                    while not opened:
                        await trio.lowlevel.checkpoint()
                    scope.cancel()
            assert not closed()
            let_go.set()
            with trio.fail_after(PATIENCE):
                while not closed():
                    await trio.lowlevel.checkpoint()

    trio.run(main)


def test_a_scan_left_in_the_middle_of_a_batch_closes_its_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a", "b", "c"):
        (tmp_path / name).touch()
    entered, let_go = threading.Event(), threading.Event()
    real = roots.Roots._entry

    def slow(self: roots.Roots, *args: Any) -> Any:
        entered.set()
        let_go.wait()
        return real(self, *args)

    async def main() -> None:
        async with posix(tmp_path) as stage:
            monkeypatch.setattr(roots, "SCAN_BATCH", 1)
            monkeypatch.setattr(roots.Roots, "_entry", slow)
            before = count_fds()
            with trio.CancelScope() as scope:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(names_in, stage)
                    await trio.to_thread.run_sync(entered.wait)
                    assert count_fds() > before
                    scope.cancel()
            let_go.set()
            with trio.fail_after(PATIENCE):
                while count_fds() > before:
                    await trio.lowlevel.checkpoint()

    trio.run(main)


def test_a_block_that_could_not_be_stored_at_close_is_not_published(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NFS tells only then that the server had no room."""
    real = os.close

    def fail(fd: int) -> None:
        path = os.readlink(f"/proc/self/fd/{fd}")
        real(fd)
        if "/.ucmfs/staging/" in path and not path.endswith("lock"):
            raise OSError(errno.ENOSPC, "No space left on device")

    async def body(stage: Posix) -> None:
        monkeypatch.setattr(os, "close", fail)
        [row] = await publish_all(stage, {"block": b"data"})
        monkeypatch.undo()
        assert isinstance(row, StageFull)
        assert await stage.lookup(["block"]) == [None]
        assert staged(tmp_path) == []

    run(body, tmp_path)


def test_a_file_that_changes_while_it_is_read_is_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "block"
    path.write_bytes(b"one")
    changes = iter([b"three", b"seventeen"])

    def change(source: int, target: int, size: int) -> None:
        local.copy_whole(source, target, size)
        for data in changes:
            path.write_bytes(data)
            os.utime(path, ns=(1, len(data)))
            return

    async def body(stage: Posix) -> None:
        monkeypatch.setattr(roots, "copy_whole", change)
        assert isinstance(await get_row(stage, "block"), BlockBusy)
        assert await get(stage, "block") == b"seventeen"

    run(body, tmp_path)


@pytest.mark.parametrize("shorter", [0, 2])
def test_a_file_cut_short_while_it_is_read_is_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shorter: int
) -> None:
    path = tmp_path / "block"
    path.write_bytes(b"long enough")
    cuts = iter([shorter])

    def cut(source: int, target: int, size: int) -> None:
        for size_now in cuts:
            os.truncate(path, size_now)
        local.copy_whole(source, target, size)

    async def body(stage: Posix) -> None:
        monkeypatch.setattr(roots, "copy_whole", cut)
        assert await get(stage, "block") == b"long enough"[:shorter]

    run(body, tmp_path)


def test_read_leaves_nothing_of_a_longer_target(tmp_path: Path) -> None:
    async def body(stage: Posix) -> None:
        await publish(stage, "block", b"short")
        with memory_file(b"x" * 10_000) as fd:
            [row] = await stage.read([("block", fd)])
            assert isinstance(row, Attributes)
            assert whole(fd) == b"short"

    run(body, tmp_path)


# Durability and processes


def test_a_durable_block_is_synced_before_it_is_visible_and_its_directories_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[tuple[str, str]] = []

    def record(call: str, path_of: Callable[..., str]) -> None:
        real = getattr(os, call)

        def recorded(*args: Any) -> Any:
            events.append((call, path_of(*args)))
            return real(*args)

        monkeypatch.setattr(os, call, recorded)

    record("fdatasync", lambda fd: os.readlink(f"/proc/self/fd/{fd}"))
    record("fsync", lambda fd: os.readlink(f"/proc/self/fd/{fd}"))
    record("rename", lambda old, new: new)

    async def body(stage: Posix) -> None:
        await publish_all(stage, {"fast": b"x"})
        assert [call for call, _ in events] == ["rename"]
        events.clear()
        await publish_all(stage, {"a/b/1": b"x", "a/b/2": b"x"}, durable=True)

    run(body, tmp_path)
    assert [call for call, _ in events[:4]] == ["fdatasync", "rename"] * 2
    assert [path for call, path in events if call == "rename"] == [f"{tmp_path}/a/b/1", f"{tmp_path}/a/b/2"]
    synced = sorted(path for call, path in events[4:])
    assert synced == [str(tmp_path), f"{tmp_path}/a", f"{tmp_path}/a/b"]


def test_a_directory_that_cannot_be_synced_fails_the_blocks_in_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.fsync

    def fail(fd: int) -> None:
        if os.readlink(f"/proc/self/fd/{fd}").endswith("/bad"):
            raise OSError(errno.EIO, "Input/output error")
        real(fd)

    async def body(stage: Posix) -> None:
        monkeypatch.setattr(os, "fsync", fail)
        rows = await publish_all(stage, {"bad/1": b"x", "good/1": b"x", "bad/2": b"x"}, durable=True)
        assert [row and row.errno for row in rows] == [errno.EIO, None, errno.EIO]

    run(body, tmp_path)


OTHER_PROCESS = """
import os, sys, trio
from ucmfs.stages.posix import Posix, PosixOptions
from ucmfs.stages import roots

def wait(source, target, size):
    print("copying", flush=True)
    if sys.stdin.readline() != "go\\n":
        os._exit(9)
    os.sendfile(target, source, 0, size)

roots.copy_whole = wait

async def main():
    from tests.stages.conformance import publish
    stage = Posix(PosixOptions.model_validate({"storage_backends": sys.argv[1]}), timeout=60)
    await stage.start()
    await publish(stage, "theirs", b"their block")
    await stage.stop()

trio.run(main)
"""


@contextmanager
def other_process(root: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that is in the middle of publishing "theirs"; it goes on when told "go" and dies otherwise."""
    command = [sys.executable, "-c", OTHER_PROCESS, str(root)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "copying\n"
        yield process
        assert process.stdin is not None
        process.stdin.close()


def test_what_a_dead_process_left_is_removed_at_the_next_start(tmp_path: Path) -> None:
    with other_process(tmp_path):
        assert staged(tmp_path) == ["0"]
    assert staged(tmp_path) == ["0"]

    async def body(stage: Posix) -> None:
        assert staged(tmp_path) == []
        assert await stage.lookup(["theirs"]) == [None]

    run(body, tmp_path)


def test_a_living_process_keeps_what_it_is_publishing(tmp_path: Path) -> None:
    async def body(stage: Posix) -> None:
        await publish(stage, "ours", b"our block")
        assert await names_in(stage) == ["ours"]

    with other_process(tmp_path) as process:
        run(body, tmp_path)
        assert staged(tmp_path) == ["0"]
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
        assert process.wait() == 0
    assert (tmp_path / "theirs").read_bytes() == b"their block"
    assert list((tmp_path / ".ucmfs" / "staging").iterdir()) == []


def test_before_start_and_after_stop_nothing_is_published(tmp_path: Path) -> None:
    stage = Posix(PosixOptions.model_validate({"storage_backends": str(tmp_path)}), timeout=30)

    async def main() -> None:
        [row] = await publish_all(stage, {"block": b"x"})
        assert isinstance(row, BlockError)
        assert "not started" in str(row)
        await stage.start()
        await publish(stage, "block", b"x")
        await stage.stop()
        [row] = await publish_all(stage, {"block": b"y"})
        assert isinstance(row, BlockError)

    trio.run(main)
    assert (tmp_path / "block").read_bytes() == b"x"


# O_DIRECT and capacity


@pytest.mark.mount
def test_io_direct_is_given_up_with_one_warning_where_it_is_refused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """ramfs takes neither O_DIRECT nor xattrs, and tells no capacity."""
    blocks = {f"{n}": contents(8192 + n, seed=n) for n in range(40)}

    async def body(stage: Posix) -> None:
        assert await publish_all(stage, blocks) == [None] * 40
        assert [await get(stage, name) for name in blocks] == list(blocks.values())
        [found] = await stage.lookup(["0"], xattrs=True)
        assert found is not None
        assert found.xattrs == {}
        usage = await stage.usage()
        assert (usage.capacity, usage.free) == (None, None)

    async def only_read(stage: Posix) -> None:
        assert await get(stage, "1") == blocks["1"]

    with mounted("ramfs", tmp_path / "root") as root:
        for once in (body, only_read):
            caplog.clear()
            run(once, root, io_direct=True)
            assert [record.levelname for record in caplog.records] == ["WARNING"]
            assert "io_direct is off" in caplog.text
            assert str(root) in caplog.text


def test_a_refusal_met_by_several_threads_is_told_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    root = roots.Root(str(tmp_path), direct=True)
    for _ in range(2):
        root.refuse_direct(OSError(errno.EINVAL, "Invalid argument"))
    assert not root.direct
    assert len(caplog.records) == 1


def test_io_direct_moves_bytes_with_o_direct(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    def record(name: str) -> None:
        real = getattr(local, name)

        def recorded(*args: Any) -> None:
            calls.append(name)
            real(*args)

        monkeypatch.setattr(roots, name, recorded)

    for name in ("write_direct", "read_direct", "copy_whole"):
        record(name)

    async def body(stage: Posix) -> None:
        data = contents(9_000)
        await publish(stage, "block", data)
        assert await get(stage, "block") == data
        await publish(stage, "less than a page", b"x")

    run(body, tmp_path, io_direct=True)
    assert calls == ["write_direct", "read_direct", "copy_whole"]
    calls.clear()
    run(body, tmp_path)
    assert calls == ["copy_whole"] * 3


def test_usage_counts_a_file_system_once_and_knows_the_bound(tmp_path: Path) -> None:
    async def one(stage: Posix) -> None:
        found = os.statvfs(tmp_path)
        assert (await stage.usage()).capacity == found.f_blocks * found.f_frsize

    async def bounded(stage: Posix) -> None:
        usage = await stage.usage()
        assert usage.capacity == 1 << 20
        assert usage.free is not None
        assert usage.used + usage.free == 1 << 20

    run(one, tmp_path / "a")
    run(one, tmp_path / "a", tmp_path / "b")
    run(bounded, tmp_path / "a", posix_capacity_gb=1 / 1024)


@pytest.mark.mount
def test_usage_adds_file_systems_up(tmp_path: Path) -> None:
    async def body(stage: Posix) -> None:
        before = await stage.usage()
        assert before.capacity == 3 << 20
        await publish(stage, name_at(0), contents(100_000))
        after = await stage.usage()
        assert after.used >= before.used + 100_000
        assert after.free is not None
        assert after.used + after.free == 3 << 20

    with mounted("tmpfs", tmp_path / "a", "size=1m") as a, mounted("tmpfs", tmp_path / "b", "size=2m") as b:
        run(body, a, b)


def test_one_thread_is_enough_for_a_large_batch(tmp_path: Path) -> None:
    options = PosixOptions.model_validate({"storage_backends": str(tmp_path)})
    blocks = {f"{n % 7}/{n}": contents(n, seed=n) for n in range(100)}

    async def main() -> None:
        stage = Posix(options, timeout=30, threads=1)
        await stage.start()
        assert await publish_all(stage, blocks) == [None] * 100
        assert [await get(stage, name) for name in blocks] == list(blocks.values())
        await stage.stop()

    trio.run(main)


def test_a_source_shared_by_many_publications_is_read_from_its_start_each_time(tmp_path: Path) -> None:
    data = contents(200_000)

    async def body(stage: Posix) -> None:
        with memory_file(data) as fd:
            rows = await stage.publish([Publication(f"{n}", fd, attributes_of(data)) for n in range(40)])
        assert rows == [None] * 40
        assert [await get(stage, f"{n}") == data for n in range(40)] == [True] * 40

    run(body, tmp_path)
