from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pydantic
import pytest
import trio

from tests.stages.conformance import StageConformance
from ucmfs.stages.base import Stage, Usage
from ucmfs.stages.empty import Empty, EmptyOptions


class TestEmpty(StageConformance):
    keeps = False
    local = False

    @asynccontextmanager
    async def make_stage(self, tmp_path: Path) -> AsyncIterator[Stage]:
        stage = Empty()
        await stage.start()
        yield stage
        await stage.stop()


def test_it_has_no_bound() -> None:
    assert trio.run(Empty().usage) == Usage(None, 0, None, 0)


def test_it_has_no_keys() -> None:
    with pytest.raises(pydantic.ValidationError):
        EmptyOptions.model_validate({"storage_backends": "/tmp"})
