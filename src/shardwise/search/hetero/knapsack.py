"""The knapsack of pipelines: the most micro-batches within a time on the devices of each pool.

An item is a set of identical pipelines that takes devices of each pool and processes micro-batches in that
time. `best_set` solves the unbounded knapsack with a dimension per pool, exactly by dynamic programming where
the number of pipelines can be one more dimension, else with a Lagrangian multiplier on it. `KnapsackDual`
bounds it by Lagrangian multipliers (prices) on devices, and finds the critical items.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import product

import numpy as np
from numpy.typing import NDArray

from shardwise.ties import ROUNDING

Ints = NDArray[np.int64]

MAX_EXACT_DP = 200_000
"""States times items times pipelines up to which the number of pipelines is exact."""

MULTIPLIER_GRID = 16
"""Steps of a pool's share in the cost of all devices."""

MULTIPLIER_STEPS = 12
"""Multipliers on a pipeline that are tried where the number of pipelines is not exact."""


@dataclass(frozen=True, slots=True)
class Item:
    """`pipelines` identical pipelines, with the devices that they take of each pool together and the
    micro-batches that they process in time."""

    devices: tuple[int, ...]
    microbatches: int
    pipelines: int = 1


@dataclass(frozen=True, slots=True)
class Items:
    """Items as columns; `devices` has a row for each."""

    devices: Ints
    microbatches: Ints
    pipelines: Ints

    def at(self, places: Ints) -> dict[int, Item]:
        """The items at these indices, by index."""
        rows = zip(
            self.devices[places].tolist(),
            self.microbatches[places].tolist(),
            self.pipelines[places].tolist(),
            strict=True,
        )
        return {
            place: Item(tuple(devices), microbatches, pipelines)
            for place, (devices, microbatches, pipelines) in zip(places.tolist(), rows, strict=True)
        }


def non_dominated(items: Items) -> Ints:
    """Indices of the non-dominated items: no other item with as many pipelines does at least as many
    micro-batches on no more devices of any pool. Of ties, the first."""
    does = np.flatnonzero(items.microbatches > 0)
    if not len(does):
        return does
    # The first of the items that do most, by pipelines and devices.
    columns = (*items.devices[does].T, items.pipelines[does])
    order = np.lexsort((does, -items.microbatches[does], *columns[::-1]))
    sorted_ = np.stack(columns, axis=1)[order]
    is_first = np.concatenate([[True], (sorted_[1:] != sorted_[:-1]).any(axis=1)])
    best = does[order[is_first]]
    remaining = []
    for pipelines in np.unique(items.pipelines[best]):
        mine = best[items.pipelines[best] == pipelines]
        done = items.microbatches[mine]
        remaining.append(mine[done > _best_on_fewer_devices(items.devices[mine], done)])
    every = np.concatenate(remaining)
    devices = items.devices[every]
    return every[np.lexsort((items.pipelines[every], *devices.T[::-1], devices.sum(axis=1)))]


def _best_on_fewer_devices(taken: Ints, does: Ints) -> Ints:
    """For each item the most that any does on fewer devices of some pool and no more of the others; `taken`
    has a row of devices for each."""
    most = np.zeros(taken.max(axis=0) + 2, dtype=np.int64)
    at = tuple((taken + 1).T)
    most[at] = does
    for axis in range(most.ndim):
        np.maximum.accumulate(most, axis=axis, out=most)
    fewer = [tuple(where - (axis == pool) for axis, where in enumerate(at)) for pool in range(most.ndim)]
    found: Ints = np.maximum.reduce([most[where] for where in fewer])
    return found


