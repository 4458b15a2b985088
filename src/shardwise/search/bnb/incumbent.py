"""Goals of the search and their incumbents.

A `Goal` says which rows may still improve on its incumbents. A row is a strategy with its time and bytes on
the fullest rank, or a node with lower bounds of both. `Fastest` keeps a solution pool, `Smallest` the
strategy of least memory, `Tradeoff` the Pareto frontier of time and memory.

Of strategies within `PROVEN_TIE` of each other, the first in canonical text order is the incumbent, in
whatever order they are evaluated. So a bound prunes only above `PRUNE_FACTOR` times the incumbent.
"""

from __future__ import annotations

from copy import copy, deepcopy
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from shardwise.cost import Index, distinct_rows
from shardwise.plans import PROVEN_GAP
from shardwise.strategy import StrategyTable
from shardwise.ties import PROVEN_TIE, are_less, is_less, least_first, ties_of_least

Mask = NDArray[np.bool_]
Floats = NDArray[np.float64]

KIND_FIELDS = ("tp", "cp", "pp", "dp", "ep", "etp", "schedule", "recompute")
"""A kind of strategy. The members of the solution pool differ in at least one of these fields."""

PRUNE_FACTOR = 1.0 + PROVEN_GAP
"""Factor over the incumbent up to which a bound is not pruned, so that tied strategies are met."""


@dataclass(frozen=True, slots=True)
class Incumbent:
    """An evaluated strategy (a table of one row) with its step time and bytes on the fullest device."""

    time_s: float
    device_bytes: float
    table: StrategyTable


@dataclass(frozen=True, slots=True)
class Incumbents:
    """Evaluated strategies as columns: the form that processes exchange."""

    time_s: Floats
    device_bytes: Floats
    table: StrategyTable


NO_INCUMBENTS = Incumbents(np.zeros(0), np.zeros(0), StrategyTable.of([]))


class Goal(Protocol):
    """An objective with its incumbents. All rows that it is given fit in memory. `weighs_memory` says whether
    bytes are part of the objective."""

    weighs_memory: bool

    def may_improve(self, time_s: Any, device_bytes: Any | None = None) -> Mask:
        """Whether each row could change the incumbents; without bytes, whatever its memory."""
        ...

    def may_improve_kind(self, table: StrategyTable, time_s: Any, device_bytes: Any) -> Mask:
        """Whether each row could change the incumbents, given its kind."""
        ...

    def cutoff_s(self, device_bytes: Any) -> Any:
        """Seconds from which a row with these bytes cannot change the incumbents."""
        ...

    def order(self, time_s: Floats, device_bytes: Floats) -> Index:
        """The order in which rows are branched or evaluated: those first whose incumbents prune most."""
        ...

    def offer(self, table: StrategyTable, time_s: Floats, device_bytes: Floats) -> None:
        """Updates the incumbents with evaluated rows."""
        ...

    @property
    def incumbents(self) -> list[Incumbent]:
        """The incumbents, best first."""
        ...

    def copy(self) -> Goal:
        """An independent copy."""
        ...


class Fastest:
    """The fastest strategy and runners-up of other kinds: a solution pool of `pool_size` kinds.

    The cutoff is the time of the worst one in a full pool. All must take less than the fixed upper bound
    `threshold_s`.
    """

    weighs_memory = False

    def __init__(self, pool_size: int, *, below_s: float = float("inf")) -> None:
        self.pool_size = pool_size
        self._best: dict[tuple[int, ...], Incumbent] = {}
        self._worst_in_pool_s = float("inf")
        self.threshold_s = below_s

    def may_improve(self, time_s: Any, device_bytes: Any | None = None) -> Mask:
        return np.asarray((time_s < self.threshold_s) & (time_s <= self._worst_in_pool_s * PRUNE_FACTOR))

    def cutoff_s(self, device_bytes: Any) -> Any:
        return min(self.threshold_s, self._worst_in_pool_s * PRUNE_FACTOR)

    def may_improve_kind(self, table: StrategyTable, time_s: Any, device_bytes: Any) -> Mask:
        rows, kind = kinds_of(table)
        none = Incumbent(np.inf, 0.0, table)
        own = np.array([self._best.get(_key(table, int(row)), none).time_s for row in rows])
        return np.asarray(self.may_improve(time_s) & (time_s <= (own * PRUNE_FACTOR)[kind]))

    def order(self, time_s: Floats, device_bytes: Floats) -> Index:
        return np.argsort(time_s, kind="stable")

    def offer(self, table: StrategyTable, time_s: Floats, device_bytes: Floats) -> None:
        _, kind = kinds_of(table)
        least_s = np.full(len(table), np.inf)
        np.minimum.at(least_s, kind, time_s)
        tied = np.flatnonzero(self.may_improve(time_s) & ~are_less(least_s[kind], time_s, PROVEN_TIE))
        order = tied[table.take(tied).text_order()]
        _, first = np.unique(kind[order], return_index=True)
        for row in order[first]:
            key = _key(table, int(row))
            found = Incumbent(float(time_s[row]), float(device_bytes[row]), _row(table, int(row)))
            if key not in self._best or _is_better(found, self._best[key]):
                self._best[key] = found
        times = sorted(found.time_s for found in self._best.values())
        if len(times) >= self.pool_size:
            self._worst_in_pool_s = times[self.pool_size - 1]

    @property
    def incumbents(self) -> list[Incumbent]:
        best = [
            found for found in self._best.values() if found.time_s <= self._worst_in_pool_s * PRUNE_FACTOR
        ]
        return _best_first(best)[: self.pool_size]

    def copy(self) -> Fastest:
        return deepcopy(self)


