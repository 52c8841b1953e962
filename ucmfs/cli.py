"""The `ucmfs` command: one function per verb. And `mount.ucmfs`, which serves fstab.

Exit status: 0 if all is well, 1 if something failed or a block asked for is not there, 2 for a configuration or a
command line that cannot be used.
"""

from __future__ import annotations

import json
import logging
import os
import re
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
import typer.core
import yaml
from rich.console import Console
from rich.filesize import pick_unit_and_suffix
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from ucmfs import config, mounting
from ucmfs.block import check_name
from ucmfs.control import protocol
from ucmfs.control.connection import Connection, row_errors
from ucmfs.errors import ConfigError, InvalidName, ProtocolError, UcmfsError

__all__ = ["app", "main", "mount_helper"]

ANSWER_TIMEOUT = 30.0
"""Seconds for a request that needs no lower stage's work."""
WORK_TIMEOUT = 300.0
"""Seconds for a request that moves blocks."""
PREFETCH_BATCH = 64
"""Names in one prefetch request: the progress bar moves by so many at most."""
BATCH_BYTES = 1 << 17
"""Bytes of names in one request. A packet must fit the socket's send buffer, 208 KiB by default."""

# fstab's words for mount(8) and systemd; they are not for us.
_MOUNT_WORDS = re.compile(
    "defaults|(no)?auto|(no)?users?|owner|group|nofail|_netdev|comment|x-.*|"
    "(no)?relatime|strictatime|(no)?lazytime|(no)?iversion",
    re.IGNORECASE,
)
# What mount(2) and fusermount3 take.
_FUSE_WORDS = (
    *("rw", "ro", "suid", "nosuid", "dev", "nodev", "exec", "noexec", "sync", "async", "dirsync", "atime", "noatime"),
    *("nodiratime", "allow_other", "default_permissions", "fsname", "subtype"),
)


# Errors


@contextmanager
def _reported(*, debug: bool) -> Iterator[None]:
    """Turn an error of the project into a message and an exit status."""
    try:
        yield
    except UcmfsError as error:
        if debug:
            traceback.print_exception(error)
        _complain(str(error))
        raise typer.Exit(2 if isinstance(error, ConfigError) else 1) from error


def _complain(message: str) -> None:
    typer.echo(f"ucmfs: {message}", err=True)


class _Group(typer.core.TyperGroup):
    def invoke(self, ctx: Any) -> Any:
        with _reported(debug=ctx.params["debug"]):
            return super().invoke(ctx)


class _Command(typer.core.TyperCommand):
    def invoke(self, ctx: Any) -> Any:
        with _reported(debug=ctx.params["verbose"]):
            return super().invoke(ctx)


app = typer.Typer(
    cls=_Group, no_args_is_help=True, add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False
)
helper = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)

ConfigFile = Annotated[Path, typer.Argument(metavar="CONFIG", help="YAML file.")]
MountPoint = Annotated[Path, typer.Argument(metavar="MOUNTPOINT")]
Names = Annotated[list[str] | None, typer.Argument(metavar="NAME...", help="Below the mount, or whole paths in it.")]
NamesFile = Annotated[str | None, typer.Option("--from", metavar="FILE", help="Read names, one a line; - is stdin.")]
Overrides = Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override a key.")]
MountOptions = Annotated[list[str] | None, typer.Option("-o", metavar="OPTIONS", help="As for mount(8).")]
AsJson = Annotated[bool, typer.Option("--json", help="For programs.")]


@app.callback()
def _common(debug: Annotated[bool, typer.Option("--debug", help="Show where an error came from.")] = False) -> None:
    """Mount a pipeline of stages as a directory of KV cache blocks, and ask the mount about it."""
    logging.basicConfig(level=logging.DEBUG if debug else logging.WARNING, format="ucmfs: %(message)s")


# Mount


@app.command()
def mount(
    config_file: ConfigFile,
    mount_point: MountPoint,
    options: MountOptions = None,
    overrides: Overrides = None,
    foreground: Annotated[bool, typer.Option("--foreground", help="Stay until the mount ends; log to stderr.")] = False,
    timeout: Annotated[float, typer.Option(min=0, help="Seconds until it must serve.")] = 30.0,
) -> None:
    """Mount; return once the mount serves."""
    fuse_options, more = _mount_options(options or [])
    section = _checked(config_file, [*more, *(overrides or [])])
    mounting.mount(section, mount_point, fuse_options, foreground=foreground, timeout=timeout)


