"""The best layout of one pipeline, exactly: a good one first, then stages in order of their bound, evaluated
until proven."""

from __future__ import annotations

from dataclasses import dataclass
from heapq import heappop
from itertools import count

import numpy as np

from shardwise.search.clock import Clock
from shardwise.search.uneven.bounds import ROUNDING, Counts, Entries, Order
from shardwise.search.uneven.estimate import STAGE_FIGURES, figures_of
from shardwise.search.uneven.grown import Placed, Tree
from shardwise.search.uneven.moved import moved
from shardwise.search.uneven.options import Options
from shardwise.sim import Durations, makespan_s


@dataclass(frozen=True, slots=True)
class Found:
    """The best layout of a pipeline: stages in order, seconds of its step. None of its layouts takes less
    than `bound_s`, which is its own time where that is proven. `is_given_up`: it is not, and no more layouts
    are to be evaluated."""

    stages: tuple[Placed, ...]
    time_s: float
    bound_s: float
    evaluated: int
    is_given_up: bool


def pipeline_s(
    options: Options, kinds: tuple[int, ...], stages: tuple[Placed, ...], microbatches: int
) -> float:
    """Seconds of a step of one pipeline: 1F1B by max-plus, gathers before, reductions behind, and the longest
    end of the step of any of its stages. Infinity where a stage does not fit."""
    pools, layers = (np.array([list(one)]) for one in zip(*stages, strict=True))
    figures = figures_of(options, kinds, pools, layers)
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


def best_partition(
    options: Options,
    entries: Entries,
    kinds: tuple[int, ...],
    counts: Counts,
    microbatches: int,
    enough_s: float,
    effort: int,
    clock: Clock | None = None,
) -> Found:
    """The fastest layout of a pipeline with so many stages of each pool, or any that takes no more than
    `enough_s` (the search ends there), or the best where `effort` partial layouts have grown, or the `clock`
    is over. Layouts whose bound is more than enough are not evaluated, nor are those told apart that have a
    stage which takes more by itself, so that there may be a bound without a layout.

    Best first: layouts grow from the first stage on, in the order of what they take at least.
    """
    tree = Tree(options, entries, kinds, counts, microbatches, enough_s)
    if tree.bound_s > enough_s:
        return Found((), float("inf"), min(tree.bound_s, beyond(enough_s)), 0, False)
    start = moved(options, kinds, counts, microbatches)
    most = clock or Clock()
    return _best_first(tree, options, kinds, microbatches, start, enough_s, enough_s, effort, most)


def best_in_order(
    options: Options,
    entries: Entries,
    kinds: tuple[int, ...],
    order: Order,
    microbatches: int,
    effort: int,
) -> Found | None:
    """The fastest layout of the pipeline whose stages lie on pools in this order, or the best where `effort`
    partial layouts have grown. None where none fits."""
    counts = tuple(order.count(pool) for pool in range(len(options.stages)))
    start = moved(options, kinds, counts, microbatches, order)
    start_s = pipeline_s(options, kinds, start, microbatches) if start else float("inf")
    tree = Tree(options, entries, kinds, counts, microbatches, start_s, order)
    found = _best_first(tree, options, kinds, microbatches, start, float("inf"), 0.0, effort, Clock())
    return found if found.stages else None


def _best_first(
    tree: Tree,
    options: Options,
    kinds: tuple[int, ...],
    microbatches: int,
    start: tuple[Placed, ...],
    most_s: float,
    enough_s: float,
    effort: int,
    clock: Clock,
) -> Found:
    """The best of `start` and of the tree's layouts that take no more than `most_s`, or the first that takes
    no more than `enough_s`."""
    best = start
    best_s = pipeline_s(options, kinds, best, microbatches) if best else float("inf")
    evaluated, grown = int(bool(best)), 0
    order = count()
    heap = [(tree.bound_s, next(order), tree.root)]
    beyond_s = float("inf")
    while heap and heap[0][0] < best_s and best_s > enough_s and grown < effort:
        if clock.is_over:
            break
        _, _, node = heappop(heap)
        if sum(node.counts):
            grown += 1
            beyond_s = min(beyond_s, tree.grow(node, min(best_s, most_s), heap, order))
            continue
        time_s = pipeline_s(options, kinds, node.stages, microbatches)
        evaluated += 1
        if time_s < best_s:
            best_s, best = time_s, node.stages
    bound_s = min(best_s, beyond_s, beyond(most_s), heap[0][0] if heap else float("inf"))
    is_ended = grown >= effort or clock.is_over
    is_given_up = is_ended and bound_s <= most_s and max(bound_s, enough_s) < best_s
    return Found(best, best_s, bound_s, evaluated, is_given_up)


def beyond(time_s: float) -> float:
    """The least time that is more, as far as bounds tell times apart."""
    return time_s * (1.0 + ROUNDING)
