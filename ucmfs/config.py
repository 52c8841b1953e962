"""Configuration: YAML in, checked options out; every refusal names the key's path, the reason and what to do.

    section = load("kv.yaml", ["buffer_number=4096"])         # read, override, expand ${VAR}
    pipeline, stages = split(section, ["Cache", "Posix"], {"Cache": CacheOptions, "Posix": PosixOptions})

A flat key belongs to the one stage of the pipeline that knows it. Where two know it, it stands under
`stages: {Posix: {...}}`.
"""

from __future__ import annotations

import difflib
import itertools
import json
import os
import re
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, Self, TypeVar

import pydantic
import yaml

from ucmfs.errors import ConfigError

__all__ = ["CONNECTOR", "Options", "PipelineOptions", "Section", "load", "machine_memory", "masked", "split"]

CONNECTOR = "UcmPipelineStore"
STAGES = "stages"
"""The key whose mapping holds the keys of single stages."""
MASK = "***"

Group = TypeVar("Group", bound="Options")

_SECRET = re.compile("key|secret|token|password", re.IGNORECASE)
_VARIABLE = re.compile(r"\$(?:\$|\{([^}]*)\})")
_SHOWN = 80
"""Characters of a refused value that a message shows."""


class Options(pydantic.BaseModel):
    """Base of every group of keys. Unknown keys are refused, and so are values of another kind ("1" for 1)."""

    model_config = pydantic.ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


_PLANNED = {"write_back_policy": ("sync", "lazy"), "fill_policy": ("write_allocate", "no_allocate")}


class PipelineOptions(Options):
    """The keys that belong to no stage. Sizes in bytes, times in seconds unless the name says otherwise."""

    store_pipeline: str = "Cache|Posix"
    mount_point: str | None = None
    passthrough: bool = True
    """Let the kernel read blocks by itself where it can (Linux 6.9, root)."""
    log_file: str | None = None
    """Where a daemon in the background logs. Default: a file named after the mount point in /var/log/ucmfs."""

    block_size: int | None = pydantic.Field(None, gt=0)
    shard_size: int | None = pydantic.Field(None, gt=0)
    tensor_size: int | None = pydantic.Field(None, gt=0)
    data_dir_shard_bytes: int = pydantic.Field(3, ge=0, le=8)
    """Hex characters of a block's id that name its directory; 0 for none."""
    unique_id: str | None = None
    device_id: int | None = None

    consistency_ttl: float = pydantic.Field(1.0, ge=0)
    """Seconds that an answer about a shared stage, or a miss, may be old."""
    fill_policy: Literal["read_allocate"] = "read_allocate"
    write_back_policy: Literal["async"] = "async"
    write_back_batch_size: int = pydantic.Field(32, ge=1)
    write_back_interval: float = pydantic.Field(1.0, gt=0)
    write_back_deadline: float = pydantic.Field(30.0, gt=0)
    """Seconds that a writer waits for room before it gets ENOSPC."""
    timeout_ms: int = pydantic.Field(30_000, ge=1)
    """Deadline of one call to a stage."""
    daemon_hang_timeout: float = pydantic.Field(10.0, ge=0)
    """Seconds without an answer after which a daemon hangs and is replaced; 0 for never."""

    @pydantic.field_validator("fill_policy", "write_back_policy", mode="before")
    @classmethod
    def _planned(cls, value: object, info: pydantic.ValidationInfo) -> object:
        if value in _PLANNED[info.field_name or ""]:
            raise ValueError(f"is not there yet; leave it out for {cls.model_fields[info.field_name or ''].default!r}")
        return value

    @pydantic.model_validator(mode="after")
    def _sizes_nest(self) -> Self:
        sizes = [
            (name, size)
            for name in ("tensor_size", "shard_size", "block_size")
            if (size := getattr(self, name)) is not None
        ]
        for (inner, part), (outer, whole) in itertools.pairwise(sizes):
            if whole % part:
                raise ValueError(f"{outer} ({whole}) must be a multiple of {inner} ({part})")
        return self


