"""The store over one stage: Posix."""

from __future__ import annotations

from ucm.store.pipeline.connector import UcmPipelineStore

__all__ = ["UcmPosixStore"]


class UcmPosixStore(UcmPipelineStore):
    """Blocks in directories of a file system. See UcmPipelineStore."""

    store_pipeline = "Posix"
