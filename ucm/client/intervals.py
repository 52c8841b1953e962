"""Which bytes of a block have been written."""

from __future__ import annotations

from bisect import bisect_left, bisect_right

__all__ = ["Intervals"]


class Intervals:
    """A set of integers as disjoint half-open ranges, in order. Ranges that touch are joined."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []
        self.covered = 0
        """How many integers are in the set."""

    def add(self, start: int, end: int) -> None:
        """Add start <= n < end. What was there already counts once."""
        if start >= end:
            return
        # The ranges first..last-1 overlap or touch the new one and are swallowed by it.
        first = bisect_left(self._ends, start)
        last = bisect_right(self._starts, end)
        if first < last:
            start = min(start, self._starts[first])
            end = max(end, self._ends[last - 1])
            self.covered -= sum(self._ends[first:last]) - sum(self._starts[first:last])
        self._starts[first:last] = [start]
        self._ends[first:last] = [end]
        self.covered += end - start
