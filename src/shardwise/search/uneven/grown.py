"""Layouts of one pipeline that grow from the first stage on, with what all that begin so take at least."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from heapq import heappush

import numpy as np
from numpy.typing import NDArray

from shardwise.search.uneven.bounds import (
    INFINITE_S,
    Counts,
    Order,
    StageTable,
    SuffixRelaxation,
    completion_lower_bound_s,
    stage_lower_bound_s,
)
from shardwise.search.uneven.options import StageOptions

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