class KnapsackDual:
    """The Lagrangian dual of the knapsack, over a grid of multipliers on devices.

    At multipliers at which no item does more than it costs, the cost of all devices bounds the micro-batches
    of any set. The least of these bounds over the grid is used. `taken` has a row of devices for each item.
    """

    def __init__(self, devices: tuple[int, ...], taken: Ints) -> None:
        there = np.array(devices, dtype=np.float64)
        self._taken, self._multipliers = taken, _multipliers(len(devices)) / there
        self._cost_of_all = self._multipliers @ there
        # Of items on the same devices, the one that does most decides.
        self._order = np.lexsort(taken.T[::-1])
        ordered = taken[self._order]
        is_first = np.ones(len(taken), dtype=np.bool_)
        is_first[1:] = (ordered[1:] != ordered[:-1]).any(axis=1)
        self._begins = np.flatnonzero(is_first)
        self._differing = ordered[self._begins]

    def critical(self, microbatches: Ints, required: float) -> tuple[Ints, NDArray[np.float64]]:
        """The critical items: without them, the dual bound does not reach `required` micro-batches.

        Returns their indices, those with most micro-batches per cost first, and the micro-batches from which
        each is critical. There are none if no set of items can do `required`, even in fractions.
        `microbatches` has an entry for each item.
        """
        if not len(microbatches):
            return microbatches, np.empty(0)
        most = np.maximum.reduceat(microbatches[self._order], self._begins)
        # The costs at every multiplier are not stored: with four pools they are many.
        gain = (most[:, None] / (self._differing @ self._multipliers.T)).max(axis=0) * self._cost_of_all
        at = int(np.argmin(gain))
        costs, required_ratio = self._taken @ self._multipliers[at], required / float(self._cost_of_all[at])
        ratios = microbatches / costs
        over = np.flatnonzero(ratios >= required_ratio)
        found: Ints = over[np.argsort(-ratios[over], kind="stable")]
        return found, required_ratio * costs[found]


@cache
def _multipliers(pools: int) -> NDArray[np.float64]:
    """Shares of the pools in the cost of all devices: a grid in sixteenths."""
    grid = [
        parts for parts in product(range(MULTIPLIER_GRID + 1), repeat=pools) if sum(parts) == MULTIPLIER_GRID
    ]
    # No multiplier is 0: an item may take only devices of that pool.
    found: NDArray[np.float64] = np.array(grid, dtype=np.float64) + 1e-3
    return found


def is_exact_dp(devices: tuple[int, ...], items: int, most: int) -> bool:
    """Whether `best_set` is exact in the number of pipelines."""
    return int(np.prod([count + 1 for count in devices])) * max(items, 1) * most <= MAX_EXACT_DP


def best_set(
    devices: tuple[int, ...], items: Items, least: int, most: int, required: int
) -> Counter[int] | None:
    """Indices of items, with counts, that do `required` micro-batches on the devices in `least` to `most`
    pipelines; None where no set can.

    Where `is_exact_dp` is false, the set may have other numbers of pipelines; None still means that no set
    can.
    """
    remaining = items.at(non_dominated(items))
    if (
        not remaining
        or most * max(item.microbatches / item.pipelines for item in remaining.values()) < required
    ):
        return None
    if is_exact_dp(devices, len(remaining), most):
        return _exact_knapsack(devices, remaining, least, most, required)
    return _lagrangian_knapsack(devices, remaining, (least, most), required)


def _exact_knapsack(
    devices: tuple[int, ...], items: Mapping[int, Item], least: int, most: int, required: int
) -> Counter[int] | None:
    """Dynamic programming over the number of pipelines: the most that exactly j pipelines do."""
    states = tuple(count + 1 for count in devices)
    shifts = {place: _state_shift(devices, item.devices) for place, item in items.items()}
    layers = [np.zeros(states, dtype=np.int64)]
    choices = [np.full(states, -1, dtype=np.int64)]
    for pipelines in range(1, most + 1):
        done = np.full(states, UNREACHABLE, dtype=np.int64)
        choice = np.full(states, -1, dtype=np.int64)
        for place, item in items.items():
            shift = shifts[place]
            if shift is None or item.pipelines > pipelines:
                continue
            into, out = shift
            more = layers[pipelines - item.pipelines][out] + item.microbatches
            better = more > done[into]
            np.copyto(done[into], more, where=better)
            np.copyto(choice[into], place, where=better)
        layers.append(done)
        choices.append(choice)
        if pipelines >= least and done.max() >= required:
            return _backtrack(layers, choices, items)
    return None


