from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.mounted import Mounted
from ucmfs import bench
from ucmfs.errors import ConfigError, UcmfsError

SCRIPTS = Path(__file__).parents[2] / "scripts"
TRANSFERS = [f"{kind} 4 KiB x {threads}" for threads in (1, 2) for kind in ("write", "first read", "reread")]
LATENCIES = ["open+close", "open+close again", "stat present", "stat missing", "stat missing again"]


@pytest.fixture(autouse=True)
def few_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "MOST_FILES", 8)
    monkeypatch.setattr(bench, "NAMES", 8)


def test_a_small_run_over_a_mount(mnt: Mounted, tmp_path: Path) -> None:
    result = bench.measure({"plain": tmp_path, "mount": mnt.point}, sizes=(4096,), threads=(1, 2), rounds=2, listed=50)
    plain, mounted = result["systems"]["plain"], result["systems"]["mount"]
    assert list(plain) == list(mounted) == [*TRANSFERS, *LATENCIES, "readdir of 50"]
    assert all(figure["ratio"] == 1 and figure["median"] > 0 for figure in plain.values())
    assert all(len(figure["samples"]) == 2 for figure in mounted.values())
    assert bench.table(result).row_count == len(plain)
    assert list(mnt.point.iterdir()) == []


def test_each_figure_is_taken_of_all_systems_in_turn(tmp_path: Path) -> None:
    systems = {label: tmp_path / label for label in "abc"}
    for directory in systems.values():
        directory.mkdir()
    seen: list[str] = []
    bench.measure(
        systems,
        settle={label: lambda label=label: seen.append(f"settle {label}") for label in systems},
        sizes=(4096,),
        threads=(1,),
        rounds=2,
        only="4 KiB",
        progress=seen.append,
    )
    steps = ("write 4 KiB x 1", "preparing", "first read 4 KiB x 1", "reread 4 KiB x 1")

    def expected() -> Iterator[str]:
        for turn, order in (1, "abc"), (2, "bca"):
            for step in steps:
                for label in order:
                    yield f"round {turn} of 2, {step}: {label}"
                    if step == "preparing":
                        yield f"settle {label}"

    assert seen == list(expected())


def test_only_the_figures_asked_for(tmp_path: Path) -> None:
    result = bench.measure(
        {"plain": tmp_path}, sizes=(4096,), threads=(1,), rounds=1, listed=5, only="^reread|missing$"
    )
    assert list(result["systems"]["plain"]) == ["reread 4 KiB x 1", "stat missing"]