@app.command()
def umount(
    mount_point: MountPoint,
    timeout: Annotated[float, typer.Option(min=0, help="Seconds for writing dirty blocks back.")] = WORK_TIMEOUT,
    force: Annotated[bool, typer.Option("--force", help="Unmount even if blocks are still dirty.")] = False,
) -> None:
    """Write dirty blocks back and unmount; name what is left if that fails."""
    mounting.unmount(mount_point, timeout=timeout, force=force)


@app.command()
def restart(
    mount_point: MountPoint,
    timeout: Annotated[float, typer.Option(min=0, help="Seconds until the new daemon must answer.")] = 30.0,
) -> None:
    """Replace the daemon by one of the version installed now; files stay open."""
    pid = mounting.restart(mount_point, timeout=timeout)
    typer.echo(f"pid {pid} serves {mount_point}")


@app.command("check-config")
def check_config(config_file: ConfigFile, overrides: Overrides = None, as_json: AsJson = False) -> None:
    """Check a configuration, and show what it comes to, secrets masked."""
    section = _checked(config_file, overrides or [])
    shown = config.masked(section)
    if as_json:
        typer.echo(json.dumps(shown, indent=2))
    else:
        typer.echo(f"# {config_file} is valid")
        rest = {key: value for key, value in shown.items() if key != "store_pipeline"}
        typer.echo(yaml.safe_dump({"store_pipeline": section.store_pipeline} | rest, sort_keys=False).rstrip())


@helper.command(cls=_Command)
def _helper(
    spec: ConfigFile,
    mount_point: MountPoint,
    options: MountOptions = None,
    sloppy: Annotated[bool, typer.Option("-s", help="Ignore unknown mount options.")] = False,
    fake: Annotated[bool, typer.Option("-f", help="Check everything, mount nothing.")] = False,
    no_mtab: Annotated[bool, typer.Option("-n", help="For mount(8); does nothing.")] = False,
    verbose: Annotated[bool, typer.Option("-v", help="Show where an error came from.")] = False,
    kind: Annotated[str | None, typer.Option("-t", help="For mount(8); does nothing.")] = None,
) -> None:
    """Mount for mount(8) and fstab, such as "/etc/kv.yaml /mnt/kv ucmfs defaults,set.buffer_number=2048 0 0"."""
    logging.basicConfig(format="mount.ucmfs: %(message)s")
    fuse_options, overrides = _mount_options(options or [], sloppy=sloppy)
    section = _checked(spec, overrides)
    if fake:
        mounting.check_mount_point(mount_point)
    else:
        mounting.mount(section, mount_point, fuse_options)


def _checked(config_file: Path, overrides: Sequence[str]) -> config.Section:
    """The configuration, found to be good, so that nothing is touched for one that is not."""
    from ucmfs import daemon  # here, so that commands that only talk to a mount need not load it

    section = config.load(config_file, overrides)
    daemon.check(section)
    return section


def _mount_options(given: Sequence[str], *, sloppy: bool = False) -> tuple[frozenset[str], list[str]]:
    """Divide the options of -o into those of FUSE and overrides of the configuration."""
    fuse_options: set[str] = set()
    overrides: list[str] = []
    for option in (option for group in given for option in group.split(",") if option):
        word = option.partition("=")[0]
        if word.startswith("set."):
            overrides.append(option.removeprefix("set."))
        elif word in _FUSE_WORDS:
            fuse_options.add(option)
        elif not (sloppy or _MOUNT_WORDS.fullmatch(word)):
            near = get_close_matches(word, _FUSE_WORDS, n=1)
            hint = f"; did you mean {near[0]}?" if near else "; a key of the configuration is set by set.KEY=VALUE"
            raise ConfigError(f"unknown mount option{hint}", path=f"-o {word}")
    return frozenset(fuse_options), overrides


# Ask


@app.command()
def status(mount_point: MountPoint, as_json: AsJson = False) -> None:
    """Show the stages and what they hold."""
    with Connection.to_mount(mount_point, timeout=ANSWER_TIMEOUT) as connection:
        stats = connection.request(protocol.Stats()).result
    if as_json:
        typer.echo(json.dumps(stats, indent=2))
        return
    console = Console(highlight=False, markup=False, soft_wrap=True)
    console.print(f"{stats['pipeline']} at {stats['mount_point']}, pid {stats['pid']}, ucmfs {stats['version']}")
    table = Table(box=None, header_style="")
    table.add_column("stage")
    for column in ("capacity", "used", "free", "blocks", "dirty"):
        table.add_column(column, justify="right")
    table.add_column("error")
    for stage in stats["stages"]:
        sizes = (_size(stage.get(key)) for key in ("capacity", "used", "free"))
        counts = ("-" if stage.get(key) is None else str(stage[key]) for key in ("blocks", "dirty"))
        table.add_row(stage["label"], *sizes, *counts, stage.get("error") or "")
    console.print(table)
    for what, key in ("reads", "data_path"), ("writes", "write_path"):
        reason = stats.get(f"{key}_reason")
        console.print(f"{what} by {'the daemon: ' + reason if reason else 'the kernel itself (passthrough)'}")
    counters = ("hits", "misses", "fills", "write_backs", "eviction_count", "corrupt")
    console.print(", ".join(f"{key} {stats[key]}" for key in counters if key in stats))
    for key, count in stats.get("errors", {}).items():
        console.print(f"errors {key} {count}")


