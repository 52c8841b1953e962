"""Two processes write one name at once: for everybody else it is whole or absent at every moment, never a mixture.

The writers go step by step, in every order that there is, and after each step this process, which is neither of them,
looks.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.engines.clients import same_on_disk
from tests.engines.processes import SteppedWriter
from tests.mounted import Mounted

HALF = {"A": 70_001, "B": 50_003}
"""Bytes that a writer writes at a time; of two lengths, so that a tail of one shows behind the other."""

RENAME_LAST = ("open", "write", "write", "close", "rename")
CLOSE_LAST = ("open", "write", "write", "rename", "close")
AT_ONCE = ("open", "write whole", "close", "rename")
FINAL_NAME = ("open", "write", "write", "close")


def whole(writer: str) -> bytes:
    return writer.encode() * 2 * HALF[writer]


def orders(first: Sequence[str], second: Sequence[str]) -> Iterator[str]:
    """Every order of A's and B's steps; where both take the same ones, A begins."""
    total = len(first) + len(second)
    for places in itertools.combinations(range(total), len(first)):
        if first != second or places[0] == 0:
            yield "".join("A" if place in places else "B" for place in range(total))


def who_is_it(path: Path) -> str:
    """The writer whose whole content is at *path*, "-" for none, "mixture" for anything else."""
    try:
        found = path.read_bytes()
    except FileNotFoundError:
        return "-"
    return next((writer for writer in HALF if found == whole(writer)), "mixture")


class Race:
    """A and B write one block, over and over, in one order of their steps after the other."""

    def __init__(self, place: Path, steps: dict[str, Sequence[str]], temporary: str = "{}.tmp") -> None:
        place.mkdir()
        self._place = place
        self._steps = steps
        self._temporary = temporary
        self._writers = {name: SteppedWriter() for name in HALF}
        self._found: dict[str, bytes] = {}

    def run(self, at_the_end: str) -> dict[str, bytes]:
        """All orders; at the end of each the block is one of *at_the_end*. Gives the files that are there now."""
        try:
            for order in orders(self._steps["A"], self._steps["B"]):
                self._run_one(order, at_the_end)
        finally:
            for writer in self._writers.values():
                writer.kill()
        return self._found

    def _run_one(self, order: str, at_the_end: str) -> None:
        final = self._place / order
        left = {name: iter(steps) for name, steps in self._steps.items()}
        story: list[str] = []
        seen = "-"
        for name in order:
            step = next(left[name])
            error = self._step(name, step, final)
            seen = who_is_it(final)
            story.append(f"{name} {step}{f' (errno {error})' if error else ''}: {seen}")
            assert seen != "mixture", "; ".join(story)
        assert seen in at_the_end, "; ".join(story)
        if seen != "-":
            self._found[f"{self._place.name}/{order}"] = final.read_bytes()

    def _step(self, name: str, step: str, final: Path) -> int:
        writer = self._writers[name]
        temporary = final.with_name(self._temporary.format(final.name))
        match step:
            case "open" | "join":
                return writer.step(step, temporary)
            case "write":
                return writer.step("write", name.encode().hex(), HALF[name])
            case "write whole":
                return writer.step("write", name.encode().hex(), 2 * HALF[name])
            case "rename":
                return writer.step(step, temporary, final)
            case "kill":
                writer.kill()
                self._writers[name] = SteppedWriter()
                return 0
            case _:
                return writer.step(step)


def test_one_temporary_name(mnt: Mounted) -> None:
    files = Race(mnt / "rename_last", {"A": RENAME_LAST, "B": RENAME_LAST}).run(at_the_end="AB")
    files |= Race(mnt / "close_last", {"A": CLOSE_LAST, "B": CLOSE_LAST}).run(at_the_end="AB")
    same_on_disk(mnt, files)


def test_one_temporary_name_and_a_killed_writer(mnt: Mounted) -> None:
    mnt.expect("dropped, its writer was killed")
    files: dict[str, bytes] = {}
    for taken in (1, 2, 3):
        killed = (*RENAME_LAST[:taken], "kill")
        files |= Race(mnt / f"{taken}", {"A": AT_ONCE, "B": killed}).run(at_the_end="A")
    # What is killed after its rename is dropped, and what it renamed over is gone, as on any file system.
    killed = ("open", "write whole", "rename", "kill")
    files |= Race(mnt / "renamed", {"A": AT_ONCE, "B": killed}).run(at_the_end="A-")
    same_on_disk(mnt, files)


def test_one_final_name(mnt: Mounted) -> None:
    mnt.expect("dropped, its writer was killed")
    files = Race(mnt / "ends", {"A": FINAL_NAME, "B": FINAL_NAME}, temporary="{}").run(at_the_end="AB")
    killed = (*FINAL_NAME[:2], "kill")
    files |= Race(mnt / "killed", {"A": FINAL_NAME, "B": killed}, temporary="{}").run(at_the_end="A")
    same_on_disk(mnt, files)


def test_one_temporary_name_that_is_not_truncated(mnt: Mounted, monkeypatch: pytest.MonkeyPatch) -> None:
    """LMCache with O_DIRECT: no O_TRUNC, one write of the same length by all."""
    monkeypatch.setitem(HALF, "B", HALF["A"])
    steps = ("join", "write whole", "close", "rename")
    same_on_disk(mnt, Race(mnt / "joined", {"A": steps, "B": steps}).run(at_the_end="AB"))


def test_a_block_that_is_changed_in_place_is_what_it_was_to_others(mnt: Mounted) -> None:
    block = mnt / "block"
    block.write_bytes(whole("A"))
    with SteppedWriter() as writer:
        assert writer.step("join", block) == 0
        assert writer.step("write", b"B".hex(), HALF["B"]) == 0
        assert who_is_it(block) == "A"
        assert writer.step("close") == 0
        changed = b"B" * HALF["B"] + whole("A")[HALF["B"] :]
        assert block.read_bytes() == changed
    same_on_disk(mnt, {"block": changed})


def test_a_rename_takes_what_is_published_while_another_changes_it(mnt: Mounted) -> None:
    block, temporary = mnt / "block", mnt / "block.tmp"
    with SteppedWriter() as first, SteppedWriter() as second:
        assert first.step("open", temporary) == 0
        assert first.step("write", b"A".hex(), 2 * HALF["A"]) == 0
        assert first.step("close") == 0
        assert second.step("join", temporary) == 0
        assert second.step("write", b"B".hex(), HALF["B"]) == 0
        assert first.step("rename", temporary, block) == 0
        assert who_is_it(block) == "A"
        second.kill()
        assert who_is_it(block) == "A"
    temporary.unlink(missing_ok=True)
    same_on_disk(mnt, {"block": whole("A")})
