"""Layouts of one pipeline that grow from the first stage on, with what all that begin so take at least."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from heapq import heappush

import numpy as np
from numpy.typing import NDArray

from shardwise.search.uneven.bounds import NEVER_S, Counts, Entries, Order, Relaxation, ended_s, stage_s
from shardwise.search.uneven.options import Options

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Placed = tuple[int, int]
"""A stage: its pool (place in the union) and its layers."""

OF_STAGE = (
    "stage_through_s", "stage_arrival_s", "stage_begun_s", "stage_work_s", "stage_back_s", "stage_reduce_s",
)  # fmt: skip
"""Of a stage: seconds of one microbatch through all before it and back, and on its way to it; from the start
of the step to its own first forward, of its work, of a backward, and of its reduction."""


@dataclass(frozen=True, slots=True)
class Node:
    """The first stages of a layout, and what is left to place. Seconds of one microbatch through them and
    back (`through_s`), of one on its way to the next (`arrival_s`); of the first stage's gathering
    (`gather_s`) and reduction (`reduce_s`); and of the longest end of the step of any (`end_s`). `begun` has
    OF_STAGE of each: what it takes is told again with every stage behind it, as its loop becomes known."""

    stages: tuple[Placed, ...]
    counts: Counts
    layers: int
    begun: tuple[tuple[float, ...], ...] = ()
    through_s: float = 0.0
    arrival_s: float = 0.0
    gather_s: float = 0.0
    reduce_s: float = 0.0
    end_s: float = 0.0


class Tree:
    """Grows partial layouts of one pipeline by a stage, with bounds, as if there were none with a stage that
    takes more than `within_s` by itself; where an `order` of pools is given, in that order only."""

    def __init__(
        self,
        options: Options,
        entries: Entries,
        kinds: tuple[int, ...],
        counts: Counts,
        microbatches: int,
        within_s: float,
        order: Order | None = None,
    ) -> None:
        self._options, self._kinds, self._m, self._order = options, kinds, microbatches, order
        self._rests = Relaxation(entries, [(kinds, counts)], [microbatches], order, within_s)
        self.bound_s = float(self._rests.bounds()[0])
        self.root = Node((), counts, options.layers)

    def grow(
        self, node: Node, most_s: float, heap: list[tuple[float, int, Node]], order: Iterator[int]
    ) -> float:
        """Puts every layout with one stage more, with its bound, on the heap where that is at most `most_s`;
        returns the least of the other bounds."""
        beyond_s = float("inf")
        for pool, left in enumerate(node.counts):
            if not left or (self._order is not None and pool != self._order[len(node.stages)]):
                continue
            counts = tuple(c - (place == pool) for place, c in enumerate(node.counts))
            fewest, most = (1, node.layers - sum(counts)) if sum(counts) else (node.layers, node.layers)
            layers = np.arange(fewest, most + 1)
            bound_s, columns = self._grown(node, pool, layers)
            near = bound_s <= most_s
            far = bound_s[~near & (bound_s < NEVER_S)]
            beyond_s = min(beyond_s, float(far.min(initial=float("inf"))))
            for at in np.flatnonzero(near).tolist():
                n = int(layers[at])
                figures = {name: float(values[at]) for name, values in columns.items()}
                begun = (*node.begun, tuple(figures.pop(name) for name in OF_STAGE))
                child = Node((*node.stages, (pool, n)), counts, node.layers - n, begun, **figures)
                heappush(heap, (float(bound_s[at]), next(order), child))
        return beyond_s

    def _grown(self, node: Node, pool: int, layers: Ints) -> tuple[Floats, dict[str, Floats]]:
        """Bounds, and figures by name, of the layouts whose next stage is on `pool` with so many layers."""
        place, kind, first = sum(node.counts), self._kinds[pool], int(not node.stages)
        stages = self._options.stages[pool]
        f, b = (
            np.minimum(getattr(stages, name)[kind, place, first, layers], NEVER_S)
            for name in ("forward_s", "backward_s")
        )
        number = self.root.counts[pool]
        is_only = int(number == sum(self.root.counts))
        seat = self._options.hops[pool].seats[is_only, kind, number, node.counts[pool]]
        g, r, e = (
            np.minimum(getattr(stages, name)[kind, seat, place, first, layers], NEVER_S)
            for name in ("gather_s", "reduce_s", "end_s")
        )
        hop_s = 0.0 if first else self._hop_s(node, pool)
        through_s, arrival_s = node.through_s + 2.0 * hop_s, node.arrival_s + hop_s
        gather_s, reduce_s = (g, r) if first else (node.gather_s, node.reduce_s)
        end_s = np.maximum(node.end_s, e)
        rest, left = self._rests.rest(node.counts, pool), node.layers - layers
        own = {
            "stage_through_s": through_s + 0.0 * f, "stage_arrival_s": arrival_s + 0.0 * f,
            "stage_begun_s": np.maximum(gather_s + arrival_s, g),
            "stage_work_s": f + b, "stage_back_s": b, "stage_reduce_s": r,
        }  # fmt: skip
        ends_s = through_s + f + b
        behind_s = ends_s if rest is None else ends_s + rest.loop_s[left]
        once = None if rest is None else (rest.ready_s[left], rest.last_s[left])
        drained_s, reduced_s = self._busy(node, place, tuple(own.values()), ends_s, behind_s, once)
        least_s, total_s = drained_s, reduced_s
        if rest is not None:
            least_s = np.maximum(least_s, ends_s + rest.drained_s[left])
            total_s = np.maximum(total_s, gather_s + arrival_s + f + rest.reduced_s[left])
        total_s = np.maximum(total_s, gather_s + least_s + reduce_s) + end_s
        if rest is not None:
            total_s = np.maximum(total_s, rest.alone_s[left])
        columns = {
            "through_s": ends_s, "arrival_s": arrival_s + f, "gather_s": gather_s + 0.0 * f,
            "reduce_s": reduce_s + 0.0 * f, "end_s": end_s, **own,
        }  # fmt: skip
        return total_s, columns

    def _busy(
        self,
        node: Node,
        place: int,
        own: tuple[Floats, ...],
        ends_s: Floats,
        behind_s: Floats,
        rest: tuple[Floats, Floats] | None,
    ) -> tuple[Floats, Floats]:
        """Seconds until the last backwards of all stages down to the one that is placed, and until their
        reductions end: by their own work and loops, and by every run of stages that ends with the placed one
        (see `estimate`). One microbatch is through it and back after `ends_s`, through all after
        `behind_s`; `rest` has `ready_s` and `last_s` of what follows."""
        m, above = float(self._m), len(node.begun)
        figures = np.empty((len(own), above + 1, len(ends_s)))
        figures[:, above] = own
        if above:
            figures[:, :above] = np.array(node.begun).T[..., None]
        through_s, arrival_s, begun_s, work_s, back_s, reduce_s = figures
        run = np.arange(above + 1, 0, -1.0)[:, None]
        places = place - 1.0 + run
        loop_s = behind_s - through_s
        busy_s = stage_s(m, work_s, back_s, loop_s, places)
        again = np.maximum(m - 1.0 - places, 0.0)
        turns = np.floor(again / run)
        runs_s = turns * (ends_s - through_s) + (again - turns * run) * work_s
        busy_s = np.where(m > places, np.maximum(busy_s, 2.0 * loop_s + runs_s), busy_s)
        homeward_s = through_s - arrival_s
        first_s, last_s = begun_s + loop_s + homeward_s, loop_s + reduce_s + arrival_s
        if rest is not None:
            forward_s = work_s[-1] - back_s[-1]
            first_s[-1] = np.maximum(first_s[-1], rest[0] + back_s[-1] + homeward_s[-1])
            last_s[-1] = np.maximum(last_s[-1], rest[1] + forward_s + arrival_s[-1])
        first_s = np.maximum.accumulate(first_s[::-1])[::-1] - homeward_s
        last_s = np.maximum.accumulate(last_s[::-1])[::-1] - arrival_s
        all_s = np.maximum(
            begun_s + busy_s + reduce_s, first_s + ended_s(m, work_s, back_s, reduce_s, last_s, places)
        )
        all_s = np.maximum(all_s, np.where(m > places, first_s + runs_s + last_s, 0.0))
        return (through_s + busy_s).max(axis=0), all_s.max(axis=0)

    def _hop_s(self, node: Node, pool: int) -> float:
        """Seconds of a hop from the last stage of `node` to one on `pool`."""
        before, hops, kinds, numbers = node.stages[-1][0], self._options.hops, self._kinds, self.root.counts
        if before == pool:
            return float(hops[pool].near_s[kinds[pool], numbers[pool], node.counts[pool] + 1])
        ends = ((before, node.counts[before] + 1), (pool, node.counts[pool]))
        return max(float(hops[end].far_s[kinds[end], numbers[end], left]) for end, left in ends)
