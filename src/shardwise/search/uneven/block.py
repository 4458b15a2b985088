"""One block of uneven plans: the least time in which its pipelines do all microbatches, or that none is less.

Whether a block can be done within a time is a question of shares: how many microbatches each pipeline does
by then, at most by its bound. Where the shares suffice, the pipelines that were taken are laid out and
evaluated; those that take longer than their bound said do fewer microbatches from then on, and the question
is asked again. So a block is done within a time only where evaluated pipelines do it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import gcd, lcm

import numpy as np

from shardwise.errors import InternalError
from shardwise.search.uneven.bounds import Counts, Relaxation, kind_tuples
from shardwise.search.uneven.options import Options
from shardwise.search.uneven.partitions import Found, best_partition
from shardwise.search.uneven.shares import Item, best_set, is_counted, undominated

Tuple = tuple[int, ...]

EVERY = 8
"""Numbers of microbatches up to this one are bounded one by one; beyond it steps grow."""

GROWTH = 1.3


@dataclass(frozen=True, slots=True)
class Shape:
    """A pipeline but for its layout: the kind of its stages on each pool, and how many there are."""

    kinds: Tuple
    counts: Counts

    def devices(self, options: Options) -> Tuple:
        """What it takes of each pool."""
        sizes = (stages.kinds[kind] for stages, kind in zip(options.stages, self.kinds, strict=True))
        return tuple(count * tp * dp for count, (tp, dp) in zip(self.counts, sizes, strict=True))


@dataclass(frozen=True, slots=True)
class Laid:
    """One pipeline of a plan: its shape, microbatches and best layout."""

    shape: Shape
    microbatches: int
    found: Found


Relaxed = Callable[[Options, np.ndarray], Relaxation]
"""The relaxation of all pipelines of some options at some numbers of microbatches."""


class Relaxations:
    """Relaxations, each made once for all blocks whose stages take the same times."""

    def __init__(self) -> None:
        self._made: dict[tuple[bytes, ...], Relaxation] = {}

    def __call__(self, options: Options, microbatches: np.ndarray) -> Relaxation:
        """The relaxation for these options at these numbers of microbatches."""
        figures = [stages.work_s[:, :, 0] for stages in options.stages]
        figures += [stages.backward_s[:, :, 0] for stages in options.stages]
        figures += [hop for row in options.hop_s for hop in row]
        shape = (options.devices, options.most_stages, options.layers)
        key = (str(shape).encode(), microbatches.tobytes(), *(figure.tobytes() for figure in figures))
        if key not in self._made:
            self._made[key] = Relaxation(options, kind_tuples(options), microbatches)
        return self._made[key]


class BlockSearch:
    """Answers whether the block's pipelines do all microbatches within a time, sharper each time."""

    def __init__(self, options: Options, least: int, most: int, effort: int, relaxed: Relaxed) -> None:
        self._options, self._least, self._most, self._effort = options, least, most, effort
        self._grid = _grid(options.microbatches)
        self._on_grid = frozenset(self._grid.tolist())
        self._shapes: list[Shape] = []
        self._sets: list[tuple[Tuple, int]] = []
        bounds: list[np.ndarray] = []
        tuples = kind_tuples(options)
        for counts, bound in relaxed(options, self._grid).bounds(options).items():
            for place, kinds in enumerate(tuples):
                shape = Shape(kinds, counts)
                # Kinds on pools without stages make no difference: the first stands for all.
                if any(kind and not count for kind, count in zip(kinds, counts, strict=True)):
                    continue
                one_set = _set_of(shape.devices(options), options.units)
                if not np.isfinite(bound[place, 0]) or not _fits(one_set[0], options.available):
                    continue
                self._shapes.append(shape)
                self._sets.append(one_set)
                bounds.append(bound[place])
        self._bounds = np.maximum.accumulate(np.array(bounds).reshape(len(bounds), len(self._grid)), axis=1)
        self._known: dict[int, dict[int, Found | None]] = {}
        self._fine: dict[tuple[Tuple, int], dict[Counts, np.ndarray]] = {}
        self.evaluated = 0
        self.gave_up = False
        """Whether layouts were left unevaluated: then `within` may miss a plan, but not `is_possible`."""

    @property
    def is_counted(self) -> bool:
        """Whether plans with other numbers of pipelines than the block's are told apart."""
        return is_counted(
            self._options.available,
            len(undominated(self._items(float("inf"), self._proven_microbatches))),
            self._most,
        )

    def within(self, time_s: float) -> list[tuple[Laid, int]] | None:
        """Pipelines, with counts, that do all microbatches within `time_s`; None where there are none, or
        none was found."""
        options = self._options
        while True:
            items = self._items(time_s, self._microbatches)
            chosen = best_set(options.available, items, self._least, self._most, options.microbatches)
            if chosen is None:
                return None
            shares = {place: items[place].microbatches // items[place].pipelines for place in chosen}
            if all([self._is_proven(place, share, time_s) for place, share in shares.items()]):
                return [
                    (self._laid(place, share), chosen[place] * items[place].pipelines)
                    for place, share in shares.items()
                ]

    def is_possible(self, time_s: float) -> bool:
        """Whether nothing that is proven forbids a plan within `time_s`."""
        items = self._items(time_s, self._proven_microbatches)
        options = self._options
        found = best_set(options.available, items, self._least, self._most, options.microbatches)
        return found is not None

    def _items(self, time_s: float, done: Callable[[int, float], int]) -> list[Item]:
        return [
            Item(devices, done(place, time_s) * pipelines, pipelines)
            for place, (devices, pipelines) in enumerate(self._sets)
        ]

    def _microbatches(self, place: int, time_s: float) -> int:
        """The most that a shape does in time as far as is known; where its layouts were given up, as if the
        best of them were the best."""
        most = self._bounded_microbatches(place, time_s)
        known = self._known.get(place, {})
        while most > 0 and most in known:
            found = known[most]
            if found is not None and found.time_s <= time_s:
                break
            if found is None or found.bound_s > time_s:
                most -= 1
            elif found.is_given_up:
                most = min(most - 1, int(most * time_s / found.time_s))  # 0 where nothing was evaluated
            else:
                break
        return most

    def _proven_microbatches(self, place: int, time_s: float) -> int:
        """No shape does more than this in time."""
        most = self._bounded_microbatches(place, time_s)
        known = self._known.get(place, {})
        while most > 0 and most in known and ((found := known[most]) is None or found.bound_s > time_s):
            most -= 1
        return most

    def _bounded_microbatches(self, place: int, time_s: float) -> int:
        """The most whose bound is in time."""
        index = int(np.searchsorted(self._bounds[place], time_s, side="right"))
        if index == 0:
            return 0
        if index == len(self._grid):
            return int(self._grid[-1])
        low, most = int(self._grid[index - 1]), int(self._grid[index] - 1)
        shape = self._shapes[place]
        fine = self._fine.get((shape.kinds, index))
        if fine is not None:
            return low + int(np.count_nonzero(fine[shape.counts] <= time_s)) - 1
        return most

    def _is_proven(self, place: int, microbatches: int, time_s: float) -> bool:
        """Whether the shape is known to do so many microbatches in time; looks closer where it is not."""
        index = int(np.searchsorted(self._grid, microbatches, side="right"))
        if microbatches not in self._on_grid and (self._shapes[place].kinds, index) not in self._fine:
            self._refine(self._shapes[place].kinds, index)
            return False
        known = self._known.setdefault(place, {})
        found = known.get(microbatches)
        if found is not None and found.time_s <= time_s:
            return True
        shape = self._shapes[place]
        found = best_partition(self._options, shape.kinds, shape.counts, microbatches, time_s, self._effort)
        known[microbatches] = found
        if found is None:
            return False
        self.evaluated += found.evaluated
        self.gave_up |= found.is_given_up
        return found.time_s <= time_s

    def _refine(self, kinds: Tuple, index: int) -> None:
        """Bounds every number of microbatches between two of the grid, of all pipelines of these kinds."""
        every = np.arange(int(self._grid[index - 1]), int(self._grid[index]))
        bounds = Relaxation(self._options, [kinds], every).bounds(self._options)
        self._fine[kinds, index] = {
            counts: np.maximum.accumulate(bound[0]) for counts, bound in bounds.items()
        }

    def _laid(self, place: int, microbatches: int) -> Laid:
        found = self._known[place][microbatches]
        if found is None:
            raise InternalError("a pipeline that does not fit was chosen")
        return Laid(self._shapes[place], microbatches, found)


def _set_of(devices: Tuple, units: Tuple) -> tuple[Tuple, int]:
    """How many alike pipelines fill whole units of every pool, and the units that they take."""
    pipelines = lcm(*(unit // gcd(unit, taken) for taken, unit in zip(devices, units, strict=True)))
    return tuple(pipelines * taken // unit for taken, unit in zip(devices, units, strict=True)), pipelines


def _fits(taken: Tuple, there: Tuple) -> bool:
    return all(a <= b for a, b in zip(taken, there, strict=True))


def _grid(top: int) -> np.ndarray:
    """1 to `top`: every number at first, then in growing steps."""
    found = list(range(1, min(top, EVERY) + 1))
    while found[-1] < top:
        found.append(min(max(int(found[-1] * GROWTH), found[-1] + 1), top))
    return np.array(found, dtype=np.int64)
