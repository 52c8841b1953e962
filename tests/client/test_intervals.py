"""Which bytes are there, against a set of integers."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ucm.client.intervals import Intervals

BOUND = st.integers(0, 40)


@given(st.lists(st.tuples(BOUND, BOUND)))
def test_covers_what_a_set_would(ranges: list[tuple[int, int]]) -> None:
    intervals, model = Intervals(), set[int]()
    for start, end in ranges:
        intervals.add(start, end)
        model |= set(range(start, end))
        assert intervals.covered == len(model)


@given(st.permutations(range(20)))
def test_parts_in_any_order_end_as_one_range(order: list[int]) -> None:
    intervals = Intervals()
    for part in order:
        intervals.add(part * 7, part * 7 + 7)
    assert intervals.covered == 140
    assert (intervals._starts, intervals._ends) == ([0], [140])
