"""Layouts of one pipeline that grow from the first stage on, with what all that begin so take at least.

A good layout of one pipeline, soon: layers dealt to stages by their pace, then moved while it helps.

The best layout of one pipeline, exactly: a good one first, then stages in order of their bound, evaluated
until proven.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import count

import numpy as np
from numpy.typing import NDArray

from shardwise.search.clock import SearchClock
from shardwise.search.hetero.lower_bounds import (
    INFINITE_S,
    ROUNDING,
    STAGE_FIGURES,
    Counts,
    Order,
    StageTable,
    SuffixRelaxation,
    completion_lower_bound_s,
    layout_figures,
    lower_bound_s,
    stage_lower_bound_s,
)
from shardwise.search.hetero.stage_costs import StageOptions
from shardwise.sim import Durations, makespan_s

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
StagePlacement = tuple[int, int]
"""A stage: its pool (place in the union) and its layers."""

STAGE_FIELDS = (
    "stage_through_s", "stage_arrival_s", "stage_begun_s", "stage_work_s", "stage_back_s", "stage_reduce_s",
)  # fmt: skip
"""Of a stage: seconds of one microbatch through all before it and back, and on its way to it; from the start
of the step to its own first forward, of its work, of a backward, and of its reduction."""


@dataclass(frozen=True, slots=True)
class PartialPipeline:
    """The first stages of a layout, and what is left to place. Seconds of one microbatch through them and
    back (`through_s`), of one on its way to the next (`arrival_s`); of the first stage's gathering
    (`gather_s`) and reduction (`reduce_s`); and of the longest end of the step of any (`end_s`). `begun` has
    OF_STAGE of each: what it takes is told again with every stage behind it, as its loop becomes known."""

    stages: tuple[StagePlacement, ...]
    counts: Counts
    layers: int
    begun: tuple[tuple[float, ...], ...] = ()
    through_s: float = 0.0
    arrival_s: float = 0.0
    gather_s: float = 0.0
    reduce_s: float = 0.0
    end_s: float = 0.0


class PipelineTree:
    """Grows partial layouts of one pipeline by a stage, with bounds, as if there were none with a stage that
    takes more than `within_s` by itself; where an `order` of pools is given, in that order only."""

    def __init__(
        self,
        options: StageOptions,
        entries: StageTable,
        kinds: tuple[int, ...],
        counts: Counts,
        microbatches: int,
        within_s: float,
        order: Order | None = None,
    ) -> None:
        self._options, self._kinds, self._m, self._order = options, kinds, microbatches, order
        self._relaxation = SuffixRelaxation(entries, [(kinds, counts)], [microbatches], order, within_s)
        self.bound_s = float(self._relaxation.bounds()[0])
        self.root = PartialPipeline((), counts, options.layers)

    def branch(
        self,
        node: PartialPipeline,
        most_s: float,
        heap: list[tuple[float, int, PartialPipeline]],
        order: Iterator[int],
    ) -> float:
        """Puts every layout with one stage more, with its bound, on the heap where that is at most `most_s`;
        returns the least of the other bounds."""
        pruned_bound_s = float("inf")
        for pool, left in enumerate(node.counts):
            if not left or (self._order is not None and pool != self._order[len(node.stages)]):
                continue
            counts = tuple(c - (place == pool) for place, c in enumerate(node.counts))
            fewest, most = (1, node.layers - sum(counts)) if sum(counts) else (node.layers, node.layers)
            layers = np.arange(fewest, most + 1)
            bound_s, columns = self._child_bounds(node, pool, layers)
            near = bound_s <= most_s
            far = bound_s[~near & (bound_s < INFINITE_S)]
            pruned_bound_s = min(pruned_bound_s, float(far.min(initial=float("inf"))))
            for at in np.flatnonzero(near).tolist():
                n = int(layers[at])
                figures = {name: float(values[at]) for name, values in columns.items()}
                begun = (*node.begun, tuple(figures.pop(name) for name in STAGE_FIELDS))
                child = PartialPipeline((*node.stages, (pool, n)), counts, node.layers - n, begun, **figures)
                heappush(heap, (float(bound_s[at]), next(order), child))
        return pruned_bound_s

    def _child_bounds(
        self, node: PartialPipeline, pool: int, layers: Ints
    ) -> tuple[Floats, dict[str, Floats]]:
        """Bounds, and figures by name, of the layouts whose next stage is on `pool` with so many layers."""
        place, kind, first = sum(node.counts), self._kinds[pool], int(not node.stages)
        stages = self._options.stages[pool]
        f, b = (
            np.minimum(getattr(stages, name)[kind, place, first, layers], INFINITE_S)
            for name in ("forward_s", "backward_s")
        )
        number = self.root.counts[pool]
        is_only = int(number == sum(self.root.counts))
        node_slot = self._options.hops[pool].node_slots[is_only, kind, number, node.counts[pool]]
        g, r, e = (
            np.minimum(getattr(stages, name)[kind, node_slot, place, first, layers], INFINITE_S)
            for name in ("gather_s", "reduce_s", "end_s")
        )
        hop_s = 0.0 if first else self._hop_s(node, pool)
        through_s, arrival_s = node.through_s + 2.0 * hop_s, node.arrival_s + hop_s
        gather_s, reduce_s = (g, r) if first else (node.gather_s, node.reduce_s)
        end_s = np.maximum(node.end_s, e)
        completion_bound, left = self._relaxation.completion_bound(node.counts, pool), node.layers - layers
        own = {
            "stage_through_s": through_s + 0.0 * f, "stage_arrival_s": arrival_s + 0.0 * f,
            "stage_begun_s": np.maximum(gather_s + arrival_s, g),
            "stage_work_s": f + b, "stage_back_s": b, "stage_reduce_s": r,
        }  # fmt: skip
        ends_s = through_s + f + b
        remaining_s = ends_s if completion_bound is None else ends_s + completion_bound.loop_s[left]
        once = (
            None
            if completion_bound is None
            else (completion_bound.ready_s[left], completion_bound.last_s[left])
        )
        drained_s, reduced_s = self._stage_bounds(node, place, tuple(own.values()), ends_s, remaining_s, once)
        lower_bound_s, total_s = drained_s, reduced_s
        if completion_bound is not None:
            lower_bound_s = np.maximum(lower_bound_s, ends_s + completion_bound.drained_s[left])
            total_s = np.maximum(total_s, gather_s + arrival_s + f + completion_bound.reduced_s[left])
        total_s = np.maximum(total_s, gather_s + lower_bound_s + reduce_s) + end_s
        if completion_bound is not None:
            total_s = np.maximum(total_s, completion_bound.alone_s[left])
        columns = {
            "through_s": ends_s, "arrival_s": arrival_s + f, "gather_s": gather_s + 0.0 * f,
            "reduce_s": reduce_s + 0.0 * f, "end_s": end_s, **own,
        }  # fmt: skip
        return total_s, columns

    def _stage_bounds(
        self,
        node: PartialPipeline,
        place: int,
        own: tuple[Floats, ...],
        ends_s: Floats,
        remaining_s: Floats,
        completion_bound: tuple[Floats, Floats] | None,
    ) -> tuple[Floats, Floats]:
        """Seconds until the last backwards of all stages down to the one that is placed, and until their
        reductions end: by their own work and loops, and by every run of stages that ends with the placed one
        (see `estimate`). One microbatch is through it and back after `ends_s`, through all after
        `remaining_s`; `completion_bound` has `ready_s` and `last_s` of what follows."""
        m, above = float(self._m), len(node.begun)
        figures = np.empty((len(own), above + 1, len(ends_s)))
        figures[:, above] = own
        if above:
            figures[:, :above] = np.array(node.begun).T[..., None]
        through_s, arrival_s, begun_s, work_s, back_s, reduce_s = figures
        run = np.arange(above + 1, 0, -1.0)[:, None]
        places = place - 1.0 + run
        loop_s = remaining_s - through_s
        busy_s = stage_lower_bound_s(m, work_s, back_s, loop_s, places)
        again = np.maximum(m - 1.0 - places, 0.0)
        rounds = np.floor(again / run)
        runs_s = rounds * (ends_s - through_s) + (again - rounds * run) * work_s
        busy_s = np.where(m > places, np.maximum(busy_s, 2.0 * loop_s + runs_s), busy_s)
        return_path_s = through_s - arrival_s
        first_s, last_s = begun_s + loop_s + return_path_s, loop_s + reduce_s + arrival_s
        if completion_bound is not None:
            forward_s = work_s[-1] - back_s[-1]
            first_s[-1] = np.maximum(first_s[-1], completion_bound[0] + back_s[-1] + return_path_s[-1])
            last_s[-1] = np.maximum(last_s[-1], completion_bound[1] + forward_s + arrival_s[-1])
        first_s = np.maximum.accumulate(first_s[::-1])[::-1] - return_path_s
        last_s = np.maximum.accumulate(last_s[::-1])[::-1] - arrival_s
        all_s = np.maximum(
            begun_s + busy_s + reduce_s,
            first_s + completion_lower_bound_s(m, work_s, back_s, reduce_s, last_s, places),
        )
        all_s = np.maximum(all_s, np.where(m > places, first_s + runs_s + last_s, 0.0))
        return (through_s + busy_s).max(axis=0), all_s.max(axis=0)

    def _hop_s(self, node: PartialPipeline, pool: int) -> float:
        """Seconds of a hop from the last stage of `node` to one on `pool`."""
        before, hops, kinds, numbers = node.stages[-1][0], self._options.hops, self._kinds, self.root.counts
        if before == pool:
            return float(hops[pool].near_s[kinds[pool], numbers[pool], node.counts[pool] + 1])
        ends = ((before, node.counts[before] + 1), (pool, node.counts[pool]))
        return max(float(hops[end].far_s[kinds[end], numbers[end], left]) for end, left in ends)


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
    for pool, stages in enumerate(counts):
        others = sequential[sequential != pool]
        half = stages // 2
        found.append(np.concatenate([np.full(half, pool), others, np.full(stages - half, pool)]))
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


@dataclass(frozen=True, slots=True)
class PipelineSolution:
    """The best layout of a pipeline: stages in order, seconds of its step. None of its layouts takes less
    than `bound_s`, which is its own time where that is proven. `is_truncated`: it is not, and no more layouts
    are to be evaluated."""

    stages: tuple[StagePlacement, ...]
    time_s: float
    bound_s: float
    evaluated: int
    is_truncated: bool


def pipeline_s(
    options: StageOptions, kinds: tuple[int, ...], stages: tuple[StagePlacement, ...], microbatches: int
) -> float:
    """Seconds of a step of one pipeline: 1F1B by max-plus, gathers before, reductions behind, and the longest
    end of the step of any of its stages. Infinity where a stage does not fit."""
    pools, layers = (np.array([list(one)]) for one in zip(*stages, strict=True))
    figures = layout_figures(options, kinds, pools, layers)
    if not all(np.isfinite(getattr(figures, name)).all() for name in STAGE_FIGURES):
        return float("inf")
    durations = Durations.of(
        stages=len(stages),
        forward_s=figures.forward_s[0],
        backward_s=figures.backward_s[0],
        gather_s=figures.gather_s[0],
        reduce_s=figures.reduce_s[0],
        hop_forward_s=figures.hop_s[0],
        hop_backward_s=figures.hop_s[0],
    )
    drained = makespan_s("1f1b", pp=len(stages), microbatches=microbatches, vpp=1, durations=durations)
    return float(drained[0] + figures.end_s.max())


def best_pipeline(
    options: StageOptions,
    entries: StageTable,
    kinds: tuple[int, ...],
    counts: Counts,
    microbatches: int,
    target_s: float,
    effort: int,
    clock: SearchClock | None = None,
) -> PipelineSolution:
    """The fastest layout of a pipeline with so many stages of each pool, or any that takes no more than
    `target_s` (the search ends there), or the best where `effort` partial layouts have grown, or the `clock`
    is over. Layouts whose bound is more than enough are not evaluated, nor are those told apart that have a
    stage which takes more by itself, so that there may be a bound without a layout.

    Best first: layouts grow from the first stage on, in the order of what they take at least.
    """
    tree = PipelineTree(options, entries, kinds, counts, microbatches, target_s)
    if tree.bound_s > target_s:
        return PipelineSolution((), float("inf"), min(tree.bound_s, next_above(target_s)), 0, False)
    start = local_search(options, kinds, counts, microbatches)
    most = clock or SearchClock()
    return _best_first(tree, options, kinds, microbatches, start, target_s, target_s, effort, most)


def best_pipeline_in_order(
    options: StageOptions,
    entries: StageTable,
    kinds: tuple[int, ...],
    order: Order,
    microbatches: int,
    effort: int,
) -> PipelineSolution | None:
    """The fastest layout of the pipeline whose stages lie on pools in this order, or the best where `effort`
    partial layouts have grown. None where none fits."""
    counts = tuple(order.count(pool) for pool in range(len(options.stages)))
    start = local_search(options, kinds, counts, microbatches, order)
    start_s = pipeline_s(options, kinds, start, microbatches) if start else float("inf")
    tree = PipelineTree(options, entries, kinds, counts, microbatches, start_s, order)
    found = _best_first(tree, options, kinds, microbatches, start, float("inf"), 0.0, effort, SearchClock())
    return found if found.stages else None


def _best_first(
    tree: PipelineTree,
    options: StageOptions,
    kinds: tuple[int, ...],
    microbatches: int,
    start: tuple[StagePlacement, ...],
    most_s: float,
    target_s: float,
    effort: int,
    clock: SearchClock,
) -> PipelineSolution:
    """The best of `start` and of the tree's layouts that take no more than `most_s`, or the first that takes
    no more than `target_s`."""
    best = start
    best_s = pipeline_s(options, kinds, best, microbatches) if best else float("inf")
    evaluated, expanded = int(bool(best)), 0
    order = count()
    heap = [(tree.bound_s, next(order), tree.root)]
    pruned_bound_s = float("inf")
    while heap and heap[0][0] < best_s and best_s > target_s and expanded < effort:
        if clock.is_over:
            break
        _, _, node = heappop(heap)
        if sum(node.counts):
            expanded += 1
            pruned_bound_s = min(pruned_bound_s, tree.branch(node, min(best_s, most_s), heap, order))
            continue
        time_s = pipeline_s(options, kinds, node.stages, microbatches)
        evaluated += 1
        if time_s < best_s:
            best_s, best = time_s, node.stages
    bound_s = min(best_s, pruned_bound_s, next_above(most_s), heap[0][0] if heap else float("inf"))
    is_ended = expanded >= effort or clock.is_over
    is_truncated = is_ended and bound_s <= most_s and max(bound_s, target_s) < best_s
    return PipelineSolution(best, best_s, bound_s, evaluated, is_truncated)


def next_above(time_s: float) -> float:
    """The least time that is more, as far as bounds tell times apart."""
    return time_s * (1.0 + ROUNDING)
