"""The commands: what they ask a daemon, what they print, how they exit; real mounts are in tests/mount/."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from tests.fake_daemon import FakeDaemon
from tests.memory import remove_cache
from tests.processes import has_exited
from ucmfs import cli, mounting
from ucmfs.control import protocol

BIN = Path(sys.executable).parent
Answer = Callable[[Any], protocol.Reply]


def run(*args: str | Path, stdin: str | bytes | None = None) -> Any:
    return CliRunner().invoke(cli.app, [str(arg) for arg in args], input=stdin)


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Callable[[Answer], FakeDaemon]]:
    running: list[FakeDaemon] = []

    def start(answer: Answer) -> FakeDaemon:
        running.append(FakeDaemon(tmp_path, answer))
        return running[-1].__enter__()

    yield start
    for one in running:
        one.__exit__()


@pytest.fixture
def config(tmp_path: Path) -> Path:
    (tmp_path / "data").mkdir()
    path = tmp_path / "kv.yaml"
    values = {"storage_backends": str(tmp_path / "data"), "cache_buffer_capacity_gb": 0.0625}
    path.write_text(yaml.safe_dump(values))
    return path


def rows(function: Callable[[str], Any]) -> Answer:
    return lambda request: protocol.Reply(rows=[function(name) for name in request.names])


def faulty(request: Any) -> protocol.Reply:
    """The second name is busy."""
    return protocol.Reply(
        rows=[True, None, *[True] * (len(request.names) - 2)],
        faults={1: protocol.Fault(errno.EBUSY, f"{request.names[1]}: it is pinned")},
    )


STATS = {
    "version": "0.1.0",
    "pid": 77,
    "pipeline": "Cache|Posix",
    "mount_point": "/mnt/[kv]",
    "uptime_s": 3.5,
    "stages": [
        {"label": "Cache", "capacity": 64 << 20, "used": 3 << 19, "free": 5, "blocks": 2, "dirty": 1, "error": None},
        {"label": "Posix", "capacity": None, "used": 0, "free": None, "blocks": None, "error": "no answer [5]"},
    ],
    "hits": 4,
    "misses": 5,
    "errors": {"Posix:StageTimeout": 2},
    "something_new": {"a": 1},
}


# Configuration and usage


def test_check_config_shows_what_it_comes_to(config: Path) -> None:
    result = run("check-config", config, "--set", "io_direct=true")
    assert result.exit_code == 0, result.stderr
    shown = yaml.safe_load(result.stdout)
    assert shown["store_pipeline"] == "Cache|Posix"
    assert shown["io_direct"] is True


def test_check_config_as_json_is_masked(config: Path) -> None:
    result = run("check-config", config, "--json")
    assert json.loads(result.stdout)["cache_buffer_capacity_gb"] == 0.0625
    masked = run("check-config", config, "--set", "s3_secret_key=hunter2")
    assert masked.exit_code == 2
    assert "hunter2" not in masked.output


@pytest.mark.parametrize(
    ("override", "reason"),
    [
        ("storage_backend=/x", "did you mean storage_backends?"),
        ("cache_buffer_capacity_gb=0", "cache_buffer_capacity_gb: must be greater than 0, given 0"),
        ("cache_buffer_capacity_gb=1000000", "cache_buffer_capacity_gb: asks for 1000000.0 GiB"),
        ("store_pipeline=Cache|Posixx", "no stage is called 'Posixx'"),
        ("unique_id=${UCMFS_TEST_UNSET}", "unique_id: the environment variable UCMFS_TEST_UNSET is not set"),
        ("nonsense", "must be key=value"),
    ],
)
@pytest.mark.parametrize("verb", ["check-config", "mount"])
def test_bad_configurations_exit_with_2(config: Path, tmp_path: Path, verb: str, override: str, reason: str) -> None:
    where = [tmp_path / "none"] if verb == "mount" else []
    result = run(verb, config, *where, "--set", override)
    assert result.exit_code == 2
    assert reason in result.stderr
    assert result.stderr.startswith("ucmfs: ")
    assert "Traceback" not in result.output


def test_bad_mount_points_exit_with_2(config: Path, tmp_path: Path) -> None:
    result = run("mount", config, tmp_path / "none")
    assert (result.exit_code, result.stderr) == (
        2,
        f"ucmfs: {tmp_path}/none: there is no such directory; mkdir -p {tmp_path}/none\n",
    )
    assert run("mount", config, tmp_path).exit_code == 2


@pytest.mark.parametrize(
    "args",
    [["umount"], ["mount", "a"], ["status", "/", "--timeout"], ["flush", "/", "--timeout", "-1"], ["frobnicate"]],
)
def test_bad_usage_exits_with_2(args: list[str]) -> None:
    result = run(*args)
    assert result.exit_code == 2
    assert "Usage: " in result.stderr


@pytest.mark.parametrize("verb", ["status", "lookup", "prefetch", "flush", "evict", "pin", "unpin", "umount"])
def test_where_no_daemon_answers_it_says_so_in_one_line(tmp_path: Path, verb: str) -> None:
    names = [] if verb in ("status", "umount", "flush") else ["abc/1"]
    result = run(verb, tmp_path, *names)
    assert result.exit_code == 1
    assert result.stderr.count("\n") == 1
    assert result.stderr.startswith(f"ucmfs: {tmp_path}: ")


def test_debug_shows_where_it_came_from(tmp_path: Path) -> None:
    result = run("--debug", "status", tmp_path)
    assert result.exit_code == 1
    assert "Traceback" in result.stderr
    assert "FileNotFoundError" in result.stderr


# Mount options


def test_mount_options_are_divided() -> None:
    given = ["rw,nofail,_netdev,x-systemd.automount,defaults", "allow_other,fsname=mine,set.buffer_number=5,,user"]
    assert cli._mount_options(given) == (
        frozenset({"rw", "allow_other", "fsname=mine"}),
        ["buffer_number=5"],
    )


def test_unknown_mount_options_are_refused(config: Path, tmp_path: Path) -> None:
    result = run("mount", config, tmp_path / "mnt", "-o", "alow_other")
    assert (result.exit_code, result.stderr) == (
        2,
        "ucmfs: -o alow_other: unknown mount option; did you mean allow_other?\n",
    )
    assert cli._mount_options(["alow_other"], sloppy=True) == (frozenset(), [])


def test_the_fstab_helper_checks_all_and_mounts_nothing_when_told(config: Path, tmp_path: Path) -> None:
    mount_point = tmp_path / "mnt"
    mount_point.mkdir()

    def helper(*options: str) -> subprocess.CompletedProcess[str]:
        command = [BIN / "mount.ucmfs", config, mount_point, *options]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    good = helper("-sfnv", "-o", "rw,set.data_dir_shard_bytes=2")
    assert (good.returncode, good.stderr) == (0, "")
    bad = helper("-f", "-o", "rw,set.data_dir_shard_bytes=20")
    assert bad.returncode == 2
    assert "data_dir_shard_bytes: must be less than or equal to 8, given 20" in bad.stderr
    (mount_point / "block").touch()
    assert helper("-f").returncode == 2
    assert mounting.find_mount(mount_point) is None


# Asking


def test_status_for_people(daemon, tmp_path: Path) -> None:
    fake = daemon(lambda _: protocol.Reply(result=STATS))
    result = run("status", tmp_path)
    assert result.exit_code == 0
    assert fake.requests == [protocol.Stats()]
    assert "Cache|Posix at /mnt/[kv], pid 77" in result.stdout
    lines = [line.split() for line in result.stdout.splitlines()]
    assert ["Cache", "64.0", "MiB", "1.5", "MiB", "5", "B", "2", "1"] in lines
    assert ["Posix", "-", "0", "B", "-", "-", "-", "no", "answer", "[5]"] in lines
    assert "hits 4, misses 5" in result.stdout
    assert "errors Posix:StageTimeout 2" in result.stdout


def test_status_for_programs_is_all_that_the_daemon_says(daemon, tmp_path: Path) -> None:
    daemon(lambda _: protocol.Reply(result=STATS))
    assert json.loads(run("status", tmp_path, "--json").stdout) == STATS


def test_lookup_tells_hits_from_misses(daemon, tmp_path: Path) -> None:
    daemon(rows(lambda name: None if "no" in name else 4096))
    result = run("lookup", tmp_path, "abc/1", f"{tmp_path}/abc/no")
    assert result.exit_code == 1
    assert result.stdout == "abc/1: 4096\nabc/no: miss\n"
    assert run("lookup", tmp_path, "abc/1").exit_code == 0
    as_json = run("lookup", tmp_path, "abc/1", "no", "--json")
    assert json.loads(as_json.stdout) == [{"name": "abc/1", "size": 4096}, {"name": "no", "size": None}]
    assert as_json.exit_code == 1


def test_an_empty_block_is_a_hit(daemon, tmp_path: Path) -> None:
    daemon(rows(lambda _: 0))
    result = run("lookup", tmp_path, "abc/1")
    assert (result.exit_code, result.stdout) == (0, "abc/1: 0\n")


def test_a_row_that_failed_is_named(daemon, tmp_path: Path) -> None:
    daemon(faulty)
    result = run("lookup", tmp_path, "a", "b", "c")
    assert (result.exit_code, result.stderr) == (1, "ucmfs: b: it is pinned\n")


def test_a_fault_of_the_whole_request_is_reported(daemon, tmp_path: Path) -> None:
    daemon(lambda _: protocol.Reply(fault=protocol.Fault(errno.EIO, "Posix: no answer within 30 s")))
    result = run("lookup", tmp_path, "a")
    assert (result.exit_code, result.stderr) == (1, "ucmfs: Posix: no answer within 30 s\n")


def test_a_reply_of_the_wrong_length_is_refused(daemon, tmp_path: Path) -> None:
    daemon(lambda _: protocol.Reply(rows=[1]))
    result = run("lookup", tmp_path, "a", "b")
    assert (result.exit_code, result.stderr) == (1, "ucmfs: the daemon answered 1 rows to 2 names\n")


# Names


def test_many_names_go_in_several_requests(daemon, tmp_path: Path) -> None:
    fake = daemon(rows(lambda _: 1))
    names = [f"abc/{number:x}" for number in range(2500)]
    (tmp_path / "names").write_text("\n".join(names) + "\n\n")
    result = run("lookup", tmp_path, "--from", tmp_path / "names")
    assert result.exit_code == 0
    assert [len(request.names) for request in fake.requests] == [1024, 1024, 452]
    assert [name for request in fake.requests for name in request.names] == names


def test_long_names_go_in_packets_that_the_socket_takes(daemon, tmp_path: Path) -> None:
    fake = daemon(rows(lambda _: 1))
    names = ["/".join(["d" * 250] * 14 + [str(number)]) for number in range(100)]
    result = run("lookup", tmp_path, "--from", "-", stdin="\n".join(names))
    assert result.exit_code == 0, result.stderr
    assert [name for request in fake.requests for name in request.names] == names
    assert len(fake.requests) > 1


def test_names_come_from_arguments_and_stdin_together(daemon, tmp_path: Path) -> None:
    fake = daemon(rows(lambda _: True))
    (tmp_path / "link").symlink_to(tmp_path)
    result = run("evict", tmp_path / "link", "a", tmp_path / "link/b", tmp_path / "c", "--from", "-", stdin="d\n")
    assert result.exit_code == 0
    assert fake.requests == [protocol.Evict(["a", "b", "c", "d"])]


@pytest.mark.parametrize(
    ("args", "status", "reason"),
    [
        ([], 2, "no names given"),
        (["--from", "/none"], 2, "--from: /none cannot be read: No such file"),
        (["/etc/passwd"], 1, "/etc/passwd: not below the mount point"),
        (["a/../b"], 1, "a/../b: has an empty, '.' or '..' component"),
        (["a" * 256], 1, "a component is over 255 bytes"),
    ],
)
@pytest.mark.parametrize("verb", ["lookup", "prefetch", "evict", "pin", "unpin"])
def test_bad_names_are_refused_before_anything_is_asked(
    daemon, tmp_path: Path, verb: str, args: list[str], status: int, reason: str
) -> None:
    fake = daemon(rows(lambda _: True))
    result = run(verb, tmp_path, *args)
    assert result.exit_code == status
    assert reason in result.stderr
    assert fake.requests == []


def test_names_that_are_not_text_are_refused(daemon, tmp_path: Path) -> None:
    daemon(rows(lambda _: True))
    result = run("lookup", tmp_path, "--from", "-", stdin=b"a\xff\n")
    assert (result.exit_code, result.stderr) == (1, "ucmfs: a\\udcff: is not UTF-8; use the file itself\n")


# Acting


def test_prefetch_waits_and_names_what_no_stage_has(daemon, tmp_path: Path) -> None:
    fake = daemon(rows(lambda name: name != "n7"))
    result = run("prefetch", tmp_path, *[f"n{number}" for number in range(100)])
    assert result.exit_code == 1
    assert result.stdout == "prefetched 99 of 100 blocks\n"
    assert result.stderr == "ucmfs: n7: no stage has it\n"
    assert all(request.wait for request in fake.requests)
    assert sum(len(request.names) for request in fake.requests) == 100


def test_prefetch_shows_a_bar_on_a_terminal(daemon, tmp_path: Path) -> None:
    daemon(rows(lambda _: True))
    ours, theirs = os.openpty()
    command = [BIN / "ucmfs", "prefetch", tmp_path, *[f"n{number}" for number in range(100)]]
    environment = os.environ | {"TERM": "xterm"}
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=theirs, text=True, env=environment, check=False)
    os.close(theirs)
    shown = os.read(ours, 1 << 16).decode()
    os.close(ours)
    assert (done.returncode, done.stdout) == (0, "prefetched 100 of 100 blocks\n")
    assert "100/100" in shown


def test_flush_of_everything(daemon, tmp_path: Path) -> None:
    fake = daemon(lambda _: protocol.Reply(result={"left": [], "error": None}))
    result = run("flush", tmp_path, "--timeout", "5")
    assert (result.exit_code, result.output) == (0, "")
    [request] = fake.requests
    assert request.names == []
    assert 0 < request.timeout <= 5


def test_flush_names_what_stays_dirty(daemon, tmp_path: Path) -> None:
    fake = daemon(lambda request: protocol.Reply(result={"left": request.names[:1], "error": "Posix: no room"}))
    result = run("flush", tmp_path, "a", "b")
    assert (result.exit_code, result.stderr) == (1, "ucmfs: a: still dirty\nucmfs: Posix: no room\n")
    assert fake.requests[0].names == ["a", "b"]


def test_flush_counts_those_that_the_reply_has_no_room_for(daemon, tmp_path: Path) -> None:
    daemon(lambda _: protocol.Reply(result={"left": ["a"], "total": 5000, "error": None}))
    result = run("flush", tmp_path)
    assert (result.exit_code, result.stderr) == (1, "ucmfs: a: still dirty\nucmfs: and 4999 more: still dirty\n")


def test_evict_counts_and_names_refusals(daemon, tmp_path: Path) -> None:
    daemon(faulty)
    result = run("evict", tmp_path, "a", "b", "c")
    assert (result.exit_code, result.stdout, result.stderr) == (
        1,
        "evicted 2 of 3 blocks\n",
        "ucmfs: b: it is pinned\n",
    )


@pytest.mark.parametrize(("verb", "on"), [("pin", True), ("unpin", False)])
def test_pin_and_unpin(daemon, tmp_path: Path, verb: str, on: bool) -> None:
    fake = daemon(rows(lambda name: name != "b"))
    result = run(verb, tmp_path, "a", "b")
    assert fake.requests == [protocol.Pin(["a", "b"], on)]
    assert (result.exit_code, result.stdout, result.stderr) == (
        1,
        f"{verb}ned 1 of 2 blocks\n",
        "ucmfs: b: not in the first stage; prefetch it before\n",
    )
    assert run(verb, tmp_path, "a").exit_code == 0


def test_umount_passes_its_bounds_on_and_names_what_is_left(daemon, tmp_path: Path) -> None:
    fake = daemon(lambda _: protocol.Reply(result={"left": ["abc/1"], "error": None}))
    result = run("umount", tmp_path, "--timeout", "7")
    assert fake.requests == [protocol.Unmount(7.0, False)]
    assert result.exit_code == 1
    assert "stays mounted: 1 dirty blocks are left: abc/1; mend that and try again, or use --force" in result.stderr


# The whole way


@pytest.mark.mount
def test_the_installed_command_mounts_serves_and_unmounts(config: Path, tmp_path: Path) -> None:
    mount_point = tmp_path / "mnt"
    mount_point.mkdir()

    def ucmfs(*args: str | Path) -> subprocess.CompletedProcess[str]:
        return subprocess.run([BIN / "ucmfs", *args], capture_output=True, text=True, check=False)

    overrides = ["--set", f"log_file={tmp_path}/log", "--set", f"cache_dir={tmp_path}/cache"]
    mounted = ucmfs("mount", config, mount_point, *overrides)
    try:
        assert (mounted.returncode, mounted.stderr) == (0, "")
        (mount_point / "abc").mkdir()
        (mount_point / "abc/1").write_bytes(b"x" * 5000)
        again = ucmfs("mount", config, mount_point, *overrides)
        assert again.returncode == 2
        assert "is already a mount (fuse.ucmfs of ucmfs)" in again.stderr
        assert ucmfs("lookup", mount_point, mount_point / "abc/1").stdout == "abc/1: 5000\n"
        status = json.loads(ucmfs("status", mount_point, "--json").stdout)
        assert status["mount_point"] == str(mount_point)
    finally:
        done = ucmfs("umount", mount_point)
        remove_cache(tmp_path / "cache")
    assert (done.returncode, done.stderr) == (0, "")
    assert mounting.find_mount(mount_point) is None
    assert has_exited(status["pid"])
    assert (tmp_path / "data/abc/1").read_bytes() == b"x" * 5000
