"""The best layout of one pipeline: which pool each stage is on, and its layers.

`local_search` finds a good layout. `best_pipeline` then branches partial pipelines from the first stage on in
the order of their bounds (`PipelineTree`), and evaluates complete ones (`pipeline_s`), until none can be
faster. `best_pipeline_in_order` does the same for a given order of pools.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import count

import numpy as np
from numpy.typing import NDArray

from shardwise.cost import with_sends
from shardwise.search.clock import SearchClock
from shardwise.search.hetero.lower_bounds import (
    INFINITE_S,
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
from shardwise.ties import PROVEN_TIE, ROUNDING, first_least, is_less

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
StagePlacement = tuple[int, int]
"""A stage: its pool (index in the union) and its layers."""

STAGE_FIELDS = (
    "stage_through_s", "stage_arrival_s", "stage_begun_s", "stage_work_s", "stage_back_s", "stage_reduce_s",
)  # fmt: skip
"""Seconds of a placed stage: one micro-batch through all earlier stages and back, and on its way to the
stage; from the start of the step to the stage's first forward; its work, a backward, and its reduction."""


@dataclass(frozen=True, slots=True)
class PartialPipeline:
    """The first stages of a layout; `counts` and `layers` are the stages and layers left to place.

    Seconds of one micro-batch through the placed stages and back (`through_s`), and on its way to the next
    stage (`arrival_s`); of the first stage's gathering and reduction; and of the longest end of the step.
    `begun` has the STAGE_FIELDS of each placed stage, whose bounds rise with each further stage, as its loop
    becomes known.
    """

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
    """Branches partial pipelines by one stage, with bounds. Stages that take more than `within_s` by
    themselves are left out. With an `order`, pools are only in that order."""

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
        """Pushes every child whose bound is at most `most_s` on the heap; returns the least of the other
        bounds."""
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
        """Bounds, and terms by name, of the children whose next stage is on `pool`, by its layers."""
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
        """Lower bounds of the last backwards of all placed stages, and of the end of their reductions.

        Each stage is bounded by its own work and loop, and by every run of stages that ends with the new one
        (see `lower_bounds.lower_bound_s`). One micro-batch takes `ends_s` through the new stage and back,
        `remaining_s` through all stages. `completion_bound` has `ready_s` and `last_s` of the stages that
        follow.
        """
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
        """Seconds of a hop from the last stage of `node` to a stage on `pool`."""
        before, hops, kinds, numbers = node.stages[-1][0], self._options.hops, self._kinds, self.root.counts
        if before == pool:
            return float(hops[pool].near_s[kinds[pool], numbers[pool], node.counts[pool] + 1])
        ends = ((before, node.counts[before] + 1), (pool, node.counts[pool]))
        return max(float(hops[end].far_s[kinds[end], numbers[end], left]) for end, left in ends)


# Local search

MAX_LOCAL_STEPS = 60
"""Steps of a local search, at most."""


def local_search(
    options: StageOptions,
    kinds: tuple[int, ...],
    counts: Counts,
    microbatches: int,
    order: Order | None = None,
) -> tuple[StagePlacement, ...]:
    """A layout with these counts of stages that no local step makes faster by its lower bound; empty where
    none was found that fits.

    A step moves one or two layers from a stage to another, or swaps two stages. Initial layouts have the
    pools one after the other, in order and in reverse, and each pool around the others; with an `order`, that
    one only, and it stays.
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
            at = int(first_least(times))
            if not is_less(float(times[at]), time_s):
                break
            time_s, pools, layers = float(times[at]), near_pools[at], near_layers[at]
        if best is None or is_less(time_s, best[0]):
            best = time_s, pools, layers
    return () if best is None else tuple(zip(best[1].tolist(), best[2].tolist(), strict=True))


def _initial_orders(counts: Counts) -> list[Ints]:
    """Initial orders of the pools of stages, each once."""
    sequential = np.repeat(np.arange(len(counts)), counts)
    found = [sequential, sequential[::-1]]
    for pool, stages in enumerate(counts):
        others = sequential[sequential != pool]
        half = stages // 2
        found.append(np.concatenate([np.full(half, pool), others, np.full(stages - half, pool)]))
    return [np.array(order) for order in dict.fromkeys(tuple(order.tolist()) for order in found)]


def _balanced_layers(options: StageOptions, kinds: tuple[int, ...], pools: Ints) -> Ints | None:
    """Layers of stages on these pools: one each, then one at a time to the stage with the least work after
    it. None where the stages cannot take all layers."""
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
    """Layouts one step away."""
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


# Exact search


@dataclass(frozen=True, slots=True)
class PipelineSolution:
    """The best layout of a pipeline, with the seconds of its step.

    No layout takes less than `bound_s`, which equals `time_s` where the optimum is proven. `is_truncated`:
    the search ended by effort or time before its proof.
    """

    stages: tuple[StagePlacement, ...]
    time_s: float
    bound_s: float
    evaluated: int
    is_truncated: bool


def pipeline_s(
    options: StageOptions, kinds: tuple[int, ...], stages: tuple[StagePlacement, ...], microbatches: int
) -> float:
    """Seconds of a step of one pipeline: all-gathers, 1F1B by max-plus, reductions, and the longest end of
    the step of its stages. Infinity where a stage does not fit."""
    pools, layers = (np.array([list(one)]) for one in zip(*stages, strict=True))
    figures = layout_figures(options, kinds, pools, layers)
    if not all(np.isfinite(getattr(figures, name)).all() for name in STAGE_FIGURES):
        return float("inf")
    forward_s, backward_s, hops_s = with_sends(
        figures.forward_s[0], figures.backward_s[0], figures.hop_s[0], options.sends_overlap
    )
    durations = Durations.of(
        stages=len(stages),
        forward_s=forward_s,
        backward_s=backward_s,
        gather_s=figures.gather_s[0],
        reduce_s=figures.reduce_s[0],
        hop_forward_s=hops_s,
        hop_backward_s=hops_s,
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
    """The fastest layout of a pipeline with these counts of stages on each pool.

    The search ends with the first layout that takes at most `target_s`, after `effort` expanded partial
    pipelines, or when the `clock` is over. Layouts whose bound, or any stage by itself, exceeds `target_s`
    are not evaluated, so the result may have a bound without a layout.
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
    """The fastest layout of the pipeline whose stages are on pools in this order, or the best after `effort`
    expanded partial pipelines. None where none fits."""
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
    """The best of `start` and of the tree's layouts that take at most `most_s`, or the first that takes at
    most `target_s`. Partial pipelines are branched in the order of their bounds."""
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
        if is_less(time_s, best_s, PROVEN_TIE):
            best_s, best = time_s, node.stages
    bound_s = min(best_s, pruned_bound_s, next_above(most_s), heap[0][0] if heap else float("inf"))
    is_ended = expanded >= effort or clock.is_over
    is_truncated = is_ended and bound_s <= most_s and max(bound_s, target_s) < best_s
    return PipelineSolution(best, best_s, bound_s, evaluated, is_truncated)


def next_above(time_s: float) -> float:
    """The least time that bounds distinguish from `time_s` and that is longer."""
    return time_s * (1.0 + ROUNDING)
