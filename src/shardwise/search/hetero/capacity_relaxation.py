"""Capacity relaxation of pipelines: a quick bound of the micro-batches that they can process within a time,
whatever their layouts, for many pipelines at once.

Within a time, a stage that processes m micro-batches takes no more layers than its work, gathering, reduction
and end of the step allow. One micro-batch must go through all layers, each at best on the fastest devices,
and over all hops, before the steady state and again after it (see `lower_bounds`). If the stages together
cannot take all layers, m micro-batches are too many. The order of pools is left out, and with it which stage
is where: several stages may count as the last ones, which save fewer activations.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from shardwise.cost import NodeSlot
from shardwise.search.hetero.lower_bounds import INFINITE_S
from shardwise.search.hetero.stage_costs import SiteCosts, StageOptions
from shardwise.ties import ROUNDING

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

PROBE_FRACTION = 16
"""Share (1 / this) of a pipeline's largest possible number of micro-batches by which the search for the most
first steps down."""


class CapacityRelaxation:
    """The relaxation of pipelines with these `kinds` and `counts` of stages, both of shape (pipelines,
    pools)."""

    def __init__(self, options: StageOptions, kinds: Ints, counts: Ints) -> None:
        self._options, self._kinds, self._counts = options, kinds, counts
        self._stages = counts.sum(axis=1).astype(np.float64)
        self._used = counts > 0
        unspread = options.unspread
        self._pools = [
            _PoolStages(stages, of, options.layers)
            for stages, (of, _) in zip(options.stages, unspread, strict=True)
        ]
        # Kinds that differ in their spread differ in node slots and hops alone.
        self._rows = np.stack([rows[kinds[:, i]] for i, (_, rows) in enumerate(unspread)], axis=1)
        most = options.most_stages + 1
        is_only = (counts == self._stages[:, None].astype(np.int64)).astype(np.int64)
        self._node_slots = [
            hops.node_slots[is_only[:, i, None], kinds[:, i, None], counts[:, i, None], np.arange(most)]
            for i, hops in enumerate(options.hops)
        ]
        every = range(len(self._pools))
        self._hops_s = 2.0 * self._hops()
        # By pipeline and pool. Pools without stages do not count; what fits nowhere takes infinite time.
        per_layer = np.stack([self._pools[i].per_layer_s[self._rows[:, i]] for i in every], axis=1)
        self._order = np.argsort(np.where(self._used, per_layer, np.inf), axis=1, kind="stable")
        self._per_layer_s = np.take_along_axis(per_layer, self._order, axis=1)
        forward = np.stack([self._pools[i].forward_share[self._rows[:, i]] for i in every], axis=1)
        self._forward_share = np.where(self._used, forward, 0.0).max(axis=1)
        # The first stage of all is the first of its pool.
        first = [self._node_slots[i][np.arange(len(kinds)), counts[:, i]] for i in every]
        overhead = np.stack([self._pools[i].overhead_s[self._rows[:, i], first[i]] for i in every], axis=1)
        self._overhead_s = np.where(self._used, overhead, np.inf).min(axis=1)
        # Layers per second of all stages together, each at its best rate.
        self._rate = (np.where(self._used, counts, 0) / per_layer).sum(axis=1) * (1.0 + ROUNDING)
        self._known: dict[float, Ints] = {}

    def microbatches(self, time_s: float, most: Ints | None = None) -> Ints:
        """The most micro-batches that each pipeline may process within `time_s`, given that none does more
        than `most`."""
        if time_s not in self._known:
            self._known[time_s] = self._bisected(time_s, most)
        return self._known[time_s]

    def quick_bound(self, time_s: float, most: Ints) -> Ints:
        """The same bound, from known results for longer times and from rates alone: cheaper and no closer."""
        longer = min((known_s for known_s in self._known if known_s >= time_s), default=None)
        high = most if longer is None else np.minimum(self._known[longer], most)
        return np.minimum(high, self._by_rate(time_s))

    def can_do(self, pipelines: Ints, microbatches: Ints, time_s: float) -> NDArray[np.bool_]:
        """Which of these pipelines may process `microbatches` micro-batches within `time_s`."""
        most_by_stage = [pool.max_microbatches(time_s) for pool in self._pools]
        return self._is_possible(pipelines, microbatches, time_s, most_by_stage)

    def _by_rate(self, time_s: float) -> Ints:
        """Micro-batches of stages that work all the time, each at its best rate."""
        most = np.minimum(time_s * self._rate / self._options.layers, self._options.microbatches)
        found: Ints = most.astype(np.int64)
        return found

    def _bisected(self, time_s: float, most: Ints | None) -> Ints:
        """The most micro-batches within `time_s`, between the results for the next shorter and the next
        longer time.

        The largest number is tried first, then fewer in growing steps until a pipeline may do them: most
        pipelines do nearly as many as by their rates.
        """
        shorter = max((known_s for known_s in self._known if known_s < time_s), default=None)
        longer = min((known_s for known_s in self._known if known_s > time_s), default=None)
        low: Ints = np.zeros_like(self._counts[:, 0]) if shorter is None else self._known[shorter].copy()
        high = np.full_like(low, self._options.microbatches) if longer is None else self._known[longer]
        high = high.copy() if most is None else np.minimum(high, most)
        high = np.minimum(high, self._by_rate(time_s))
        low = np.minimum(low, high)
        most_by_stage = [pool.max_microbatches(time_s) for pool in self._pools]
        fewer, step = np.zeros_like(high), np.maximum(high // PROBE_FRACTION, 1)
        while len(rows := np.flatnonzero(low < high)):
            tried = np.maximum(high[rows] - fewer[rows], (low[rows] + high[rows] + 1) // 2)
            can = self._is_possible(rows, tried, time_s, most_by_stage)
            low[rows[can]] = tried[can]
            high[rows[~can]] = tried[~can] - 1
            fewer[rows[can]], fewer[rows[~can]] = high.max(initial=0), step[rows[~can]]
            step[rows[~can]] *= 2
        return low

    def _is_possible(
        self, rows: Ints, m: Ints, time_s: float, most_by_stage: list[Floats]
    ) -> NDArray[np.bool_]:
        """Whether the relaxation allows each of these pipelines to do `m` micro-batches."""
        layers = self._options.layers
        hops_s, left_s = self._hops_s[rows], time_s - self._overhead_s[rows]
        through_s = hops_s + layers * self._per_layer_s[rows, 0]
        can = np.ones(len(rows), dtype=np.bool_)
        for _ in range(2):
            open_ = np.flatnonzero(can)
            most_s = self._most_work_s(rows[open_], m[open_], left_s[open_], through_s[open_])
            can[open_] = most_s * self._rate[rows[open_]] >= layers
            open_, most_s = open_[can[open_]], most_s[can[open_]]
            some = rows[open_]
            takes, more = self._layers(some, m[open_], most_s, most_by_stage)
            can[open_] = (takes.sum(axis=1) + more.max(axis=1) >= layers) & (most_s > 0.0)
            through_s[open_] = hops_s[open_] + self._quickest_s(some, takes + np.maximum(more, 0.0))
        return can & (self._most_work_s(rows, m, left_s, through_s) > 0.0)

    def _most_work_s(self, rows: Ints, m: Ints, time_s: Floats, through_s: Floats) -> Floats:
        """Upper bound of the time that one micro-batch takes on the busiest stage; 0 where no time is
        left."""
        p = self._stages[rows]
        loops = np.ceil(m / p)
        first = np.maximum(m - 1 - (p - 1.0) * self._forward_share[rows], 0.0)
        most = np.where(m >= p, _divided(time_s - through_s, first), np.inf)
        again = _divided(time_s - 2.0 * through_s, m - 1.0 - p)
        most = np.minimum(most, np.where(m > p, again, np.inf))
        most = np.minimum(most, time_s / np.maximum(m, 1))
        return np.where(loops * through_s > time_s, 0.0, most)

    def _layers(
        self, some: Ints, m: Ints, most_s: Floats, most_by_stage: list[Floats]
    ) -> tuple[Floats, Floats]:
        """Layers that the stages of each pool can take, by pipeline and pool, as if none were the last stage,
        which has the head; and the difference if one of the pool is the last stage."""
        found, more = np.zeros((len(m), len(self._pools))), np.full((len(m), len(self._pools)), -np.inf)
        for place, pool in enumerate(self._pools):
            stages = self._counts[some, place]
            has = np.flatnonzero(stages)
            if not len(has):
                continue
            # One entry for each stage of a row, after an entry for the last stage of the pipeline.
            entries = stages[has] + 1
            rows, ends = np.repeat(has, entries), np.cumsum(entries)
            begins = ends - entries
            from_end = np.minimum(np.arange(ends[-1]) - np.repeat(begins, entries), pool.places - 1)
            of, kinds = some[rows], self._rows[some, place][rows]
            # A stage that counts as not the last is this one from its pool's end, or the next.
            left = np.minimum(np.arange(ends[-1]) - np.repeat(begins, entries) + 1, stages[rows])
            node_slots = self._node_slots[place][of, left]
            takes = pool.layers(kinds, node_slots, from_end, most_s[rows], most_by_stage[place], m[rows])
            found[has, place] = np.add.reduceat(takes, begins) - takes[begins]
            more[has, place] = takes[begins] - takes[ends - 1]
        return found, more

    def _quickest_s(self, some: Ints, takes: Floats) -> Floats:
        """Seconds of one micro-batch through all layers, each on the fastest devices that can take it."""
        ordered = np.take_along_axis(takes, self._order[some], axis=1)
        before = np.cumsum(ordered, axis=1) - ordered
        mine = np.clip(self._options.layers - before, 0.0, ordered)
        quickest: Floats = (mine * self._per_layer_s[some]).sum(axis=1)
        return quickest

    def _hops(self) -> Floats:
        """Lower bound in seconds of all hops one way: after the stages of each pool except the last, and
        between pools. A hop between pools takes at least the second-least end, since its ends are on two
        pools."""
        inside: Floats = np.zeros(len(self._counts))
        across: Floats = np.full(self._counts.shape, np.inf)
        for pool, hops in enumerate(self._options.hops):
            kinds, counts = self._kinds[:, pool], self._counts[:, pool]
            inside += hops.total_s()[kinds, counts]
            across[:, pool] = np.where(counts > 0, hops.least_far_s()[kinds, counts], np.inf)
        between = self._used.sum(axis=1) - 1
        if len(self._pools) == 1:
            return inside
        found: Floats = inside + np.where(between > 0, between * _finite(np.sort(across, axis=1)[:, 1]), 0.0)
        return found


def _finite(values: Floats) -> Floats:
    return np.where(np.isfinite(values), values, 0.0)


class _PoolStages:
    """Stages of some kinds of one pool, by kind, place from the end and layers from 1, at whichever end of
    the pipeline is cheaper.

    `work_s` is the least work with at least the given layers. By kind: the least work per layer, the largest
    share of the forward in the work, and the least time around a first stage's work (by node slot too).
    """

    def __init__(self, stages: SiteCosts, kinds: Ints, layers: int) -> None:
        n = np.arange(1, layers + 1)
        forward_s, all_s = stages.forward_s[kinds], stages.work_s[kinds]
        gather_s, end_s = stages.gather_s[kinds], stages.end_s[kinds]
        work_s = np.minimum(all_s[:, 1:, 0, 1:], all_s[:, 1:, 1, 1:])
        self._works = all_s[:, None, 1:, :, 1:]
        overhead_s = gather_s + stages.reduce_s[kinds] + end_s
        self._overhead = _min_over_fuller_slots(overhead_s[:, :, 1:, :, 1:], stages.node_slots)
        self.work_s = _suffix_minimum(work_s)
        self.per_layer_s = np.minimum((work_s / n).min(axis=(1, 2)), INFINITE_S)
        with np.errstate(invalid="ignore"):
            share = forward_s / all_s
        self.forward_share = np.nanmax(np.where(np.isfinite(share), share, 0.0), axis=(1, 2, 3))
        first = (gather_s + end_s)[:, :, 1:, 1, 1:]
        self.overhead_s = first.min(axis=(2, 3))

    @property
    def places(self) -> int:
        """How many places from the end are distinguished."""
        return int(self.work_s.shape[1])

    def layers(
        self, kinds: Ints, node_slots: Ints, from_end: Ints, most_s: Floats, most_by_stage: Floats, m: Ints
    ) -> Floats:
        """The most layers with which stages take no more than `most_s` and do `m` micro-batches, by
        bisection: both limits are monotonic in the layers. Stages are given by kind, node slot and place from
        the end (0)."""
        layers = self.work_s.shape[2]
        first = (kinds * self.places + from_end) * layers - 1
        slot_rows = ((kinds * most_by_stage.shape[1] + node_slots) * self.places + from_end) * layers - 1
        work_s, does = self.work_s.ravel(), most_by_stage.ravel()
        low, step = np.zeros_like(first), 1 << (layers.bit_length() - 1)
        while step:
            more = low + step
            at = np.minimum(more, layers)
            can = (more <= layers) & (work_s[first + at] <= most_s) & (does[slot_rows + at] >= m)
            low = np.where(can, more, low)
            step >>= 1
        most: Floats = low.astype(np.float64)
        return most

    def max_microbatches(self, time_s: float) -> Floats:
        """The most micro-batches that a stage with at least the given layers does in time, with the time
        around its work; by kind, node slot, place and layers."""
        with np.errstate(invalid="ignore"):
            most = np.floor((time_s - self._overhead) / self._works)
        most = np.where(np.isfinite(most), most, 0.0).max(axis=3)
        return -_suffix_minimum(-most)


def _suffix_minimum(values: Floats) -> Floats:
    """The minimum of each value and all that follow it on the last axis."""
    least: Floats = np.minimum.accumulate(values[..., ::-1], axis=-1)[..., ::-1]
    return least


def _min_over_fuller_slots(values: Floats, node_slots: Sequence[NodeSlot]) -> Floats:
    """The minimum of each node slot (second axis) and those with more stages per node. Slots of stages whose
    pipeline has no others are kept apart."""
    others = sum(not node_slot.is_whole for node_slot in node_slots)
    least = np.minimum.accumulate(values[:, others - 1 :: -1], axis=1)[:, ::-1]
    found: Floats = np.concatenate([least, values[:, others:]], axis=1)
    return found


def _divided(time_s: Floats, parts: Floats) -> Floats:
    """`time_s` / `parts`; infinity where there are no parts and time is left, 0 where no time is left."""
    share = time_s / np.where(parts > 0.0, parts, 1.0)
    return np.where(time_s < 0.0, 0.0, np.where(parts > 0.0, share, np.inf))
