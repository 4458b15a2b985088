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
and one hop each, and its own reduction; or else its own gathering, reduction and end of the step alone.

The loops at either end may take longer: its first backward waits for those of all later stages, none of which
begins before it has gathered; and behind its last forward they have theirs to do, and then to reduce. Between
the two it is at work for m - 1 - q microbatches, where there are more than q.

A suffix of a pipeline is told by how many stages of each pool it has (`counts`), the pool of its first, and
its layers; the least over all of its layouts is a minimum over the first stage's layers. Every figure is
minimised apart, so that the result never exceeds the bound of any one layout. All suffixes of several
pipelines with equally many stages are bounded at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from itertools import product
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from shardwise.search.uneven.options import Options, Stages

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Counts = tuple[int, ...]
Order = tuple[int, ...]
"""Pools of the stages of a pipeline, the first first."""

NEVER_S = 1e30
"""Seconds that stand for forever: finite, so that none of them is nothing."""

ROUNDING = 1e-9
"""Of a time that nothing exceeds, so that rounding forbids nothing."""

TOGETHER = 200_000
"""Entries of tables that are made at a time: they stay within a cache."""

FIGURES = ("forward_s", "backward_s")
SEATED = ("gather_s", "reduce_s", "end_s")
"""Of stages; and what depends on their seat."""


class Entries:
    """The stages of a block by *entry*, which is a pool and a kind on it: finite `figures` of shape (FIGURES,
    entries, places, ends, layers), those that are `seated` of shape (SEATED, entries, seats, ...), and their
    hops and seats (see `Hops`). `first` is a pool's first entry. Behind a pool's kinds are entries that take
    no more than any of those that differ in how they are spread alone (see `loose`)."""

    def __init__(self, options: Options) -> None:
        self.layers = options.layers
        begins = [kinds for kinds, _ in options.unspread]
        self._families = [of + len(of) for _, of in options.unspread]
        of = list(zip(options.stages, options.hops, begins, strict=True))
        self.figures: Floats = np.minimum(
            [
                np.concatenate([part for stages, _, begin in of for part in _and_some(stages, name, begin)])
                for name in FIGURES
            ],
            NEVER_S,
        )
        most = max(len(stages.seats) for stages in options.stages)
        self.seated: Floats = np.array(
            [
                np.concatenate(
                    [
                        _filled(part, most)
                        for stages, _, begin in of
                        for part in (getattr(stages, name), _least_seat(getattr(stages, name)[begin], most))
                    ]
                )
                for name in SEATED
            ]
        )
        sizes = [len(stages.kinds) + len(begin) for stages, _, begin in of]
        self.first = np.cumsum([0, *sizes[:-1]])
        self.near_s: Floats = np.concatenate(
            [part for _, hops, begin in of for part in _and_least(hops.near_s, begin)]
        )
        self.far_s: Floats = np.concatenate(
            [part for _, hops, begin in of for part in _and_least(hops.far_s, begin)]
        )
        self.seats: Ints = np.concatenate(
            [part for _, hops, begin in of for part in (hops.seats, hops.seats[:, begin])], axis=1
        )

    def loose(self, kinds: Sequence[int]) -> tuple[int, ...]:
        """Of kinds by pool those that take no more however they are spread: the same for all that differ in
        nothing else."""
        return tuple(int(of[kind]) for of, kind in zip(self._families, kinds, strict=True))


@dataclass(frozen=True, slots=True)
class Suffixes:
    """Least figures of suffixes, of shape (..., layers + 1): the loop; seconds from the start of the step
    until the first backward has ended (`ready_s`), and from the start of the last forward until all have
    reduced (`last_s`). With an axis of microbatches in front seconds from the first forward to the last
    backward (`drained_s`) and to the end of the reductions of all (`reduced_s`), and from the start of the
    step to the end of any stage by itself (`alone_s`). NEVER_S where there is none."""

    loop_s: Floats
    ready_s: Floats
    last_s: Floats
    drained_s: Floats
    reduced_s: Floats
    alone_s: Floats


@dataclass(frozen=True, slots=True)
class _Level:
    """Suffixes with equally many stages: their counts, the pool of each one's first, and by pool that may
    follow the row of the rest among the suffixes with one stage less; -1 where none does. `rows` finds them
    by their counts and pool."""

    counts: Ints
    pools: Ints
    rests: Ints
    rows: dict[tuple[Counts, int], int]


@dataclass(frozen=True, slots=True)
class _Rows:
    """Suffixes of several pipelines, as `_Level` has those of one; and which pipeline each is of."""

    counts: Ints
    pools: Ints
    rests: Ints
    pipelines: Ints


