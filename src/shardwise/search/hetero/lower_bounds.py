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

What layouts of one pipeline take at least, many at once: the longest way through 1F1B that keeps to a run
of stages.

In steady state k stages in a row do k microbatches in no less than all of their forwards and backwards and
the hops among them, there and back: the first of the run begins microbatch j + k only after one has gone to
the end of the run and come back since it began microbatch j. So with q the place from the end of the run's
first stage, W one microbatch through the whole pipeline and back, and its loop (see `bounds`), m > q
microbatches take the pipeline at least

    W + loop + floor((m - 1 - q) / k) run + ((m - 1 - q) mod k) w.

The loop is at either end: the first backward of the stage, which the first loop ends with, may be later where
a stage behind is not soon done with gathering; and behind the last one's way another stage may have more to
reduce.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from typing import Any, NamedTuple

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from shardwise.search.hetero.stage_costs import SiteCosts, StageOptions, hops_s, node_slots_of

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Counts = tuple[int, ...]
Order = tuple[int, ...]
"""Pools of the stages of a pipeline, the first first."""

INFINITE_S = 1e30
"""Seconds that stand for forever: finite, so that none of them is nothing."""

ROUNDING = 1e-9
"""Of a time that nothing exceeds, so that rounding forbids nothing."""

MAX_TABLE_ENTRIES = 200_000
"""Entries of tables that are made at a time: they stay within a cache."""

FIGURES = ("forward_s", "backward_s")
BY_NODE_SLOT = ("gather_s", "reduce_s", "end_s")
"""Of stages; and what depends on their seat."""


class StageTable:
    """The stages of a block by *entry*, which is a pool and a kind on it: finite `figures` of shape (FIGURES,
    entries, places, ends, layers), those that are `slot_figures` of shape (SEATED, entries, seats, ...), and
    their hops and seats (see `Hops`). By entry and layers, what a stage takes at least wherever it is: one
    microbatch (`min_work_s`), and all that surrounds its work (`min_overhead_s`). `first` is a pool's first
    entry. Behind a pool's kinds are entries that take no more than any of those that differ in how they are
    spread alone (see `relaxed_kinds`)."""

    def __init__(self, options: StageOptions) -> None:
        self.layers = options.layers
        begins = [kinds for kinds, _ in options.unspread]
        self._families = [of + len(of) for _, of in options.unspread]
        of = list(zip(options.stages, options.hops, begins, strict=True))
        self.figures: Floats = np.minimum(
            [
                np.concatenate(
                    [part for stages, _, begin in of for part in _with_selection(stages, name, begin)]
                )
                for name in FIGURES
            ],
            INFINITE_S,
        )
        most = max(len(stages.node_slots) for stages in options.stages)
        self.slot_figures: Floats = np.array(
            [
                np.concatenate(
                    [
                        _padded(part, most)
                        for stages, _, begin in of
                        for part in (
                            getattr(stages, name),
                            _min_over_node_slots(getattr(stages, name)[begin], most),
                        )
                    ]
                )
                for name in BY_NODE_SLOT
            ]
        )
        self.min_work_s: Floats = self.figures.sum(axis=0)[:, 1:].min(axis=(1, 2))
        self.min_overhead_s: Floats = self.slot_figures.sum(axis=0)[:, :, 1:].min(axis=(1, 2, 3))
        sizes = [len(stages.kinds) + len(begin) for stages, _, begin in of]
        self.first = np.cumsum([0, *sizes[:-1]])
        self.near_s: Floats = np.concatenate(
            [part for _, hops, begin in of for part in _with_run_minimum(hops.near_s, begin)]
        )
        self.far_s: Floats = np.concatenate(
            [part for _, hops, begin in of for part in _with_run_minimum(hops.far_s, begin)]
        )
        self.node_slots: Ints = np.concatenate(
            [part for _, hops, begin in of for part in (hops.node_slots, hops.node_slots[:, begin])], axis=1
        )

    def relaxed_kinds(self, kinds: Sequence[int]) -> tuple[int, ...]:
        """Of kinds by pool those that take no more however they are spread: the same for all that differ in
        nothing else."""
        return tuple(int(of[kind]) for of, kind in zip(self._families, kinds, strict=True))


