"""The store over one stage: Ds3fs."""

from __future__ import annotations

from ucm.store.pipeline.connector import UcmPipelineStore

__all__ = ["UcmDs3fsStore"]


class UcmDs3fsStore(UcmPipelineStore):
    """Blocks in a bucket of an object store. See UcmPipelineStore."""

    store_pipeline = "Ds3fs"
