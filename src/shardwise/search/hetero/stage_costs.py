"""Costs of every stage and hop that the pipelines of a subproblem may have.

`StageCostModel.options` returns `StageOptions`: one `SiteCosts` and one `StageHops` for each site. Arrays of
`SiteCosts` have shape (kinds, places, ends, layers). `place` counts stages from the last (1) to the first,
`ends` is 1 for a pipeline's first stage, and `layers` starts at 0, which no stage has. Gathering, reduction
and the end of the step have a further axis of node slots after the kinds. A stage that does not fit takes
infinite time. Each stage has the fastest recomputation that fits: no other is faster in any respect.

The stages that a pipeline has on one pool form *groups*, each in one node (`group_sizes`). Hops inside a
group stay in the node. A hop that leaves it shares the node's cards with the node's other groups, as if all
groups were equal in size.

Each part of a mixed-pool stage is estimated by itself, and the slower one decides. The parts are two replicas
in nodes of different pools, so they reduce gradients on the outermost tier, and all of their hops leave the
node.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import cache, lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardwise.cluster import Tier
from shardwise.cost import (
    NodeSlot,
    Problem,
    StageBytes,
    StageCosts,
    StageKinds,
    StageShape,
    hop_s,
    stage_bytes,
    stage_costs,
    stage_costs_by_slot,
    stage_kinds_of,
)
from shardwise.search.hetero.space import (
    MixedPoolKind,
    Site,
    StageKind,
    StageSpread,
    UnevenSpace,
    UnevenSubproblem,
    devices_by_pool,
    max_stages_per_node,
)

Floats = NDArray[np.float64]

# Mixed-pool stages


@dataclass(frozen=True, slots=True)
class PoolPart:
    """One pool's parts of mixed-pool stages, by tp (the last axis): their costs, the usable bytes of a
    device, and the seconds of a hop over the outermost tier at this end, with all devices of the node sending
    at once."""

    price: StageCosts
    nbytes: StageBytes
    usable_bytes: float
    hop_s: Floats

    @staticmethod
    def of(kinds: StageKinds, shape: StageShape, chosen: Sequence[int], devices: int) -> PoolPart:
        """Stages of these shapes on the `chosen` ones of the kinds, on nodes of `devices` devices."""
        count = len(np.atleast_1d(kinds.tp))

        def some(values: Any) -> Any:
            return np.broadcast_to(values, (*np.shape(values)[:-1], count))[..., list(chosen)]

        price, nbytes = stage_costs(kinds, shape), stage_bytes(kinds, shape)
        hops_s = np.asarray(hop_s(kinds, -1, np.full(count, devices)), dtype=np.float64)
        return PoolPart(
            StageCosts(**{one.name: some(getattr(price, one.name)) for one in fields(StageCosts)}),
            StageBytes(some(nbytes.allocated), some(nbytes.device)),
            kinds.problem.usable_bytes,
            hops_s[list(chosen)],
        )


def mixed_pool_cost(one: PoolPart, other: PoolPart) -> tuple[StageCosts, Any]:
    """Costs of mixed-pool stages for every pair of tp, the tp of `other` varying fastest: the times of the
    slower part, and whether both fit."""
    price = {
        field.name: _all_pairs(np.maximum, getattr(one.price, field.name), getattr(other.price, field.name))
        for field in fields(StageCosts)
    }
    fits = _all_pairs(np.logical_and, *(part.nbytes.device <= part.usable_bytes for part in (one, other)))
    return StageCosts(**price), fits


def mixed_pool_hops(one: PoolPart, other: PoolPart) -> Floats:
    """Seconds of a hop to or from a mixed-pool stage, by pairs of tp: those of the slower part."""
    found: Floats = _all_pairs(np.maximum, one.hop_s, other.hop_s)
    return found


def _all_pairs(joined: Callable[[Any, Any], Any], one: Any, other: Any) -> Any:
    """`joined` of every pair of the last axes, with all pairs on one last axis."""
    both = joined(np.asarray(one)[..., :, None], np.asarray(other)[..., None, :])
    return both.reshape(*both.shape[:-2], -1)


# Node slots and hops

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class StageHops:
    """Hops of the stages of one pool, of shape (kinds, stages + 1, stages + 1): by how many stages the
    pipeline has there, and the stage's place among them, counted from the pipeline's end (1).

    `near_s` are the seconds from that stage to the next one of the pool if it follows directly. `far_s` are
    the seconds at this end of a hop to or from a stage of another pool.

    `node_slots` has a further first axis, which is 1 if all of the pipeline's stages are on this pool. Its
    values index the result of `node_slots_of_pool`.
    """

    near_s: Floats
    far_s: Floats
    node_slots: Ints

    def total_s(self) -> Floats:
        """Lower bound of all hops after the pool's stages except the last, wherever the other stages are;
        shape (kinds, stages + 1)."""
        least = np.minimum(self.near_s, self.far_s)
        least[:, :, :2] = 0.0
        return np.stack([least[:, n, : n + 1].sum(axis=1) for n in range(least.shape[1])], axis=1)

    def least_far_s(self) -> Floats:
        """Lower bound of a hop to or from another pool, at this end; shape (kinds, stages + 1)."""
        numbers = range(1, self.far_s.shape[1])
        found = [self.far_s[:, n, 1 : n + 1].min(axis=1) for n in numbers]
        return np.stack([found[0], *found], axis=1)


@cache
def group_sizes(stages: int, most: int) -> tuple[int, ...]:
    """Sizes of the groups of `stages` stages, from the pipeline's end on.

    A node has up to `most` stages of a pipeline, a power of two. Each group is the largest power of two up to
    that and up to the remaining stages, so that groups of any pipelines fill nodes without gaps.
    """
    found = []
    while stages:
        found.append(min(most, 1 << (stages.bit_length() - 1)))
        stages -= found[-1]
    return tuple(found)


def node_slots_of_pool(
    devices: int, sizes: Sequence[int], stages: int, is_tied: bool
) -> tuple[NodeSlot, ...]:
    """The node slots that stages of these `sizes` may have in nodes of `devices`, in pipelines of up to
    `stages` stages.

    First those with 1, 2, 4, ... stages per node. Then the same for stages whose pipeline has no others,
    which matters if both ends of the model share weights (`is_tied`).
    """
    most = min(max_stages_per_node(devices, min(sizes)), 1 << (stages.bit_length() - 1))
    powers = [1 << exponent for exponent in range(most.bit_length())]
    whole = [NodeSlot(stages_per_node, devices, True) for stages_per_node in powers[1:] if is_tied]
    return (*(NodeSlot(stages_per_node, devices) for stages_per_node in powers), *whole)


def hops_of_pool(
    own: StageKinds,
    across: StageKinds,
    sizes: Sequence[int],
    kinds: Sequence[tuple[int, int]],
    devices: int,
    stages: int,
    node_slots: Sequence[NodeSlot],
) -> StageHops:
    """Hops of pipelines with up to `stages` stages on a pool of nodes of `devices`.

    `own` has the tiers of the pool, `across` the tiers to other pools, both for stages of these `sizes`.
    `kinds` has, for each kind, the index of its size and its stages per node.
    """
    inner = max((i for i, tier in enumerate(own.problem.tiers) if tier.span <= devices), default=-1)
    near_s = np.zeros((len(kinds), stages + 1, stages + 1))
    far_s = np.zeros_like(near_s)
    taken = np.zeros((2, *near_s.shape), dtype=np.int64)
    within = _seconds(own, inner, sizes)
    powers = {node_slot.stages_per_node for node_slot in node_slots}
    all_leave, all_across = (
        {many: _seconds(one, -1, [devices // many] * len(sizes)) for many in powers} for one in (own, across)
    )
    for kind, (of, stages_per_node) in enumerate(kinds):
        leaves, crossing = (
            {many: float(values[of]) for many, values in some.items()} for some in (all_leave, all_across)
        )
        for number in range(1, stages + 1):
            placed_stages = [
                (g, many) for g, many in enumerate(group_sizes(number, stages_per_node)) for _ in range(many)
            ]
            for stage, (group, many) in enumerate(placed_stages, start=1):
                far_s[kind, number, stage] = crossing[many]
                node_slot, whole = NodeSlot(many, devices), NodeSlot(many, devices, True)
                is_whole = many == number and whole in node_slots
                taken[0, kind, number, stage] = node_slots.index(node_slot)
                taken[1, kind, number, stage] = node_slots.index(whole if is_whole else node_slot)
                if stage > 1:
                    next_group, fewer = placed_stages[stage - 2]
                    is_inside = group == next_group
                    near_s[kind, number, stage] = (
                        within[of] if is_inside else max(leaves[many], leaves[fewer])
                    )
    return StageHops(near_s, far_s, taken)


def _seconds(kinds: StageKinds, tier: int, senders: Sequence[int]) -> Floats:
    """Seconds of a hop over the tier, by kind, with `senders` adjacent devices below the tier sending at
    once."""
    return np.asarray(hop_s(kinds, tier, np.array(senders)), dtype=np.float64)


def hops_s(hops: Sequence[StageHops], kinds: Sequence[int], pools: Ints) -> Floats:
    """Seconds of the hops of layouts, of shape (layouts, stages - 1); `pools` has the pool of each stage."""
    stages = np.arange(pools.shape[1])
    left, number = np.zeros_like(pools), np.zeros_like(pools)
    near, far = np.zeros(pools.shape), np.zeros(pools.shape)
    for pool, kind in enumerate(kinds):
        mine = pools == pool
        before = np.cumsum(mine, axis=1)
        number = before[:, -1:] + 0 * stages
        left = number - before + 1
        near[mine] = hops[pool].near_s[kind, number[mine], left[mine]]
        far[mine] = hops[pool].far_s[kind, number[mine], left[mine]]
    is_same = pools[:, 1:] == pools[:, :-1]
    return np.where(is_same, near[:, :-1], np.maximum(far[:, :-1], far[:, 1:]))


def node_slots_of(hops: Sequence[StageHops], kinds: Sequence[int], pools: Ints) -> Ints:
    """The node slot of every stage of layouts, of shape (layouts, stages)."""
    found = np.zeros_like(pools)
    for pool, kind in enumerate(kinds):
        mine = pools == pool
        before = np.cumsum(mine, axis=1)
        number = before[:, -1:] + 0 * before
        is_only = (number == pools.shape[1]).astype(np.int64)
        found[mine] = hops[pool].node_slots[is_only[mine], kind, number[mine], (number - before + 1)[mine]]
    return found


# Costs of a subproblem


@dataclass(frozen=True, slots=True, kw_only=True)
class SiteCosts:
    """Costs of the stages on one site.

    Seconds of a forward and a backward of a micro-batch; of gathering, reduction and the end of the step, for
    each of its `node_slots`. `recompute` is the index in RECOMPUTES of the chosen recomputation, -1 where
    nothing fits.
    """

    kinds: tuple[StageKind | MixedPoolKind, ...]
    node_slots: tuple[NodeSlot, ...]
    forward_s: Floats
    backward_s: Floats
    gather_s: Floats
    reduce_s: Floats
    end_s: Floats
    recompute: Ints

    @property
    def work_s(self) -> Floats:
        """Seconds of one micro-batch, forward and backward."""
        return self.forward_s + self.backward_s


@dataclass(frozen=True, slots=True, kw_only=True)
class StageOptions:
    """The stages that a subproblem's pipelines may have, and their hops, which cost the same in both
    directions.

    `sites` index `pools`, and the single pools are first. `spread` has how the stages of each kind are
    spread. Sets of identical pipelines take devices in multiples of `units`. Where the subproblem has a range
    of numbers of pipelines, all seconds are the least for any of them. The share `sends_overlap` of each hop
    overlaps with the next action of its sender.
    """

    pools: tuple[int, ...]
    devices: tuple[int, ...]
    units: tuple[int, ...]
    sites: tuple[Site, ...]
    stages: tuple[SiteCosts, ...]
    spread: tuple[tuple[StageSpread | None, ...], ...]
    hops: tuple[StageHops, ...]
    layers: int
    most_stages: int
    microbatches: int
    sends_overlap: float

    @property
    def available(self) -> tuple[int, ...]:
        """Units of devices of each pool."""
        return tuple(count // unit for count, unit in zip(self.devices, self.units, strict=True))

    @property
    def unspread(self) -> tuple[tuple[Ints, Ints], ...]:
        """For each site, the kinds that are not spread, and the index of every kind among them. Kinds that
        differ only in their spread follow the one that is not spread."""
        found = [np.flatnonzero([one is None for one in some]) for some in self.spread]
        return tuple(
            (kinds, np.searchsorted(kinds, np.arange(len(some)), side="right") - 1)
            for kinds, some in zip(found, self.spread, strict=True)
        )

    @property
    def stage_devices(self) -> tuple[tuple[tuple[int, ...], ...], ...]:
        """Devices of each pool that a stage takes, by site and kind."""

        def taken(site: Site, kind: StageKind | MixedPoolKind) -> tuple[int, ...]:
            of = dict(zip(site, devices_by_pool(kind), strict=True))
            return tuple(of.get(pool, 0) for pool in range(len(self.pools)))

        sites = zip(self.sites, self.stages, strict=True)
        return tuple(tuple(taken(site, kind) for kind in stages.kinds) for site, stages in sites)


class StageCostModel:
    """Costs for the subproblems of one space; shared parts are computed once."""

    def __init__(self, space: UnevenSpace) -> None:
        self._space = space
        self._problem = lru_cache(maxsize=None)(space.problem)
        self._kinds = lru_cache(maxsize=None)(self._kinds_of)
        self._inside: dict[tuple[int, int, tuple[Tier, ...]], StageKinds] = {}
        self._costs = lru_cache(maxsize=512)(self._costs_of)
        self._mixed_pool_costs = lru_cache(maxsize=24)(self._mixed_pool_costs_of)
        self._hops = lru_cache(maxsize=None)(self._hops_of)
        self._spread = lru_cache(maxsize=None)(self._spread_of)
        self._rate = lru_cache(maxsize=None)(self._rate_of)

    def options(self, subproblem: UnevenSubproblem) -> StageOptions:
        """The stages of the subproblem's pipelines, with their costs."""
        space = self._space
        pairs = space.pairs(subproblem)
        mixed_pool_stages = [self._mixed_pool_costs(subproblem, pair) for pair in pairs]
        places = tuple((place,) for place in range(len(subproblem.pools)))
        return StageOptions(
            pools=subproblem.pools,
            devices=tuple(space.pools[pool].devices for pool in subproblem.pools),
            units=tuple(1 if subproblem.is_alike else space.unit(pool) for pool in subproblem.pools),
            sites=(*places, *(tuple(subproblem.pools.index(pool) for pool in pair) for pair in pairs)),
            stages=(
                *(self._costs(subproblem, pool) for pool in subproblem.pools),
                *(stages for stages, _ in mixed_pool_stages),
            ),
            spread=(
                *(self._spread(pool, subproblem.micro_batch_size) for pool in subproblem.pools),
                *((None,) * len(stages.kinds) for stages, _ in mixed_pool_stages),
            ),
            hops=(
                *(
                    self._hops(pool, subproblem.pools, subproblem.micro_batch_size)
                    for pool in subproblem.pools
                ),
                *(hops for _, hops in mixed_pool_stages),
            ),
            layers=space.model.layers,
            most_stages=space.most_stages,
            microbatches=space.job.global_batch_size // subproblem.micro_batch_size,
            sends_overlap=space.job.profile.pipeline_overlap,
        )

    def _extreme_pipeline_counts(self, subproblem: UnevenSubproblem, own: int) -> list[int]:
        """Numbers of pipelines among which each cost of the subproblem has its minimum.

        Until replicas fill the tiers inside a node, in each of two groups, more of them use the outer tiers
        more. All other costs fall with their number. One pipeline with a single replica (`own`) per stage
        gathers and reduces nothing, which no other number undercuts, so it and the largest number suffice.
        """
        inner = max(self._space.pools[pool].node.devices for pool in subproblem.pools)
        few = range(subproblem.least, min(subproblem.most, 2 * inner) + 1)
        return sorted({subproblem.least, subproblem.most, *(few if subproblem.least * own > 1 else ())})

    def quick_bound_s(self, subproblem: UnevenSubproblem) -> float:
        """Quick bound: seconds in which the devices of the subproblem's pools do the work, whatever their
        stages. The rates are those of the subproblem on all pools, whose stages are at least as fast and fit
        at least as well."""
        space = self._space
        whole = space.widest(tuple(range(len(space.pools))), subproblem.micro_batch_size)
        rate = sum(self._rate(whole, pool) * space.pools[pool].devices for pool in subproblem.pools)
        batches = space.job.global_batch_size // subproblem.micro_batch_size
        return batches * space.model.layers / rate if rate else float("inf")

    def lower_bound_s(self, subproblem: UnevenSubproblem, options: StageOptions) -> float:
        """Lower bound in seconds of every plan of the subproblem: all devices that its pipelines can have
        work all the time, each at its best rate."""
        space, rate = self._space, 0.0
        for pool, devices in zip(subproblem.pools, options.devices, strict=True):
            largest = max(tp * dp for tp, dp in space.degrees(pool, subproblem.micro_batch_size))
            rate += self._rate(subproblem, pool) * min(
                devices, subproblem.most * options.most_stages * largest
            )
        overhead_s = min(float((stages.end_s[:, :, 1:, :, 1:]).min()) for stages in options.stages)
        if rate == 0.0:
            return float("inf")
        return options.microbatches * options.layers / rate + overhead_s

    def _rate_of(self, subproblem: UnevenSubproblem, pool: int) -> float:
        """The best rate of a pool: layers of micro-batches per second and device. A mixed-pool stage counts
        by its share of the rows."""
        stages = self._costs(subproblem, pool)
        rates = [_best_rate(stages, np.array([devices_by_pool(kind)[0] for kind in stages.kinds]))]
        for pair in (pair for pair in self._space.pairs(subproblem) if pool in pair):
            stages, _ = self._mixed_pool_costs(subproblem, pair)
            part = pair.index(pool)
            mixed_pool_stages = [kind for kind in stages.kinds if isinstance(kind, MixedPoolKind)]
            sizes = np.array([mixed_stage.tp[part] for mixed_stage in mixed_pool_stages])
            shares = (
                np.array([mixed_stage.rows[part] for mixed_stage in mixed_pool_stages])
                / subproblem.micro_batch_size
            )
            rates.append(_best_rate(stages, sizes / shares))
        return max(rates)

    def single_pool_problem(self, pool: int) -> Problem:
        """The problem of training on the pool alone."""
        return self._problem(pool, (pool,), False)

    def _kinds_of(self, pool: int, union: tuple[int, ...], size: int, is_alike: bool = False) -> StageKinds:
        """Stage kinds of a pool. Their costs inside a node are shared by all unions with the same inner
        tiers."""
        problem = self._problem(pool, union, is_alike)
        inside = pool, size, problem.tiers[:-1]
        if inside not in self._inside:
            self._inside[inside] = stage_kinds_of(problem, self._space.degrees(pool, size), size)
        return self._inside[inside].among(problem)

    def _costs_of(self, subproblem: UnevenSubproblem, pool: int) -> SiteCosts:
        """The least costs for any of the subproblem's numbers of pipelines.

        If the pipelines are on several pools and not identical, replicas of a stage meet on the outermost
        tier: some of them are in nodes of another pool.
        """
        size = subproblem.micro_batch_size
        kinds = self._kinds(pool, subproblem.pools, size, subproblem.is_alike)
        groups = 1 if subproblem.is_alike or len(subproblem.pools) == 1 else 2
        replicas, node_slots = (
            self._extreme_pipeline_counts(subproblem, self._space.limits.stage_dp),
            self._node_slots(pool, size),
        )
        shape, at = self._timed_shape(replicas, groups)
        prices = stage_costs_by_slot(kinds, shape, node_slots)
        nbytes = stage_bytes(kinds, self._shape(replicas, groups))
        fits = nbytes.device <= kinds.problem.usable_bytes
        return self._fastest_recompute(
            self._space.kinds(pool, size),
            self._degree_indices(pool, size),
            node_slots,
            prices,
            at,
            fits,
        )

    def _degree_indices(self, pool: int, size: int) -> list[int]:
        """The index of each kind's tp and dp among the pool's degrees, for which costs are estimated."""
        degrees = self._space.degrees(pool, size)
        return [degrees.index((kind.tp, kind.dp)) for kind in self._space.kinds(pool, size)]

    def _node_slots(self, pool: int, size: int) -> tuple[NodeSlot, ...]:
        space = self._space
        sizes = [tp * dp for tp, dp in space.degrees(pool, size)]
        is_tied = space.model.embedding_copies > 0
        return node_slots_of_pool(space.pools[pool].node.devices, sizes, space.most_stages, is_tied)

    def _mixed_pool_costs_of(self, subproblem: UnevenSubproblem, pair: Site) -> tuple[SiteCosts, StageHops]:
        """Costs and hops of mixed-pool stages. Both parts are replicas of the stage, so there are twice as
        many replicas as pipelines."""
        size, found = subproblem.micro_batch_size, []
        shape = self._shape([2 * number for number in self._extreme_pipeline_counts(subproblem, 2)], 2)
        mixed_pool_stages = self._space.mixed_pool_stages(pair, size)
        hops_s = []
        for rows in range(1, size):
            one, other = (
                self._part(subproblem, pool, of, shape)
                for pool, of in zip(pair, (rows, size - rows), strict=True)
            )
            some = tuple(mixed_stage for mixed_stage in mixed_pool_stages if mixed_stage.rows[0] == rows)
            price, fits = mixed_pool_cost(one, other)
            every, at = range(len(some)), np.arange(price.forward_s.shape[-2])
            found.append(self._fastest_recompute(some, every, (NodeSlot(),), [price], at, fits))
            hops_s.append(mixed_pool_hops(one, other))
        names = [field.name for field in fields(SiteCosts) if field.name not in ("kinds", "node_slots")]
        whole = {name: np.concatenate([getattr(stages, name) for stages in found]) for name in names}
        stages = self._space.most_stages
        hop_s = np.tile(np.concatenate(hops_s)[:, None, None], (1, stages + 1, stages + 1))
        node_slots = np.zeros((2, *hop_s.shape), dtype=np.int64)
        return SiteCosts(kinds=mixed_pool_stages, node_slots=(NodeSlot(),), **whole), StageHops(
            hop_s, hop_s, node_slots
        )

    def _part(self, subproblem: UnevenSubproblem, pool: int, rows: int, shape: StageShape) -> PoolPart:
        """The pool's part of mixed-pool stages with `rows` rows, by tp."""
        kinds = self._kinds(pool, subproblem.pools, rows)
        alone = [index for index, (_, dp) in enumerate(self._space.degrees(pool, rows)) if dp == 1]
        devices = self._space.pools[pool].node.devices
        return PoolPart.of(kinds, shape, alone, devices)

    def _shape(self, replicas: Sequence[int], groups: int) -> StageShape:
        """Every stage by its place, whether it is the first, and its layers."""
        place, first, count = (axis.reshape(-1, 1) for axis in np.indices(self._axes))
        return StageShape(
            layers=count, in_flight=place, is_first=1.0 * first, is_last=1.0 * (place == 1),
            replicas=replicas, groups=groups,
        )  # fmt: skip

    def _timed_shape(self, replicas: Sequence[int], groups: int) -> tuple[StageShape, Ints]:
        """Every stage with a distinct time, and the index of each stage of `_shape` among them."""
        last, first, count = (axis.reshape(-1, 1) for axis in np.indices((2, *self._axes[1:])))
        shape = StageShape(
            layers=count, in_flight=1, is_first=1.0 * first, is_last=1.0 * last,
            replicas=replicas, groups=groups,
        )  # fmt: skip
        is_last = 1 * (np.arange(self._axes[0]) == 1)
        return shape, np.arange(len(last)).reshape(2, -1)[is_last].ravel()

    @property
    def _axes(self) -> tuple[int, int, int]:
        return self._space.most_stages + 1, 2, self._space.model.layers + 1

    def _fastest_recompute(
        self,
        kinds: tuple[StageKind | MixedPoolKind, ...],
        of: Sequence[int],
        node_slots: tuple[NodeSlot, ...],
        prices: Sequence[StageCosts],
        at: Ints,
        fits: Any,
    ) -> SiteCosts:
        place, _, count = (axis.reshape(-1, 1) for axis in np.indices(self._axes))
        is_one = (place >= 1) & (count >= 1)
        return _fastest_recompute(kinds, of, node_slots, prices, at, fits & is_one, self._axes)

    def _hops_of(self, pool: int, union: tuple[int, ...], size: int) -> StageHops:
        own, across = self._kinds(pool, (pool,), size), self._kinds(pool, union, size)
        sizes = [tp * dp for tp, dp in self._space.degrees(pool, size)]
        stages_per_node = [kind.stages_per_node for kind in self._space.kinds(pool, size)]
        kinds = list(zip(self._degree_indices(pool, size), stages_per_node, strict=True))
        devices, node_slots = self._space.pools[pool].node.devices, self._node_slots(pool, size)
        return hops_of_pool(own, across, sizes, kinds, devices, self._space.most_stages, node_slots)

    def _spread_of(self, pool: int, size: int) -> tuple[StageSpread | None, ...]:
        return tuple(self._space.spread(pool, kind) for kind in self._space.kinds(pool, size))


