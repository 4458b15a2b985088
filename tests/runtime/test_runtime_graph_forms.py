"""Parts of a dim: every element is in one of them, whatever stays together."""

from __future__ import annotations

from itertools import pairwise, product

from shardwise.runtime.graphs.forms import part


def test_parts_have_each_element_once() -> None:
    for start, length, count, unit in product((0, 48), range(13), range(1, 5), range(1, 6)):
        parts = [part(start, start + length, count, index, unit) for index in range(count)]
        assert parts[0][0] == start and parts[-1][1] == start + length
        assert all(one[1] == other[0] for one, other in pairwise(parts))


def test_units_stay_together_where_no_other_axis_cut_them_apart() -> None:
    # 96 elements in units of 32: 3 units in two parts are 2 and 1. Behind an axis that cut them in halves of
    # 48, a unit and a half, two parts are 24 each.
    assert [part(0, 96, 2, index, 32) for index in (0, 1)] == [(0, 64), (64, 96)]
    assert [part(48, 96, 2, index, 32) for index in (0, 1)] == [(48, 72), (72, 96)]
