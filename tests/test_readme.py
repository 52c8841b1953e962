"""What README.md says: its blocks are run over real mounts, its tables are compared with the code.

A section's blocks run in order in one directory. `/mnt/kv`, `/data/ucm_cache` and the log file stand for temporary
places; where the section does not mount anything itself, the first block of "Mount it" is run before.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from pydantic_core import PydanticUndefined

from tests.memory import remove_cache
from tests.mounted import Mounted
from ucmfs import cli, mounting
from ucmfs.config import Options, PipelineOptions
from ucmfs.errors import MountError
from ucmfs.pipeline.builder import default_cache_dir
from ucmfs.stages.cache import CacheOptions
from ucmfs.stages.posix import PosixOptions
from ucmfs.telemetry import Counters

ROOT = Path(__file__).parents[1]
BIN = Path(sys.executable).parent
TEXT = (ROOT / "README.md").read_text()
MINUTE = 60

MakeMount = Callable[..., Mounted]


# Reading the file


@dataclasses.dataclass(frozen=True)
class Block:
    line: int
    kind: str
    text: str


def _sections() -> dict[str, str]:
    """The text below each heading of the second level, and what stands before the first, as ""."""
    parts = re.split(r"^## (.+)$", TEXT, flags=re.MULTILINE)
    return {"": parts[0], **dict(zip(parts[1::2], parts[2::2], strict=True))}


SECTIONS = _sections()


def blocks(section: str) -> list[Block]:
    text = SECTIONS[section]
    start = TEXT.index(text)
    return [
        Block(TEXT.count("\n", 0, start + found.start()) + 1, found[1], found[2])
        for found in re.finditer(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    ]


def table(section: str, header: str) -> list[list[str]]:
    """The rows of the tables of *section* that begin with *header*; cells as they are written, but for `\\|`."""
    rows: list[list[str]] = []
    for found in re.finditer(rf"^\| {re.escape(header)} .*\n\|[-|]+\n((?:\|.*\n)+)", SECTIONS[section], re.MULTILINE):
        for line in found[1].splitlines():
            cells = re.split(r"(?<!\\)\|", line)[1:-1]
            rows.append([cell.replace("\\|", "|").strip() for cell in cells])
    assert rows, f"no table of {header} in {section}"
    return rows


def code(cell: str) -> list[str]:
    """What stands in backticks in *cell*."""
    return re.findall("`([^`]+)`", cell)


# Blocks


class Place:
    """The temporary places that README's paths stand for, and the directory that its blocks run in."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.point, self.storage, self.log = root / "mnt", root / "data", root / "daemon.log"
        self._cache = default_cache_dir(str(self.point))

    def substitute(self, text: str) -> str:
        for path, mine in (
            ("/mnt/kv", self.point),
            ("/data/ucm_cache", self.storage),
            ("/var/log/ucmfs-kv.log", self.log),
        ):
            text = text.replace(path, str(mine))
        return text

    def run(self, block: Block) -> None:
        text = self.substitute(block.text)
        match block.kind:
            case "sh":
                self._execute(block, ["bash", "-euo", "pipefail", "-c", text])
            case "python":
                self._execute(block, [sys.executable, "-W", "error", "-c", text])
            case "yaml":
                path = self.root / "block.yaml"
                path.write_text(text)
                self._execute(block, ["ucmfs", "check-config", str(path)])
            case "fstab":
                spec, point, kind, options, _, _ = text.split()
                assert kind == "ucmfs"
                if mounting.find_mount(self.point):
                    self._execute(block, ["ucmfs", "umount", point])
                self._execute(block, ["mount.ucmfs", spec, point, "-o", options])
            case _:
                raise AssertionError(f"README.md:{block.line}: nothing can run a block of kind {block.kind!r}")

    def _execute(self, block: Block, command: list[str]) -> None:
        environment = {**os.environ, "PATH": f"{BIN}:{os.environ['PATH']}"}
        done = subprocess.run(
            command,
            cwd=self.root,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=MINUTE,
            check=False,
        )
        assert done.returncode == 0, f"README.md:{block.line}: status {done.returncode}\n{done.stdout}{done.stderr}"
        assert not done.stderr, f"README.md:{block.line}: {done.stderr}"

    def end(self) -> None:
        if mounting.find_mount(self.point):
            subprocess.run([BIN / "ucmfs", "umount", "--force", self.point], check=True, timeout=MINUTE)
        remove_cache(self._cache)


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    place = Place(tmp_path)
    try:
        yield place
    finally:
        place.end()
    if place.log.exists():
        assert not re.search(r"WARNING|ERROR|CRITICAL|Traceback", place.log.read_text())


