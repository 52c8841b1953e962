from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from tests.stages.conformance import StageConformance
from ucmfs.stages.base import Stage
from ucmfs.stages.posix import Posix, PosixOptions

class TestOneRoot(StageConformance):
    @asynccontextmanager
    async def make_stage(self, tmp_path: Path) -> AsyncIterator[Stage]:
        (tmp_path/"r").mkdir(exist_ok=True)
        stage = Posix(PosixOptions.model_validate({"storage_backends": str(tmp_path/"r")}), timeout=30)
        await stage.start()
        yield stage
        await stage.stop()
