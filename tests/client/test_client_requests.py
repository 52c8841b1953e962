"""Bad input: an error that names the row, and no byte written anywhere."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ucm.store.factory import UcmConnectorFactory
from ucm.store.pipeline.connector import UcmPipelineStore, UcmPipelineStoreBuilder
from ucm.store.posix.connector import UcmPosixStore
from ucmfs.errors import ConfigError, InvalidRequest, StageError
from ucmfs.stages.empty import Empty

GOOD, OTHER = b"\x01" * 16, b"\x02" * 16


def full() -> bytearray:
    return bytearray(b"." * 64)


BAD = [
    pytest.param([GOOD, OTHER], [0], [full(), full()], "row 1: .*2 entries, offset 1", id="too few offsets"),
    pytest.param([GOOD], [0, 0], [full(), full()], "row 1: .*1 entries", id="too few ids"),
    pytest.param([GOOD, OTHER], [0, 0], [full()], "row 1: .*tensor 1;", id="too few tensors"),
    pytest.param([GOOD, OTHER], [0, 0], torch.zeros(2, 64), "list with one entry per row", id="one tensor for all"),
    pytest.param([GOOD, OTHER], 0, [full(), full()], "offset must be a list", id="one offset for all"),
    pytest.param([GOOD, "aa"], [0, 0], [full(), full()], "row 1: .*bytes, given str", id="id of text"),
    pytest.param([GOOD, bytearray(4)], [0, 0], [full(), full()], "row 1: .*given bytearray", id="id of bytearray"),
    pytest.param(GOOD, [0] * 16, [full()] * 16, "row 0: .*given int", id="an id for the list"),
    pytest.param([GOOD, b""], [0, 0], [full(), full()], "row 1: .*given 0", id="empty id"),
    pytest.param([GOOD, b"x" * 101], [0, 0], [full(), full()], "row 1: .*given 101", id="long id"),
    pytest.param([GOOD, OTHER], [0, -1], [full(), bytearray(1)], "row 1: the offset is -1", id="negative offset"),
    pytest.param([GOOD, OTHER], [0, 0.0], [full(), full()], "row 1: .*given float", id="offset of float"),
    pytest.param([GOOD, OTHER], [0, 1], [full(), full()], "row 1: 64 bytes at offset 1 pass", id="past the end"),
    pytest.param([GOOD, OTHER], [0, 2**70], [full(), bytearray(1)], "row 1: .*pass the end", id="far past the end"),
    pytest.param([GOOD, OTHER], [0, 0], [full(), [full(), bytearray(1)]], "row 1: 65 bytes", id="list past the end"),
    pytest.param([GOOD, OTHER], [0, 0], [full(), torch.zeros(4, 4).t()], "row 1: .*contiguous", id="strided"),
    pytest.param([GOOD, OTHER], [0, 0], [full(), "text"], "row 1: str is no tensor", id="no tensor"),
    pytest.param([GOOD, OTHER], [0, 0], [full(), torch.zeros(4, device="meta")], "row 1: .*on meta", id="device"),
]


@pytest.mark.parametrize("method", ["load", "dump"])
@pytest.mark.parametrize(("ids", "offsets", "rows", "message"), BAD)
def test_a_bad_row_is_named_and_nothing_is_written(
    open_store: Callable[..., UcmPipelineStore],
    written: Callable[[], dict[str, bytes]],
    method: str,
    ids: Any,
    offsets: Any,
    rows: Any,
    message: str,
) -> None:
    store = open_store(block_size=64)
    store.wait(store.dump([b"there"], [0], [b"t" * 64]))
    before = written()
    with pytest.raises(InvalidRequest, match=message):
        getattr(store, method)(ids, offsets, rows)
    assert written() == before
    assert not any(store.lookup([GOOD, OTHER]))
    if isinstance(rows, list):
        assert all(row == full() for row in rows if isinstance(row, bytearray) and len(row) == 64)


@pytest.mark.parametrize(
    ("ids", "offsets", "rows", "message"),
    [
        pytest.param([GOOD], [1], [b"xy"], "row 0: begins at byte 1 .*byte 0 is next", id="no start"),
        pytest.param([OTHER, GOOD, GOOD], [0, 0, 3], [b"x", b"xy", b"z"], "row 2: begins at byte 3", id="gap"),
        pytest.param([GOOD, GOOD], [0, 1], [b"xy", b"z"], "row 1: begins at byte 1", id="overlap"),
        pytest.param([GOOD, GOOD], [0, 0], [b"xy", b"xy"], "row 1: begins at byte 0", id="twice"),
    ],
)
def test_without_block_size_a_dump_is_whole_blocks(
    store: UcmPipelineStore,
    written: Callable[[], dict[str, bytes]],
    ids: list[bytes],
    offsets: list[int],
    rows: list[bytes],
    message: str,
) -> None:
    before = written()
    with pytest.raises(InvalidRequest, match=message):
        store.dump(ids, offsets, rows)
    assert written() == before


def test_a_read_only_destination_is_refused_and_a_read_only_source_is_not(store: UcmPipelineStore) -> None:
    store.wait(store.dump([GOOD], [0], [b"read only"]))
    with pytest.raises(InvalidRequest, match="row 0: the destination is read-only"):
        store.load([GOOD], [0], [b"read only"])


@pytest.mark.parametrize("method", ["lookup", "lookup_on_prefix", "prefetch"])
def test_ids_are_checked_everywhere(store: UcmPipelineStore, method: str) -> None:
    with pytest.raises(InvalidRequest, match="row 1: a block id must be bytes"):
        getattr(store, method)([GOOD, 5])


@pytest.mark.parametrize("method", ["wait", "check"])
def test_only_a_task_can_be_waited_for(store: UcmPipelineStore, method: str) -> None:
    with pytest.raises(InvalidRequest, match="given NoneType"):
        getattr(store, method)(None)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"mount_point": "/no/such/place"}, "not a directory"),
        ({"mount_point": "/tmp", "blok_size": 4}, "block_size"),
        ({"mount_point": "/tmp", "block_size": 0}, "block_size"),
        ({"store_pipeline": "Cache|Posix", "storage_backends": "/no/such/place"}, "/no/such/place"),
        ({"store_pipeline": "Cache|Possix", "storage_backends": "/tmp"}, "Possix"),
    ],
)
def test_a_bad_configuration_is_refused(config: dict[str, Any], message: str, cache_dir: Path) -> None:
    with pytest.raises((ConfigError, StageError), match=message):
        UcmPipelineStore(config)


def test_a_single_stage_connector_has_its_own_pipeline_only(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"store_pipeline: UcmPosixStore is always Posix, given Cache\|Posix"):
        UcmPosixStore({"store_pipeline": "Cache|Posix", "storage_backends": str(tmp_path)})


def test_the_factory_knows_the_connectors(tmp_path: Path) -> None:
    with UcmConnectorFactory.create_connector("UcmPosixStore", {"mount_point": str(tmp_path)}) as store:
        assert isinstance(store, UcmPosixStore)
    with pytest.raises(ConfigError, match=r"no connector is called 'UcmPosix'; there are UcmPipelineStore, .*UcmDs3fs"):
        UcmConnectorFactory.create_connector("UcmPosix", {})


@pytest.mark.parametrize("name", ["UcmNfsStore", "UcmDs3fsStore"])
def test_connectors_of_stages_to_come_are_there(name: str, tmp_path: Path) -> None:
    with UcmConnectorFactory.create_connector(name, {"mount_point": str(tmp_path)}) as store:
        assert type(store).__name__ == name


def test_a_pipeline_can_be_registered_once() -> None:
    def build(section: Any) -> list[Empty]:
        return []

    UcmPipelineStoreBuilder.register("Cache|Registered", build)
    assert UcmPipelineStoreBuilder.get("Cache|Registered") is build
    with pytest.raises(ConfigError, match="already registered"):
        UcmPipelineStoreBuilder.register("Cache|Registered", build)
    assert UcmPipelineStoreBuilder.get("Cache|Other") is None
