"""Any directory as a place for blocks."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.client.faulty_daemon import files_of
from ucm.client.blocks import Staging
from ucm.client.plain import PlainBlocks
from ucmfs.errors import BlockNotFound, NotABlock, StoreClosed, UcmfsError


def create(blocks: PlainBlocks, name: str, content: bytes) -> Staging:
    [staging] = blocks.create([name], len(content))
    assert isinstance(staging, Staging)
    os.write(staging.fd, content)
    return staging


def test_nothing_is_visible_before_publish(tmp_path: Path) -> None:
    blocks = PlainBlocks(tmp_path)
    staging = create(blocks, "a/b/block", b"data")
    assert blocks.lookup(["a/b/block"]) == [None]
    [temporary] = files_of(tmp_path)
    assert temporary.startswith("a/b/.")
    assert temporary.endswith(".tmp")
    assert blocks.publish([staging]) == [None]
    assert blocks.lookup(["a/b/block"]) == [4]
    assert files_of(tmp_path) == {"a/b/block": b"data"}


def test_discard_leaves_no_file(tmp_path: Path) -> None:
    blocks = PlainBlocks(tmp_path)
    blocks.discard([create(blocks, "block", b"data")])
    assert files_of(tmp_path) == {}


def test_what_cannot_be_published_is_an_error_and_leaves_no_file(tmp_path: Path) -> None:
    (tmp_path / "block/inside").mkdir(parents=True)
    blocks = PlainBlocks(tmp_path)
    [error] = blocks.publish([create(blocks, "block", b"data")])
    assert isinstance(error, UcmfsError)
    assert "block" in str(error)
    assert files_of(tmp_path) == {}


def test_what_cannot_be_created_is_an_error_of_its_row(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    blocks = PlainBlocks(tmp_path)
    error, staging = blocks.create(["file/block", "block"], 1)
    assert isinstance(error, BlockNotFound)
    assert isinstance(staging, Staging)
    blocks.discard([staging])


def test_things_that_are_no_block(tmp_path: Path) -> None:
    (tmp_path / "directory").mkdir()
    os.mkfifo(tmp_path / "fifo")
    blocks = PlainBlocks(tmp_path)
    names = ["directory", "fifo", "missing"]
    assert blocks.lookup(names) == [None] * 3
    assert [type(error) for error in blocks.open(names)] == [NotABlock, NotABlock, BlockNotFound]
    blocks.prefetch(names)


def test_an_existing_file_is_a_block(tmp_path: Path) -> None:
    (tmp_path / "block").write_bytes(b"12345")
    blocks = PlainBlocks(tmp_path)
    assert blocks.lookup(["block"]) == [5]
    blocks.prefetch(["block"])
    [fd] = blocks.open(["block"])
    assert isinstance(fd, int)
    assert os.read(fd, 9) == b"12345"
    with pytest.raises(OSError, match="Bad file"):
        os.write(fd, b"x")
    os.close(fd)


def test_it_follows_no_change_of_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "block").write_bytes(b"1")
    (tmp_path / "below").mkdir()
    blocks = PlainBlocks(".")
    monkeypatch.chdir("below")
    assert blocks.lookup(["block"]) == [1]


def test_a_closed_one_says_so(tmp_path: Path) -> None:
    blocks = PlainBlocks(tmp_path)
    blocks.close()
    for call in (lambda: blocks.lookup([]), lambda: blocks.open([]), lambda: blocks.create([], 1), blocks.stats):
        with pytest.raises(StoreClosed):
            call()