def _size(size: int | None) -> str:
    if size is None:
        return "-"
    unit, suffix = pick_unit_and_suffix(size, ["B", "KiB", "MiB", "GiB", "TiB", "PiB"], 1024)
    return f"{size / unit:.1f} {suffix}" if unit > 1 else f"{size} B"


@app.command()
def lookup(mount_point: MountPoint, names: Names = None, source: NamesFile = None, as_json: AsJson = False) -> None:
    """Say which blocks are there, with their sizes; exit status 1 if any is missing."""
    found: list[dict[str, Any]] = []
    failed = False
    for name, size, error in _rows(mount_point, _names(mount_point, names, source), protocol.Lookup):
        failed |= size is None
        found.append({"name": name, "size": size} | ({"error": str(error)} if error else {}))
        if not as_json:
            typer.echo(f"{name}: {'miss' if size is None else size}")
        if error:
            _complain(str(error))
    if as_json:
        typer.echo(json.dumps(found, indent=2))
    if failed:
        raise typer.Exit(1)


@app.command()
def bench(
    mount_point: MountPoint,
    beside: Annotated[Path, typer.Option(help="A tmpfs to compare with.")] = Path("/dev/shm"),
    rounds: Annotated[int, typer.Option(min=1, help="Rounds; medians of them are shown.")] = 3,
    size: Annotated[list[int] | None, typer.Option(min=1, help="Bytes of the files; may be given again.")] = None,
    listed: Annotated[int, typer.Option(min=1, help="Names in the directory that is listed.")] = 10_000,
    only: Annotated[str | None, typer.Option(metavar="REGEX", help="Only figures that have it in their names.")] = None,
    as_json: AsJson = False,
) -> None:
    """Measure reads, writes and latencies of the mount beside a tmpfs; needs 128 MiB of room in its first stage."""
    from ucmfs import bench as measuring  # here, for secrets and statistics cost every other command time

    with Console(stderr=True).status("preparing") as status:
        result = measuring.measure(
            {str(beside): beside, str(mount_point): Path(mount_point)},
            sizes=size or measuring.SIZES,
            rounds=rounds,
            listed=listed,
            only=only,
            progress=status.update,
        )
    if as_json:
        typer.echo(json.dumps(result, indent=2))
    else:
        Console(width=None if sys.stdout.isatty() else 100).print(measuring.table(result))


# Act


