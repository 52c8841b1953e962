"""Configuration: YAML in, checked options out; every refusal names the key's path, the reason and what to do."""

from __future__ import annotations

import pydantic

__all__ = ["Options", "PipelineOptions"]


class Options(pydantic.BaseModel):
    """Base of every group of keys. Unknown keys are refused."""

    model_config = pydantic.ConfigDict(extra="forbid", frozen=True)


class PipelineOptions(Options):
    """The keys that belong to no stage."""

    store_pipeline: str = "Cache|Posix"
    mount_point: str | None = None
    consistency_ttl: float = pydantic.Field(1.0, ge=0)
    """Seconds that an answer about a shared stage, or a miss, may be old."""
    write_back_batch_size: int = pydantic.Field(32, ge=1)
    write_back_interval: float = pydantic.Field(1.0, gt=0)
    write_back_deadline: float = pydantic.Field(30.0, gt=0)
    """Seconds that a writer waits for room before it gets ENOSPC."""
    timeout_ms: int = pydantic.Field(30_000, ge=1)
    """Deadline of one call to a stage."""
