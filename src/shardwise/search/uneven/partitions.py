"""The best layout of one pipeline, exactly: a good one first, then stages in order of their bound, evaluated
until proven."""

from __future__ import annotations

from dataclasses import dataclass
from heapq import heappop
from itertools import count

import numpy as np

from shardwise.search.clock import SearchClock
from shardwise.search.uneven.bounds import ROUNDING, Counts, Order, StageTable
from shardwise.search.uneven.estimate import STAGE_FIGURES, layout_figures
from shardwise.search.uneven.grown import PipelineTree, StagePlacement
from shardwise.search.uneven.moved import local_search
from shardwise.search.uneven.options import StageOptions
from shardwise.sim import Durations, makespan_s


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
