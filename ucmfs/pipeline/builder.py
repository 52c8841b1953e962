"""From "Cache|Posix" and a configuration to a pipeline."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
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
    """Which stage a label stands for, and who builds pipelines that are registered whole."""

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
        """The class that *label* stands for. Raises LookupError, saying why there is none."""
        found = self._stages.get(label)
        if found is not None:
            return found
        for entry in entry_points(group=ENTRY_POINTS, name=label):
            loaded = entry.load()
            if not (isinstance(loaded, type) and issubclass(loaded, Stage)):
                raise LookupError(f"entry point {entry.value} is no Stage class")
            return loaded
        if label in PLANNED:
            raise LookupError(f"stage {label} is not there yet")
        known = [*self._stages, *(entry.name for entry in entry_points(group=ENTRY_POINTS))]
        near = difflib.get_close_matches(label, known, 1)
        advice = f"did you mean {near[0]}?" if near else f"there are {', '.join(known)}"
        raise LookupError(f"no stage is called {label!r}; {advice}")


registry = Registry()
"""The process's registry: a program that adds stages does so before it builds pipelines."""


def check(section: Section) -> tuple[PipelineOptions, dict[str, Options], list[str]]:
    """Check all of *section*; give its options and the labels of its stages, Cache first. Raises ConfigError."""
    description = section.store_pipeline
    labels = [part.strip() for part in description.split("|")]
    registered = registry.get(description) is not None
    if registered:
        labels = ["Cache"]
        section = _without_foreign_stages(section)
    elif labels == ["Empty"]:
        raise section.refusal("store_pipeline", "Empty alone keeps nothing; write Cache|Empty for memory only")
    elif labels[0] != "Cache":
        # Blocks have to be somewhere while they are written: what does not begin with a Cache gets one.
        labels.insert(0, "Cache")
    for number, label in enumerate(labels):
        if label in labels[:number]:
            raise section.refusal("store_pipeline", f"{label} stands there twice; each stage may stand once")
    try:
        classes = {label: registry.stage(label).options for label in labels}
    except LookupError as error:
        raise section.refusal("store_pipeline", str(error)) from error
    pipeline, stages = split(section, labels, classes)
    cache = stages["Cache"]
    assert isinstance(cache, CacheOptions)
    try:
        cache.capacity(pipeline.block_size)
    except ConfigError as error:
        raise section.refusal(error.path or "", error.reason) from error
    return pipeline, stages, labels


def _without_foreign_stages(section: Section) -> Section:
    """A registered pipeline's own stages have their keys under `stages`, and check them themselves."""
    own = section.values.get("stages")
    if not isinstance(own, dict):
        return section
    return replace(section, values={**section.values, "stages": {k: v for k, v in own.items() if k == "Cache"}})


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
        timeout = options.timeout_ms / 1000
        lower = [registry.stage(label).build(stages[label], timeout=timeout, label=label) for label in labels[1:]]
    return Pipeline(options.store_pipeline, cache, lower, options)


def default_cache_dir(owner: str) -> str:
    """A directory of /dev/shm for *owner*: readable, and its own also where two owners read alike."""
    readable = re.sub(r"[^A-Za-z0-9.]+", "-", owner).strip("-")[:100]
    return f"/dev/shm/ucmfs-{readable}-{xxhash.xxh3_64_hexdigest(os.fsencode(owner))[:8]}"