@lru_cache(maxsize=4096)
def _levels(counts: Counts) -> tuple[_Level, ...]:
    """Of pipelines with so many stages of each pool: all suffixes by their number of stages from 1, the last
    level being whole pipelines."""
    found: list[_Level] = []
    rows: dict[tuple[Counts, int], int] = {}
    for stages in range(1, sum(counts) + 1):
        before, rows = rows, {}
        every: list[Counts] = []
        pools: list[int] = []
        rests: list[list[int]] = []
        for some in (one for one in product(*(range(c + 1) for c in counts)) if sum(one) == stages):
            for pool in (pool for pool, count in enumerate(some) if count):
                left = tuple(count - (place == pool) for place, count in enumerate(some))
                rows[some, pool] = len(pools)
                every.append(some)
                pools.append(pool)
                rests.append([before.get((left, then), -1) for then in range(len(counts))])
        found.append(_Level(np.array(every), np.array(pools), np.array(rests), rows))
    return tuple(found)


@lru_cache(maxsize=4096)
def _levels_in(order: Order, pools: int) -> tuple[_Level, ...]:
    """The same of the pipeline whose stages lie on pools in this order: one suffix per level."""
    found: list[_Level] = []
    for stages in range(1, len(order) + 1):
        suffix = order[-stages:]
        counts = tuple(suffix.count(pool) for pool in range(pools))
        rests = [0 if stages > 1 and then == suffix[1] else -1 for then in range(pools)]
        rows = {(counts, suffix[0]): 0}
        found.append(_Level(np.array([counts]), np.array(suffix[:1]), np.array([rests]), rows))
    return tuple(found)


