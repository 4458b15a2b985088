"""Lower bounds of pipelines, for all layouts at once: dynamic programming from the last stage to the first.

A pipeline runs 1F1B over stages of forward f, backward b, w = f + b, hops c. Let stage s be the q-th from
the last. Its first backward ends no sooner than its *loop* after its first forward began: all of its own and
later stages' w, and two hops for each that follows. By then it has done at most q forwards; q microbatches
at most are between its forward and its backward, so that every q-th begins a loop when the one before ended.
So m microbatches take it at least

    max( m w,  loop + max(m - q, 0) w + (min(m, q) - 1) b,  k loop + (m - (k - 1) q - 1) b )

with k = ceil(m / q), and the stages before it, each with its w and two hops, add to that. A suffix of a
pipeline is told by how many stages of each pool it has (`counts`), the pool of its first, and its layers;
the least over all of its layouts is a minimum over the first stage's layers. Loops and times are minimised
apart, so that the result never exceeds the bound of any one layout.
"""

from __future__ import annotations

from dataclasses import dataclass
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


def kind_tuples(options: Options) -> list[tuple[int, ...]]:
    """Every choice of one kind of stage per pool: within a pipeline, stages of one pool are of one kind."""
    return list(product(*(range(len(stages.kinds)) for stages in options.stages)))


@dataclass(frozen=True, slots=True)
class Suffixes:
    """Least figures of suffixes with given counts, by the pool of their first stage; shape (tuples of kinds,
    layers + 1) and for times one more axis of microbatches. NEVER_S where there is none."""

    loop_s: Floats
    time_s: Floats


