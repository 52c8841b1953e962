"""Stores by the names that configuration files use (`ucm_connector_name`)."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

from ucm.store.ucmstore import UcmKVStoreBase
from ucmfs.errors import ConfigError

__all__ = ["UcmConnectorFactory"]

_MODULES = {
    "UcmPipelineStore": "ucm.store.pipeline.connector",
    "UcmCacheStore": "ucm.store.cache.connector",
    "UcmPosixStore": "ucm.store.posix.connector",
    "UcmNfsStore": "ucm.store.nfsstore.connector",
    "UcmDs3fsStore": "ucm.store.ds3fs.connector",
}


class UcmConnectorFactory:
    """Makes a store from the name of its class. A connector's module is imported when it is first asked for."""

    @staticmethod
    def create_connector(connector_name: str, config: Mapping[str, Any]) -> UcmKVStoreBase:
        """A store of class *connector_name* over *config*. Raises ConfigError, and what the class raises."""
        try:
            module = _MODULES[connector_name]
        except KeyError:
            raise ConfigError(
                f"no connector is called {connector_name!r}; there are {', '.join(_MODULES)}", path="ucm_connector_name"
            ) from None
        store = getattr(importlib.import_module(module), connector_name)(config)
        assert isinstance(store, UcmKVStoreBase)
        return store