@dataclass(frozen=True)
class Section:
    """The `ucm_connector_config` of one UcmPipelineStore: the values, and where they stand."""

    values: dict[str, Any]
    path: str = ""
    """Path of the section in its source, such as `ucm_connectors[0].ucm_connector_config`; '' for the whole."""
    source: str | None = None
    """The file's name, None where there is no file."""

    @classmethod
    def of(cls, mapping: Mapping[str, Any]) -> Section:
        """Give the section for a mapping that a Python caller built, in either form that a file may have.

        Raises ConfigError as load() does.
        """
        return _expand(_pick(mapping, None))

    @property
    def store_pipeline(self) -> str:
        """What `store_pipeline` says, or its default. Raises ConfigError if it is no string."""
        key = "store_pipeline"
        found = self.values.get(key, PipelineOptions.model_fields[key].default)
        if not isinstance(found, str):
            raise self.refusal(key, f"must be stages such as Cache|Posix, given {_shown(key, found)}")
        return found

    def at(self, key: str) -> str:
        """The whole path of *key*."""
        return f"{self.path}.{key}" if self.path else key

    def refusal(self, key: str, reason: str) -> ConfigError:
        """The error that says why *key* (such as `stages.Posix.io_direct`) cannot be used."""
        return _refusal(self.source, [(self.at(key), reason)])


def load(path: str | os.PathLike[str], overrides: Sequence[str] = ()) -> Section:
    """Read the YAML file at *path*, apply *overrides* (`key=value`, `stages.Posix.key=value`; the value is YAML)
    and put environment variables in place of `${VAR}` (`$$` is a dollar).

    The file holds `ucm_connectors: [{ucm_connector_name, ucm_connector_config}]` or one such config by itself.
    Raises ConfigError.
    """
    source = os.fspath(path)
    try:
        text = Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"{source}: cannot be read: {error.strerror}; give the path of a YAML file") from error
    section = _pick(_parse(text, source), source)
    for override in overrides:
        section = _override(section, override)
    return _expand(section)


def split(
    section: Section, labels: Sequence[str], options: Mapping[str, type[Options]]
) -> tuple[PipelineOptions, dict[str, Options]]:
    """Give each key of *section* to the pipeline or to the one stage of *labels* that knows it, and check all.

    *options* has the keys that each stage knows, by label; it may hold more stages than the pipeline has.
    Raises one ConfigError that lists everything that is wrong.
    """
    problems: list[tuple[str, str]] = []
    general: dict[str, Any] = {}
    by_stage: dict[str, dict[str, Any]] = {label: {} for label in labels}
    places: dict[tuple[str, str], str] = {}
    for key, value in section.values.items():
        if key == STAGES:
            continue
        if key in PipelineOptions.model_fields:
            general[key] = value
            continue
        owners = [label for label in labels if key in options[label].model_fields]
        if len(owners) == 1:
            by_stage[owners[0]][key] = value
            places[owners[0], key] = section.at(key)
        elif owners:
            problems.append((section.at(key), _ambiguous(key, owners)))
        else:
            problems.append((section.at(key), _unknown(key, section, labels, options)))

    own = section.values.get(STAGES) or {}
    if not isinstance(own, Mapping):
        problems.append((section.at(STAGES), f"must be a mapping of stages, given {_shown(STAGES, own)}"))
        own = {}
    for label, keys in own.items():
        at = section.at(f"{STAGES}.{label}")
        if label not in by_stage:
            problems.append((at, f"no such stage in {'|'.join(labels)}" + _nearest(str(label), labels)))
        elif not isinstance(keys, Mapping | None):
            problems.append((at, f"must be a mapping of keys, given {_shown(label, keys)}"))
        else:
            known = options[label].model_fields
            for key, value in (keys or {}).items():
                if key not in known:
                    problems.append((f"{at}.{key}", f"unknown key of {label}" + _nearest(str(key), known)))
                elif key in by_stage[label]:
                    problems.append((f"{at}.{key}", f"given twice, also at {section.at(key)}; leave one"))
                else:
                    by_stage[label][key] = value
                    places[label, key] = f"{at}.{key}"

    pipeline = _validate(PipelineOptions, general, section.at, section.path, problems)
    stages: dict[str, Options] = {}
    for label, values in by_stage.items():

        def place(key: str, label: str = label) -> str:
            return places.get((label, key), section.at(key))

        whole = section.at(f"{STAGES}.{label}") if label in own else section.path
        found = _validate(options[label], values, place, whole, problems)
        if found is not None:
            stages[label] = found
    if problems or pipeline is None:
        raise _refusal(section.source, problems)
    return pipeline, stages


