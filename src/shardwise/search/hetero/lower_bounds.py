"""Lower bounds of pipelines: for all layouts at once (`SuffixRelaxation`), and for given layouts
(`lower_bound_s`).

A pipeline runs 1F1B over stages of forward f, backward b, w = f + b. Let a stage be the q-th from the end.
Its first backward ends no sooner than its *loop* after its first forward began: w of itself and of all later
stages, and two hops for each later stage. Until then it has done at most q forwards. At most q micro-batches
are between its forward and its backward, so every q-th micro-batch begins a loop when the one before has
ended, and the last micro-batch takes a whole loop. So from the first forward of the stage to its last
backward, m micro-batches take at least (`stage_lower_bound_s`)

    max( m w,  loop + max(m - q, 0) w + (min(m, q) - 1) b,  k loop + (m - (k - 1) q - 1) b,
         2 loop + (m - 1 - q) w where m > q )

with k = ceil(m / q). One of these is added: w and two hops of each earlier stage; or their forwards and one
hop each, and the stage's own reduction; or the stage's own gathering, reduction and end of the step.

The loops at both ends may take longer (`completion_lower_bound_s`). The first backward of a stage waits for
those of all later stages, and none of them begins before it has gathered. After its last forward, later
stages have theirs to do, and then reduce. Between the two, the stage works for m - 1 - q micro-batches, where
m > q.
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

from shardwise.search.hetero.stage_costs import StageOptions, hops_s, node_slots_of
from shardwise.ties import ROUNDING

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Counts = tuple[int, ...]
Order = tuple[int, ...]
"""Pools of the stages of a pipeline, in order."""

INFINITE_S = 1e30
"""Finite seconds that stand for infinity, so that no arithmetic on them gives NaN."""

MAX_TABLE_ENTRIES = 200_000
"""Entries of a table that are computed in one batch: they fit the processor's cache."""

FIGURES = ("forward_s", "backward_s")
BY_NODE_SLOT = ("gather_s", "reduce_s", "end_s")
"""Terms of a stage that do not depend on its node slot (FIGURES), and those that do."""


