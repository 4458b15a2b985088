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


def kind_tuples(options: Options) -> list[tuple[int, ...]]:
    """Every choice of one kind of stage per pool: within a pipeline, stages of one pool are of one kind."""
    return list(product(*(range(len(stages.kinds)) for stages in options.stages)))


@dataclass(frozen=True, slots=True)
class Suffixes:
    """Least figures of suffixes with given counts, by the pool of their first stage; shape (tuples of kinds,
    layers + 1) and for times one more axis of microbatches. Infinity where there is none."""

    loop_s: Floats
    time_s: Floats
    pace_s: Floats


@dataclass(frozen=True, slots=True)
class Bounds:
    """Lower bounds of whole pipelines of given counts: `time_s` of shape (tuples of kinds, microbatches), and
    `pace_s`, by how much every further microbatch adds at least, of shape (tuples of kinds,)."""

    time_s: Floats
    pace_s: Floats


class Relaxation:
    """The bounds of all pipelines of some tuples of kinds at some numbers of microbatches; with `within`,
    only of those that have no more stages of any pool."""

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
        self.suffixes: dict[tuple[Counts, int], Suffixes] = {}
        self.bounds: dict[Counts, Bounds] = {}
        pools = range(len(options.stages))
        self._works = [self._column("work_s", pool) for pool in pools]
        self._backs = [self._column("backward_s", pool) for pool in pools]
        self._hops = [
            [options.hop_s[a][b][self._kinds[:, a], self._kinds[:, b]] for b in pools] for a in pools
        ]
        for counts in _counts(options, within):
            self._add(counts)

    def _column(self, name: str, pool: int) -> Floats:
        """A figure of the pool's stages, by tuple of kinds."""
        values: Floats = getattr(self._options.stages[pool], name)[self._kinds[:, pool]]
        return values

    def _add(self, counts: Counts) -> None:
        place = sum(counts)
        is_longest = place == self._options.most_stages
        fronts: list[Bounds] = []
        for pool, count in enumerate(counts):
            if not count:
                continue
            rests = self._rests(counts, pool)
            if not is_longest:
                self.suffixes[counts, pool] = self._suffix(pool, place, rests)
            fronts.append(self._front(pool, place, rests))
        self.bounds[counts] = Bounds(
            np.minimum.reduce([front.time_s for front in fronts]),
            np.minimum.reduce([front.pace_s for front in fronts]),
        )

    def _rests(self, counts: Counts, pool: int) -> list[tuple[Floats, Suffixes]]:
        """What may follow a first stage on `pool`: hop and suffix."""
        left = tuple(count - (place == pool) for place, count in enumerate(counts))
        if not sum(left):
            return []
        return [
            (self._hops[pool][then], self.suffixes[left, then]) for then, count in enumerate(left) if count
        ]

    def _suffix(self, pool: int, place: int, rests: list[tuple[Floats, Suffixes]]) -> Suffixes:
        layers = self._options.layers
        work_s, back_s = self._works[pool][:, place, 0], self._backs[pool][:, place, 0]
        if not rests:
            time_s = self._stage_s(work_s, back_s, work_s, place)
            return Suffixes(work_s, time_s, work_s)
        loop_s = np.full(work_s.shape, np.inf)
        pace_s = np.full(work_s.shape, np.inf)
        time_s = np.full((*work_s.shape, len(self._m)), np.inf)
        for hop_s, rest in rests:
            for n in range(1, layers):
                w, b = work_s[:, n, None], back_s[:, n, None]
                if not np.isfinite(w).any():
                    continue
                through_s = w + 2.0 * hop_s[:, None]
                loop = through_s + rest.loop_s[:, : layers + 1 - n]
                own = self._stage_s(w, b, loop, place)
                whole = np.maximum(own, through_s[..., None] + rest.time_s[:, : layers + 1 - n])
                np.minimum(loop_s[:, n:], loop, out=loop_s[:, n:])
                np.minimum(time_s[:, n:], whole, out=time_s[:, n:])
                pace = np.maximum(w, rest.pace_s[:, : layers + 1 - n])
                np.minimum(pace_s[:, n:], pace, out=pace_s[:, n:])
        return Suffixes(loop_s, time_s, pace_s)

    def _front(self, pool: int, place: int, rests: list[tuple[Floats, Suffixes]]) -> Bounds:
        """Whole pipelines that begin on `pool`, with what surrounds the first stage's work."""
        layers = self._options.layers
        figures = [
            self._column(name, pool)[:, place, 1]
            for name in ("work_s", "backward_s", "gather_s", "reduce_s", "end_s")
        ]
        if not rests:
            work_s, back_s, gather_s, reduce_s, end_s = (figure[:, layers, None] for figure in figures)
            time_s = self._stage_s(work_s, back_s, work_s, place)[:, 0]
            return Bounds(gather_s + time_s + reduce_s + end_s, work_s[:, 0])
        n = np.arange(1, layers)
        work_s, back_s, gather_s, reduce_s, end_s = (figure[:, n] for figure in figures)
        times, paces = [], []
        for hop_s, rest in rests:
            through_s = work_s + 2.0 * hop_s[:, None]
            own = self._stage_s(work_s, back_s, through_s + rest.loop_s[:, layers - n], place)
            drained = np.maximum(own + reduce_s[..., None], through_s[..., None] + rest.time_s[:, layers - n])
            times.append((drained + (gather_s + end_s)[..., None]).min(axis=1))
            paces.append(np.maximum(work_s, rest.pace_s[:, layers - n]).min(axis=1))
        return Bounds(np.minimum.reduce(times), np.minimum.reduce(paces))

    def _stage_s(self, work_s: Floats, back_s: Floats, loop_s: Floats, place: int) -> Floats:
        """What m microbatches take one stage at least, with a last axis of m."""
        m = self._m
        work, back, loop = work_s[..., None], back_s[..., None], loop_s[..., None]
        loops = np.ceil(m / place)
        left = m - (loops - 1.0) * place
        with np.errstate(invalid="ignore"):
            walked = (
                loop + _times(np.maximum(m - place, 0.0), work) + _times(np.minimum(m, place) - 1.0, back)
            )
            looped = loops * loop + _times(left - 1.0, back)
        return np.maximum(np.maximum(walked, m * work), looped)


def _times(number: Floats, seconds: Floats) -> Floats:
    """Nothing takes no time, even where one would take forever."""
    return np.where(number > 0.0, number * seconds, 0.0)


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