def masked(section: Section) -> dict[str, Any]:
    """The values of *section*, secrets hidden, to be shown."""
    return {key: _mask(key, value) for key, value in section.values.items()}


def machine_memory(root: Path = Path("/")) -> int:
    """Bytes of memory that this process may use: the machine's, or the least limit of its control groups.

    *root* is where proc and sys are found.
    """
    total = re.search(r"^MemTotal:\s+(\d+) kB", (root / "proc/meminfo").read_text(), re.MULTILINE)
    if total is None:
        raise ConfigError("/proc/meminfo does not say how much memory there is; is /proc mounted?")
    found = int(total[1]) * 1024
    try:
        groups = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return found
    for line in groups:
        _, controllers, group = line.split(":", 2)
        if controllers == "":
            top, limit = root / "sys/fs/cgroup", "memory.max"
        elif "memory" in controllers.split(","):
            top, limit = root / "sys/fs/cgroup/memory", "memory.limit_in_bytes"
        else:
            continue
        # A limit of any group above counts too. In a container the path may be one of the host's: then only its end
        # at the top exists.
        lowest = top / group.lstrip("/")
        for directory in [lowest, *lowest.parents]:
            if not directory.is_relative_to(top):
                break
            try:
                found = min(found, int((directory / limit).read_text()))
            except (OSError, ValueError):  # no such group, or "max"
                continue
    return found


# Reading


