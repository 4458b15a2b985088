"""What a search looks for: which rows may still matter, and what was found.

A row is a strategy or a block, with a time and device bytes that nothing in it undercuts.
"""

from __future__ import annotations

from copy import copy, deepcopy
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from shardwise.cost import Index, distinct_rows
from shardwise.strategy import StrategyTable

Mask = NDArray[np.bool_]
Floats = NDArray[np.float64]

KIND_FIELDS = ("tp", "cp", "pp", "dp", "ep", "etp", "schedule", "recompute")
"""Runners-up differ from the best, and from each other, in at least one of these."""


@dataclass(frozen=True, slots=True)
class Found:
    """An evaluated strategy (a table of one row) with its price."""

    time_s: float
    device_bytes: float
    table: StrategyTable


@dataclass(frozen=True, slots=True)
class Finds:
    """Evaluated strategies with their prices, as columns: what goes from one process to another."""

    time_s: Floats
    device_bytes: Floats
    table: StrategyTable


NO_FINDS = Finds(np.zeros(0), np.zeros(0), StrategyTable.of([]))


class Goal(Protocol):
    """What is looked for. All answers are about rows that fit. `weighs_memory` says whether bytes decide."""

    weighs_memory: bool

    def may_matter(self, time_s: Any, device_bytes: Any | None = None) -> Mask:
        """Whether a row could change what is found; without bytes, whatever it takes."""
        ...

    def may_matter_of_kind(self, table: StrategyTable, time_s: Any, device_bytes: Any) -> Mask:
        """The same where the row's kind is known."""
        ...

    def limit_s(self, device_bytes: Any) -> Any:
        """A time from which on no row of so many bytes matters."""
        ...

    def order(self, time_s: Floats, device_bytes: Floats) -> Index:
        """In which order to look at rows: those first whose finds cut most."""
        ...

    def offer(self, table: StrategyTable, time_s: Floats, device_bytes: Floats) -> None:
        """Takes evaluated rows into account; of equals the first offered stays."""
        ...

    @property
    def found(self) -> list[Found]:
        """What was found, best first."""
        ...

    def copy(self) -> Goal:
        """The same, to be pursued apart."""
        ...


class Fastest:
    """The fastest strategy, and runners-up of other kinds, all of which take less than `below_s`.

    `threshold_s` is the time that a strategy must beat: `below_s`, then the `wanted`-th best found. It never
    rises.
    """

    weighs_memory = False

    def __init__(self, wanted: int, *, below_s: float = float("inf")) -> None:
        self.wanted, self.below_s = wanted, below_s
        self._best: dict[tuple[int, ...], Found] = {}
        self.threshold_s = below_s

    def may_matter(self, time_s: Any, device_bytes: Any | None = None) -> Mask:
        return np.asarray(time_s < self.threshold_s)

    def limit_s(self, device_bytes: Any) -> Any:
        return self.threshold_s

    def may_matter_of_kind(self, table: StrategyTable, time_s: Any, device_bytes: Any) -> Mask:
        rows, kind = kinds_of(table)
        none = Found(np.inf, 0.0, table)
        own = np.array([self._best.get(_key(table, int(row)), none).time_s for row in rows])
        return np.asarray(time_s < np.minimum(own, self.threshold_s)[kind])

    def order(self, time_s: Floats, device_bytes: Floats) -> Index:
        return np.argsort(time_s, kind="stable")

    def offer(self, table: StrategyTable, time_s: Floats, device_bytes: Floats) -> None:
        below = np.flatnonzero(time_s < self.below_s)
        table, time_s, device_bytes = table.take(below), time_s[below], device_bytes[below]
        _, kind = kinds_of(table)
        order = np.lexsort((np.arange(len(table)), time_s))
        _, first = np.unique(kind[order], return_index=True)
        for row in order[np.sort(first)]:
            key = _key(table, int(row))
            if key not in self._best or time_s[row] < self._best[key].time_s:
                self._best[key] = Found(float(time_s[row]), float(device_bytes[row]), _row(table, int(row)))
        times = sorted(found.time_s for found in self._best.values())
        if len(times) >= self.wanted:
            self.threshold_s = times[self.wanted - 1]

    @property
    def found(self) -> list[Found]:
        return sorted(self._best.values(), key=lambda found: found.time_s)[: self.wanted]

    def copy(self) -> Fastest:
        return deepcopy(self)