class Relaxation:
    """The bounds of all suffixes of some tuples of kinds at some numbers of microbatches; with `within`, only
    of those that have no more stages of any pool.

    Blocks that differ in what surrounds the first stage alone (gathers, reductions, the end of the step) have
    the same suffixes: `bounds` adds what surrounds.
    """

    def __init__(
        self,
        options: Options,
        tuples: list[tuple[int, ...]],
        microbatches: Any,
        within: Counts | None = None,
    ) -> None:
        self._options = options
        self._kinds = np.array(tuples, dtype=np.int64).reshape(len(tuples), len(options.stages))
        self._m = np.asarray(microbatches, dtype=np.float64)
        self._every = _counts(options, within)
        self.suffixes: dict[tuple[Counts, int], Suffixes] = {}
        pools = range(len(options.stages))
        self._works = [self._column(options, "work_s", pool) for pool in pools]
        self._backs = [self._column(options, "backward_s", pool) for pool in pools]
        self._hops = [
            [options.hop_s[a][b][self._kinds[:, a], self._kinds[:, b]] for b in pools] for a in pools
        ]
        for counts in self._every:
            if sum(counts) < options.most_stages:
                for pool, count in enumerate(counts):
                    if count:
                        rest = self._rest(counts, pool)
                        self.suffixes[counts, pool] = self._suffix(pool, sum(counts), rest)

    def bounds(self, options: Options) -> dict[Counts, Floats]:
        """Lower bounds of whole pipelines by their counts, of shape (tuples of kinds, microbatches), where
        `options` has these stages."""
        found: dict[Counts, Floats] = {}
        for counts in self._every:
            fronts = [
                self._front(options, pool, sum(counts), self._rest(counts, pool))
                for pool, count in enumerate(counts)
                if count
            ]
            found[counts] = np.minimum.reduce(fronts)
        return found

    def _column(self, options: Options, name: str, pool: int) -> Floats:
        """A figure of the pool's stages, by tuple of kinds; finite, so that none of it is nothing."""
        values: Floats = getattr(options.stages[pool], name)[self._kinds[:, pool]]
        return np.minimum(values, NEVER_S)

    def _rest(self, counts: Counts, pool: int) -> Suffixes | None:
        """What may follow a first stage on `pool`, with two hops to it; None where nothing does."""
        left = tuple(count - (place == pool) for place, count in enumerate(counts))
        if not sum(left):
            return None
        after = [
            (2.0 * self._hops[pool][then], self.suffixes[left, then])
            for then, count in enumerate(left)
            if count
        ]
        return Suffixes(
            np.minimum.reduce([hop_s[:, None] + rest.loop_s for hop_s, rest in after]),
            np.minimum.reduce([hop_s[:, None, None] + rest.time_s for hop_s, rest in after]),
        )

    def _suffix(self, pool: int, place: int, rest: Suffixes | None) -> Suffixes:
        """The least over the layers of the first stage."""
        work_s, back_s = self._works[pool][:, place, 0], self._backs[pool][:, place, 0]
        if rest is None:
            return Suffixes(work_s, self._stage_s(work_s, back_s, work_s, place))
        layers = self._options.layers
        loop_s = np.full(work_s.shape, NEVER_S)
        time_s = np.full((*work_s.shape, len(self._m)), NEVER_S)
        # Entry [n, l] of a suffix of l layers whose first stage has n: the rest of l - n, or never.
        loops = np.concatenate([np.full_like(rest.loop_s, NEVER_S), rest.loop_s], axis=1)
        times = np.concatenate([np.full_like(rest.time_s, NEVER_S), rest.time_s], axis=1)
        whole = np.arange(layers + 1)[None, :]
        size = max(TOGETHER // time_s.size, 1)
        for start in range(1, layers, size):
            n = np.arange(start, min(start + size, layers))
            at = whole - n[:, None] + layers + 1
            w, b = work_s[:, n, None], back_s[:, n, None]
            loop = w + loops[:, at]
            one = self._stage_s(w, b, loop, place)
            np.maximum(one, w[..., None] + times[:, at], out=one)
            np.minimum(loop_s, loop.min(axis=1), out=loop_s)
            np.minimum(time_s, one.min(axis=1), out=time_s)
        return Suffixes(np.minimum(loop_s, NEVER_S), np.minimum(time_s, NEVER_S))

    def _front(self, options: Options, pool: int, place: int, rest: Suffixes | None) -> Floats:
        """Whole pipelines that begin on `pool`, with what surrounds the first stage's work."""
        layers = self._options.layers
        names = ("work_s", "backward_s", "gather_s", "reduce_s", "end_s")
        n = np.arange(1, layers) if rest is not None else np.array([layers])
        work_s, back_s, gather_s, reduce_s, end_s = (
            self._column(options, name, pool)[:, place, 1][:, n] for name in names
        )
        loop_s = work_s if rest is None else work_s + rest.loop_s[:, layers - n]
        drained = self._stage_s(work_s, back_s, loop_s, place) + reduce_s[..., None]
        if rest is not None:
            np.maximum(drained, work_s[..., None] + rest.time_s[:, layers - n], out=drained)
        least: Floats = (drained + (gather_s + end_s)[..., None]).min(axis=1)
        return np.where(least < NEVER_S, least, np.inf)

    def _stage_s(self, work_s: Floats, back_s: Floats, loop_s: Floats, place: int) -> Floats:
        """What m microbatches take one stage at least, with a last axis of m."""
        m = self._m
        work, back, loop = work_s[..., None], back_s[..., None], loop_s[..., None]
        loops = np.ceil(m / place)
        least = loops * loop
        least += (m - (loops - 1.0) * place - 1.0) * back
        walked = np.maximum(m - place, 0.0) * work + (np.minimum(m, place) - 1.0) * back
        np.maximum(least, loop + walked, out=least)
        return np.maximum(least, m * work, out=least)


def _counts(options: Options, within: Counts | None) -> list[Counts]:
    """How many stages of each pool a pipeline may have, no more than `within`, short pipelines first."""
    smallest = [min(tp * dp for tp, dp in stages.kinds) for stages in options.stages]
    most = [
        min(options.most_stages, devices // size)
        for devices, size in zip(options.devices, smallest, strict=True)
    ]
    found = [
        counts
        for counts in product(*(range(count + 1) for count in most))
        if 1 <= sum(counts) <= options.most_stages
        and (within is None or all(count <= top for count, top in zip(counts, within, strict=True)))
    ]
    return sorted(found, key=lambda counts: (sum(counts), counts))
