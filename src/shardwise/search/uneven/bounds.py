"""Lower bounds of pipelines, for all layouts at once: dynamic programming from the last stage to the first.

A pipeline runs 1F1B over stages of forward f, backward b, w = f + b, hops c. Let stage s be the q-th from
the last. Its first backward ends no sooner than its *loop* after its first forward began: all of its own and
later stages' w, and two hops for each that follows. By then it has done at most q forwards; q microbatches
at most are between its forward and its backward, so that every q-th begins a loop when the one before ended,
and the last one is a loop of its own. So from the first forward of the stage to its last backward m
microbatches take it at least

    max( m w,  loop + max(m - q, 0) w + (min(m, q) - 1) b,  k loop + (m - (k - 1) q - 1) b,
         2 loop + (m - 1 - q) w where m > q )

with k = ceil(m / q). The stages before it, each with its w and two hops, add to that; or else their forwards
and one hop each, and its own reduction; or else its own gathering, reduction and end of the step alone. A
suffix of a pipeline is told by how many stages of each pool it has (`counts`), the pool of its first, and its
layers; the least over all of its layouts is a minimum over the first stage's layers. Every figure is
minimised apart, so that the result never exceeds the bound of any one layout.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce
from itertools import product
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardwise.search.uneven.options import Options

Floats = NDArray[np.float64]
Counts = tuple[int, ...]

NEVER_S = 1e30
"""Seconds that stand for forever: finite, so that none of them is nothing."""

TOGETHER = 200_000
"""Entries of tables that are made at a time: they stay within a cache."""


@dataclass(frozen=True, slots=True)
class Suffixes:
    """Least figures of suffixes with given counts, by the pool of their first stage: its loop, of shape
    (layers + 1); and with one more axis of microbatches seconds from its first forward to its last backward
    (`drained_s`) and to the end of the reductions of all (`reduced_s`), and from the start of the step to the
    end of any stage by itself (`alone_s`). NEVER_S where there is none."""

    loop_s: Floats
    drained_s: Floats
    reduced_s: Floats
    alone_s: Floats

    def least(self, other: Suffixes) -> Suffixes:
        """The least of both."""
        return Suffixes(
            np.minimum(self.loop_s, other.loop_s),
            np.minimum(self.drained_s, other.drained_s),
            np.minimum(self.reduced_s, other.reduced_s),
            np.minimum(self.alone_s, other.alone_s),
        )

    def after(self, hop_s: float) -> Suffixes:
        """The same behind a hop."""
        return Suffixes(
            self.loop_s + 2.0 * hop_s, self.drained_s + 2.0 * hop_s, self.reduced_s + hop_s, self.alone_s
        )


class Relaxation:
    """The bounds of all suffixes of pipelines of some kinds, with no more stages of any pool than `counts`,
    at some numbers of microbatches."""

    def __init__(self, options: Options, kinds: tuple[int, ...], counts: Counts, microbatches: Any) -> None:
        self._options, self._kinds = options, kinds
        self._m = np.asarray(microbatches, dtype=np.float64)
        self._counts = counts
        self.suffixes: dict[tuple[Counts, int], Suffixes] = {}
        for some in sorted(product(*(range(count + 1) for count in counts)), key=sum):
            if some != counts:
                for pool, count in enumerate(some):
                    if count:
                        self.suffixes[some, pool] = self._suffix(pool, some)

    def bounds(self) -> Floats:
        """Lower bounds of whole pipelines with all of the counts, by microbatches; infinity where there are
        none."""
        fronts = [self._front(pool) for pool, count in enumerate(self._counts) if count]
        least: Floats = np.minimum.reduce(fronts)
        return np.where(least < NEVER_S, least, np.inf)

    def hop_s(self, pool: int, then: int) -> float:
        """Seconds of a hop between stages on two pools."""
        return float(self._options.hop_s[pool][then][self._kinds[pool], self._kinds[then]])

    def rest(self, counts: Counts, pool: int) -> Suffixes | None:
        """What may follow a stage on `pool`, behind the hop to it; None where nothing does."""
        left = tuple(count - (place == pool) for place, count in enumerate(counts))
        after = [
            self.suffixes[left, then].after(self.hop_s(pool, then))
            for then, count in enumerate(left)
            if count
        ]
        return reduce(Suffixes.least, after) if after else None

    def _stage(self, pool: int, place: int, first: int) -> tuple[Floats, ...]:
        """Forward, backward, gathering, reduction and end of the step by layers; finite, so that none of it
        is nothing."""
        stages = self._options.stages[pool]
        names = ("forward_s", "backward_s", "gather_s", "reduce_s", "end_s")
        every = [getattr(stages, name)[self._kinds[pool], place, first] for name in names]
        return tuple(np.minimum(values, NEVER_S) for values in every)

    def _suffix(self, pool: int, counts: Counts) -> Suffixes:
        """The least over the layers of the first stage."""
        place, rest = sum(counts), self.rest(counts, pool)
        forward_s, back_s, gather_s, reduce_s, end_s = self._stage(pool, place, 0)
        work_s = forward_s + back_s
        if rest is None:
            work, back = work_s[:, None], back_s[:, None]
            own = stage_s(self._m, work, back, work, place)
            around_s = gather_s + reduce_s + end_s
            return Suffixes(work_s, own, own + reduce_s[:, None], own + around_s[:, None])
        layers = self._options.layers
        figures = (rest.loop_s[:, None], rest.drained_s, rest.reduced_s, rest.alone_s)
        # Entry [n, l] of a suffix of l layers whose first stage has n: the rest of l - n, or never.
        loops, drains, reduced, alones = (
            np.concatenate([np.full_like(values, NEVER_S), values]) for values in figures
        )
        found = [np.full((layers + 1, 1), NEVER_S)]
        found += [np.full((layers + 1, len(self._m)), NEVER_S) for _ in range(3)]
        whole = np.arange(layers + 1)[None, :]
        size = max(TOGETHER // found[1].size, 1)
        last = int(np.flatnonzero(work_s < NEVER_S).max(initial=0))
        for start in range(1, min(layers, last + 1), size):
            n = np.arange(start, min(start + size, layers, last + 1))
            at = whole - n[:, None] + layers + 1
            f, b, g, r, e = (
                values[n][:, None, None] for values in (forward_s, back_s, gather_s, reduce_s, end_s)
            )
            loop = f + b + loops[at]
            own = stage_s(self._m, f + b, b, loop, place)
            taken = (
                loop,
                np.maximum(own, f + b + drains[at]),
                np.maximum(own + r, f + reduced[at]),
                np.maximum(own + g + r + e, alones[at]),
            )
            for least, values in zip(found, taken, strict=True):
                np.minimum(least, values.min(axis=0), out=least)
        loop_s, drained_s, reduced_s, alone_s = (np.minimum(values, NEVER_S) for values in found)
        return Suffixes(loop_s[:, 0], drained_s, reduced_s, alone_s)

    def _front(self, pool: int) -> Floats:
        """Whole pipelines that begin on `pool`."""
        layers, place, rest = self._options.layers, sum(self._counts), self.rest(self._counts, pool)
        n = np.arange(1, layers) if rest is not None else np.array([layers])
        f, b, g, r, e = (values[n][:, None] for values in self._stage(pool, place, 1))
        if rest is None:
            least = stage_s(self._m, f + b, b, f + b, place) + r
        else:
            left = layers - n
            own = stage_s(self._m, f + b, b, f + b + rest.loop_s[left, None], place)
            least = np.maximum(own, f + b + rest.drained_s[left]) + r
            least = np.maximum(least, f + rest.reduced_s[left])
            least = np.maximum(least, rest.alone_s[left] - g - e)
        bounds: Floats = (least + g + e).min(axis=0)
        return bounds


def stage_s(microbatches: Any, work_s: Any, back_s: Any, loop_s: Any, place: Any) -> Any:
    """Seconds from the first forward of a stage to its last backward, at least: see above."""
    m = microbatches
    loops, beyond = np.ceil(m / place), np.maximum(m - place, 0.0)
    least = loops * loop_s + (m - (loops - 1.0) * place - 1.0) * back_s
    least = np.maximum(least, m * work_s)
    least = np.maximum(least, loop_s + beyond * work_s + (np.minimum(m, place) - 1.0) * back_s)
    return np.maximum(least, np.where(beyond > 0.0, 2.0 * loop_s + (beyond - 1.0) * work_s, 0.0))