class Smallest:
    """The strategy of least memory; of ties the fastest."""

    weighs_memory = True

    def __init__(self) -> None:
        self._best = Incumbent(float("inf"), float("inf"), StrategyTable.of([]))

    def may_improve(self, time_s: Any, device_bytes: Any | None = None) -> Mask:
        if device_bytes is None:
            return np.ones(np.shape(time_s), dtype=bool)
        best = self._best
        return np.asarray(
            are_less(device_bytes, best.device_bytes, PROVEN_TIE)
            | ((device_bytes <= best.device_bytes * PRUNE_FACTOR) & (time_s <= best.time_s * PRUNE_FACTOR))
        )

    def may_improve_kind(self, table: StrategyTable, time_s: Any, device_bytes: Any) -> Mask:
        return self.may_improve(time_s, device_bytes)

    def cutoff_s(self, device_bytes: Any) -> Any:
        return np.inf

    def order(self, time_s: Floats, device_bytes: Floats) -> Index:
        return np.lexsort((time_s, device_bytes))

    def offer(self, table: StrategyTable, time_s: Floats, device_bytes: Floats) -> None:
        if not len(table):
            return
        if len(self._best.table):
            table = StrategyTable.joined([self._best.table, table])
            time_s = np.append(self._best.time_s, time_s)
            device_bytes = np.append(self._best.device_bytes, device_bytes)
        tied = np.arange(len(table))
        for figures in (device_bytes, time_s):
            tied = tied[ties_of_least(figures[tied], PROVEN_TIE)]
        row = int(tied[table.take(tied).text_order()[0]])
        self._best = Incumbent(float(time_s[row]), float(device_bytes[row]), _row(table, row))

    @property
    def incumbents(self) -> list[Incumbent]:
        return [self._best] if len(self._best.table) else []

    def copy(self) -> Smallest:
        return deepcopy(self)