@pytest.mark.parametrize(("only", "reason"), [("nothing", "no figure has nothing in its name"), ("(", "unterminated")])
def test_a_bad_selection_is_refused(tmp_path: Path, only: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        bench.measure({"plain": tmp_path}, only=only)


def test_a_ratio_is_the_median_of_those_within_a_round() -> None:
    systems = {"a": {"key": {"samples": [1.0, 10.0, 100.0]}}, "b": {"key": {"samples": [2.0, 40.0, 300.0]}}}
    assert bench.ratio({"systems": systems}, ("b", "key"), ("a", "key")) == 3
    assert bench.ratio({"systems": systems}, ("b", "key"), ("c", "key")) is None


def test_the_command(mnt: Mounted) -> None:
    words = ("bench", mnt.point, "--rounds", "1", "--size", "1000000", "--listed", "100", "--json")
    result = json.loads(mnt.ucmfs(*words).stdout)
    assert set(result["systems"]) == {"/dev/shm", str(mnt.point)}


def test_a_wrong_byte_ends_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def write(name: str, data: memoryview) -> float:
        Path(name).write_bytes(bytes(data[:-1]) + b"\0" * 2)
        return 0.0

    monkeypatch.setattr(bench, "_write", write)
    with pytest.raises(UcmfsError, match="other bytes were read"):
        bench.measure({"plain": tmp_path}, sizes=(4096,), threads=(1,), rounds=1, listed=1)
    assert list(tmp_path.iterdir()) == []


# scripts


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> None:
    """The scripts can be imported."""
    monkeypatch.syspath_prepend(SCRIPTS)


def start(script: str, *arguments: str, temporary: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, SCRIPTS / script, *arguments],
        env={**os.environ, "TMPDIR": str(temporary)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def run(script: str, *arguments: str, temporary: Path, status: int = 0) -> str:
    """What *script* prints; its storage and mount points are below *temporary*."""
    with start(script, *arguments, temporary=temporary) as process:
        out, err = process.communicate(timeout=120)
    assert (process.returncode, err) == (status, ""), out
    check_nothing_is_left(temporary)
    return out


def check_nothing_is_left(temporary: Path) -> None:
    assert list(temporary.iterdir()) == []
    assert str(temporary) not in Path("/proc/self/mountinfo").read_text()


def test_the_script_says_what_was_reached(tmp_path: Path) -> None:
    out = run("bench_compare.py", "--rounds", "1", "--only", "missing", "--json", temporary=tmp_path)
    result = json.loads(out)
    assert {label: list(figures) for label, figures in result["systems"].items()} == {
        label: ["stat missing", "stat missing again"] for label in ("tmpfs", "ucmfs", "ucmfs, no passthrough")
    }
    assert {measure["reached"] for measure in result["measures"]} == {None}


@pytest.mark.parametrize(
    ("script", "number"),
    [
        ("bench_compare.py", signal.SIGINT),
        ("bench_restart.py", signal.SIGTERM),
        ("bench_relay_memory.py", signal.SIGINT),
    ],
)
def test_a_signal_ends_a_script_and_its_mounts(script: str, number: signal.Signals, tmp_path: Path) -> None:
    deadline = time.monotonic() + 60
    with start(script, temporary=tmp_path) as process:
        while not (at_work := [path for path in tmp_path.glob("*/*/mnt/*") if path.name != ".ucmfs"]):
            assert process.poll() is None
            assert time.monotonic() < deadline
        config = yaml.safe_load((at_work[0].parents[1] / "config.yaml").read_text())
        # As a terminal does it: to the whole group of processes.
        os.killpg(process.pid, number)
        assert process.communicate(timeout=60) == ("", "")
    assert process.returncode == 128 + number
    check_nothing_is_left(tmp_path)
    assert not Path(config["cache_dir"]).parent.exists()


def test_measures(modules: None) -> None:
    import bench_measures

    def figures(rate: float, latency: float) -> dict[str, dict[str, list[float]]]:
        rates = {key: {"samples": [rate]} for key in ("first read 8 MiB x 1", "reread 8 MiB x 1")}
        return rates | {"stat missing": {"samples": [latency]}}

    result = {
        "systems": {"tmpfs": figures(100, 1), "ucmfs": figures(89, 5), "pyfuse3": figures(50, 4)},
        "relay_memory": {"most_mib": 30.5, "growth_mib": 0},
    }
    judged = bench_measures.judge(result)
    assert [(each.measure, each.wanted, each.seen, each.reached) for each in judged if each.seen is not None] == [
        ("first read 8 MiB x 1: ucmfs / tmpfs", "at least 0.9", 0.89, False),
        ("reread 8 MiB x 1: ucmfs / tmpfs", "at least 0.9", 0.89, False),
        ("stat missing: ucmfs / pyfuse3", "not over 1.25", 1.25, True),
        ("the relay's memory over a million requests", "not over 30 MiB", 30.5, False),
        ("growth of the relay's memory over them", "not over 1 MiB", 0, True),
    ]
    assert bench_measures.table(judged).row_count == len(bench_measures.MEASURES)


def test_plain_pyfuse3_is_a_file_system(modules: None, tmp_path: Path) -> None:
    import bench_mounts
    import bench_peers

    plain = tmp_path / "plain"
    plain.mkdir()
    with bench_peers.pyfuse3(bench_mounts.Places(tmp_path, tmp_path)).mounted() as peer:
        result = bench.measure({"plain": plain, "pyfuse3": peer.point}, sizes=(300_000,), rounds=1, listed=500)
        assert result["systems"]["plain"].keys() == result["systems"]["pyfuse3"].keys()
        assert list(peer.point.iterdir()) == []
    assert str(tmp_path) not in Path("/proc/self/mountinfo").read_text()


@pytest.mark.parametrize("kill_every", ["0", "0.7"])
def test_reads_are_right_while_daemons_are_killed(kill_every: str, tmp_path: Path) -> None:
    arguments = ("--seconds", "2", "--readers", "2", "--kill-every", kill_every, "--json")
    result = json.loads(run("bench_restart.py", *arguments, temporary=tmp_path))
    assert result["reads"] > 0
    assert result["writes"] > 0
    assert (result["errors"], result["wrong"], result["messages"]) == (0, 0, [])
    assert (result["kills"] > 0) == (kill_every != "0")


def test_what_is_wrong_with_a_read_is_seen(modules: None) -> None:
    from bench_restart import Blocks, Wrong

    blocks = Blocks()
    data = blocks.content("name", 3)
    blocks.check("name", data, 3, 3)
    blocks.check("name", data, 1, 4)
    changed = bytearray(data)
    changed[-1] ^= 1
    for bad, oldest, newest in (
        (data, 4, 5),
        (data, 1, 2),
        (data[:-1], 3, 3),
        (data + b"x", 3, 3),
        (bytes(changed), 3, 3),
        (blocks.content("other", 3), 3, 3),
        (b"", 3, 3),
    ):
        with pytest.raises(Wrong):
            blocks.check("name", bad, oldest, newest)


def test_blocks_that_are_not_there_at_the_end_are_seen(modules: None, tmp_path: Path) -> None:
    from bench_restart import Blocks, Tally, Versions, _check_all, write

    names = ("a", "b")
    blocks, versions, tally = Blocks(), Versions(tmp_path / "versions", names), Tally()
    storage = tmp_path / "storage"
    storage.mkdir()
    for kind, name in zip("AB", names, strict=True):
        write(storage, kind, name, blocks, versions, tally)
    _check_all(storage, blocks, versions, names, tally)
    assert (tally.writes, tally.errors, tally.wrong) == (2, 0, 0)
    versions.end("a", versions.begin("a"))
    (storage / "b").rename(storage / "b.tmp")
    _check_all(storage, blocks, versions, names, tally)
    assert (tally.errors, tally.wrong) == (1, 2), tally.messages


def test_the_memory_of_the_relay(tmp_path: Path) -> None:
    result = json.loads(run("bench_relay_memory.py", "1000", "--json", temporary=tmp_path))
    assert result["requests"] >= 1000
    assert 0 < result["least_mib"] <= result["most_mib"]