class _Loader(yaml.SafeLoader):
    """YAML as ever, but a key given twice is refused."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        seen: dict[Hashable, yaml.Mark] = {}
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if key.value in seen:
                    raise yaml.composer.ComposerError(
                        None, None, f"the key {key.value} is given twice; leave one", key.start_mark
                    )
                seen[key.value] = key.start_mark
        return node


def _parse(text: str | bytes, source: str) -> Any:
    try:
        # A subclass of SafeLoader: no objects are made.
        return yaml.load(text, _Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f": line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        reason = error.problem or error.context
        raise ConfigError(f"{source}{where}: not YAML: {reason}") from error
    except (yaml.YAMLError, RecursionError) as error:
        raise ConfigError(f"{source}: not YAML: {' '.join(str(error).split())}") from error


def _pick(found: Any, source: str | None) -> Section:
    """The section of the one UcmPipelineStore in *found*."""
    connectors = "ucm_connectors"
    if not isinstance(found, Mapping) or not found:
        what = "is empty" if not found else f"holds {_shown('', found)}"
        raise ConfigError(f"{source or 'the configuration'}: {what}; it must be a mapping with {connectors}")
    if connectors not in found:
        return _plain_section(found, "", source)
    listed = found[connectors]
    if not isinstance(listed, list | tuple):
        raise _refusal(source, [(connectors, f"must be a list, given {_shown('', listed)}")])
    chosen: Section | None = None
    names: list[str] = []
    for index, connector in enumerate(listed):
        at = f"{connectors}[{index}]"
        name_key, config_key = "ucm_connector_name", "ucm_connector_config"
        if not isinstance(connector, Mapping) or name_key not in connector:
            raise _refusal(source, [(at, f"must be a mapping with {name_key} and {config_key}")])
        names.append(str(connector[name_key]))
        if names[-1] != CONNECTOR:
            continue
        if chosen is not None:
            raise _refusal(source, [(at, f"a second {CONNECTOR}; leave one")])
        for key in connector:
            if key not in (name_key, config_key):
                nearest = _nearest(str(key), (name_key, config_key))
                raise _refusal(source, [(f"{at}.{key}", "unknown key" + nearest)])
        if not isinstance(connector.get(config_key), Mapping):
            raise _refusal(source, [(f"{at}.{config_key}", "must be a mapping of keys")])
        chosen = _plain_section(connector[config_key], f"{at}.{config_key}", source)
    if chosen is None:
        reason = f"no connector is named {CONNECTOR}" + (_nearest(CONNECTOR, names) or "; add one")
        raise _refusal(source, [(connectors, reason)])
    return chosen


def _plain_section(values: Mapping[Any, Any], path: str, source: str | None) -> Section:
    return Section({str(key): _plain(value) for key, value in values.items()}, path, source)


def _plain(value: Any) -> Any:
    """*value* as YAML would have given it: what a Python caller passes may hold paths and tuples."""
    if isinstance(value, Mapping):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    return os.fspath(value) if isinstance(value, os.PathLike) else value


def _override(section: Section, override: str) -> Section:
    key, equals, text = override.partition("=")
    key = key.strip()
    if not equals or not all(key.split(".")):
        raise ConfigError(f"--set {key}: must be key=value, such as buffer_number=4096")
    value = _plain(_parse(text, f"--set {key}"))
    values: dict[str, Any] = dict(section.values)
    inside = values
    *outer, last = key.split(".")
    for depth, part in enumerate(outer, 1):
        below = inside.get(part)
        if not isinstance(below, dict | None):
            raise ConfigError(f"--set {key}: {'.'.join(outer[:depth])} is no mapping")
        inside[part] = dict(below or {})
        inside = inside[part]
    inside[last] = value
    return replace(section, values=values)


def _expand(section: Section) -> Section:
    """Put environment variables into the strings of *section*."""
    unset: list[tuple[str, str]] = []

    def expanded(value: Any, at: str) -> Any:
        if isinstance(value, dict):
            return {key: expanded(inner, f"{at}.{key}") for key, inner in value.items()}
        if isinstance(value, list):
            return [expanded(inner, f"{at}[{index}]") for index, inner in enumerate(value)]
        if not isinstance(value, str):
            return value

        def variable(match: re.Match[str]) -> str:
            name = match[1]
            if name is None:
                return "$"
            if name not in os.environ:
                unset.append((at, f"the environment variable {name} is not set; export {name}=... or write the value"))
            return os.environ.get(name, "")

        return _VARIABLE.sub(variable, value)

    values = {key: expanded(value, section.at(key)) for key, value in section.values.items()}
    if unset:
        raise _refusal(section.source, unset)
    return replace(section, values=values)


# Checking


def _validate(
    model: type[Group], values: dict[str, Any], place: Callable[[str], str], whole: str, problems: list[tuple[str, str]]
) -> Group | None:
    """The options for *values*, or None after adding to *problems*.

    *place* gives the path of a key, *whole* that of all of them.
    """
    try:
        return model.model_validate(values)
    except pydantic.ValidationError as error:
        # Where a value may be of several kinds, there is an entry for each; the deepest is of the kind that was meant.
        found: dict[str, tuple[list[str], str]] = {}
        for entry in error.errors(include_url=False):
            keys = _keys(entry, values)
            path = place(str(keys[0])) if keys else whole
            for key in keys[1:]:
                path += f"[{key}]" if isinstance(key, int) else f".{key}"
            reasons, _ = found.setdefault(path, ([], _given(entry, keys)))
            if (reason := _reason(entry)) not in reasons:
                reasons.append(reason)
        for path, (reasons, given) in found.items():
            if not any(other.startswith((f"{path}[", f"{path}.")) for other in found):
                problems.append((path, " or ".join(reasons) + given))
        return None


def _keys(entry: Any, values: Any) -> list[int | str]:
    """The keys and indices of a pydantic entry's place, without the names of kinds that stand between them."""
    keys: list[int | str] = []
    for part in entry["loc"]:
        if isinstance(values, Mapping) and (part in values or entry["type"] == "missing"):
            keys.append(part)
            values = values.get(part)
        elif isinstance(values, list) and isinstance(part, int):
            keys.append(part)
            values = values[part]
    return keys


