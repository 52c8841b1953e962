"""The store over one stage: NFS."""

from __future__ import annotations

from ucm.store.pipeline.connector import UcmPipelineStore

__all__ = ["UcmNfsStore"]


class UcmNfsStore(UcmPipelineStore):
    """Blocks on an NFS export. See UcmPipelineStore."""

    store_pipeline = "NFS"
