from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.mounted import Mounted
from ucmfs import bench
from ucmfs.errors import ConfigError, UcmfsError

TRANSFERS = [f"{kind} 4 KiB x {threads}" for threads in (1, 2) for kind in ("write", "first read", "reread")]
LATENCIES = ["open+close", "open+close again", "stat present", "stat missing", "stat missing again"]


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
