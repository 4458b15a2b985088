"""A good layout of one pipeline, soon: layers dealt to stages by their pace, then moved while it helps."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from shardwise.search.uneven.bounds import Counts, Order
from shardwise.search.uneven.estimate import layout_figures, lower_bound_s
from shardwise.search.uneven.grown import StagePlacement
from shardwise.search.uneven.options import StageOptions

Ints = NDArray[np.int64]

MAX_LOCAL_STEPS = 60
"""Moves of a layout, at most."""


def local_search(
    options: StageOptions,
    kinds: tuple[int, ...],
    counts: Counts,
    microbatches: int,
    order: Order | None = None,
) -> tuple[StagePlacement, ...]:
    """A layout with so many stages of each pool that no small move makes faster, as far as `estimate` tells;
    empty where none was found that fits.

    Pools begin one behind the other, in their order and against it, and each of them around the others;
    where an `order` is given they begin and stay in that. A move takes one or two layers from a stage to
    another, or swaps two stages.
    """
    best: tuple[float, Ints, Ints] | None = None
    for pools in _initial_orders(counts) if order is None else [np.array(order, dtype=np.int64)]:
        layers = _balanced_layers(options, kinds, pools)
        if layers is None:
            continue
        time_s = float(
            lower_bound_s(layout_figures(options, kinds, pools[None], layers[None]), microbatches)[0]
        )
        for _ in range(MAX_LOCAL_STEPS):
            near_pools, near_layers = _neighbours(pools, layers)
            if order is not None:
                stays = (near_pools == pools).all(axis=1)
                near_pools, near_layers = near_pools[stays], near_layers[stays]
            if not len(near_pools):
                break
            times = lower_bound_s(layout_figures(options, kinds, near_pools, near_layers), microbatches)
            at = int(np.argmin(times))
            if times[at] >= time_s * (1.0 - 1e-9):
                break
            time_s, pools, layers = float(times[at]), near_pools[at], near_layers[at]
        if best is None or time_s < best[0]:
            best = time_s, pools, layers
    return () if best is None else tuple(zip(best[1].tolist(), best[2].tolist(), strict=True))


def _initial_orders(counts: Counts) -> list[Ints]:
    """Pools of stages in the orders to begin with, each once."""
    sequential = np.repeat(np.arange(len(counts)), counts)
    found = [sequential, sequential[::-1]]
    for pool, count in enumerate(counts):
        others = sequential[sequential != pool]
        half = count // 2
        found.append(np.concatenate([np.full(half, pool), others, np.full(count - half, pool)]))
    return [np.array(order) for order in dict.fromkeys(tuple(order.tolist()) for order in found)]


def _balanced_layers(options: StageOptions, kinds: tuple[int, ...], pools: Ints) -> Ints | None:
    """Layers of stages on these pools: one each, and then always to the stage that is least at work with one
    more; None where they cannot take all."""
    stages = len(pools)
    works = np.stack(
        [
            options.stages[pool].work_s[kinds[pool], stages - index, int(index == 0)]
            for index, pool in enumerate(pools.tolist())
        ]
    )
    works = np.concatenate([works, np.full((stages, 2), np.inf)], axis=1)
    layers = np.ones(stages, dtype=np.int64)
    rows = np.arange(stages)
    for _ in range(options.layers - stages):
        more = works[rows, layers + 1]
        at = int(np.argmin(more))
        if not np.isfinite(more[at]):
            return None
        layers[at] += 1
    return layers if np.isfinite(works[rows, layers]).all() else None


def _neighbours(pools: Ints, layers: Ints) -> tuple[Ints, Ints]:
    """Layouts that are one move away."""
    stages = len(pools)
    if stages == 1:
        return np.empty((0, 1), dtype=np.int64), np.empty((0, 1), dtype=np.int64)
    source, target = (axis.ravel() for axis in np.indices((stages, stages)))
    other = source != target
    source, target = source[other], target[other]
    found_pools, found_layers = [], []
    for many in (1, 2):
        can = layers[source] > many
        rows = np.arange(int(can.sum()))
        after = np.tile(layers, (len(rows), 1))
        after[rows, source[can]] -= many
        after[rows, target[can]] += many
        found_layers.append(after)
        found_pools.append(np.tile(pools, (len(rows), 1)))
    swapped = source < target
    one, two = source[swapped], target[swapped]
    rows = np.arange(len(one))
    for values, found in ((pools, found_pools), (layers, found_layers)):
        after = np.tile(values, (len(rows), 1))
        after[rows, one], after[rows, two] = values[two], values[one]
        found.append(after)
    return np.concatenate(found_pools), np.concatenate(found_layers)
