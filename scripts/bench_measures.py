"""What ucmfs is to reach, and whether a run of scripts/bench reached it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich import box
from rich.table import Table

from ucmfs import bench

__all__ = ["JUICEFS", "MEASURES", "PYFUSE3", "RCLONE", "TMPFS", "UCMFS", "WITHOUT", "Seen", "judge", "table"]

TMPFS, UCMFS, WITHOUT = "tmpfs", "ucmfs", "ucmfs, no passthrough"
PYFUSE3, JUICEFS, RCLONE = "pyfuse3", "JuiceFS", "rclone"

Result = Mapping[str, Any]
"""What bench.measure() gives; with --long also "restart" and "relay_memory"."""


@dataclass(frozen=True)
class Measure:
    text: str
    wanted: float
    take: Callable[[Result], float | None]
    """The value in a run; None if the run did not take it."""
    unit: str = ""
    at_most: bool = False
    option: str = ""
    """What scripts/bench must be told to take it."""


@dataclass(frozen=True)
class Seen:
    """A measure in one run. *reached* is None where the run did not take it."""

    measure: str
    wanted: str
    seen: float | None
    reached: bool | None
    option: str
    unit: str


def _ratios() -> Iterator[Measure]:
    def of(
        over: str, key: str, under: str, wanted: float, *, option: str = "", under_key: str = "", at_most: bool = False
    ) -> Measure:
        figures = (over, key), (under, under_key or key)
        text = f"{key}: {over} / {under}" + (f", {under_key}" if under_key else "")
        return Measure(text, wanted, lambda result: bench.ratio(result, *figures), at_most=at_most, option=option)

    for size, read, write in ("8 MiB", 0.90, 0.85), ("1 MiB", 0.85, 0.60):
        yield of(UCMFS, f"first read {size} x 1", TMPFS, read)
        yield of(UCMFS, f"reread {size} x 1", TMPFS, read)
        yield of(UCMFS, f"write {size} x 1", TMPFS, write)
    yield of(WITHOUT, "first read 8 MiB x 1", TMPFS, 0.35)
    yield of(WITHOUT, "reread 8 MiB x 1", TMPFS, 0.35)
    yield of(UCMFS, "open+close again", PYFUSE3, 0.35, option="--peers", at_most=True)
    yield of(UCMFS, "stat missing", PYFUSE3, 1.25, option="--peers", at_most=True)
    yield of(UCMFS, "first read 8 MiB x 1", JUICEFS, 5, option="--peers")
    yield of(UCMFS, "first read 8 MiB x 1", RCLONE, 10, option="--peers")
    yield of(UCMFS, "reread 8 MiB x 1", RCLONE, 10, option="--peers")


def _long() -> Iterator[Measure]:
    def of(part: str, key: str, text: str, wanted: float, unit: str = "") -> Measure:
        def take(result: Result) -> float | None:
            value: float | None = result.get(part, {}).get(key)
            return value

        return Measure(text, wanted, take, unit=unit, at_most=True, option="--long")

    yield of("restart", "errors", "errors while the daemon is killed every 2 s", 0)
    yield of("restart", "wrong", "wrong reads while the daemon is killed every 2 s", 0)
    yield of("restart", "longest_pause", "longest call while the daemon is killed every 2 s", 1, "s")
    yield of("relay_memory", "most_mib", "the relay's memory over a million requests", 30, "MiB")
    yield of("relay_memory", "growth_mib", "growth of the relay's memory over them", 1, "MiB")


MEASURES = (*_ratios(), *_long())


def judge(result: Result) -> list[Seen]:
    """All measures, as *result* has them."""
    judged = []
    for measure in MEASURES:
        value = measure.take(result)
        reached = None
        if value is not None:
            reached = value <= measure.wanted if measure.at_most else value >= measure.wanted
        wanted = f"{'not over' if measure.at_most else 'at least'} {measure.wanted:g} {measure.unit}".rstrip()
        judged.append(Seen(measure.text, wanted, value, reached, measure.option, measure.unit))
    return judged


def table(judged: Sequence[Seen]) -> Table:
    """*judged* for people."""
    shown = Table(title="measures", box=box.SIMPLE_HEAD, padding=0)
    for column in ("measure", "wanted"):
        shown.add_column(column, no_wrap=True)
    shown.add_column("seen", justify="right", no_wrap=True)
    shown.add_column("", no_wrap=True)
    for each in judged:
        if each.seen is None:
            seen, verdict = "-", f"not taken{f' ({each.option})' if each.option else ''}"
        else:
            seen = f"{each.seen:.2f} {each.unit}".rstrip() if each.seen % 1 else f"{each.seen:g} {each.unit}".rstrip()
            verdict = "[green]reached[/]" if each.reached else "[bold red]NOT reached[/]"
        shown.add_row(each.measure, each.wanted, seen, verdict)
    return shown


def as_json(judged: Sequence[Seen]) -> list[dict[str, Any]]:
    return [asdict(each) for each in judged]
