"""The stepped writer, from the outside."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import TracebackType

__all__ = ["SteppedWriter"]

PROGRAM = Path(__file__).with_name("stepped_writer.py")


class SteppedWriter:
    """A process that has done a step when step() returns, and nothing more."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-S", PROGRAM], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        )

    def __enter__(self) -> SteppedWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.kill()

    def step(self, verb: str, *arguments: object) -> int:
        """0, or the errno that the step met."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(verb, *arguments, file=self._process.stdin)
        return int(self._process.stdout.readline())

    def kill(self) -> None:
        """SIGKILL, wherever it is."""
        self._process.kill()
        self._process.communicate()
