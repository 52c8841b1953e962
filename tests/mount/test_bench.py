from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.mounted import Mounted
from ucmfs import bench
from ucmfs.errors import UcmfsError


def test_a_small_run_over_a_mount(mnt: Mounted, tmp_path: Path) -> None:
    sizes = (4096, 10_000)
    result = bench.measure({"plain": tmp_path, "mount": mnt.point}, sizes=sizes, threads=(1, 2), rounds=1, listed=50)
    plain, mounted = result["systems"]["plain"], result["systems"]["mount"]
    assert plain.keys() == mounted.keys()
    assert {key for key in plain if key.startswith("write")} == {
        f"write {k} x {n}" for k in ("4 KiB", "9 KiB") for n in (1, 2)
    }
    assert all(figure["ratio"] == 1 and figure["median"] > 0 for figure in plain.values())
    assert bench.table(result).row_count == len(plain)
    assert list(mnt.point.iterdir()) == []


def test_the_command(mnt: Mounted) -> None:
    words = ("bench", mnt.point, "--rounds", "1", "--size", "1000000", "--listed", "100", "--json")
    result = json.loads(mnt.ucmfs(*words).stdout)
    assert set(result["systems"]) == {"/dev/shm", str(mnt.point)}


def test_a_wrong_byte_ends_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "_write", lambda data, name: Path(name).write_bytes(data[:-1] + b"\0" * 2))
    with pytest.raises(UcmfsError, match="other bytes were read"):
        bench.measure({"plain": tmp_path}, sizes=(4096,), threads=(1,), rounds=1, listed=1)
    assert list(tmp_path.iterdir()) == []