def _best_rate(stages: SiteCosts, devices: Floats) -> float:
    """The best layers of micro-batches per second and device, where a stage of each kind has `devices`
    devices."""
    layers = np.arange(stages.work_s.shape[-1])
    with np.errstate(divide="ignore", invalid="ignore"):
        rates = layers / (stages.work_s * devices[:, None, None, None])
    return float(np.max(np.where(layers > 0, rates, 0.0)))


def _fastest_recompute(
    kinds: tuple[StageKind | MixedPoolKind, ...],
    of: Sequence[int],
    node_slots: tuple[NodeSlot, ...],
    prices: Sequence[StageCosts],
    at: Ints,
    fits: Any,
    shape: tuple[int, ...],
) -> SiteCosts:
    """For each stage and number of pipelines the fastest recomputation that fits; then the least seconds over
    the numbers of pipelines. The recomputation is that of the first number.

    `prices` has the costs for each node slot. `at` has the row of each stage in them, `of` the column of each
    kind.
    """
    price = prices[0]
    backward_s = np.where(fits, price.backward_s[:, :, at], np.inf)
    chosen = np.argmin(backward_s, axis=0)
    numbers, _, columns = np.ogrid[tuple(map(slice, chosen.shape))]

    def picked(values: Any) -> Any:
        full = np.broadcast_to(values, (*backward_s.shape[:2], *values.shape[2:]))
        return full[chosen, numbers, at[:, None], columns]

    def arranged(values: Any) -> Any:
        full = np.broadcast_to(values, backward_s.shape[2:])
        found = np.moveaxis(full.reshape(*shape, -1), -1, 0)
        return found if list(of) == list(range(len(found))) else found[list(of)]

    def by_node_slot(values: Sequence[Any]) -> Floats:
        return np.stack([arranged(some) for some in values], axis=1)

    backward = arranged(backward_s.min(axis=(0, 1)))
    return SiteCosts(
        kinds=kinds,
        node_slots=node_slots,
        forward_s=arranged(price.forward_s[at]),
        backward_s=backward,
        gather_s=by_node_slot([one.gather_s.min(axis=0)[at] for one in prices]),
        reduce_s=by_node_slot([picked(one.reduce_s).min(axis=0) for one in prices]),
        end_s=by_node_slot([one.end_s.min(axis=0)[at] for one in prices]),
        recompute=np.where(np.isinf(backward), -1, arranged(chosen[0])),
    )
