"""Order of a ring over nodes with unequal links (`ring_order`).

A ring is as fast as its slowest hop, so the order minimises the slowest hop, and then the sum of hops. Equal
nodes form one class and are adjacent. Up to `EXACT_CLASSES` classes, dynamic programming over subsets is
exact (Held and Karp 1962). For more, insertion and local search (2-opt and relocation) find an order, and the
assignment bound is a lower bound: the least hop time whose hops give every class its own successor and
predecessor and connect all classes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from shardwise.errors import InternalError

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

EXACT_CLASSES: Final = 12
"""Largest number of classes for the exact Held-Karp search, whose time and memory grow as 2^classes."""


@dataclass(frozen=True, slots=True)
class RingOrder:
    """The classes in ring order from class 0, with seconds of the slowest hop and of all hops together.

    `bound_s` is a lower bound of the slowest hop of any ring.
    """

    order: tuple[int, ...]
    slowest_s: float
    total_s: float
    bound_s: float

    @property
    def is_optimal(self) -> bool:
        """Whether no order has a faster slowest hop, by the lower bound."""
        return self.slowest_s <= self.bound_s


def ring_order(hop_s: Any) -> RingOrder:
    """The ring order for hops of `hop_s[i, j]` seconds from class i to class j.

    Infinity means no connection; the diagonal is not read. InternalError for another shape, NaN or negative
    times.
    """
    hops: Floats = np.array(hop_s, dtype=np.float64)
    if hops.ndim != 2 or hops.shape[0] != hops.shape[1] or not len(hops):
        raise InternalError(f"hops between classes have shape (classes, classes), not {hops.shape}")
    np.fill_diagonal(hops, np.inf)
    if np.isnan(hops).any() or (hops < 0.0).any():
        raise InternalError("hops between classes have a negative or NaN time")
    if len(hops) == 1:
        return RingOrder((0,), 0.0, 0.0, 0.0)
    if len(hops) <= EXACT_CLASSES:
        bound_s = _held_karp(hops, np.maximum)[0]
        within = np.where(hops <= bound_s, hops, np.inf)
        order = _held_karp(within, np.add)[1]
    else:
        bound_s, order = _assignment_bound_s(hops), _local_search(hops, _insertion_order(hops))
    along = hops[order, [*order[1:], order[0]]]
    return RingOrder(tuple(order), float(along.max()), float(along.sum()), bound_s)


def _held_karp(hops: Floats, combine: Any) -> tuple[float, list[int]]:
    """The least cost of a ring, where `combine` joins the costs of two hops (maximum or sum), and its order.

    `best[visited, last]` is the least cost of a path from class 0 through the set `visited` (bits) that ends
    in `last`.
    """
    others = len(hops) - 1
    best: Floats = np.full((1 << others, others), np.inf)
    for last in range(others):
        best[1 << last, last] = hops[0, last + 1]
    inner = hops[1:, 1:]
    predecessor = np.zeros(best.shape, dtype=np.int64)
    for visited in range(1, 1 << others):
        for last in range(others):
            rest = visited & ~(1 << last)
            if visited >> last & 1 and rest:
                edges = combine(best[rest], inner[:, last])
                predecessor[visited, last] = best_edge = int(edges.argmin())
                best[visited, last] = edges[best_edge]
    every = (1 << others) - 1
    closed = combine(best[every], hops[1:, 0])
    last = int(closed.argmin())
    if np.isinf(closed[last]):
        return float("inf"), list(range(len(hops)))
    order, visited = [last + 1], every
    while visited & (visited - 1):
        visited, last = visited & ~(1 << last), int(predecessor[visited, last])
        order.append(last + 1)
    return float(closed.min()), [0, *order[::-1]]


def _assignment_bound_s(hops: Floats) -> float:
    """The least hop time whose hops give each class its own successor and connect all classes (a lower
    bound)."""
    times = np.unique(hops[np.isfinite(hops)])
    low, high = 0, len(times)
    while low < high:
        middle = (low + high) // 2
        if _may_have_ring(hops <= times[middle]):
            high = middle
        else:
            low = middle + 1
    return float(times[low]) if low < len(times) else float("inf")


def _may_have_ring(edges: Bools) -> bool:
    return _are_connected(edges) and _are_connected(edges.T) and _have_perfect_matching(edges)


def _are_connected(edges: Bools) -> bool:
    """Whether all classes are reached from class 0."""
    reached: Bools = np.zeros(len(edges), dtype=np.bool_)
    reached[0] = True
    for _ in range(len(edges)):
        reached = reached | edges[reached].any(axis=0)
    return bool(reached.all())


def _have_perfect_matching(edges: Bools) -> bool:
    """Whether every class can have its own successor: a perfect matching, by augmenting paths."""
    previous = [-1] * len(edges)

    def is_augmented(one: int, tried: set[int]) -> bool:
        for other in np.flatnonzero(edges[one]).tolist():
            if other not in tried:
                tried.add(other)
                if previous[other] < 0 or is_augmented(previous[other], tried):
                    previous[other] = one
                    return True
        return False

    return all(is_augmented(one, set()) for one in range(len(edges)))


def _cost(hops: Floats, order: list[int]) -> tuple[float, float]:
    along = hops[order, [*order[1:], order[0]]]
    return float(along.max()), float(along.sum())


def _insertion_order(hops: Floats) -> list[int]:
    """Insert classes one by one at the position that makes the slowest hop, and then the sum, least."""
    order = [0]
    for one in range(1, len(hops)):
        places = [[*order[:at], one, *order[at:]] for at in range(1, len(order) + 1)]
        order = min(places, key=lambda place: _cost(hops, place))
    return order


def _local_search(hops: Floats, order: list[int]) -> list[int]:
    """Reverse runs of classes (2-opt) and relocate single classes while that improves the order."""
    cost, is_better = _cost(hops, order), True
    while is_better:
        is_better = False
        for found in _neighbourhood(order):
            if (new := _cost(hops, found)) < cost:
                order, cost, is_better = found, new, True
                break
    return order


def _neighbourhood(order: list[int]) -> list[list[int]]:
    size = len(order)
    reversals = [
        [*order[:first], *reversed(order[first:last]), *order[last:]]
        for first in range(1, size)
        for last in range(first + 2, size + 1)
    ]
    relocations = []
    for at in range(1, size):
        rest = [*order[:at], *order[at + 1 :]]
        relocations += [[*rest[:to], order[at], *rest[to:]] for to in range(1, size) if to != at]
    return [*reversals, *relocations]
