"""What the rest of a chain can come to beside each label, in few columns: which labels lead anywhere."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from shardwise.search.tracking import machine
from shardwise.search.tracking.labels import Labels, keys_on
from shardwise.search.tracking.lines import SLACK

Mask = npt.NDArray[np.bool_]
Indices = npt.NDArray[np.intp]
Values = npt.NDArray[np.float64]

_PAIRS_AT_ONCE = 1 << 20
"""Pairs of labels and rests that are held in memory at a time."""


@dataclass(frozen=True, slots=True, eq=False)
class Completions:
    """Of a chain whose held bytes are paid in seconds, `rate` of them a byte, all that can be `prefix` of
    each border and `suffix` it: whole solutions are wanted as far as the larger time, and `rate` times the
    largest peak, come to less than `cutoff` seconds. `share` is that of hidden_s in the sum that they are
    ordered by.

    A weighted sum bounds what labels end in by a mean of both times and of all peaks, which tells little of a
    few large costs that are in one time, or in the other. These are the times and peaks themselves.
    """

    prefix: Mapping[int, Labels]
    suffix: Mapping[int, Labels]
    rate: float
    share: float
    cutoff: float

    def completed(self, table: Labels, border: int, *, is_prefix: bool) -> Labels:
        """The labels of a table ahead of a border, or behind it, that come to less than the reach with some
        rest."""
        matches = _Matches.of(
            table, (self.suffix if is_prefix else self.prefix)[border], self.rate, self.share
        )
        left = np.flatnonzero(matches.is_there)
        own = dualised_points(table.points[left], self.rate)
        found = _are_within(
            own, matches.at[left], matches.completions, matches.places, self.cutoff * (1.0 + SLACK)
        )
        return _some(table, left[found])

    def completed_between(self, table: Labels, before: int, after: int) -> Mask:
        """Which labels of a table between two borders come to less than the reach with some rest before and
        some behind; at an end of the chain, with what is at the other. All where there is no machine code."""
        if not machine.is_installed():
            return np.ones(len(table), dtype=bool)
        from shardwise.search.tracking.compiled_rests import are_within_both

        own = dualised_points(table.points, self.rate)
        nothing = _Matches(np.zeros(len(table), dtype=np.intp), np.ones(len(table), dtype=bool),
                       np.zeros((1, 3)), np.array([0, 1], dtype=np.intp))  # fmt: skip
        sides = [
            _Matches.of(table, completions[border], self.rate, self.share)
            if border in completions
            else nothing
            for completions, border in ((self.prefix, before), (self.suffix, after))
        ]
        found: Mask = sides[0].is_there & sides[1].is_there
        left = np.flatnonzero(found)
        one, other = sides
        found[left] = are_within_both(
            np.ascontiguousarray(own[left]), one.at[left], one.completions, one.places, other.at[left],
            other.completions,
            other.places, self.share, self.cutoff * (1.0 + SLACK),
        )  # fmt: skip
        return found


@dataclass(frozen=True, slots=True, eq=False)
class _Matches:
    """The rests that each label of a table meets: those from places[at] to places[at + 1] of `completions`
    (n, 3), by ascending weighted sum of both times; whether there is any."""

    at: Indices
    is_there: Mask
    completions: Values
    places: Indices

    @staticmethod
    def of(table: Labels, rest: Labels, rate: float, share: float) -> _Matches:
        """Those that agree in the variables they share; hidden_s has this share of the sum."""
        shared = tuple(variable for variable in table.variables if variable in rest.variables)
        points = dualised_points(rest.points, rate)
        keys, table_keys = keys_on(rest, shared), keys_on(table, shared)
        order = np.lexsort((points[:, :2] @ [share, 1.0 - share], keys))
        known, starts = np.unique(keys[order], return_index=True)
        at = np.minimum(np.searchsorted(known, table_keys), max(len(known) - 1, 0))
        is_there = known[at] == table_keys if len(known) else np.zeros(len(table), dtype=bool)
        places = np.append(starts, len(order)).astype(np.intp)
        return _Matches(at, is_there, np.ascontiguousarray(points[order]), places)


def dualised_points(points: Values, rate: float) -> Values:
    """Folded columns (n, 4) in seconds: both times with what is held, and the peak, (n, 3)."""
    resident_s = rate * points[:, 2]
    return np.stack([points[:, 0] + resident_s, points[:, 1] + resident_s, rate * points[:, 3]], axis=1)


def _some(table: Labels, rows: Indices) -> Labels:
    """Some labels of a table."""
    if len(rows) == len(table):
        return table
    return Labels(table.variables, table.sizes, table.cells[rows], table.points[rows], ((table, rows),))


def _are_within(own: Values, at: Indices, completions: Values, places: Indices, cutoff: float) -> Mask:
    """Which rows (n, 3) come to less than `cutoff` with any of the rests places[at] to places[at + 1]."""
    if machine.uses_numba(len(own) * len(completions)):
        from shardwise.search.tracking.compiled_rests import are_within

        return are_within(np.ascontiguousarray(own), at, completions, places, cutoff)
    found = np.zeros(len(own), dtype=bool)
    for group in np.unique(at).tolist():
        rows, some = np.flatnonzero(at == group), completions[places[group] : places[group + 1]]
        step = max(1, _PAIRS_AT_ONCE // len(some))
        for start in range(0, len(rows), step):
            mine = own[rows[start : start + step], None]
            time_s = (mine[..., :2] + some[None, :, :2]).max(axis=2)
            whole = time_s + np.maximum(mine[..., 2], some[None, :, 2])
            found[rows[start : start + step]] = (whole < cutoff).any(axis=1)
    return found
