"""From "Cache|Posix" and a configuration to a pipeline."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from importlib.metadata import entry_points

import xxhash

from ucmfs.config import Options, PipelineOptions, Section, split
from ucmfs.errors import ConfigError
from ucmfs.pipeline.eviction import Lru
from ucmfs.pipeline.pipeline import Pipeline
from ucmfs.stages.base import Stage
from ucmfs.stages.cache import Cache, CacheOptions
from ucmfs.stages.empty import Empty
from ucmfs.stages.posix import Posix

__all__ = ["ENTRY_POINTS", "Build", "Registry", "build", "check", "registry"]

ENTRY_POINTS = "ucmfs.stages"
"""Entry point group of stages in other packages: the entry's name is the label, its object the Stage class."""
PLANNED = ("NFS", "Ds3fs", "S3")

Build = Callable[[Section], Sequence[Stage]]
"""Builds the stages below the Cache of a registered pipeline, nearest first."""


class Registry:
    """Which stage a label stands for, and who builds pipelines that are registered whole.

    A lower stage's class is called as `Class(options, timeout=seconds, label=label)`, options being an instance of
    its `options` class.
    """

    def __init__(self) -> None:
        self._stages: dict[str, type[Stage]] = {"Cache": Cache, "Posix": Posix, "Empty": Empty}
        self._pipelines: dict[str, Build] = {}

    def register(self, description: str, build: Build) -> None:
        """Let *build* make the stages of the pipeline written *description*. Raises ValueError if it is taken."""
        if description in self._pipelines:
            raise ValueError(f"pipeline {description!r} is already registered")
        self._pipelines[description] = build

    def get(self, description: str) -> Build | None:
        return self._pipelines.get(description)

    def stage(self, label: str) -> type[Stage]:
        """The class that *label* stands for. Raises ConfigError."""
        found = self._stages.get(label)
        if found is not None:
            return found
        for entry in entry_points(group=ENTRY_POINTS, name=label):
            loaded = entry.load()
            if not (isinstance(loaded, type) and issubclass(loaded, Stage)):
                raise ConfigError(f"entry point {entry.value} is no Stage class", path="store_pipeline")
            return loaded
        if label in PLANNED:
            raise ConfigError(f"stage {label} is not there yet", path="store_pipeline")
        others = [entry.name for entry in entry_points(group=ENTRY_POINTS)]
        raise ConfigError(
            f"no stage is called {label!r}; there are {', '.join([*self._stages, *others])}", path="store_pipeline"
        )


registry = Registry()
"""The process's registry: a program that adds stages does so before it builds pipelines."""


def check(section: Section) -> tuple[PipelineOptions, dict[str, Options], list[str]]:
    """Check all of *section*; give its options and the labels of its stages, Cache first. Raises ConfigError."""
    description = str(section.values.get("store_pipeline", PipelineOptions.model_fields["store_pipeline"].default))
    labels = [part.strip() for part in description.split("|")]
    whole = registry.get(description) is not None
    if whole:
        labels = ["Cache"]
    elif labels == ["Empty"]:
        raise ConfigError("Empty alone keeps nothing; write Cache|Empty for memory only", path="store_pipeline")
    elif labels[0] != "Cache":
        # Blocks have to be somewhere while they are written: what does not begin with a Cache gets one.
        labels.insert(0, "Cache")
    for number, label in enumerate(labels):
        if label in labels[:number]:
            raise ConfigError(f"{label} stands there twice", path="store_pipeline")
    classes = {label: registry.stage(label).options for label in labels}
    pipeline, stages = split(section, labels, classes)
    cache = stages["Cache"]
    assert isinstance(cache, CacheOptions)
    try:
        cache.capacity(pipeline.block_size)
    except ConfigError as error:
        raise ConfigError(error.message.removeprefix(f"{error.path}: "), path=f"{section.path}.{error.path}") from error
    return pipeline, stages, labels


def build(section: Section, *, mount_point: str | None = None) -> Pipeline:
    """Build the pipeline that *section* describes. Raises ConfigError.

    With a *mount_point* the Cache's directory is named after it, so that the next mount there finds what the last
    one left. Without, it belongs to this process and goes with it, unless dirty blocks are left in it.
    """
    options, stages, labels = check(section)
    cache_options = stages["Cache"]
    assert isinstance(cache_options, CacheOptions)
    temporary = cache_options.cache_dir is None and mount_point is None
    owner = mount_point or f"{options.unique_id or 'process'}-{os.getpid()}-{os.urandom(4).hex()}"
    cache = Cache(
        cache_options.cache_dir or default_cache_dir(owner),
        cache_options.capacity(options.block_size),
        Lru(),
        temporary=temporary,
    )
    whole = registry.get(options.store_pipeline)
    if whole is not None:
        lower = [stage for stage in whole(section) if not isinstance(stage, Cache)]
    else:
        lower = [_make(label, stages[label], options) for label in labels[1:]]
    return Pipeline(options.store_pipeline, cache, lower, options)


def _make(label: str, stage_options: Options, options: PipelineOptions) -> Stage:
    make: Callable[..., Stage] = registry.stage(label)
    return make(stage_options, timeout=options.timeout_ms / 1000, label=label)


def default_cache_dir(owner: str) -> str:
    """A directory of /dev/shm for *owner*: readable, and its own also where two owners read alike."""
    readable = re.sub(r"[^A-Za-z0-9.]+", "-", owner).strip("-")[:100]
    return f"/dev/shm/ucmfs-{readable}-{xxhash.xxh3_64_hexdigest(os.fsencode(owner))[:8]}"
