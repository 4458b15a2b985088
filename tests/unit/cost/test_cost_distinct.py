"""Distinct rows of integer columns, compared with a dictionary of tuples."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from shardwise.cost import distinct_rows


def column(values: list[int]) -> Any:
    return np.array(values, dtype=np.int64)


def checked(*columns: list[int]) -> int:
    """Check representatives and inverse; returns the number of distinct rows."""
    rows, inverse = distinct_rows([column(values) for values in columns])
    whole = list(zip(*columns, strict=True))
    distinct = [whole[row] for row in rows]
    assert len(set(distinct)) == len(distinct) == len(set(whole))
    assert [distinct[place] for place in inverse] == whole
    return len(distinct)


def test_one_row() -> None:
    assert checked([7]) == 1


def test_runs_and_repeats() -> None:
    assert checked([1, 1, 2, 2, 1, 1], [5, 5, 5, 5, 5, 5]) == 2
    assert checked([1, 1, 2, 2, 1, 1], [5, 6, 5, 5, 5, 6]) == 3
    assert checked([3, 3, 3]) == 1


def test_every_row_distinct() -> None:
    assert checked([0, 0, 1, 1], [0, 1, 0, 1]) == 4
    assert checked([4, 3, 2, 1]) == 4


def test_the_representative_is_the_first_of_its_rows() -> None:
    rows, inverse = distinct_rows([column([2, 1, 2, 1, 0])])
    assert rows.tolist() == [4, 1, 0]
    assert inverse.tolist() == [2, 1, 2, 1, 0]


@pytest.mark.parametrize("seed", range(20))
def test_random_columns(seed: int) -> None:
    rng = random.Random(seed)
    length, width = rng.randint(1, 60), rng.randint(1, 6)
    checked(*([rng.randint(-2, rng.choice((1, 3, 9))) for _ in range(length)] for _ in range(width)))


@pytest.mark.parametrize("seed", range(20))
def test_values_too_large_for_one_key_together(seed: int) -> None:
    # Four columns of up to 2**40: their product of ranges exceeds 64 bits many times over.
    rng = random.Random(seed)
    values = [0, 1, 2**20, 2**40, 2**40 + 1]
    columns = [[rng.choice(values) for _ in range(80)] for _ in range(4)]
    assert checked(*columns) > 40


def test_single_columns_too_large_for_a_key() -> None:
    columns = [[0, 2**61, 0, 2**61, 5], [2**61, 0, 2**61, 0, 7], [1, 2, 1, 2, 2**60]]
    assert checked(*columns) == 3


def test_ranges_that_just_fill_a_key() -> None:
    assert checked([0, 2**30, 0, 2**30], [2**31, 0, 0, 2**31], [1, 1, 0, 0]) == 4
    assert checked([0, 2**31 - 1, 1, 0], [2**31 - 1, 0, 0, 2**31 - 1]) == 3


def test_no_rows() -> None:
    rows, inverse = distinct_rows([column([]), column([])])
    assert rows.tolist() == inverse.tolist() == []


def test_keys_that_would_wrap_around_are_ranked_first() -> None:
    # 2**33 * 2**32 is 0 in 64 bits: without ranking, the second row would be the first.
    assert checked([0, 2**33, 0], [0, 0, 2**32 - 1]) == 3


def test_columns_that_would_wrap_around_are_ranked_too() -> None:
    # Five values before a range of 2**62: 4 * 2**62 is 0 in 64 bits.
    assert checked([0, 1, 2, 3, 4, 0], [0, 0, 0, 0, 0, 2**62 - 1]) == 6
    assert checked([0, 1, 2, 3, 4, 0], [-5, -5, -5, -5, -5, 2**62 - 6]) == 6


def test_a_wide_key_is_ranked_before_a_ranked_column_joins_it() -> None:
    # 2**61 times eight values is 0 in 64 bits: without ranking the first column, the last row would be the
    # first.
    assert checked([0] * 8 + [2**61], [*(place * 2**59 for place in range(8)), 0]) == 9