class Relaxation:
    """The bounds of all suffixes of some pipelines, each of a `shape` of kinds and counts of stages by pool,
    at some numbers of microbatches each, of shape (pipelines, numbers). Where an `order` is given, only of
    those whose stages lie on pools in it; and where a time is given, only of those none of whose stages takes
    more than `within_s` by itself."""

    def __init__(
        self,
        entries: Entries,
        shapes: Sequence[tuple[tuple[int, ...], Counts]],
        microbatches: Any,
        order: Order | None = None,
        within_s: float = NEVER_S,
    ) -> None:
        self._entries, self._within_s = entries, within_s * (1.0 + ROUNDING)
        self._m = np.asarray(microbatches, dtype=np.float64)
        self._of = np.array([kinds for kinds, _ in shapes], dtype=np.int64) + entries.first
        self._counts = np.array([counts for _, counts in shapes], dtype=np.int64)
        self._lattices = [
            _levels(counts) if order is None else _levels_in(order, len(counts)) for _, counts in shapes
        ]
        self._begins: list[dict[int, int]] = []
        self._suffixes: list[Suffixes] = []
        self.runs = 0
        """Suffixes that were bounded."""
        self._bounds = np.full(self._m.shape, NEVER_S)
        for stages in range(1, max(map(len, self._lattices)) + 1):
            self._rise(stages)

    def bounds(self) -> Floats:
        """Lower bounds of the pipelines, by microbatches; infinity where there are none."""
        return np.where(self._bounds < NEVER_S, self._bounds, np.inf)

    def rest(self, counts: Counts, pool: int) -> Suffixes | None:
        """Of the only pipeline: what may follow a stage on `pool` that begins a suffix with these counts,
        behind the hop to it; None where nothing does."""
        stages = sum(counts)
        if stages == 1:
            return None
        level = self._lattices[0][stages - 1]
        row = level.rows[counts, pool]
        rows = _Rows(level.counts[[row]], np.array([pool]), level.rests[[row]], np.array([0]))
        found = self._rest(stages, rows)
        once = found.loop_s[0], found.ready_s[0], found.last_s[0]
        return Suffixes(*once, found.drained_s[:, 0], found.reduced_s[:, 0], found.alone_s[:, 0])

    def _rise(self, stages: int) -> None:
        """Suffixes with so many stages, and whole pipelines that have no more."""
        tall = [place for place, levels in enumerate(self._lattices) if len(levels) > stages]
        whole = [place for place, levels in enumerate(self._lattices) if len(levels) == stages]
        if whole:
            self._close(stages, whole)
        if not tall:
            return
        rows = self._rows(stages, tall)
        m = self._m[rows.pipelines].T
        figures = self._stage(rows, stages, 0)
        if stages > 1:
            found = self._before(stages, figures, m, self._rest(stages, rows))
        else:
            found = self._last(figures, m)
        sizes = [len(self._lattices[place][stages - 1].pools) for place in tall]
        self._begins.append(dict(zip(tall, np.cumsum([0, *sizes[:-1]]).tolist(), strict=True)))
        self._suffixes.append(found)
        self.runs += len(rows.pools)

    def _rows(self, stages: int, pipelines: Sequence[int]) -> _Rows:
        """All suffixes of these pipelines with so many stages, rests counted through."""
        levels = [self._lattices[place][stages - 1] for place in pipelines]
        begins = [self._begins[-1][place] if stages > 1 else 0 for place in pipelines]
        rests = [
            np.where(level.rests >= 0, level.rests + begin, -1)
            for level, begin in zip(levels, begins, strict=True)
        ]
        return _Rows(
            np.concatenate([level.counts for level in levels]),
            np.concatenate([level.pools for level in levels]),
            np.concatenate(rests),
            np.repeat(pipelines, [len(level.pools) for level in levels]),
        )

    def _rest(self, stages: int, rows: _Rows) -> Suffixes:
        """The least of what may follow first stages, behind the hops."""
        before, rests = self._suffixes[stages - 2], rows.rests
        hop_s = self._hops(rows)
        found: list[Floats] = []
        for values, hops in (
            (before.loop_s, 2.0), (before.ready_s, 1.0), (before.last_s, 1.0),
            (before.drained_s, 2.0), (before.reduced_s, 1.0), (before.alone_s, 0.0),
        ):  # fmt: skip
            after = np.where(rests >= 0, hops * hop_s, NEVER_S)[..., None]
            found.append(np.minimum((values[..., rests, :] + after).min(axis=-2), NEVER_S))
        return Suffixes(*found)

    def _hops(self, rows: _Rows) -> Floats:
        """Seconds from the first stage of each suffix to the next, by the pool of that."""
        every = np.arange(len(rows.pools))
        at = (self._of[rows.pipelines], self._counts[rows.pipelines], rows.counts)
        far_s = self._entries.far_s[at]
        found: Floats = np.maximum(far_s, far_s[every, rows.pools][:, None])
        found[every, rows.pools] = self._entries.near_s[at][every, rows.pools]
        return found

    def _stage(self, rows: _Rows, place: int, first: int) -> tuple[Floats, ...]:
        """Forward, backward, gathering, reduction and end of the step of the first stages of suffixes, by
        layers."""
        entries, every = self._of[rows.pipelines, rows.pools], self._counts[rows.pipelines]
        at = np.arange(len(rows.pools)), rows.pools
        is_only = (every[at] == every.sum(axis=1)).astype(np.int64)
        seats = self._entries.seats[is_only, entries, every[at], rows.counts[at]]
        figures = (
            *self._entries.figures[:, entries, place, first],
            *self._entries.seated[:, entries, seats, place, first],
        )
        if self._within_s >= NEVER_S:
            return figures
        forward_s, back_s, *around_s = figures
        alone_s = self._m[rows.pipelines].min(axis=1)[:, None] * (forward_s + back_s) + sum(around_s)
        return tuple(np.where(alone_s > self._within_s, NEVER_S, values) for values in figures)

    def _last(self, figures: tuple[Floats, ...], m: Floats) -> Suffixes:
        """Suffixes of one stage."""
        forward_s, back_s, gather_s, reduce_s, end_s = figures
        work_s = forward_s + back_s
        own = stage_s(m[..., None], work_s, back_s, work_s, 1)
        around_s = gather_s + reduce_s + end_s
        once = work_s, gather_s + work_s, work_s + reduce_s
        taken = (*once, own, own + reduce_s, own + around_s)
        return Suffixes(*(np.minimum(values, NEVER_S) for values in taken))

    def _before(self, place: int, figures: tuple[Floats, ...], m: Floats, rest: Suffixes) -> Suffixes:
        """Suffixes that begin with a stage of these figures: the least over its layers."""
        layers, rows = self._entries.layers, len(figures[0])
        finite = (figures[1] < NEVER_S).any(axis=0)
        last = min(int(np.flatnonzero(finite).max(initial=0)), layers - place)
        found = [np.full((rows, layers + 1), NEVER_S) for _ in range(3)]
        found += [np.full((len(m), rows, layers + 1), NEVER_S) for _ in range(3)]
        # Entry [., n, l] is the rest of a suffix of l layers whose first stage has n: its l - n.
        rests = [_sloped(getattr(rest, field.name)) for field in fields(Suffixes)]
        size = max(TOGETHER // found[3].size, 1)
        for start in range(1, last + 1, size):
            n = slice(start, min(start + size, last + 1))
            # The stages behind have a layer each, at least.
            whole = slice(start + place - 1, layers)
            f, b, g, r, e = (values[:, n, None] for values in figures)
            loops, readies, lasts, drains, reduced, alones = (values[..., n, whole] for values in rests)
            loop = f + b + loops
            ready_s, last_s = np.maximum(g + loop, b + readies), np.maximum(loop + r, f + lasts)
            own = stage_s(m[..., None, None], f + b, b, loop, place)
            ended = ended_s(m[..., None, None], f + b, b, r, last_s, place)
            taken = (
                loop,
                ready_s,
                last_s,
                np.maximum(own, f + b + drains),
                np.maximum(np.maximum(own + r, f + reduced), loop + ended),
                np.maximum(np.maximum(own + (g + r + e), ready_s + e + ended), alones),
            )
            for least, values in zip(found, taken, strict=True):
                some = least[..., whole]
                np.minimum(some, values.min(axis=-2), out=some)
        return Suffixes(*(np.minimum(values, NEVER_S) for values in found))

    def _close(self, stages: int, whole: Sequence[int]) -> None:
        """Bounds of these pipelines, all of which have so many stages, over the pools that they begin on."""
        rows, layers = self._rows(stages, whole), self._entries.layers
        m = self._m[rows.pipelines].T[..., None]
        n = np.arange(1, layers) if stages > 1 else np.array([layers])
        f, b, g, r, e = (values[:, n] for values in self._stage(rows, stages, 1))
        if stages == 1:
            least = stage_s(m, f + b, b, f + b, stages) + r
        else:
            rest, left = self._rest(stages, rows), layers - n
            loop = f + b + rest.loop_s[:, left]
            ready = np.maximum(g + loop, b + rest.ready_s[:, left])
            last = np.maximum(loop + r, f + rest.last_s[:, left])
            own = stage_s(m, f + b, b, loop, stages)
            least = np.maximum(own, f + b + rest.drained_s[..., left]) + r
            least = np.maximum(least, f + rest.reduced_s[..., left])
            least = np.maximum(least, ready + ended_s(m, f + b, b, r, last, stages) - g)
            least = np.maximum(least, rest.alone_s[..., left] - g - e)
        np.minimum.at(self._bounds, rows.pipelines, (least + g + e).min(axis=-1).T)
        self.runs += len(whole)


def _and_some(stages: Stages, name: str, kinds: Ints) -> tuple[Floats, Floats]:
    """A figure of all kinds, and again of these."""
    values: Floats = getattr(stages, name)
    return values, values[kinds]


def _and_least(hops_s: Floats, begins: Ints) -> tuple[Floats, Floats]:
    """Hops of all kinds, and the least of each run of them."""
    return hops_s, np.minimum.reduceat(hops_s, begins)


def _least_seat(values: Floats, seats: int) -> Floats:
    """The least of any seat, as that of each."""
    return np.repeat(values.min(axis=1, keepdims=True), seats, axis=1)


def _filled(values: Floats, seats: int) -> Floats:
    """Finite, and with as many seats; those that there are not take forever."""
    missing = [(0, seats - values.shape[1]) if axis == 1 else (0, 0) for axis in range(values.ndim)]
    return np.pad(np.minimum(values, NEVER_S), missing, constant_values=NEVER_S)


def _sloped(values: Floats) -> Floats:
    """A view of `values`, of shape (..., layers + 1), whose entry [..., n, l] is [..., l - n], or NEVER_S
    where there is none."""
    padded = np.concatenate([np.full_like(values, NEVER_S), values], axis=-1)
    length = values.shape[-1]
    *rows, step = padded.strides
    return as_strided(padded[..., length:], (*values.shape, length), (*rows, -step, step), writeable=False)


def stage_s(microbatches: Any, work_s: Any, back_s: Any, loop_s: Any, place: Any) -> Any:
    """Seconds from the first forward of a stage to its last backward, at least: see above."""
    m = microbatches
    loops, beyond = np.ceil(m / place), np.maximum(m - place, 0.0)
    again_s = np.where(beyond > 0.0, (beyond - 1.0) * work_s, -4.0 * NEVER_S)
    behind_s = beyond * work_s + (np.minimum(m, place) - 1.0) * back_s
    least = loops * loop_s + (m - (loops - 1.0) * place - 1.0) * back_s
    least = np.maximum(least, loop_s + behind_s)
    least = np.maximum(least, 2.0 * loop_s + again_s)
    return np.maximum(least, m * work_s)


def ended_s(microbatches: Any, work_s: Any, back_s: Any, reduce_s: Any, last_s: Any, place: Any) -> Any:
    """Seconds from the end of a stage's first backward until it and all later stages have reduced, at least;
    `last_s` from the start of its last forward until then."""
    beyond = np.maximum(microbatches - place, 0.0)
    own_s = beyond * work_s + (np.minimum(microbatches, place) - 1.0) * back_s + reduce_s
    again_s = np.where(beyond > 0.0, (beyond - 1.0) * work_s, -4.0 * NEVER_S)
    return np.maximum(own_s, again_s + last_s)
