"""Pricing what repeats only once: distinct combinations of a few columns of a table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Index = NDArray[np.intp]


def distinct_rows(columns: Sequence[NDArray[np.int64]]) -> tuple[Index, Index]:
    """Representatives and inverse of the distinct rows of integer columns of equal lengths.

    Returns (rows, inverse): `rows` holds the index of one row of each distinct combination, `inverse[i]` says
    which of them row i equals. Runs of equal rows, which tables in product order are full of, are folded
    before anything is sorted.
    """
    length = len(columns[0])
    if length <= 1:
        return np.zeros(length, dtype=np.intp), np.zeros(length, dtype=np.intp)
    change = np.zeros(length, dtype=bool)
    change[0] = True
    for column in columns:
        change[1:] |= column[1:] != column[:-1]
    heads = np.flatnonzero(change)
    key = _packed([column[heads] for column in columns])
    _, first, inverse = np.unique(key, return_index=True, return_inverse=True)
    if len(heads) == length:
        return heads[first], inverse
    return heads[first], inverse[np.cumsum(change) - 1]


def _packed(columns: Sequence[NDArray[np.int64]]) -> Any:
    """One int64 key per row; columns are ranked again whenever their product would not fit."""
    key = np.zeros(len(columns[0]), dtype=np.int64)
    radix = 1
    for column in columns:
        low = int(column.min())
        span = int(column.max()) - low + 1
        if radix * span >= 2**62:
            values, key = np.unique(key, return_inverse=True)
            radix = len(values)
        if radix * span >= 2**62:
            values, column = np.unique(column, return_inverse=True)
            low, span = 0, len(values)
        key = key * span + (column - low)
        radix *= span
    return key
