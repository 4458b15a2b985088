"""The best layout of one pipeline, exactly: stages in order of their bound, evaluated until proven."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import count, pairwise

import numpy as np
from numpy.typing import NDArray

from shardwise.search.uneven.bounds import NEVER_S, Counts, Relaxation
from shardwise.search.uneven.options import Options
from shardwise.sim import Durations, makespan_s

Floats = NDArray[np.float64]
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
    Layouts whose bound is more than enough are not evaluated, so that there may be a bound without a layout.

    Best first: layouts grow from the first stage on, in the order of what they take at least.
    """
    tree = _Tree(options, kinds, counts, microbatches)
    order = count()
    heap = [(0.0, next(order), _Node((), counts, options.layers, 0.0, 0.0, 0.0))]
    best: tuple[Placed, ...] = ()
    best_s, evaluated = float("inf"), 0
    beyond_s = float("inf")
    while heap and heap[0][0] < best_s and best_s > enough_s and evaluated < effort:
        _, _, node = heappop(heap)
        if sum(node.counts):
            beyond_s = min(beyond_s, tree.grow(node, min(best_s, enough_s), heap, order))
            continue
        time_s = pipeline_s(options, kinds, node.stages, microbatches)
        evaluated += 1
        if time_s < best_s:
            best_s, best = time_s, node.stages
    bound_s = min(best_s, beyond_s, heap[0][0] if heap else float("inf"))
    if bound_s == float("inf"):
        return None
    return Found(
        stages=best,
        time_s=best_s,
        bound_s=bound_s,
        evaluated=evaluated,
        is_given_up=evaluated >= effort and bound_s <= enough_s < best_s,
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

    def grow(
        self, node: _Node, most_s: float, heap: list[tuple[float, int, _Node]], order: Iterator[int]
    ) -> float:
        """Puts every layout with one stage more, with its bound, on the heap where that is at most `most_s`;
        returns the least of the other bounds."""
        beyond_s = float("inf")
        for pool, left in enumerate(node.counts):
            if not left:
                continue
            counts = tuple(c - (place == pool) for place, c in enumerate(node.counts))
            fewest, most = (1, node.layers - sum(counts)) if sum(counts) else (node.layers, node.layers)
            layers = np.arange(fewest, most + 1)
            bound_s, through_s, peak_s, around_s = self._grown(node, pool, layers, counts)
            near = bound_s <= most_s
            far = bound_s[~near & (bound_s < NEVER_S)]
            beyond_s = min(beyond_s, float(far.min(initial=float("inf"))))
            for at in np.flatnonzero(near).tolist():
                n = int(layers[at])
                child = _Node(
                    (*node.stages, (pool, n)), counts, node.layers - n, float(through_s[at]),
                    float(peak_s[at]), float(around_s[at]),
                )  # fmt: skip
                heappush(heap, (float(bound_s[at]), next(order), child))
        return beyond_s

    def _grown(
        self, node: _Node, pool: int, layers: NDArray[np.int64], counts: Counts
    ) -> tuple[Floats, Floats, Floats, Floats]:
        """Bound, way through, longest path and surroundings of the layouts whose next stage is on `pool` and
        has so many layers."""
        options, kinds, place = self._options, self._kinds, sum(node.counts)
        stages, kind, first = options.stages[pool], kinds[pool], int(not node.stages)
        forward_s, backward_s, gather_s, reduce_s, end_s = (
            np.minimum(getattr(stages, name)[kind, place, first, layers], NEVER_S)
            for name in ("forward_s", "backward_s", "gather_s", "reduce_s", "end_s")
        )
        before_s = node.through_s
        if node.stages:
            before = node.stages[-1][0]
            before_s += 2.0 * float(options.hop_s[before][pool][kinds[before], kind])
        work_s, rest = forward_s + backward_s, node.layers - layers
        loop_s, whole_s = work_s, np.zeros_like(work_s)
        if sum(counts):
            after = [
                (2.0 * float(options.hop_s[pool][then][kind, kinds[then]]), self._rests[counts, then])
                for then, left in enumerate(counts)
                if left
            ]
            loop_s = work_s + np.minimum.reduce([hop_s + suffix.loop_s[0, rest] for hop_s, suffix in after])
            rest_s = np.minimum.reduce([hop_s + suffix.time_s[0, rest, 0] for hop_s, suffix in after])
            whole_s = before_s + work_s + rest_s
        own_s = before_s + self._stage_s(work_s, backward_s, loop_s, place)
        around_s = gather_s + end_s if first else np.full_like(work_s, node.around_s)
        peak_s = np.maximum(node.peak_s, own_s + reduce_s if first else own_s)
        return around_s + np.maximum(peak_s, whole_s), before_s + work_s, peak_s, around_s

    def _stage_s(self, work_s: Floats, backward_s: Floats, loop_s: Floats, place: int) -> Floats:
        """What the microbatches take one stage at least: see `bounds`."""
        m = self._m
        walked = loop_s + max(m - place, 0) * work_s + (min(m, place) - 1) * backward_s
        loops = -(-m // place)
        looped = loops * loop_s + (m - (loops - 1) * place - 1) * backward_s
        return np.maximum(np.maximum(walked, m * work_s), looped)