class StageTable:
    """The stages of a subproblem by *entry*: a pool and a kind on it. All values are finite.

    `figures` has shape (FIGURES, entries, places, ends, layers), `slot_figures` shape (BY_NODE_SLOT, entries,
    node slots, places, ends, layers). `near_s`, `far_s` and `node_slots` are those of `StageHops`.
    `min_work_s` and `min_overhead_s` are the least work of a micro-batch and the least time around it, by
    entry and layers. `first` is the first entry of each pool. After a pool's kinds there is an entry for each
    family of kinds that differ only in how they are spread, with the least values of the family (see
    `relaxed_kinds`).
    """

    def __init__(self, options: StageOptions) -> None:
        self.layers = options.layers
        begins = [kinds for kinds, _ in options.unspread]
        self._families = [of + len(of) for _, of in options.unspread]
        of = list(zip(options.stages, options.hops, begins, strict=True))
        self.figures: Floats = np.minimum(
            [
                np.concatenate(
                    [part for one, _, begin in of for part in (getattr(one, name), getattr(one, name)[begin])]
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
        """For each kind (by pool), the relaxed kind that takes no more, however the stages are spread. It is
        the same for kinds that differ in nothing else."""
        return tuple(int(of[kind]) for of, kind in zip(self._families, kinds, strict=True))


class SuffixBounds(NamedTuple):
    """Lower bounds of suffixes in seconds, each an array over layers; INFINITE_S where there is no suffix.

    - `loop_s`: the loop of the first stage
    - `ready_s`: from the start of the step to the end of the first backward
    - `last_s`: from the start of the last forward to the end of all reductions
    - `drained_s`: from the first forward to the last backward
    - `reduced_s`: from the first forward to the end of all reductions
    - `alone_s`: from the start of the step to the end of any stage, by its own work alone
    """

    loop_s: Floats
    ready_s: Floats
    last_s: Floats
    drained_s: Floats
    reduced_s: Floats
    alone_s: Floats


HOPS_PER_FIGURE = np.array([2.0, 1.0, 1.0, 2.0, 1.0, 0.0])
"""How many hops before the suffix each of the `SuffixBounds` includes."""


@dataclass(frozen=True, slots=True)
class _SuffixSet:
    """Suffixes of one pipeline with equally many stages: their counts, and the pool of the first stage of
    each. `successors` has, for each pool, the row of the suffix that follows the first stage among those with
    one stage less, -1 where there is none. `rows` finds a suffix by counts and pool."""

    counts: Ints
    pools: Ints
    successors: Ints
    rows: dict[tuple[Counts, int], int]


@dataclass(frozen=True, slots=True)
class _SuffixBatch:
    """Suffixes of several pipelines, as in `_SuffixSet`, with the pipeline of each. `layers` are the layers
    of a suffix, `own` those of its first stage, at least and at most."""

    counts: Ints
    pools: Ints
    successors: Ints
    pipelines: Ints
    layers: tuple[Ints, Ints]
    own: tuple[Ints, Ints]

    def at(self, places: Any) -> _SuffixBatch:
        """The selected suffixes."""
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
    """All suffixes of pipelines with these counts of stages, by number of stages from 1 on. The last set has
    the whole pipelines."""
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
    """The same for a pipeline whose stages are on pools in this order: one suffix for each number of
    stages."""
    found: list[_SuffixSet] = []
    for stages in range(1, len(order) + 1):
        suffix = order[-stages:]
        counts = tuple(suffix.count(pool) for pool in range(pools))
        successors = [0 if stages > 1 and then == suffix[1] else -1 for then in range(pools)]
        rows = {(counts, suffix[0]): 0}
        found.append(_SuffixSet(np.array([counts]), np.array(suffix[:1]), np.array([successors]), rows))
    return tuple(found)


class SuffixRelaxation:
    """Suffix bounds of pipelines, each given by a shape (kinds and counts of stages by pool) and its
    micro-batches.

    A suffix is identified by its stages on each pool (`counts`), the pool of its first stage, and its layers.
    Dynamic programming from the last stage to the first minimises over the layers of the suffix's first
    stage. Each term is minimised by itself, so a result never exceeds the bound of a single layout. All
    suffixes of several pipelines with equally many stages are bounded together.

    With an `order`, only layouts whose stages are on pools in that order. With `within_s`, only layouts that
    take no more: a stage then takes no more layers than it can process all micro-batches with, by itself, in
    that time. In most pipelines each stage must take nearly as many, so few numbers of layers remain.
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
        """Suffixes that were bounded, a measure of the work done."""
        self._bounds = np.full(len(shapes), INFINITE_S)
        for stages in range(1, max(map(len, self._lattices)) + 1):
            self._extend(stages)

    def bounds(self) -> Floats:
        """Lower bounds of the pipelines in seconds; infinity where no layout is possible."""
        return np.where(self._bounds < INFINITE_S, self._bounds, np.inf)

    def completion_bound(self, counts: Counts, pool: int) -> SuffixBounds | None:
        """Completion bound of the only pipeline: bounds of the stages after one on `pool` that begins a
        suffix with these counts, including the hop to them. None where no stage follows."""
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
        """The most layers with which a stage can process all micro-batches in time, by pipeline and pool."""
        work_s, overhead_s = self._table.min_work_s[self._of], self._table.min_overhead_s[self._of]
        can = self._m[:, None, None] * work_s + overhead_s <= self._within_s
        most: Ints = (can * np.arange(self._table.layers + 1)).max(axis=-1)
        return most

    def _extend(self, stages: int) -> None:
        """Bounds the suffixes with `stages` stages, and the pipelines that have no more."""
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
        # The last row and the last number of layers stand for no suffix.
        table = np.full((len(HOPS_PER_FIGURE), len(rows.pools) + 1, layers + 2), INFINITE_S)
        for some in self._batches(rows):
            at, _, found = self._extended(stages, rows.at(some), 0)
            values = np.stack([figure.min(axis=1) for figure in found])
            # A suffix that exceeds the time limit is left out.
            is_late = values[3:].max(axis=0) > self._within_s
            table[:, some[:, None], at] = np.where(is_late, INFINITE_S, values)
        table[..., -1] = INFINITE_S
        sizes = [len(self._lattices[place][stages - 1].pools) for place in tall]
        self._begins.append(dict(zip(tall, np.cumsum([0, *sizes[:-1]]).tolist(), strict=True)))
        self._tables.append(table)
        self.suffix_count += len(rows.pools)

    def _rows(self, stages: int, pipelines: Sequence[int]) -> _SuffixBatch:
        """All suffixes of these pipelines with `stages` stages, with successors as rows of the previous
        table."""
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
        """Indices of suffixes in batches that fit the cache, together with others that have about as many
        numbers of layers."""
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
        """The least bounds of the suffixes after first stages, including the hops, by their layers; shape
        (SuffixBounds, suffixes, ...)."""
        none = self._table.layers + 1
        at = np.where((layers < 0) | (layers > none), none, layers)
        values = self._tables[stages - 2][:, rows.successors[:, :, None], at[:, None, :]]
        values += HOPS_PER_FIGURE[:, None, None, None] * self._hops(rows)[..., None]
        found: Floats = np.minimum(values.min(axis=2), INFINITE_S)
        return found

    def _hops(self, rows: _SuffixBatch) -> Floats:
        """Seconds from the first stage of each suffix to the next, by the pool of the next."""
        every = np.arange(len(rows.pools))
        at = (self._of[rows.pipelines], self._counts[rows.pipelines], rows.counts)
        far_s = self._table.far_s[at]
        found: Floats = np.maximum(far_s, far_s[every, rows.pools][:, None])
        found[every, rows.pools] = self._table.near_s[at][every, rows.pools]
        return found

    def _stage(self, rows: _SuffixBatch, place: int, first: int, layers: Ints) -> Floats:
        """Forward, backward, gathering, reduction and end of the step of the first stages of suffixes, by
        their layers."""
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
        """Bounds of suffixes with one more stage.

        Returns the layers of the suffixes, of shape (suffixes, numbers); the terms of the new stage by its
        layers; and the bounds, of shape (suffixes, layers of the stage, layers).
        """
        (few, many), (least, most) = rows.layers, rows.own
        widest, long = int((most - least).max()) + 1, int((many - few).max()) + 1
        layers = few[:, None] + np.arange(long)
        if place == 1:
            f, b, g, r, e = own_figures = self._stage(rows, place, first, layers)[:, :, None]
            own = stage_lower_bound_s(self._m[rows.pipelines, None, None], f + b, b, f + b, 1)
            last = SuffixBounds(f + b, g + f + b, f + b + r, own, own + r, own + g + r + e)
            return self._clamped(layers), own_figures, last
        n = least[:, None] + np.arange(widest)
        # Entry [., n, l] is the suffix of l - n layers after a first stage of n, in a suffix of l.
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
        """Numbers of layers, at most one more than the model has."""
        return np.minimum(layers, self._table.layers + 1)

    def _finish(self, stages: int, rows: _SuffixBatch) -> None:
        """Updates the bounds of pipelines with `stages` stages, over the pools of their first stage."""
        _, (_, _, g, r, e), found = self._extended(stages, rows, 1)
        least = np.maximum(found.drained_s + r, found.reduced_s) + g + e
        least = np.maximum(least, found.alone_s)
        np.minimum.at(self._bounds, rows.pipelines, least.min(axis=(1, 2)))


def _with_run_minimum(hops_s: Floats, begins: Ints) -> tuple[Floats, Floats]:
    """Hops of all kinds, and the least of each run of kinds."""
    return hops_s, np.minimum.reduceat(hops_s, begins)


def _min_over_node_slots(values: Floats, node_slots: int) -> Floats:
    """The least over all node slots, repeated for each of them."""
    return np.repeat(values.min(axis=1, keepdims=True), node_slots, axis=1)


def _padded(values: Floats, node_slots: int) -> Floats:
    """Finite values padded to `node_slots` node slots; the added ones take INFINITE_S."""
    missing = [(0, node_slots - values.shape[1]) if axis == 1 else (0, 0) for axis in range(values.ndim)]
    return np.pad(np.minimum(values, INFINITE_S), missing, constant_values=INFINITE_S)


def _diagonal_view(values: Floats, rows: int) -> Floats:
    """A view of `values`, of shape (..., rows + columns - 1). Its entry [..., n, l] is the value at l - n,
    relative to the first entry of the last row."""
    columns = values.shape[-1] - rows + 1
    *others, step = values.strides
    shape = (*values.shape[:-1], rows, columns)
    return as_strided(values[..., rows - 1 :], shape, (*others, -step, step), writeable=False)


def stage_lower_bound_s(microbatches: Any, work_s: Any, back_s: Any, loop_s: Any, place: Any) -> Any:
    """Lower bound in seconds from the first forward of a stage to its last backward (see the module)."""
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
    """Lower bound in seconds from the end of a stage's first backward until it and all later stages have
    reduced. `last_s` is that from the start of its last forward."""
    beyond = np.maximum(microbatches - place, 0.0)
    own_s = beyond * work_s + (np.minimum(microbatches, place) - 1.0) * back_s + reduce_s
    steady_s = np.where(beyond > 0.0, (beyond - 1.0) * work_s, -4.0 * INFINITE_S)
    return np.maximum(own_s, steady_s + last_s)


# Bounds of given layouts

STAGE_FIGURES = ("forward_s", "backward_s", "gather_s", "reduce_s", "end_s")


@dataclass(frozen=True, slots=True)
class LayoutFigures:
    """Seconds by layout and stage: a forward, a backward, gathering, reduction and the end of the step; and
    of the hop after each stage but the last."""

    forward_s: Floats
    backward_s: Floats
    gather_s: Floats
    reduce_s: Floats
    end_s: Floats
    hop_s: Floats


def layout_figures(options: StageOptions, kinds: tuple[int, ...], pools: Ints, layers: Ints) -> LayoutFigures:
    """The terms of layouts, given `pools` and `layers` by layout and stage; infinite where a stage does not
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
    """Lower bound in seconds of the step of each layout; infinity where a stage does not fit.

    In addition to the bounds of single stages (see the module), every run of k stages is bounded. In the
    steady state, a run does k micro-batches in no less than all of its forwards, backwards and hops, both
    ways: between the start of micro-batch j and that of j + k on its first stage, one micro-batch has gone to
    the end of the run and come back. With q the place of the run's first stage and W one micro-batch through
    the whole pipeline and back, m > q micro-batches take at least

        W + loop + floor((m - 1 - q) / k) run + ((m - 1 - q) mod k) w.

    Both loops may be longer, as above.
    """
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
    """Seconds, by layout and stage, from the start of the step to the end of the stage's first backward; and
    from the start of its last forward until it and all later stages have reduced.

    `looped_s` is the first of these by the stage's own loop, `reduced_s` the second. One micro-batch takes
    `arrival_s` to arrive at the stage, and `through_s` through all earlier stages and back.
    """
    back_s = through_s - arrival_s
    first = np.maximum.accumulate((looped_s + back_s)[:, ::-1], axis=1)[:, ::-1] - back_s
    last = np.maximum.accumulate((reduced_s + arrival_s)[:, ::-1], axis=1)[:, ::-1] - arrival_s
    return first, last