@pytest.mark.parametrize("section", [name for name in SECTIONS if name and blocks(name)])
def test_the_blocks_of_a_section_run(section: str, place: Place) -> None:
    if section != "Mount it":
        place.storage.mkdir()
        if "/mnt/kv" in "".join(block.text for block in blocks(section)):
            place.run(blocks("Mount it")[0])
    for block in blocks(section):
        place.run(block)


def test_the_first_block_is_the_two_scripts() -> None:
    """They are not run from here: one runs the tests, the other is run by test_scripts.py."""
    [block] = blocks("")
    commands = [line.split("#")[0].strip() for line in block.text.splitlines()]
    assert commands == ["./scripts/quickstart", "./scripts/test"]
    assert all(os.access(ROOT / command, os.X_OK) for command in commands)


def test_no_block_is_of_a_kind_that_is_not_run() -> None:
    fences = re.findall(r"^```(.*)$", TEXT, re.MULTILINE)
    assert set(fences[::2]) <= {"sh", "python", "yaml", "fstab"}
    assert len(fences) == 2 * sum(len(blocks(name)) for name in SECTIONS)


def test_links_lead_somewhere() -> None:
    anchors = {re.sub(r"[^\w -]", "", name.lower()).replace(" ", "-") for name in SECTIONS}
    for target in re.findall(r"\]\(([^)]+)\)", TEXT):
        assert target[1:] in anchors if target.startswith("#") else (ROOT / target).exists(), target


# Tables


@pytest.mark.parametrize(
    ("heading", "options"),
    [("Of the pipeline:", PipelineOptions), ("Of `Cache`:", CacheOptions), ("Of `Posix`:", PosixOptions)],
)
def test_every_key_is_there_with_its_default(heading: str, options: type[Options]) -> None:
    after = SECTIONS["Configuration"].split(heading)[1]
    lines = re.match(r"\s*\| key .*\n\|[-|]+\n((?:\|.*\n)+)", after)
    assert lines
    told: dict[str, Any] = {}
    for line in lines[1].splitlines():
        key, default = (cell.replace("\\|", "|").strip() for cell in re.split(r"(?<!\\)\|", line)[1:3])
        match default:
            case "none":
                told[code(key)[0]] = None
            case "required":
                told[code(key)[0]] = PydanticUndefined
            case _:
                told[code(key)[0]] = yaml.safe_load(code(default)[0])
    assert told == {name: field.default for name, field in options.model_fields.items()}


def test_every_command_is_there() -> None:
    group = typer.main.get_command(cli.app)
    assert isinstance(group, typer.core.TyperGroup)
    told = [code(row[0])[0].split()[1] for row in table("Commands", "command")]
    assert sorted(told) == sorted(group.commands)
    for row in table("Commands", "command"):
        command = group.commands[code(row[0])[0].split()[1]]
        known = {name for parameter in command.params for name in parameter.opts}
        assert {word for word in code(row[1]) if word.startswith("-")} <= {*known, "--set KEY=VALUE"}


def test_every_counter_is_there() -> None:
    told = {name for row in table("Look inside", "counter") for name in code(row[0])}
    assert told == {field.name for field in dataclasses.fields(Counters)} - {"errors"} | {"eviction_count"}


def test_every_file_of_the_mount_is_there(mnt: Mounted) -> None:
    told = {name for block in blocks("Look inside") for name in re.findall(r"\.ucmfs/([\w.]+)", block.text)}
    assert told == set(os.listdir(mnt / ".ucmfs")) - {"sock"}


