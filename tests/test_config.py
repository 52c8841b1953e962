"""Configuration: what is read, whose each key is, and how each mistake is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pydantic
import pytest

from ucmfs.config import Options, PipelineOptions, Section, load, machine_memory, masked, split
from ucmfs.errors import ConfigError

SECTION = "ucm_connectors[0].ucm_connector_config"


class CacheKeys(Options):
    buffer_number: int | None = pydantic.Field(None, gt=0)
    cache_buffer_capacity_gb: float | None = pydantic.Field(None, gt=0)


class PosixKeys(Options):
    storage_backends: str | list[str]
    io_direct: bool = False


class RemoteKeys(Options):
    storage_backends: str
    s3_secret_key: str | None = None
    s3_retries: int = 3


OPTIONS: dict[str, type[Options]] = {"Cache": CacheKeys, "Posix": PosixKeys, "S3": RemoteKeys}


@pytest.fixture
def write(tmp_path: Path):
    def _write(text: str) -> Path:
        path = tmp_path / "kv.yaml"
        path.write_text(text)
        return path

    return _write


def connector(config: str, name: str = "UcmPipelineStore") -> str:
    lines = "".join(f"      {line}\n" for line in config.splitlines())
    return f'ucm_connectors:\n  - ucm_connector_name: "{name}"\n    ucm_connector_config:\n{lines}'


def refused(section: Section, labels: tuple[str, ...] = ("Cache", "Posix")) -> str:
    with pytest.raises(ConfigError) as caught:
        split(section, labels, OPTIONS)
    return str(caught.value)


def of(**values: Any) -> Section:
    return Section.of({"storage_backends": "/data", **values})


# Reading


def test_the_form_that_engines_use(write) -> None:
    path = write(
        connector('store_pipeline: "Cache|Posix"\nbuffer_number: 2048\nstorage_backends: "/data/kv"\nio_direct: true')
        + "load_only_first_rank: false\n"
    )
    section = load(path)
    assert section.path == SECTION
    assert section.source == str(path)
    assert section.store_pipeline == "Cache|Posix"
    pipeline, stages = split(section, ["Cache", "Posix"], OPTIONS)
    assert pipeline == PipelineOptions(store_pipeline="Cache|Posix")
    assert stages == {
        "Cache": CacheKeys(buffer_number=2048),
        "Posix": PosixKeys(storage_backends="/data/kv", io_direct=True),
    }


def test_a_bare_mapping_is_the_config_itself(write) -> None:
    section = load(write("storage_backends: [/a, /b]\ncache_buffer_capacity_gb: 2\n"))
    assert section.path == ""
    _, stages = split(section, ["Cache", "Posix"], OPTIONS)
    assert stages["Posix"] == PosixKeys(storage_backends=["/a", "/b"])
    assert stages["Cache"] == CacheKeys(cache_buffer_capacity_gb=2.0)


def test_other_connectors_are_left_alone(write) -> None:
    other = "  - ucm_connector_name: UcmNfsStore\n    anything: 1\n"
    section = load(write(connector("storage_backends: /data") + other))
    assert section.values == {"storage_backends": "/data"}


def test_the_upstream_names_are_accepted() -> None:
    section = of(
        shard_size=1 << 20,
        tensor_size=1 << 18,
        block_size=1 << 21,
        data_dir_shard_bytes=0,
        unique_id="engine-0",
        device_id=0,
        timeout_ms=500,
        mount_point="/mnt/kv",
        consistency_ttl=0,
        fill_policy="read_allocate",
        write_back_policy="async",
    )
    pipeline, _ = split(section, ["Cache", "Posix"], OPTIONS)
    assert pipeline.block_size == 1 << 21
    assert pipeline.data_dir_shard_bytes == 0
    assert pipeline.unique_id == "engine-0"
    assert pipeline.timeout_ms == 500


def test_a_python_caller_may_pass_paths_and_tuples() -> None:
    section = Section.of({"storage_backends": (Path("/a"), Path("/b"))})
    _, stages = split(section, ["Posix"], OPTIONS)
    assert stages["Posix"] == PosixKeys(storage_backends=["/a", "/b"])


def test_yaml_errors_say_file_line_and_column(write) -> None:
    path = write("a: 1\nb: [1, 2\nc: 3\n")
    with pytest.raises(ConfigError, match=rf"^{path}: line 3, column 2: not YAML: ") as caught:
        load(path)
    assert caught.value.__cause__ is not None


@pytest.mark.parametrize("text", ["a: 1\nb: 2\na: 3\n", "stages:\n  b: 2\n  a: 3\n  b: 3\n"])
def test_a_key_given_twice_is_refused(write, text: str) -> None:
    with pytest.raises(ConfigError, match=r"line \d, column \d: .*the key [ab] is given twice"):
        load(write(text))


def test_yaml_merge_keys_may_override(write) -> None:
    section = load(write("stages:\n  Posix: &p {io_direct: true}\n  S3: {<<: *p, io_direct: false}\n"))
    assert section.values["stages"] == {"Posix": {"io_direct": True}, "S3": {"io_direct": False}}


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "is empty"),
        (b"[1, 2]", r"holds \[1, 2\]; it must be a mapping"),
        (b"\xff\xfe\x00", "not YAML"),
        (b"a: !!python/object:os.system {}", "not YAML"),
        (b"ucm_connectors: 5", "ucm_connectors: must be a list, given 5"),
        (b"ucm_connectors: [5]", r"ucm_connectors\[0\]: must be a mapping with ucm_connector_name"),
        (b"ucm_connectors: []", "no connector is named UcmPipelineStore; add one"),
        (
            b"ucm_connectors: [{ucm_connector_name: UcmPipelineStor}]",
            "no connector is named UcmPipelineStore; did you mean UcmPipelineStor",
        ),
        (
            b"ucm_connectors: [{ucm_connector_name: UcmPipelineStore, ucm_conector_config: {}}]",
            r"ucm_connectors\[0\].ucm_conector_config: unknown key; did you mean ucm_connector_config",
        ),
        (
            b"ucm_connectors: [{ucm_connector_name: UcmPipelineStore}]",
            r"ucm_connectors\[0\].ucm_connector_config: must be a mapping",
        ),
        (
            b"ucm_connectors: [&c {ucm_connector_name: UcmPipelineStore, ucm_connector_config: {a: 1}}, *c]",
            r"ucm_connectors\[1\]: a second UcmPipelineStore",
        ),
    ],
)
def test_what_is_no_configuration_is_refused(tmp_path: Path, content: bytes, reason: str) -> None:
    path = tmp_path / "kv.yaml"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=reason) as caught:
        load(path)
    assert str(caught.value).startswith(str(path))


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.yaml: cannot be read: No such file"):
        load(tmp_path / "none.yaml")


# Environment and --set


def test_variables_are_expanded_anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KV_ROOT", "/data")
    monkeypatch.setenv("KV_DOLLAR", "a$${b}")
    section = Section.of(
        {
            "storage_backends": ["${KV_ROOT}/a", "x${KV_ROOT}${KV_ROOT}"],
            "stages": {"S3": {"s3_secret_key": "$${KV_ROOT} $1 ${KV_DOLLAR}"}},
        }
    )
    assert section.values == {
        "storage_backends": ["/data/a", "x/data/data"],
        "stages": {"S3": {"s3_secret_key": "${KV_ROOT} $1 a$${b}"}},  # what a variable holds is not looked into
    }


def test_unset_variables_are_refused_with_their_keys(write, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KV_NONE", raising=False)
    path = write(connector("storage_backends: [/a, '${KV_NONE}/b']\nunique_id: '${KV_NONE}'"))
    with pytest.raises(ConfigError) as caught:
        load(path)
    message = str(caught.value)
    assert f"{SECTION}.storage_backends[1]: the environment variable KV_NONE is not set; export KV_NONE=" in message
    assert f"{SECTION}.unique_id: " in message
    assert caught.value.path == f"{SECTION}.storage_backends[1]"


def test_an_override_replaces_an_unset_variable(write, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KV_NONE", raising=False)
    section = load(write("storage_backends: '${KV_NONE}'\n"), ["storage_backends=/data"])
    assert section.values["storage_backends"] == "/data"


def test_overrides_are_yaml_and_reach_into_stages(write) -> None:
    section = load(
        write(connector("buffer_number: 1\nstages: {S3: {s3_retries: 1, storage_backends: b}}")),
        ["buffer_number=2", "stages.S3.s3_retries=5", "stages.Posix.storage_backends=[/a, /b]", "unique_id='7'"],
    )
    pipeline, stages = split(section, ["Cache", "Posix", "S3"], OPTIONS)
    assert stages["Cache"] == CacheKeys(buffer_number=2)
    assert stages["Posix"] == PosixKeys(storage_backends=["/a", "/b"])
    assert stages["S3"] == RemoteKeys(storage_backends="b", s3_retries=5)
    assert pipeline.unique_id == "7"


@pytest.mark.parametrize(
    ("override", "reason"),
    [
        ("buffer_number", "must be key=value"),
        ("=5", "must be key=value"),
        ("stages..x=5", "must be key=value"),
        ("a=[1", "--set a: line 1, column 3: not YAML"),
        ("storage_backends.x=5", "--set storage_backends.x: storage_backends is no mapping"),
    ],
)
def test_bad_overrides_are_refused(write, override: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        load(write("storage_backends: /data\n"), [override])


# Whose key it is


def test_an_unknown_key_is_refused_with_the_nearest_spelling(write) -> None:
    section = load(write(connector("storage_backends: /data\nbuffer_nubmer: 5")))
    message = refused(section)
    assert f": {SECTION}.buffer_nubmer: unknown key: neither the pipeline Cache|Posix nor a stage" in message
    assert message.endswith("did you mean buffer_number?")
    assert message.startswith(str(section.source))


def test_a_key_of_a_stage_that_is_not_there_says_so() -> None:
    assert "s3_retries: a key of the stage S3, which is not in the pipeline Cache|Posix" in refused(of(s3_retries=1))


def test_a_key_that_two_stages_know_must_say_whose_it_is() -> None:
    message = refused(of(), ("Cache", "Posix", "S3"))
    assert "storage_backends: Posix and S3 both know this key" in message
    assert "stages: {Posix: {storage_backends: ...}, S3: {storage_backends: ...}}" in message


@pytest.mark.parametrize(
    ("stages", "reason"),
    [
        (5, "stages: must be a mapping of stages, given 5"),
        ({"Posx": {}}, "stages.Posx: no such stage in Cache|Posix; did you mean Posix"),
        ({"Posix": 5}, "stages.Posix: must be a mapping of keys, given 5"),
        ({"Posix": {"io_dirct": 1}}, "stages.Posix.io_dirct: unknown key of Posix; did you mean io_direct"),
        ({"Posix": {"storage_backends": "/b"}}, "stages.Posix.storage_backends: given twice"),
        ({"Posix": {"io_direct": 1}}, "stages.Posix.io_direct: must be a valid boolean, given 1"),
    ],
)
def test_mistakes_under_stages_are_refused(stages: Any, reason: str) -> None:
    assert reason in refused(of(stages=stages))


def test_a_stage_without_keys_may_be_empty() -> None:
    _, stages = split(of(stages={"Cache": None}), ["Cache", "Posix"], OPTIONS)
    assert stages["Cache"] == CacheKeys()


# Values


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"buffer_number": True}, "buffer_number: must be a valid integer, given true"),
        ({"buffer_number": "2048"}, 'must be a valid integer, given "2048" (a string: take the quotes away)'),
        ({"buffer_number": 1.5}, "buffer_number: must be a valid integer"),
        ({"buffer_number": 0}, "buffer_number: must be greater than 0, given 0"),
        ({"cache_buffer_capacity_gb": True}, "cache_buffer_capacity_gb: must be a valid number, given true"),
        ({"cache_buffer_capacity_gb": float("nan")}, "cache_buffer_capacity_gb: must be "),
        ({"io_direct": "yes"}, "io_direct: must be a valid boolean"),
        ({"storage_backends": None}, "must be a valid string or must be a valid list, given null"),
        ({"consistency_ttl": float("inf")}, "consistency_ttl: must be a finite number"),
        ({"unique_id": 83}, "unique_id: must be a valid string, given 83 (put it in quotes)"),
        ({"data_dir_shard_bytes": 9}, "data_dir_shard_bytes: must be less than or equal to 8, given 9"),
        ({"timeout_ms": 0}, "timeout_ms: must be greater than or equal to 1"),
        ({"write_back_policy": "sync"}, "write_back_policy: is not there yet; leave it out for 'async', given"),
        ({"write_back_policy": "snyc"}, "write_back_policy: must be 'async', given \"snyc\""),
        ({"fill_policy": "no_allocate"}, "fill_policy: is not there yet"),
        ({"block_size": 10, "shard_size": 4}, "block_size (10) must be a multiple of shard_size (4)"),
        ({"block_size": 10, "tensor_size": 3}, "block_size (10) must be a multiple of tensor_size (3)"),
    ],
)
def test_bad_values_are_refused(values: dict[str, Any], reason: str) -> None:
    assert reason in refused(of(**values))


def test_of_several_kinds_the_one_that_was_meant_is_spoken_of() -> None:
    message = refused(of(storage_backends=["/a", 5]))
    assert message == "storage_backends[1]: must be a valid string, given 5 (put it in quotes)"


def test_a_required_key_that_is_missing_is_named() -> None:
    assert refused(Section.of({"io_direct": True})) == "storage_backends: is required"


def test_store_pipeline_must_be_a_string() -> None:
    assert Section.of({"io_direct": True}).store_pipeline == "Cache|Posix"
    with pytest.raises(ConfigError, match=r"store_pipeline: must be stages such as Cache\|Posix, given 5"):
        _ = Section.of({"store_pipeline": 5}).store_pipeline


def test_all_problems_are_listed_at_once() -> None:
    message = refused(of(buffer_number=0, io_direct="no", timeout_ms=0, colour="red"))
    assert message.startswith("4 problems:\n")
    for key in ("buffer_number", "io_direct", "timeout_ms", "colour"):
        assert f"\n  {key}: " in message


def test_secrets_are_masked_in_messages_and_listings() -> None:
    section = Section.of({"stages": {"S3": {"storage_backends": "b", "s3_secret_key": ["hunter2"]}}, "api_token": 7})
    message = refused(section, ("S3",))
    assert "s3_secret_key: must be a valid string" in message
    assert "hunter2" not in message
    assert masked(section) == {
        "stages": {"S3": {"storage_backends": "b", "s3_secret_key": "***"}},
        "api_token": "***",
    }
    assert section.values["api_token"] == 7


# Memory


def _machine(root: Path, *, total_kb: int, cgroup: str, limits: dict[str, str]) -> Path:
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/meminfo").write_text(f"MemTotal:       {total_kb} kB\nMemFree:  1 kB\n")
    (root / "proc/self/cgroup").write_text(cgroup)
    for path, limit in limits.items():
        file = root / "sys/fs/cgroup" / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(limit + "\n")
    return root


@pytest.mark.parametrize(
    ("cgroup", "limits", "expected"),
    [
        ("0::/\n", {}, 8 << 20),
        ("0::/a/b\n", {"a/b/memory.max": "max", "a/memory.max": str(2 << 20)}, 2 << 20),
        ("0::/not/here\n", {"memory.max": str(3 << 20)}, 3 << 20),
        ("0::/\n", {"memory.max": str(1 << 40)}, 8 << 20),
        (
            "5:cpu,memory:/docker/x\n1:name=systemd:/\n",
            {"memory/docker/x/memory.limit_in_bytes": str(1 << 20)},
            1 << 20,
        ),
    ],
)
def test_memory_is_the_least_of_machine_and_groups(
    tmp_path: Path, cgroup: str, limits: dict[str, str], expected: int
) -> None:
    assert machine_memory(_machine(tmp_path, total_kb=8 << 10, cgroup=cgroup, limits=limits)) == expected


def test_this_machine_has_memory() -> None:
    assert machine_memory() > 64 << 20