class SuffixBounds(NamedTuple):
    """Least figures of suffixes, an array of layers each: the loop; seconds from the start of the step until
    the first backward has ended (`ready_s`), and from the start of the last forward until all have reduced
    (`last_s`); seconds from the first forward to the last backward (`drained_s`) and to the end of the
    reductions of all (`reduced_s`), and from the start of the step to the end of any stage by itself
    (`alone_s`). NEVER_S where there is none."""

    loop_s: Floats
    ready_s: Floats
    last_s: Floats
    drained_s: Floats
    reduced_s: Floats
    alone_s: Floats


HOPS_PER_FIGURE = np.array([2.0, 1.0, 1.0, 2.0, 1.0, 0.0])
"""How often each of these goes over the hop before the suffix."""


@dataclass(frozen=True, slots=True)
class _SuffixSet:
    """Suffixes with equally many stages: their counts, the pool of each one's first, and by pool that may
    follow the row of the rest among the suffixes with one stage less; -1 where none does. `rows` finds them
    by their counts and pool."""

    counts: Ints
    pools: Ints
    successors: Ints
    rows: dict[tuple[Counts, int], int]


@dataclass(frozen=True, slots=True)
class _SuffixBatch:
    """Suffixes of several pipelines, as `_SuffixSet` has those of one; and which pipeline each is of, how
    many layers the suffix has, and its first stage, at least and at most."""

    counts: Ints
    pools: Ints
    successors: Ints
    pipelines: Ints
    layers: tuple[Ints, Ints]
    own: tuple[Ints, Ints]

    def at(self, places: Any) -> _SuffixBatch:
        """Some of them."""
        few, many = self.layers
        least, most = self.own
        return _SuffixBatch(
            self.counts[places],
            self.pools[places],
            self.successors[places],
            self.pipelines[places],
            (few[places], many[places]),
            (least[places], most[places]),
        )


@lru_cache(maxsize=4096)
def _suffix_sets(counts: Counts) -> tuple[_SuffixSet, ...]:
    """Of pipelines with so many stages of each pool: all suffixes by their number of stages from 1, the last
    level being whole pipelines."""
    found: list[_SuffixSet] = []
    rows: dict[tuple[Counts, int], int] = {}
    for stages in range(1, sum(counts) + 1):
        before, rows = rows, {}
        every: list[Counts] = []
        pools: list[int] = []
        successors: list[list[int]] = []
        for some in (one for one in product(*(range(c + 1) for c in counts)) if sum(one) == stages):
            for pool in (pool for pool, count in enumerate(some) if count):
                left = tuple(count - (place == pool) for place, count in enumerate(some))
                rows[some, pool] = len(pools)
                every.append(some)
                pools.append(pool)
                successors.append([before.get((left, then), -1) for then in range(len(counts))])
        found.append(_SuffixSet(np.array(every), np.array(pools), np.array(successors), rows))
    return tuple(found)


@lru_cache(maxsize=4096)
def _suffix_sets_in_order(order: Order, pools: int) -> tuple[_SuffixSet, ...]:
    """The same of the pipeline whose stages lie on pools in this order: one suffix per level."""
    found: list[_SuffixSet] = []
    for stages in range(1, len(order) + 1):
        suffix = order[-stages:]
        counts = tuple(suffix.count(pool) for pool in range(pools))
        successors = [0 if stages > 1 and then == suffix[1] else -1 for then in range(pools)]
        rows = {(counts, suffix[0]): 0}
        found.append(_SuffixSet(np.array([counts]), np.array(suffix[:1]), np.array([successors]), rows))
    return tuple(found)