UNREACHABLE = -(1 << 40)


def _backtrack(layers: list[Ints], choices: list[Ints], items: Mapping[int, Item]) -> Counter[int]:
    pipelines = len(layers) - 1
    state = tuple(int(x) for x in np.unravel_index(int(layers[-1].argmax()), layers[-1].shape))
    found: Counter[int] = Counter()
    while pipelines:
        place = int(choices[pipelines][state])
        found[place] += 1
        state = tuple(a - b for a, b in zip(state, items[place].devices, strict=True))
        pipelines -= items[place].pipelines
    return found


def _lagrangian_knapsack(
    devices: tuple[int, ...], items: Mapping[int, Item], range_: tuple[int, int], required: int
) -> Counter[int] | None:
    """Any number of each item, with a multiplier on the number of pipelines, which bisection moves.

    The Lagrangian bound is the value of the set, minus the cost of its pipelines, plus the cost of `most`
    pipelines (of `least` where the multiplier is negative). For every multiplier it is at least the optimum
    of the range.
    """
    least, most = range_
    top = max(item.microbatches / item.pipelines for item in items.values())
    low, high, multiplier = -top - 1.0, top, 0.0
    found: Counter[int] | None = None
    for _ in range(MULTIPLIER_STEPS):
        value, chosen = _unbounded_knapsack(devices, items, multiplier)
        if value + multiplier * (most if multiplier > 0.0 else least) < required * (1.0 - ROUNDING):
            return None
        does = sum(items[place].microbatches * count for place, count in chosen.items())
        number = sum(items[place].pipelines * count for place, count in chosen.items())
        if does >= required:
            found = chosen if found is None or least <= number <= most else found
            if least <= number <= most:
                return found
        if number > most:
            low = multiplier
        elif number < least:
            high = multiplier
        else:
            return found  # a number in the range does not do enough, and the bound does not exclude it
        multiplier = (low + high) / 2.0
    return found if found is not None else _unbounded_knapsack(devices, items, 0.0)[1]


def _unbounded_knapsack(
    devices: tuple[int, ...], items: Mapping[int, Item], multiplier: float
) -> tuple[float, Counter[int]]:
    """The largest value of any set, minus the cost of its pipelines, and such a set. Each item is tried once,
    twice, four times, ... in turn."""
    states = tuple(count + 1 for count in devices)
    done = np.zeros(states)
    last = np.full(states, -1, dtype=np.int64)
    times = np.zeros(states, dtype=np.int64)
    for place, item in items.items():
        gain = item.microbatches - multiplier * item.pipelines
        if _state_shift(devices, item.devices) is None or done[item.devices] >= gain:
            continue  # smaller items do as much on the same devices
        count = 1
        while (shift := _state_shift(devices, tuple(count * taken for taken in item.devices))) is not None:
            into, out = shift
            more = done[out] + count * gain
            better = more > done[into]
            if better.any():
                np.copyto(done[into], more, where=better)
                np.copyto(last[into], place, where=better)
                np.copyto(times[into], count, where=better)
            count *= 2
    state = tuple(int(x) for x in np.unravel_index(int(done.argmax()), states))
    value, found = float(done[state]), Counter[int]()
    while int(last[state]) >= 0:
        place, count = int(last[state]), int(times[state])
        found[place] += count
        state = tuple(a - count * b for a, b in zip(state, items[place].devices, strict=True))
    return value, found


@lru_cache(maxsize=1 << 16)
def _state_shift(
    devices: tuple[int, ...], taken: tuple[int, ...]
) -> tuple[tuple[slice, ...], tuple[slice, ...]] | None:
    """Slices of the states after and before `taken` devices are taken; None where there are too few
    devices."""
    if any(one > there for one, there in zip(taken, devices, strict=True)):
        return None
    into = tuple(slice(one, None) for one in taken)
    out = tuple(slice(None, there + 1 - one) for one, there in zip(taken, devices, strict=True))
    return into, out
