"""The store over one stage: Cache|Empty."""

from __future__ import annotations

from ucm.store.pipeline.connector import UcmPipelineStore

__all__ = ["UcmCacheStore"]


class UcmCacheStore(UcmPipelineStore):
    """Blocks in memory only: a miss after eviction, and after the process. See UcmPipelineStore."""

    store_pipeline = "Cache|Empty"