class Smallest:
    """The strategy that takes least memory; of equals the fastest."""

    weighs_memory = True

    def __init__(self) -> None:
        self._best = Found(float("inf"), float("inf"), StrategyTable.of([]))

    def may_matter(self, time_s: Any, device_bytes: Any | None = None) -> Mask:
        if device_bytes is None:
            return np.ones(np.shape(time_s), dtype=bool)
        best = self._best
        return np.asarray(
            (device_bytes < best.device_bytes)
            | ((device_bytes == best.device_bytes) & (time_s < best.time_s))
        )

    def may_matter_of_kind(self, table: StrategyTable, time_s: Any, device_bytes: Any) -> Mask:
        return self.may_matter(time_s, device_bytes)

    def limit_s(self, device_bytes: Any) -> Any:
        return np.inf

    def order(self, time_s: Floats, device_bytes: Floats) -> Index:
        return np.lexsort((time_s, device_bytes))

    def offer(self, table: StrategyTable, time_s: Floats, device_bytes: Floats) -> None:
        for row in np.lexsort((np.arange(len(table)), time_s, device_bytes))[:1]:
            if self.may_matter(time_s[row], device_bytes[row]):
                self._best = Found(float(time_s[row]), float(device_bytes[row]), _row(table, int(row)))

    @property
    def found(self) -> list[Found]:
        return [self._best] if len(self._best.table) else []

    def copy(self) -> Smallest:
        return deepcopy(self)


class Tradeoff:
    """The frontier of time against memory: every strategy that none beats in one without losing in the
    other. Of equals the first offered stays."""

    weighs_memory = True

    def __init__(self) -> None:
        # Points by ascending bytes, hence by descending times.
        self._table = StrategyTable.of([])
        self._bytes = np.zeros(0)
        self._times = np.zeros(0)

    def may_matter(self, time_s: Any, device_bytes: Any | None = None) -> Mask:
        if device_bytes is None:
            return np.ones(np.shape(time_s), dtype=bool)
        if not len(self._bytes):
            return np.ones(np.broadcast_shapes(np.shape(time_s), np.shape(device_bytes)), dtype=bool)
        # The last that takes no more is the fastest of them.
        place = np.searchsorted(self._bytes, device_bytes, side="right") - 1
        return np.asarray((place < 0) | (time_s < self._times[np.maximum(place, 0)]))

    def may_matter_of_kind(self, table: StrategyTable, time_s: Any, device_bytes: Any) -> Mask:
        return self.may_matter(time_s, device_bytes)

    def limit_s(self, device_bytes: Any) -> Any:
        place = np.searchsorted(self._bytes, device_bytes, side="right") - 1
        times = np.concatenate([[np.inf], self._times])
        return times[place + 1]

    def order(self, time_s: Floats, device_bytes: Floats) -> Index:
        """By how much slower they are than the fastest of those that take no more: those that none of them
        beats come first, and must be evaluated anyway."""
        by_bytes = np.lexsort((time_s, device_bytes))
        excess = np.empty(len(by_bytes))
        excess[by_bytes] = time_s[by_bytes] / np.minimum.accumulate(time_s[by_bytes])
        return np.lexsort((time_s, excess))

    def offer(self, table: StrategyTable, time_s: Floats, device_bytes: Floats) -> None:
        new = np.flatnonzero(self.may_matter(time_s, device_bytes))
        table = StrategyTable.joined([self._table, table.take(new)])
        times = np.concatenate([self._times, time_s[new]])
        nbytes = np.concatenate([self._bytes, device_bytes[new]])
        order = np.lexsort((times, nbytes))
        fastest = np.minimum.accumulate(times[order])
        kept = order[np.flatnonzero(times[order] < np.concatenate([[np.inf], fastest[:-1]]))]
        self._table, self._times, self._bytes = table.take(kept), times[kept], nbytes[kept]

    @property
    def found(self) -> list[Found]:
        points = zip(self._times.tolist(), self._bytes.tolist(), strict=True)
        return [Found(*point, _row(self._table, row)) for row, point in enumerate(points)][::-1]

    def copy(self) -> Tradeoff:
        return copy(self)


def finds_of(goal: Goal) -> Finds:
    """What a goal has found, best first."""
    found = goal.found
    return Finds(
        np.array([one.time_s for one in found]),
        np.array([one.device_bytes for one in found]),
        StrategyTable.joined([NO_FINDS.table, *(one.table for one in found)]),
    )


def kinds_of(table: StrategyTable) -> tuple[Index, Index]:
    """One row of each kind, and the kind of every row."""
    return distinct_rows([getattr(table, name) for name in KIND_FIELDS])


def _key(table: StrategyTable, row: int) -> tuple[int, ...]:
    return tuple(int(getattr(table, name)[row]) for name in KIND_FIELDS)


def _row(table: StrategyTable, row: int) -> StrategyTable:
    return table.take(slice(row, row + 1))