@app.command()
def prefetch(mount_point: MountPoint, names: Names = None, source: NamesFile = None) -> None:
    """Fill blocks into the first stage; return when they are there."""
    wanted = _names(mount_point, names, source)
    columns = (TextColumn("prefetch"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    failures: list[str] = []
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task("prefetch", total=len(wanted))
        rows = _rows(
            mount_point,
            wanted,
            lambda batch: protocol.Prefetch(batch, wait=True),
            timeout=WORK_TIMEOUT,
            most=PREFETCH_BATCH,
        )
        for name, there, error in rows:
            progress.advance(task)
            if not there:
                failures.append(str(error or f"{name}: no stage has it"))
    _finish(f"prefetched {len(wanted) - len(failures)} of {len(wanted)} blocks", failures)


@app.command()
def flush(
    mount_point: MountPoint,
    names: Names = None,
    source: NamesFile = None,
    timeout: Annotated[float, typer.Option(min=0, help="Seconds for all of it.")] = WORK_TIMEOUT,
) -> None:
    """Write dirty blocks back, all of them if no name is given; name those that stay dirty."""
    wanted = _names(mount_point, names, source) if names or source else []
    deadline = time.monotonic() + timeout
    failures: list[str] = []
    with Connection.to_mount(mount_point, timeout=ANSWER_TIMEOUT) as connection:
        for batch in _batches(wanted) if wanted else [[]]:
            left = max(0.0, deadline - time.monotonic())
            answer = connection.request(protocol.Flush(batch, left), timeout=left + ANSWER_TIMEOUT).result
            failures += [f"{name}: still dirty" for name in answer["left"]]
            unnamed = answer.get("total", 0) - len(answer["left"])
            if unnamed > 0:
                failures.append(f"and {unnamed} more: still dirty")
            if answer["error"]:
                failures.append(str(answer["error"]))
    _finish(None, failures)


@app.command()
def evict(mount_point: MountPoint, names: Names = None, source: NamesFile = None) -> None:
    """Drop blocks from the first stage; those that are not there need nothing."""
    wanted = _names(mount_point, names, source)
    rows = list(_rows(mount_point, wanted, protocol.Evict))
    failures = [str(error) for _, _, error in rows if error]
    _finish(f"evicted {sum(bool(there) for _, there, _ in rows)} of {len(wanted)} blocks", failures)


@app.command()
def pin(mount_point: MountPoint, names: Names = None, source: NamesFile = None) -> None:
    """Keep blocks in the first stage."""
    _pin(mount_point, _names(mount_point, names, source), on=True)


@app.command()
def unpin(mount_point: MountPoint, names: Names = None, source: NamesFile = None) -> None:
    """Let pinned blocks go."""
    _pin(mount_point, _names(mount_point, names, source), on=False)


def _pin(mount_point: Path, wanted: list[str], *, on: bool) -> None:
    failures = [
        str(error or f"{name}: not in the first stage; prefetch it before")
        for name, there, error in _rows(mount_point, wanted, lambda batch: protocol.Pin(batch, on))
        if not there
    ]
    _finish(f"{'pinned' if on else 'unpinned'} {len(wanted) - len(failures)} of {len(wanted)} blocks", failures)


def _finish(summary: str | None, failures: Sequence[str]) -> None:
    """Say what was done and what was not; exit with 1 if anything was not."""
    if summary:
        typer.echo(summary)
    for failure in failures:
        _complain(failure)
    if failures:
        raise typer.Exit(1)


# Names and requests


def _names(mount_point: Path, names: Sequence[str] | None, source: str | None) -> list[str]:
    """The names given, by argument and by file. Raises ConfigError if there is none, InvalidName for a bad one."""
    given = list(names or [])
    if source is not None:
        try:
            data = sys.stdin.buffer.read() if source == "-" else Path(source).read_bytes()
        except OSError as error:
            raise ConfigError(f"{source} cannot be read: {error.strerror}", path="--from") from error
        given += [os.fsdecode(line) for line in data.splitlines() if line]
    if not given:
        raise ConfigError("no names given; give some, or --from FILE")
    roots = [os.path.abspath(mount_point), str(mounting.resolve(mount_point))]
    return [_below(name, roots) for name in given]


def _below(given: str, roots: Sequence[str]) -> str:
    """The name of the block for *given*, which may be a whole path in one of *roots*."""
    name = given
    if given.startswith("/"):
        inside = [given.removeprefix(f"{root}/") for root in roots if given.startswith(f"{root}/")]
        if not inside:
            raise InvalidName(given, f"not below the mount point {roots[0]}")
        name = inside[0]
    try:
        name.encode()
    except UnicodeEncodeError as error:
        shown = name.encode(errors="backslashreplace").decode()
        raise InvalidName(shown, "is not UTF-8; use the file itself") from error
    return check_name(name)


def _batches(names: Sequence[str], most: int = protocol.MAX_NAMES) -> Iterator[list[str]]:
    """*names* in parts that fit a packet each."""
    batch: list[str] = []
    size = 0
    for name in names:
        length = len(name.encode())
        if batch and (len(batch) == most or size + length > BATCH_BYTES):
            yield batch
            batch, size = [], 0
        batch.append(name)
        size += length
    if batch:
        yield batch


def _rows(
    mount_point: Path,
    names: Sequence[str],
    make: Callable[[list[str]], protocol.Request],
    *,
    timeout: float = ANSWER_TIMEOUT,
    most: int = protocol.MAX_NAMES,
) -> Iterator[tuple[str, Any, UcmfsError | None]]:
    """Ask about all of *names*, in batches; give each name with its row, or with None and its error."""
    with Connection.to_mount(mount_point, timeout=ANSWER_TIMEOUT) as connection:
        for batch in _batches(names, most):
            reply = connection.request(make(batch), timeout=timeout)
            if len(reply.rows) != len(batch):
                raise ProtocolError(f"the daemon answered {len(reply.rows)} rows to {len(batch)} names")
            errors = row_errors(batch, reply)
            yield from ((name, reply.rows[row], errors.get(row)) for row, name in enumerate(batch))


# Entry points


def main() -> NoReturn:
    """The console command `ucmfs`."""
    sys.exit(app())


def mount_helper() -> NoReturn:
    """The console command `mount.ucmfs`, called by mount(8) as `mount.ucmfs SPEC MOUNTPOINT [-sfnv] [-o OPTIONS]`."""
    sys.exit(helper())