class SuffixRelaxation:
    """The bounds of all suffixes of some pipelines, each of a `shape` of kinds and counts of stages by pool,
    at a number of microbatches each. Where an `order` is given, only of those whose stages lie on pools in
    it; and where a time is given, only of those that take no more than `within_s`.

    A stage takes no more layers than it does so many microbatches with, by itself, within that time: so that
    in most pipelines each of them takes nearly as many, and few numbers of layers are left to look at.
    """

    def __init__(
        self,
        entries: StageTable,
        shapes: Sequence[tuple[tuple[int, ...], Counts]],
        microbatches: Any,
        order: Order | None = None,
        within_s: float = INFINITE_S,
    ) -> None:
        self._table, self._within_s = entries, min(within_s, INFINITE_S) * (1.0 + ROUNDING)
        self._m = np.asarray(microbatches, dtype=np.float64)
        self._of = np.array([kinds for kinds, _ in shapes], dtype=np.int64) + entries.first
        self._counts = np.array([counts for _, counts in shapes], dtype=np.int64)
        self._most = self._most_layers()
        takes = (self._counts * self._most).sum(axis=1) >= entries.layers
        possible = takes & ((self._counts == 0) | (self._most > 0)).all(axis=1)
        self._lattices = [
            (_suffix_sets(counts) if order is None else _suffix_sets_in_order(order, len(counts)))
            if can
            else ()
            for (_, counts), can in zip(shapes, possible.tolist(), strict=True)
        ]
        self._begins: list[dict[int, int]] = []
        self._tables: list[Floats] = []
        self.suffix_count = 0
        """Suffixes that were bounded."""
        self._bounds = np.full(len(shapes), INFINITE_S)
        for stages in range(1, max(map(len, self._lattices)) + 1):
            self._extend(stages)

    def bounds(self) -> Floats:
        """Lower bounds of the pipelines; infinity where there are none."""
        return np.where(self._bounds < INFINITE_S, self._bounds, np.inf)

    def completion_bound(self, counts: Counts, pool: int) -> SuffixBounds | None:
        """Of the only pipeline: what may follow a stage on `pool` that begins a suffix with these counts,
        behind the hop to it; None where nothing does."""
        stages = sum(counts)
        if stages == 1:
            return None
        suffix_set = self._lattices[0][stages - 1]
        none = np.zeros(1, dtype=np.int64)
        successors = suffix_set.successors[[suffix_set.rows[counts, pool]]]
        rows = _SuffixBatch(
            np.array([counts]), np.array([pool]), successors, none, (none, none), (none, none)
        )
        return SuffixBounds(
            *self._completion_bound(stages, rows, np.arange(self._table.layers + 1)[None])[:, 0]
        )

    def _most_layers(self) -> Ints:
        """By pipeline and pool, with how many layers a stage does all microbatches in time, at most."""
        work_s, overhead_s = self._table.min_work_s[self._of], self._table.min_overhead_s[self._of]
        can = self._m[:, None, None] * work_s + overhead_s <= self._within_s
        most: Ints = (can * np.arange(self._table.layers + 1)).max(axis=-1)
        return most

    def _extend(self, stages: int) -> None:
        """Suffixes with so many stages, and whole pipelines that have no more."""
        tall = [place for place, suffix_sets in enumerate(self._lattices) if len(suffix_sets) > stages]
        whole = [place for place, suffix_sets in enumerate(self._lattices) if len(suffix_sets) == stages]
        if whole:
            rows = self._rows(stages, whole)
            for some in self._batches(rows):
                self._finish(stages, rows.at(some))
            self.suffix_count += len(whole)
        if not tall:
            return
        rows, layers = self._rows(stages, tall), self._table.layers
        # Behind the last row and the last number of layers nothing is.
        table = np.full((len(HOPS_PER_FIGURE), len(rows.pools) + 1, layers + 2), INFINITE_S)
        for some in self._batches(rows):
            at, _, found = self._extended(stages, rows.at(some), 0)
            values = np.stack([figure.min(axis=1) for figure in found])
            # What takes longer than the time that is given has none that matters.
            is_late = values[3:].max(axis=0) > self._within_s
            table[:, some[:, None], at] = np.where(is_late, INFINITE_S, values)
        table[..., -1] = INFINITE_S
        sizes = [len(self._lattices[place][stages - 1].pools) for place in tall]
        self._begins.append(dict(zip(tall, np.cumsum([0, *sizes[:-1]]).tolist(), strict=True)))
        self._tables.append(table)
        self.suffix_count += len(rows.pools)

    def _rows(self, stages: int, pipelines: Sequence[int]) -> _SuffixBatch:
        """All suffixes of these pipelines with so many stages, rests counted through."""
        suffix_sets = [self._lattices[place][stages - 1] for place in pipelines]
        begins = [self._begins[-1][place] if stages > 1 else 0 for place in pipelines]
        sizes = [len(suffix_set.pools) for suffix_set in suffix_sets]
        successors = np.concatenate([suffix_set.successors for suffix_set in suffix_sets])
        successors = np.where(successors >= 0, successors + np.repeat(begins, sizes)[:, None], -1)
        counts = np.concatenate([suffix_set.counts for suffix_set in suffix_sets])
        pools = np.concatenate([suffix_set.pools for suffix_set in suffix_sets])
        of, layers = np.repeat(pipelines, sizes), self._table.layers
        most, before = self._most[of], self._counts[of] - counts
        takes, own = (counts * most).sum(axis=1), most[np.arange(len(of)), pools]
        few = np.maximum(layers - (before * most).sum(axis=1), stages)
        many = np.minimum(takes, layers - before.sum(axis=1))
        return _SuffixBatch(
            counts,
            pools,
            successors,
            of,
            (few, many),
            (np.maximum(few - (takes - own), 1), np.minimum(own, many - (stages - 1))),
        )

    def _batches(self, rows: _SuffixBatch) -> list[Ints]:
        """Places of suffixes that are grown at a time, those together that have about as many numbers of
        layers to look at."""
        (few, many), (least, most) = rows.layers, rows.own
        of_suffix, of_own = many - few + 1, most - least + 1
        order = np.argsort(of_suffix * of_own, kind="stable")
        found, start = [], 0
        while start < len(order):
            end = len(order)
            while end > start + 1:
                some = order[start:end]
                size = len(some) * int(of_suffix[some].max()) * int(of_own[some].max())
                if size <= MAX_TABLE_ENTRIES:
                    break
                end = start + max((end - start) * MAX_TABLE_ENTRIES // (2 * size), (end - start) // 2)
            found.append(order[start:end])
            start = end
        return found

    def _completion_bound(self, stages: int, rows: _SuffixBatch, layers: Ints) -> Floats:
        """The least of what may follow first stages, behind the hops, with so many layers, of shape (figures
        of Suffixes, suffixes, ...)."""
        none = self._table.layers + 1
        at = np.where((layers < 0) | (layers > none), none, layers)
        values = self._tables[stages - 2][:, rows.successors[:, :, None], at[:, None, :]]
        values += HOPS_PER_FIGURE[:, None, None, None] * self._hops(rows)[..., None]
        found: Floats = np.minimum(values.min(axis=2), INFINITE_S)
        return found

    def _hops(self, rows: _SuffixBatch) -> Floats:
        """Seconds from the first stage of each suffix to the next, by the pool of that."""
        every = np.arange(len(rows.pools))
        at = (self._of[rows.pipelines], self._counts[rows.pipelines], rows.counts)
        far_s = self._table.far_s[at]
        found: Floats = np.maximum(far_s, far_s[every, rows.pools][:, None])
        found[every, rows.pools] = self._table.near_s[at][every, rows.pools]
        return found

    def _stage(self, rows: _SuffixBatch, place: int, first: int, layers: Ints) -> Floats:
        """Forward, backward, gathering, reduction and end of the step of the first stages of suffixes, with
        so many layers."""
        entries, every = self._of[rows.pipelines, rows.pools], self._counts[rows.pipelines]
        at = np.arange(len(rows.pools)), rows.pools
        is_only = (every[at] == every.sum(axis=1)).astype(np.int64)
        node_slots = self._table.node_slots[is_only, entries, every[at], rows.counts[at]]
        n = np.minimum(layers, self._table.layers)
        figures = np.concatenate(
            [
                self._table.figures[:, entries[:, None], place, first, n],
                self._table.slot_figures[:, entries[:, None], node_slots[:, None], place, first, n],
            ]
        )
        forward_s, back_s, *overhead_s = figures
        alone_s = self._m[rows.pipelines, None] * (forward_s + back_s) + sum(overhead_s)
        is_out = (alone_s > self._within_s) | (layers > self._table.layers)
        return np.where(is_out, INFINITE_S, figures)

    def _extended(self, place: int, rows: _SuffixBatch, first: int) -> tuple[Ints, Floats, SuffixBounds]:
        """Suffixes that begin with one more stage: their layers, of shape (suffixes, numbers), the stage's
        own figures by its layers, and those of the suffixes, of shape (suffixes, layers of the stage,
        layers)."""
        (few, many), (least, most) = rows.layers, rows.own
        widest, long = int((most - least).max()) + 1, int((many - few).max()) + 1
        layers = few[:, None] + np.arange(long)
        if place == 1:
            f, b, g, r, e = own_figures = self._stage(rows, place, first, layers)[:, :, None]
            own = stage_lower_bound_s(self._m[rows.pipelines, None, None], f + b, b, f + b, 1)
            last = SuffixBounds(f + b, g + f + b, f + b + r, own, own + r, own + g + r + e)
            return self._clamped(layers), own_figures, last
        n = least[:, None] + np.arange(widest)
        # Entry [., n, l] is the rest of a suffix of l layers whose first stage has n: its l - n.
        rest_layers = few - least - (widest - 1)
        successors = _diagonal_view(
            self._completion_bound(place, rows, rest_layers[:, None] + np.arange(widest + long - 1)), widest
        )
        f, b, g, r, e = own_figures = self._stage(rows, place, first, n)[..., None]
        m, work = self._m[rows.pipelines, None, None], f + b
        loops, readies, lasts, drains, reduced, alones = successors
        loop = work + loops
        ready_s, last_s = np.maximum(g + loop, b + readies), np.maximum(loop + r, f + lasts)
        own = stage_lower_bound_s(m, work, b, loop, place)
        ended = completion_lower_bound_s(m, work, b, r, last_s, place)
        return (
            self._clamped(layers),
            own_figures,
            SuffixBounds(
                loop,
                ready_s,
                last_s,
                np.maximum(own, work + drains),
                np.maximum(np.maximum(own + r, f + reduced), loop + ended),
                np.maximum(np.maximum(own + (g + r + e), ready_s + e + ended), alones),
            ),
        )

    def _clamped(self, layers: Ints) -> Ints:
        """Numbers of layers, those that are too many as one more than there are."""
        return np.minimum(layers, self._table.layers + 1)

    def _finish(self, stages: int, rows: _SuffixBatch) -> None:
        """Bounds of pipelines all of which have so many stages, over the pools that they begin on."""
        _, (_, _, g, r, e), found = self._extended(stages, rows, 1)
        least = np.maximum(found.drained_s + r, found.reduced_s) + g + e
        least = np.maximum(least, found.alone_s)
        np.minimum.at(self._bounds, rows.pipelines, least.min(axis=(1, 2)))


def _with_selection(stages: SiteCosts, name: str, kinds: Ints) -> tuple[Floats, Floats]:
    """A figure of all kinds, and again of these."""
    values: Floats = getattr(stages, name)
    return values, values[kinds]


def _with_run_minimum(hops_s: Floats, begins: Ints) -> tuple[Floats, Floats]:
    """Hops of all kinds, and the least of each run of them."""
    return hops_s, np.minimum.reduceat(hops_s, begins)


def _min_over_node_slots(values: Floats, node_slots: int) -> Floats:
    """The least of any seat, as that of each."""
    return np.repeat(values.min(axis=1, keepdims=True), node_slots, axis=1)


def _padded(values: Floats, node_slots: int) -> Floats:
    """Finite, and with as many seats; those that there are not take forever."""
    missing = [(0, node_slots - values.shape[1]) if axis == 1 else (0, 0) for axis in range(values.ndim)]
    return np.pad(np.minimum(values, INFINITE_S), missing, constant_values=INFINITE_S)


def _diagonal_view(values: Floats, rows: int) -> Floats:
    """A view of `values`, of shape (..., rows + columns - 1), whose entry [..., n, l] is that at l - n from
    the place of the last row's first."""
    columns = values.shape[-1] - rows + 1
    *others, step = values.strides
    shape = (*values.shape[:-1], rows, columns)
    return as_strided(values[..., rows - 1 :], shape, (*others, -step, step), writeable=False)


def stage_lower_bound_s(microbatches: Any, work_s: Any, back_s: Any, loop_s: Any, place: Any) -> Any:
    """Seconds from the first forward of a stage to its last backward, at least: see above."""
    m = microbatches
    loops, beyond = np.ceil(m / place), np.maximum(m - place, 0.0)
    steady_s = np.where(beyond > 0.0, (beyond - 1.0) * work_s, -4.0 * INFINITE_S)
    remaining_s = beyond * work_s + (np.minimum(m, place) - 1.0) * back_s
    least = loops * loop_s + (m - (loops - 1.0) * place - 1.0) * back_s
    least = np.maximum(least, loop_s + remaining_s)
    least = np.maximum(least, 2.0 * loop_s + steady_s)
    return np.maximum(least, m * work_s)


def completion_lower_bound_s(
    microbatches: Any, work_s: Any, back_s: Any, reduce_s: Any, last_s: Any, place: Any
) -> Any:
    """Seconds from the end of a stage's first backward until it and all later stages have reduced, at least;
    `last_s` from the start of its last forward until then."""
    beyond = np.maximum(microbatches - place, 0.0)
    own_s = beyond * work_s + (np.minimum(microbatches, place) - 1.0) * back_s + reduce_s
    steady_s = np.where(beyond > 0.0, (beyond - 1.0) * work_s, -4.0 * INFINITE_S)
    return np.maximum(own_s, steady_s + last_s)


STAGE_FIGURES = ("forward_s", "backward_s", "gather_s", "reduce_s", "end_s")


@dataclass(frozen=True, slots=True)
class LayoutFigures:
    """Of layouts, by layout and stage: seconds of a forward, a backward, gathering, reducing and the end of
    the step; and of the hops behind all stages but the last."""

    forward_s: Floats
    backward_s: Floats
    gather_s: Floats
    reduce_s: Floats
    end_s: Floats
    hop_s: Floats


def layout_figures(options: StageOptions, kinds: tuple[int, ...], pools: Ints, layers: Ints) -> LayoutFigures:
    """The figures of layouts, `pools` and `layers` by layout and stage; infinite where a stage does not
    fit."""
    stages = pools.shape[1]
    found = {name: np.empty(pools.shape) for name in STAGE_FIGURES}
    places = np.broadcast_to(np.arange(stages, 0, -1), pools.shape)
    node_slots = node_slots_of(options.hops, kinds, pools)
    for pool, kind in enumerate(kinds):
        mine = pools == pool
        at = (places[mine], (places[mine] == stages).astype(np.int64), layers[mine])
        for name, values in found.items():
            of = getattr(options.stages[pool], name)[kind]
            values[mine] = of[node_slots[mine], *at] if name in BY_NODE_SLOT else of[at]
    return LayoutFigures(**found, hop_s=hops_s(options.hops, kinds, pools))


def lower_bound_s(figures: LayoutFigures, microbatches: int) -> Floats:
    """Seconds of a step of each layout, at least; infinity where a stage does not fit."""
    m = microbatches
    fits = np.all(np.isfinite(figures.backward_s), axis=1)
    back = np.where(fits[:, None], figures.backward_s, 0.0)
    reduce = np.where(fits[:, None], figures.reduce_s, 0.0)
    work = figures.forward_s + back
    stages = work.shape[1]
    through, arrival = np.zeros_like(work), np.zeros_like(work)
    through[:, 1:] = np.cumsum(work[:, :-1] + 2.0 * figures.hop_s, axis=1)
    arrival[:, 1:] = np.cumsum(figures.forward_s[:, :-1] + figures.hop_s, axis=1)
    whole = through[:, -1:] + work[:, -1:]
    loops = whole - through
    begun = np.maximum(arrival + figures.gather_s[:, :1], figures.gather_s)
    first, last = first_and_last_s(arrival, through, begun + loops, loops + reduce)
    drained, ended = np.zeros(len(work)), np.zeros(len(work))
    for s in range(stages):
        place, loop = stages - s, loops[:, s]
        own = stage_lower_bound_s(float(m), work[:, s], back[:, s], loop, place)
        for k in range(1, place + 1):
            if m > place:
                run = through[:, s + k - 1] + work[:, s + k - 1] - through[:, s]
                times, rest = divmod(m - 1 - place, k)
                between = times * run + rest * work[:, s]
                own = np.maximum(own, 2.0 * loop + between)
                ended = np.maximum(ended, first[:, s] + between + last[:, s])
        drained = np.maximum(drained, through[:, s] + own)
        ended = np.maximum(ended, begun[:, s] + own + reduce[:, s])
        steady = max(m - place, 0) * work[:, s] + (min(m, place) - 1) * back[:, s]
        ended = np.maximum(ended, first[:, s] + steady + reduce[:, s])
    ended = np.maximum(ended, figures.gather_s[:, 0] + drained + reduce[:, 0]) + figures.end_s.max(axis=1)
    return np.where(fits, ended, np.inf)


def first_and_last_s(
    arrival_s: Floats, through_s: Floats, looped_s: Floats, reduced_s: Floats
) -> tuple[Floats, Floats]:
    """By layout and stage: seconds from the start of the step until the stage's first backward has ended, and
    from the start of its last forward until it and all stages behind have reduced. `looped_s` is the first by
    the stage's own loop, `reduced_s` the second; `arrival_s` and `through_s` are those of one microbatch on
    its way to each stage, and to it and back."""
    back_s = through_s - arrival_s
    first = np.maximum.accumulate((looped_s + back_s)[:, ::-1], axis=1)[:, ::-1] - back_s
    last = np.maximum.accumulate((reduced_s + arrival_s)[:, ::-1], axis=1)[:, ::-1] - arrival_s
    return first, last