def test_xattrs_do_what_the_table_says(mnt: Mounted) -> None:
    block = mnt / "block"
    block.write_bytes(b"kv" * 5000)
    mnt.flush()
    rows = {code(row[0])[0]: row[1:] for row in table("Look inside", "xattr of a block")}
    assert set(os.listxattr(block)) == {name for name, (reads, _) in rows.items() if "absent" not in reads}
    for name, (_, setting) in rows.items():
        if setting == "refused":
            with pytest.raises(PermissionError):
                os.setxattr(block, name, b"x")
    assert os.getxattr(block, "user.ucmfs.stage") == b"Cache,Posix"
    os.setxattr(block, "user.ucmfs.pin", b"1")
    assert os.getxattr(block, "user.ucmfs.pin") == b"1"
    os.setxattr(block, "user.ucmfs.pin", b"0")
    os.setxattr(block, "user.ucmfs.evict", b"1")
    assert os.getxattr(block, "user.ucmfs.stage") == b"Posix"
    os.setxattr(block, "user.ucmfs.prefetch", b"1")
    assert os.getxattr(block, "user.ucmfs.stage") == b"Cache,Posix"


# Troubleshooting: each message is provoked


def refused(make: MakeMount, **config: Any) -> str:
    """What `ucmfs mount` says."""
    return mount_refused(make(mount=False, **config))


def mount_refused(mounted: Mounted) -> str:
    mounted.write_config()
    done = mounted.ucmfs("mount", mounted.config_file, mounted.point, check=False)
    assert done.returncode == 2
    return done.stderr


def unknown_key(make: MakeMount) -> str:
    return refused(make, buffer_numbr=4)


def no_storage(make: MakeMount) -> str:
    return refused(make, storage_backends="/data/none")


def too_much_memory(make: MakeMount) -> str:
    return refused(make, cache_buffer_capacity_gb=1e6)


def unset_variable(make: MakeMount) -> str:
    return refused(make, storage_backends="${UCMFS_TEST_NOT_SET}")


def planned_stage(make: MakeMount) -> str:
    return refused(make, store_pipeline="Cache|Posix|S3")


def no_mount_point(make: MakeMount) -> str:
    mounted = make()
    return mounted.ucmfs("mount", mounted.config_file, "/mnt/none", check=False).stderr


def not_empty(make: MakeMount) -> str:
    mounted = make(mount=False)
    (mounted.point / "file").touch()
    return as_told(mount_refused(mounted), mounted)


def already_mounted(make: MakeMount) -> str:
    mounted = make()
    return as_told(mounted.ucmfs("mount", mounted.config_file, mounted.point, check=False).stderr, mounted)


def no_device(make: MakeMount) -> str:
    mounted = make(mount=False)
    device = mounted.root / "fuse"
    with pytest.raises(MountError) as found:
        mounting.check_mount_point(mounted.point, device=device)
    return str(found.value).replace(str(device), "/dev/fuse")


def nobody_answers(make: MakeMount) -> str:
    mounted = make(mount=False)
    return as_told(mounted.ucmfs("status", mounted.point, check=False).stderr, mounted)


def dead(make: MakeMount) -> str:
    mounted = make()
    mounted.kill_all(clear=False)
    with pytest.raises(OSError, match="not connected") as found:
        (mounted / "block").read_bytes()
    mounted.ucmfs("umount", mounted.point)
    return str(found.value)


def killed_daemon(make: MakeMount) -> str:
    mounted = make()
    mounted.kill_daemon()
    return mounted.log.read_text()


def hanging_daemon(make: MakeMount) -> str:
    mounted = make(daemon_hang_timeout=2)
    mounted.expect("it is killed", "starting another")
    os.kill(mounted.status()["daemon_pid"], signal.SIGSTOP)
    assert not (mounted / "block").exists()
    return mounted.log.read_text()


def failing_daemons(make: MakeMount) -> str:
    mounted = make()
    mounted.expect("starting another", "does not exist", "in a row failed")
    status = mounted.status()
    relay = os.pidfd_open(status["relay_pid"])
    mounted.storage.rename(mounted.root / "elsewhere")
    os.kill(status["daemon_pid"], signal.SIGKILL)
    mounted.wait_exit(relay)
    return mounted.log.read_text()


def busy(make: MakeMount) -> str:
    mounted = make()
    with (mounted / "block").open("wb"):
        return as_told(mounted.ucmfs("umount", mounted.point, check=False).stderr, mounted)


@contextlib.contextmanager
def obstructed(mounted: Mounted) -> Iterator[None]:
    """Blocks in directory a cannot be written back."""
    mounted.expect("stays dirty")
    (mounted / "a").mkdir()
    (mounted.storage / "a").touch()
    try:
        yield
    finally:
        (mounted.storage / "a").unlink()


def dirty_left(make: MakeMount) -> str:
    mounted = make()
    with obstructed(mounted):
        (mounted / "a/block").write_bytes(b"kv")
        return as_told(mounted.ucmfs("umount", mounted.point, check=False).stderr, mounted)