class Tradeoff:
    """The Pareto frontier of step time and memory: all non-dominated strategies. Of ties in both, the first
    in text order."""

    weighs_memory = True

    def __init__(self) -> None:
        # Points by ascending bytes, so by descending time.
        self._table = StrategyTable.of([])
        self._bytes = np.zeros(0)
        self._times = np.zeros(0)

    def may_improve(self, time_s: Any, device_bytes: Any | None = None) -> Mask:
        if device_bytes is None:
            return np.ones(np.shape(time_s), dtype=bool)
        if not len(self._bytes):
            return np.ones(np.broadcast_shapes(np.shape(time_s), np.shape(device_bytes)), dtype=bool)
        # Of the points with at most these bytes, the last one is the fastest.
        place = np.searchsorted(self._bytes, device_bytes, side="right") - 1
        fastest_s, most = self._times[np.maximum(place, 0)], self._bytes[np.maximum(place, 0)] * PRUNE_FACTOR
        is_equal = (time_s <= fastest_s * PRUNE_FACTOR) & (device_bytes <= most)
        return np.asarray((place < 0) | (time_s < fastest_s) | is_equal)

    def may_improve_kind(self, table: StrategyTable, time_s: Any, device_bytes: Any) -> Mask:
        return self.may_improve(time_s, device_bytes)

    def cutoff_s(self, device_bytes: Any) -> Any:
        place = np.searchsorted(self._bytes, device_bytes, side="right") - 1
        times = np.concatenate([[np.inf], self._times])
        return times[place + 1] * PRUNE_FACTOR

    def order(self, time_s: Floats, device_bytes: Floats) -> Index:
        """By excess over the fastest row of at most as many bytes. Non-dominated rows come first, since they
        must be evaluated anyway."""
        by_bytes = np.lexsort((time_s, device_bytes))
        excess = np.empty(len(by_bytes))
        excess[by_bytes] = time_s[by_bytes] / np.minimum.accumulate(time_s[by_bytes])
        return np.lexsort((time_s, excess))

    def offer(self, table: StrategyTable, time_s: Floats, device_bytes: Floats) -> None:
        new = np.flatnonzero(self.may_improve(time_s, device_bytes))
        table = StrategyTable.joined([self._table, table.take(new)])
        times = np.concatenate([self._times, time_s[new]])
        nbytes = np.concatenate([self._bytes, device_bytes[new]])
        order = np.lexsort((times, nbytes))
        fastest = np.minimum.accumulate(times[order])
        tied = order[times[order] <= PRUNE_FACTOR * np.concatenate([[np.inf], fastest[:-1]])]
        non_dominated = tied[_non_dominated(table.take(tied), times[tied], nbytes[tied])]
        self._table, self._times, self._bytes = (
            table.take(non_dominated),
            times[non_dominated],
            nbytes[non_dominated],
        )

    @property
    def incumbents(self) -> list[Incumbent]:
        points = zip(self._times.tolist(), self._bytes.tolist(), strict=True)
        return [Incumbent(*point, _row(self._table, row)) for row, point in enumerate(points)][::-1]

    def copy(self) -> Tradeoff:
        return copy(self)


def incumbents_of(goal: Goal) -> Incumbents:
    """The incumbents of a goal as columns, best first."""
    found = goal.incumbents
    return Incumbents(
        np.array([one.time_s for one in found]),
        np.array([one.device_bytes for one in found]),
        StrategyTable.joined([NO_INCUMBENTS.table, *(one.table for one in found)]),
    )


def _is_better(one: Incumbent, other: Incumbent) -> bool:
    """Whether `one` is faster, or as fast and first in text order."""
    if is_less(other.time_s, one.time_s, PROVEN_TIE):
        return False
    is_first = StrategyTable.joined([other.table, one.table]).text_order()[0] == 1
    return bool(is_first or is_less(one.time_s, other.time_s, PROVEN_TIE))


def _non_dominated(table: StrategyTable, time_s: Floats, device_bytes: Floats) -> list[int]:
    """The non-dominated rows, given by ascending bytes; of ties in both, the first in text order."""
    place_in_text = np.argsort(table.text_order()).tolist()
    non_dominated: list[int] = []
    for row in range(len(table)):
        last = non_dominated[-1] if non_dominated else row
        is_as_small = not is_less(device_bytes[last], device_bytes[row], PROVEN_TIE)
        if not non_dominated or is_less(time_s[row], time_s[last], PROVEN_TIE):
            non_dominated[len(non_dominated) - (bool(non_dominated) and is_as_small) :] = [row]
        elif is_as_small and not is_less(time_s[last], time_s[row], PROVEN_TIE):
            non_dominated[-1] = min(last, row, key=place_in_text.__getitem__)
    return non_dominated


def _best_first(found: list[Incumbent]) -> list[Incumbent]:
    """From the fastest to the slowest; ties in text order."""
    order = StrategyTable.joined([NO_INCUMBENTS.table, *(one.table for one in found)]).text_order()
    in_order = [found[place] for place in order.tolist()]
    return [in_order[place] for place in least_first([one.time_s for one in in_order], PROVEN_TIE)]


def kinds_of(table: StrategyTable) -> tuple[Index, Index]:
    """One row of each kind, and the kind of every row."""
    return distinct_rows([getattr(table, name) for name in KIND_FIELDS])


def _key(table: StrategyTable, row: int) -> tuple[int, ...]:
    return tuple(int(getattr(table, name)[row]) for name in KIND_FIELDS)


def _row(table: StrategyTable, row: int) -> StrategyTable:
    return table.take(slice(row, row + 1))
