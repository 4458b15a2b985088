"""The best layout of one pipeline, exactly: stages in order of their bound, evaluated until proven."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import count, pairwise

import numpy as np

from shardwise.search.uneven.bounds import NEVER_S, Counts, Relaxation
from shardwise.search.uneven.options import Options
from shardwise.sim import Durations, makespan_s

Placed = tuple[int, int]
"""A stage: its pool (place in the union) and its layers."""


@dataclass(frozen=True, slots=True, kw_only=True)
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
    places = range(len(stages), 0, -1)
    figures = np.array(
        [
            [
                getattr(options.stages[pool], name)[kinds[pool], place, int(place == len(stages)), layers]
                for name in ("forward_s", "backward_s", "gather_s", "reduce_s", "end_s")
            ]
            for place, (pool, layers) in zip(places, stages, strict=True)
        ]
    ).T
    if not np.isfinite(figures).all():
        return float("inf")
    hops = [options.hop_s[a][b][kinds[a], kinds[b]] for (a, _), (b, _) in pairwise(stages)]
    durations = Durations.of(
        stages=len(stages),
        forward_s=figures[0],
        backward_s=figures[1],
        gather_s=figures[2],
        reduce_s=figures[3],
        hop_forward_s=np.array(hops),
        hop_backward_s=np.array(hops),
    )
    drained = makespan_s("1f1b", pp=len(stages), microbatches=microbatches, vpp=1, durations=durations)
    return float(drained[0] + figures[4].max())


def best_partition(
    options: Options, kinds: tuple[int, ...], counts: Counts, microbatches: int, enough_s: float, effort: int
) -> Found | None:
    """The fastest layout of a pipeline with so many stages of each pool, or any that takes no more than
    `enough_s` (the search ends there), or the best of the `effort` evaluated first. None where none fits.

    Best first: layouts grow from the first stage on, in the order of what they take at least.
    """
    tree = _Tree(options, kinds, counts, microbatches)
    order = count()
    heap = [(0.0, next(order), _Node((), counts, options.layers, 0.0, 0.0, 0.0))]
    best_s, best, evaluated = float("inf"), None, 0
    while heap and heap[0][0] < best_s and best_s > enough_s and evaluated < effort:
        _, _, node = heappop(heap)
        if sum(node.counts):
            for bound_s, child in tree.grown(node):
                if bound_s < best_s:
                    heappush(heap, (bound_s, next(order), child))
            continue
        time_s = pipeline_s(options, kinds, node.stages, microbatches)
        evaluated += 1
        if time_s < best_s:
            best_s, best = time_s, node.stages
    if best is None:
        return None
    bound_s = min(best_s, heap[0][0]) if heap else best_s
    return Found(
        stages=best,
        time_s=best_s,
        bound_s=bound_s,
        evaluated=evaluated,
        is_given_up=evaluated >= effort and bound_s < best_s,
    )


@dataclass(frozen=True, slots=True)
class _Node:
    """The first stages of a layout: what is left to place; seconds of one microbatch through them and back
    (`through_s`), of the longest path found so far (`peak_s`), and around it (`around_s`)."""

    stages: tuple[Placed, ...]
    counts: Counts
    layers: int
    through_s: float
    peak_s: float
    around_s: float


class _Tree:
    """Grows partial layouts of one pipeline by a stage, with bounds."""

    def __init__(self, options: Options, kinds: tuple[int, ...], counts: Counts, microbatches: int) -> None:
        self._options, self._kinds, self._m = options, kinds, microbatches
        self._rests = Relaxation(options, [kinds], [microbatches], within=counts).suffixes

    def grown(self, node: _Node) -> Iterator[tuple[float, _Node]]:
        """Every layout with one stage more, with its bound."""
        for pool, left in enumerate(node.counts):
            if not left:
                continue
            counts = tuple(c - (place == pool) for place, c in enumerate(node.counts))
            fewest, most = (node.layers, node.layers) if not sum(counts) else (1, node.layers - sum(counts))
            for layers in range(fewest, most + 1):
                child = self._child(node, pool, layers, counts)
                if child is not None:
                    yield child

    def _child(self, node: _Node, pool: int, layers: int, counts: Counts) -> tuple[float, _Node] | None:
        options, kinds, place = self._options, self._kinds, sum(node.counts)
        stages, kind, first = options.stages[pool], kinds[pool], int(not node.stages)
        forward_s, backward_s, gather_s, reduce_s, end_s = (
            float(getattr(stages, name)[kind, place, first, layers])
            for name in ("forward_s", "backward_s", "gather_s", "reduce_s", "end_s")
        )
        if backward_s == float("inf"):
            return None
        through_s = node.through_s
        if node.stages:
            before = node.stages[-1][0]
            through_s += 2.0 * float(options.hop_s[before][pool][kinds[before], kind])
        work_s, rest = forward_s + backward_s, node.layers - layers
        loop_s, rest_s = work_s, 0.0
        if sum(counts):
            loops, times = [], []
            for then, left in enumerate(counts):
                if left:
                    hop_s = 2.0 * float(options.hop_s[pool][then][kind, kinds[then]])
                    suffix = self._rests[counts, then]
                    loops.append(hop_s + float(suffix.loop_s[0, rest]))
                    times.append(hop_s + float(suffix.time_s[0, rest, 0]))
            loop_s, rest_s = work_s + min(loops), min(times)
        own_s = through_s + self._stage_s(work_s, backward_s, loop_s, place)
        around_s = gather_s + end_s if first else node.around_s
        peak_s = max(node.peak_s, own_s + (reduce_s if first else 0.0))
        bound_s = around_s + max(peak_s, through_s + work_s + rest_s if sum(counts) else 0.0)
        if bound_s >= NEVER_S:
            return None
        grown = (*node.stages, (pool, layers))
        return bound_s, _Node(grown, counts, rest, through_s + work_s, peak_s, around_s)

    def _stage_s(self, work_s: float, backward_s: float, loop_s: float, place: int) -> float:
        """What the microbatches take one stage at least: see `bounds`."""
        m = self._m
        walked = loop_s + max(m - place, 0) * work_s + (min(m, place) - 1) * backward_s
        loops = -(-m // place)
        looped = loops * loop_s + (m - (loops - 1) * place - 1) * backward_s
        return max(walked, m * work_s, looped)