def stays_dirty(make: MakeMount) -> str:
    mounted = make()
    with obstructed(mounted):
        (mounted / "a/block").write_bytes(b"kv")
        mounted.ucmfs("flush", mounted.point, check=False)
        return mounted.log.read_text()


MIB = 1 << 20


def await_dropped(mounted: Mounted) -> None:
    """The kernel tells the daemon of the last close a little after close() or the process ended."""
    while not mounted.stats()["dropped"]:
        pass


def too_large(make: MakeMount) -> str:
    mounted = make(cache_buffer_capacity_gb=MIB / (1 << 30))
    mounted.expect("a write to it failed")
    with pytest.raises(OSError, match="No space left"):
        (mounted / "block").write_bytes(bytes(2 * MIB))
    await_dropped(mounted)
    return mounted.log.read_text()


def full_of_dirty(make: MakeMount) -> str:
    mounted = make(cache_buffer_capacity_gb=MIB / (1 << 30), write_back_deadline=0.2)
    mounted.expect("a write to it failed")
    with obstructed(mounted):
        (mounted / "a/one").write_bytes(bytes(MIB * 3 // 4))
        with pytest.raises(OSError, match="No space left"):
            (mounted / "a/two").write_bytes(bytes(MIB * 3 // 4))
        return mounted.log.read_text()


def killed_writer(make: MakeMount) -> str:
    mounted = make()
    mounted.expect("its writer was killed")
    subprocess.run(["bash", "-c", f"exec 3> {mounted.point}/block; echo half >&3; kill -9 $$"], check=False)
    await_dropped(mounted)
    return mounted.log.read_text()


def outrun(make: MakeMount) -> str:
    """The kernel writes by itself, quicker than room can be made, for all else is dirty."""
    mounted = make(cache_buffer_capacity_gb=1 / 16, write_back_interval=3600.0, write_back_batch_size=10**6)
    mounted.expect("the cache was full", "stays dirty")
    with obstructed(mounted):
        (mounted / "a/one").write_bytes(bytes(28 * MIB))
        fd = os.open(mounted / "block", os.O_WRONLY | os.O_CREAT)
        assert os.write(fd, bytes(40 * MIB)) < 40 * MIB
        with pytest.raises(OSError, match="No space left"):
            os.write(fd, bytes(MIB))
        os.close(fd)
        await_dropped(mounted)
        return mounted.log.read_text()


def as_told(said: str, mounted: Mounted) -> str:
    return said.replace(str(mounted.point), "/mnt/kv")


PROVOKED: dict[str, Callable[[MakeMount], str]] = {
    "buffer_numbr": unknown_key,
    "does not exist; make it": no_storage,
    "the machine has": too_much_memory,
    "environment variable": unset_variable,
    "S3": planned_stage,
    "no such directory": no_mount_point,
    "is not empty": not_empty,
    "is already a mount": already_mounted,
    "/dev/fuse": no_device,
    "no ucmfs daemon answers": nobody_answers,
    "Transport endpoint": dead,
    "5 daemons in a row": failing_daemons,
    "ended by SIGKILL": killed_daemon,
    "answered nothing": hanging_daemon,
    "resource busy": busy,
    "stays mounted: 1": dirty_left,
    "stays dirty": stays_dirty,
    "does not fit": too_large,
    "no room for": full_of_dirty,
    "a write to it failed": too_large,
    "the cache was full": outrun,
    "was killed": killed_writer,
}
"""What provokes each message of the table, by a part that only this one has."""

MESSAGES = [code(row[1])[0] for row in table("Troubleshooting", "symptom")]


def test_every_message_of_the_table_is_provoked_once() -> None:
    by_part = {part: [message for message in MESSAGES if part in message] for part in PROVOKED}
    assert sorted(message for found in by_part.values() for message in found) == sorted(MESSAGES)
    assert all(len(found) == 1 for found in by_part.values()), by_part


@pytest.mark.parametrize("part", PROVOKED)
def test_a_message_reads_as_told(part: str, make_mount: MakeMount) -> None:
    [message] = [message for message in MESSAGES if part in message]
    pattern = re.escape(message).replace(re.escape("..."), ".+")
    assert re.search(pattern, PROVOKED[part](make_mount)), f"is not {message}"