def _reason(entry: Any) -> str:
    kind, text = entry["type"], str(entry["msg"])
    if kind == "missing":
        return "is required"
    if kind == "extra_forbidden":
        return "unknown key"
    if kind == "value_error":
        return str(entry["ctx"]["error"])
    return text.replace("Input should", "must", 1)


def _given(entry: Any, keys: Sequence[int | str]) -> str:
    value = entry["input"]
    if not keys or entry["type"] in ("missing", "extra_forbidden"):
        return ""
    hint = ""
    if isinstance(value, str) and entry["type"] in ("int_type", "float_type", "bool_type"):
        hint = " (a string: take the quotes away)"
    elif isinstance(value, int | float) and entry["type"] == "string_type":
        hint = " (put it in quotes)"
    return f", given {_shown('.'.join(map(str, keys)), value)}{hint}"


# Saying what is wrong


def _refusal(source: str | None, problems: Sequence[tuple[str, str]]) -> ConfigError:
    """One error for all of *problems*, (path of the key, reason) each."""
    lines = [f"{path}: {reason}" if path else reason for path, reason in problems]
    prefix = f"{source}: " if source else ""
    if len(lines) == 1:
        text = prefix + lines[0]
    else:
        text = f"{prefix}{len(lines)} problems:" + "".join(f"\n  {line}" for line in lines)
    error = ConfigError(text)
    error.path = problems[0][0] or None
    return error


def _mask(key: str, value: Any) -> Any:
    if value is not None and _SECRET.search(key):
        return MASK
    if isinstance(value, Mapping):
        return {inner: _mask(str(inner), below) for inner, below in value.items()}
    return [_mask(key, below) for below in value] if isinstance(value, list) else value


def _shown(key: str, value: Any) -> str:
    """*value* as it may stand in a message."""
    text = json.dumps(_mask(key, value), default=str, ensure_ascii=False)
    return text if len(text) <= _SHOWN else text[: _SHOWN - 3] + "..."


def _nearest(word: str, known: Iterable[str]) -> str:
    """'; did you mean ...?' where there is something like *word*, else ''."""
    found = difflib.get_close_matches(word, list(known), n=1)
    return f"; did you mean {found[0]}?" if found else ""


def _ambiguous(key: str, owners: Sequence[str]) -> str:
    where = ", ".join(f"{label}: {{{key}: ...}}" for label in owners)
    return f"{' and '.join(owners)} both know this key; say whose it is: {STAGES}: {{{where}}}"


def _unknown(key: str, section: Section, labels: Sequence[str], options: Mapping[str, type[Options]]) -> str:
    pipeline = "|".join(labels)
    for label, model in options.items():
        if label not in labels and key in model.model_fields:
            return f"a key of the stage {label}, which is not in the pipeline {pipeline}; leave it out"
    known = {STAGES, *PipelineOptions.model_fields, *(key for label in labels for key in options[label].model_fields)}
    if not section.path:
        known.add("ucm_connectors")
    return f"unknown key: neither the pipeline {pipeline} nor a stage of it knows it" + _nearest(key, known)
