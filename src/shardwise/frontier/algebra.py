"""The algebra of Pareto sets: union is choice, product is composition, every point remembers its origin.

Union is commutative and associative, product too, and product distributes over union (points as sets;
floating-point sums to rounding). No points are neutral for union, the single point 0 is neutral for
product.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from shardwise.errors import InternalError
from shardwise.frontier.reduce import Indices, Points, non_dominated

_PAIRS_AT_ONCE = 1 << 22
"""Pairs of points that a product holds in memory at a time."""


@dataclass(frozen=True, slots=True, eq=False)
class Frontier:
    """Non-dominated points and their origins.

    `points` (n, k) float64, in lexicographic order, k = 2 or 3 objectives, all minimised. `choice` (n, 2)
    says where point i comes from: (0, row) for `frontier_of`, (operand, point) for a union, (point of a,
    point of b) for a product.
    """

    points: Points
    choice: Indices

    def __len__(self) -> int:
        return len(self.points)


def frontier_of(points: npt.NDArray[Any] | Sequence[Sequence[float]], *, epsilon: float = 0.0) -> Frontier:
    """The frontier of the rows of `points` (n, k); `non_dominated` says what is kept."""
    rows = np.asarray(points, dtype=np.float64)
    selected = non_dominated(rows, epsilon=epsilon)
    return Frontier(rows[selected], np.column_stack([np.zeros_like(selected), selected]))


def union(a: Frontier, b: Frontier, *, epsilon: float = 0.0) -> Frontier:
    """What a choice between `a` and `b` can reach; of equal points that of `a` stays."""
    return union_all([a, b], epsilon=epsilon)


def union_all(frontiers: Sequence[Frontier], *, epsilon: float = 0.0) -> Frontier:
    """What a choice among all `frontiers` can reach; of equal points that of the first stays."""
    if not frontiers:
        raise InternalError("the union of no frontiers has no number of objectives")
    operands = np.repeat(np.arange(len(frontiers)), [len(frontier) for frontier in frontiers])
    places = np.concatenate([np.arange(len(frontier)) for frontier in frontiers])
    points = np.concatenate([frontier.points for frontier in frontiers])
    selected = non_dominated(points, epsilon=epsilon)
    return Frontier(points[selected], np.column_stack([operands[selected], places[selected]]))


def product(a: Frontier, b: Frontier, *, epsilon: float = 0.0) -> Frontier:
    """Non-dominated sums of a point of `a` and a point of `b`; of equal sums the first pair stays.

    An epsilon is paid once per call: after d nested calls on objectives that are not negative every exact
    point p has a kept q <= (1 + epsilon)^d p, because a sum of points within a factor is within that
    factor.
    """
    rows = max(1, _PAIRS_AT_ONCE // max(1, len(b)))
    parts = [_block_product(a, b, start, start + rows) for start in range(0, len(a), rows)]
    points = np.concatenate([part.points for part in parts]) if parts else a.points
    choice = np.concatenate([part.choice for part in parts]) if parts else a.choice
    selected = non_dominated(points, epsilon=epsilon)
    return Frontier(points[selected], choice[selected])


def _block_product(a: Frontier, b: Frontier, start: int, stop: int) -> Frontier:
    """The exact product of points `start` to `stop` (or the end) of `a` with all of `b`."""
    sums = (a.points[start:stop, None, :] + b.points[None, :, :]).reshape(-1, a.points.shape[1])
    selected = non_dominated(sums)
    return Frontier(sums[selected], np.column_stack([selected // len(b) + start, selected % len(b)]))
