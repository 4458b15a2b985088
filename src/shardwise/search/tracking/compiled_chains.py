"""Least sums along a chain as machine code: what `chained` does in numpy where numba is not installed.

All that is added up lies side by side for one weight after the other, so that the processor adds up several
at a time, and sums of every choice of the hubs with every pair of borders are never held at once.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from shardwise.search.tracking.compiled import numba_compiled

Indices = npt.NDArray[np.intp]
Values = npt.NDArray[np.float64]


@numba_compiled
def extended_sums(
    before: Values, table: Values, before_at: Indices, table_at: Indices, found: Values
) -> None:
    """Lower `found` (weights, hubs, after) to the least of `before` (weights, hubs, from) and `table`
    (weights, hubs, from, after) together; choice h of the hubs is before_at[h] and table_at[h] there."""
    for j in range(len(found)):
        for h in range(found.shape[1]):
            target, own, rows = found[j, h], before[j, before_at[h]], table[j, table_at[h]]
            for start in range(len(own)):
                first, row = own[start], rows[start]
                for end in range(len(target)):
                    target[end] = min(target[end], first + row[end])


@numba_compiled
def least_outside(
    prefix: Values, suffix: Values, prefix_at: Indices, suffix_at: Indices, into: Indices, found: Values
) -> None:
    """Lower `found` (weights, kept hubs, entry, exit) to the least of `prefix` (weights, hubs, entry) and
    `suffix` (weights, hubs, exit) together; choice h of the hubs is ahead_at[h], behind_at[h] and into[h]."""
    for j in range(len(found)):
        for h in range(len(into)):
            one, other, target = prefix[j, prefix_at[h]], suffix[j, suffix_at[h]], found[j, into[h]]
            for entry in range(len(one)):
                first, row = one[entry], target[entry]
                for end in range(len(row)):
                    row[end] = min(row[end], first + other[end])
