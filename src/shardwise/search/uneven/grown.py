"""Layouts of one pipeline that grow from the first stage on, with what all that begin so take at least."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from heapq import heappush

import numpy as np
from numpy.typing import NDArray

from shardwise.search.uneven.bounds import NEVER_S, Counts, Relaxation, stage_s
from shardwise.search.uneven.options import Options

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Placed = tuple[int, int]
"""A stage: its pool (place in the union) and its layers."""


@dataclass(frozen=True, slots=True)
class Node:
    """The first stages of a layout, and what is left to place. Seconds of one microbatch through them and
    back (`through_s`), of one on its way to the next (`arrival_s`); of the first stage's gathering
    (`gather_s`) and reduction (`reduce_s`); until the first stage's last backward (`drained_s`) and the step
    (`ended_s`) end as far as these stages tell; and of the longest end of the step of any (`end_s`)."""

    stages: tuple[Placed, ...]
    counts: Counts
    layers: int
    through_s: float = 0.0
    arrival_s: float = 0.0
    gather_s: float = 0.0
    reduce_s: float = 0.0
    drained_s: float = 0.0
    ended_s: float = 0.0
    end_s: float = 0.0


class Tree:
    """Grows partial layouts of one pipeline by a stage, with bounds."""

    def __init__(self, options: Options, kinds: tuple[int, ...], counts: Counts, microbatches: int) -> None:
        self._options, self._kinds, self._m = options, kinds, microbatches
        self._rests = Relaxation(options, kinds, counts, [microbatches])
        self.bound_s = float(self._rests.bounds()[0])
        self.root = Node((), counts, options.layers)

    def grow(
        self, node: Node, most_s: float, heap: list[tuple[float, int, Node]], order: Iterator[int]
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
            bound_s, columns = self._grown(node, pool, layers)
            near = bound_s <= most_s
            far = bound_s[~near & (bound_s < NEVER_S)]
            beyond_s = min(beyond_s, float(far.min(initial=float("inf"))))
            for at in np.flatnonzero(near).tolist():
                n = int(layers[at])
                figures = {name: float(values[at]) for name, values in columns.items()}
                child = Node((*node.stages, (pool, n)), counts, node.layers - n, **figures)
                heappush(heap, (float(bound_s[at]), next(order), child))
        return beyond_s

    def _grown(self, node: Node, pool: int, layers: Ints) -> tuple[Floats, dict[str, Floats]]:
        """Bounds, and figures by name, of the layouts whose next stage is on `pool` with so many layers."""
        place, kind, first = sum(node.counts), self._kinds[pool], int(not node.stages)
        stages = self._options.stages[pool]
        f, b, g, r, e = (
            np.minimum(getattr(stages, name)[kind, place, first, layers], NEVER_S)
            for name in ("forward_s", "backward_s", "gather_s", "reduce_s", "end_s")
        )
        hop_s = 0.0 if first else self._rests.hop_s(node.stages[-1][0], pool)
        through_s, arrival_s = node.through_s + 2.0 * hop_s, node.arrival_s + hop_s
        gather_s, reduce_s = (g, r) if first else (node.gather_s, node.reduce_s)
        end_s = np.maximum(node.end_s, e)
        rest, left = self._rests.rest(node.counts, pool), node.layers - layers
        loop_s = f + b if rest is None else f + b + rest.loop_s[left]
        own_s = stage_s(float(self._m), f + b, b, loop_s, place)
        drained_s = np.maximum(node.drained_s, through_s + own_s)
        ended_s = np.maximum(node.ended_s, np.maximum(gather_s + arrival_s, g) + own_s + r)
        least_s, total_s = drained_s, ended_s
        if rest is not None:
            least_s = np.maximum(least_s, through_s + f + b + rest.drained_s[left, 0])
            total_s = np.maximum(total_s, gather_s + arrival_s + f + rest.reduced_s[left, 0])
        total_s = np.maximum(total_s, gather_s + least_s + reduce_s) + end_s
        if rest is not None:
            total_s = np.maximum(total_s, rest.alone_s[left, 0])
        columns = {
            "through_s": through_s + f + b, "arrival_s": arrival_s + f, "gather_s": gather_s + 0.0 * f,
            "reduce_s": reduce_s + 0.0 * f, "drained_s": drained_s, "ended_s": ended_s, "end_s": end_s,
        }  # fmt: skip
        return total_s, columns
