"""The space of uneven plans, which docs/concepts/mixed-clusters.md defines.

A `StageKind` is tp, dp and stages per node on one pool. A `MixedPoolKind` is a stage whose replicas are in
two pools. A *site* is a pool or a pair of pools: all stages of one pipeline on a site are of one kind. An
`UnevenSubproblem` has all plans on the given pools with one micro-batch size and a range of numbers of
pipelines. `shapes_of` lists every pipeline shape (a pipeline without its layout) for which there are devices,
as columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import combinations, product
from math import isqrt, lcm
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from shardwise.cluster import Cluster, Pool, Tier, cluster_of_pools, pools_of, tier_of_pool
from shardwise.cost import Problem, bind, limits_of
from shardwise.model import Model
from shardwise.strategy import Job

Degrees = tuple[int, int]
"""tp and dp of a stage."""

Site = tuple[int, ...]
"""A pool or a pair of pools, by index."""


class StageKind(NamedTuple):
    """A kind of stage on one pool, with up to `stages_per_node` stages of one pipeline in a node (see
    `stage_costs.group_sizes`). If a node has capacity for more, the stages are *spread*: each group of them
    has nodes of its own, full of its replicas."""

    tp: int
    dp: int
    stages_per_node: int


class StageSpread(NamedTuple):
    """How stages are spread: up to `stages_per_node` stages of a pipeline are in a node, which has capacity
    for `node_capacity`."""

    stages_per_node: int
    node_capacity: int

    def has_effect(self, stages: int) -> bool:
        """Whether `stages` stages of a pipeline have other node slots than if they were not spread."""
        return 2 * self.stages_per_node <= stages

    def set_size(self, stages: int) -> int:
        """Identical pipelines, with `stages` stages on the pool, that fill the nodes of each of their groups.
        The smallest group decides."""
        return self.node_capacity // min(self.stages_per_node, stages & -stages)


@dataclass(frozen=True, slots=True)
class MixedPoolKind:
    """A kind of mixed-pool stage. Its part on each of two pools is `tp` devices of one node, with all layers
    of the stage and `rows` of every micro-batch."""

    tp: tuple[int, int]
    rows: tuple[int, int]


def devices_by_pool(kind: StageKind | MixedPoolKind) -> tuple[int, ...]:
    """Devices that a stage of the kind takes, for each pool of its site."""
    return kind.tp if isinstance(kind, MixedPoolKind) else (kind.tp * kind.dp,)


@dataclass(frozen=True, slots=True, kw_only=True)
class UnevenLimits:
    """Limits of the space: stages of a pipeline, replicas of a stage on one pool (`stage_dp`), and rows of a
    micro-batch that a mixed-pool stage splits, at most. On pools of more than `whole_node_threshold` nodes,
    sets of identical pipelines fill whole nodes."""

    stages: int = 8
    stage_dp: int = 1
    mixed_stage_rows: int = 1
    whole_node_threshold: int = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class UnevenSubproblem:
    """Plans on `pools` (indices of the cluster's pools) with micro-batches of `micro_batch_size` sequences,
    in `least` to `most` pipelines. With `is_alike`, the pipelines are identical: they have the same stages,
    and shares that differ by at most one micro-batch."""

    pools: tuple[int, ...]
    micro_batch_size: int
    least: int
    most: int
    is_alike: bool = False

    @property
    def size(self) -> int:
        """How many numbers of pipelines are in the range."""
        return self.most - self.least + 1

    def halves(self) -> tuple[UnevenSubproblem, UnevenSubproblem]:
        """The subproblem in two, halved by the ratio of the numbers of pipelines."""
        middle = isqrt(self.least * self.most)
        return replace(self, most=middle), replace(self, least=middle + 1)


class UnevenSpace:
    """The space of one model on one mixed cluster, without costs."""

    def __init__(self, model: Model, cluster: Cluster, job: Job, limits: UnevenLimits | None = None) -> None:
        self.model, self.cluster, self.job = model, cluster, job
        self.limits = limits or UnevenLimits()
        self.pools: tuple[Pool, ...] = pools_of(cluster)

    @property
    def most_stages(self) -> int:
        """Stages of a pipeline, at most."""
        return min(self.limits.stages, self.model.layers)

    def unions(self) -> list[tuple[int, ...]]:
        """Every set of pools that a plan may use."""
        places = range(len(self.pools))
        return [
            tuple(place for place in places if mask >> place & 1) for mask in range(1, 1 << len(self.pools))
        ]

    @cached_property
    def micro_batch_sizes(self) -> tuple[int, ...]:
        """The divisors of the global batch."""
        batch = self.job.global_batch_size
        return tuple(size for size in range(1, batch + 1) if batch % size == 0)

    def kinds(self, pool: int, micro_batch_size: int) -> tuple[StageKind, ...]:
        """Kinds of stages on the pool. Of each tp and dp, the kind with most stages per node is first."""
        return tuple(
            StageKind(tp, dp, stages_per_node)
            for tp, dp in self.degrees(pool, micro_batch_size)
            for stages_per_node in _powers_of_two(self.stages_per_node(pool, tp * dp))[::-1]
        )

    def stages_per_node(self, pool: int, stage: int) -> int:
        """Stages of a pipeline, of `stage` devices each, in a node of the pool, at most."""
        most = max_stages_per_node(self.pools[pool].node.devices, stage)
        return min(most, _powers_of_two(self.most_stages)[-1])

    def spread(self, pool: int, kind: StageKind) -> StageSpread | None:
        """How stages of the kind are spread; None where a node has as many of them as it can."""
        stage = kind.tp * kind.dp
        if kind.stages_per_node == self.stages_per_node(pool, stage):
            return None
        return StageSpread(kind.stages_per_node, self.pools[pool].node.devices // stage)

    def degrees(self, pool: int, micro_batch_size: int) -> tuple[Degrees, ...]:
        """tp and dp of the stages that fit inside a node of the pool and that the model allows.

        A stage has a power of two of devices that divides the node's devices, so stages of any sizes fill
        nodes without gaps.
        """
        limits = limits_of(self.model, self.job)
        devices = self.pools[pool].node.devices
        found: list[Degrees] = []
        size = 1
        while devices % size == 0:
            for dp in (
                d for d in _powers_of_two(size) if d <= self.limits.stage_dp and micro_batch_size % d == 0
            ):
                tp = size // dp
                splits_kv = limits.kv_heads % tp == 0 or tp % limits.kv_heads == 0
                splits = (limits.heads, limits.ffn_splits, limits.seq_len)
                if splits_kv and all(count % tp == 0 for count in splits):
                    found.append((tp, dp))
            size *= 2
        return tuple(found)

    def pairs(self, subproblem: UnevenSubproblem) -> tuple[Site, ...]:
        """The pairs of pools on which the subproblem has mixed-pool stages; identical pipelines have none."""
        if subproblem.is_alike or not 2 <= subproblem.micro_batch_size <= self.limits.mixed_stage_rows:
            return ()
        return tuple(combinations(subproblem.pools, 2))

    def mixed_pool_stages(self, pair: Site, micro_batch_size: int) -> tuple[MixedPoolKind, ...]:
        """Every kind of mixed-pool stage on the pair: at least one row per part, and any tp of a stage on one
        pool."""
        one, other = ([tp for tp, _ in self.degrees(pool, 1)] for pool in pair)
        return tuple(
            MixedPoolKind((a, b), (rows, micro_batch_size - rows))
            for rows in range(1, micro_batch_size)
            for a in one
            for b in other
        )

    def subproblems(self) -> list[UnevenSubproblem]:
        """All plans of the space, as subproblems. They are disjoint, except that plans on fewer pools are
        also in those of more pools, where their links cost no less."""
        found = []
        for union in self.unions():
            for size in self.micro_batch_sizes:
                subproblem = self.widest(union, size)
                found.append(subproblem)
                if len(union) > 1 and subproblem.most > 1:
                    found.append(replace(subproblem, least=2, is_alike=True))
        return found

    def widest(self, union: tuple[int, ...], micro_batch_size: int) -> UnevenSubproblem:
        """The subproblem of all plans on these pools with one micro-batch size."""
        devices = sum(self.pools[pool].devices for pool in union)
        most = min(devices, self.job.global_batch_size // micro_batch_size)
        return UnevenSubproblem(pools=union, micro_batch_size=micro_batch_size, least=1, most=most)

    def problem(self, pool: int, union: tuple[int, ...], is_alike: bool) -> Problem:
        """The cost model's problem of one pool in a union of pools.

        It has the pool's own devices and inner tiers. Traffic that leaves a node has the rate of the union's
        slowest network cards. Where pipelines are identical, only traffic that leaves the pool has it.
        """
        own = cluster_of_pools(self.cluster, [self.pools[pool]])
        if len(union) == 1:
            return bind(self.model, own, self.job)
        whole = cluster_of_pools(self.cluster, [self.pools[place] for place in union])
        inside = own.tiers if is_alike else _inside(own)
        return bind(
            self.model, replace(own, tiers=(*inside, tier_of_pool(self.pools[pool], whole))), self.job
        )

    def unit(self, pool: int) -> int:
        """Devices of the pool in multiples of which sets of identical pipelines take them: a node's on a
        large pool, else 1."""
        return (
            self.pools[pool].node.devices if self.pools[pool].nodes > self.limits.whole_node_threshold else 1
        )


def _inside(own: Cluster) -> tuple[Tier, ...]:
    """The tiers inside a node of `own`."""
    devices = own.nodes[0].devices
    return tuple(tier for tier in own.tiers if tier.span <= devices and not tier.is_network)


def _powers_of_two(most: int) -> list[int]:
    """1, 2, 4, ... up to `most`."""
    return [1 << exponent for exponent in range(most.bit_length()) if 1 << exponent <= most]


# Pipeline shapes

Ints = NDArray[np.int64]
IntTuple = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PipelineShape:
    """A pipeline without its layout: the kind of its stages on each site, and how many there are."""

    kinds: IntTuple
    counts: IntTuple


@dataclass(frozen=True, slots=True)
class PipelineShapes:
    """Pipeline shapes as columns: `kinds` and `counts` of stages, of shape (shapes, sites).

    Pipelines of a shape come in sets of `set_size` identical ones, which fill whole units and the nodes of
    spread stages. `devices`, of shape (shapes, pools), has the units of each pool that a set takes.
    """

    kinds: Ints
    counts: Ints
    devices: Ints
    set_size: Ints

    def at(self, place: int) -> PipelineShape:
        """The shape at index `place`."""
        return PipelineShape(tuple(self.kinds[place].tolist()), tuple(self.counts[place].tolist()))


@lru_cache(maxsize=256)
def shapes_of(
    stage_devices: tuple[tuple[IntTuple, ...], ...],
    spread: tuple[tuple[StageSpread | None, ...], ...],
    devices: IntTuple,
    units: IntTuple,
    most_stages: int,
    most_sites: int,
) -> PipelineShapes:
    """Every pipeline shape on at most `most_sites` sites for which there are devices, those with few stages
    first.

    `stage_devices` has the devices of each pool that a stage takes, by site and kind; `spread` has how the
    stages of each kind are spread, if they are.
    """
    unit, available = np.array(units), np.array(devices) // np.array(units)
    stage = [np.array(some) for some in stage_devices]
    empty = np.empty((0, len(stage_devices)), dtype=np.int64)
    found = [
        PipelineShapes(empty, empty, np.empty((0, len(devices)), dtype=np.int64), np.empty(0, dtype=np.int64))
    ]
    for counts in _counts(stage_devices, devices, most_stages):
        used = [site for site, count in enumerate(counts) if count]
        if len(used) > most_sites:
            continue
        some = [_distinct_spreads(spread[site], counts[site]) for site in used]
        of_used = np.indices([len(kinds) for kinds, _ in some]).reshape(len(used), -1)
        sets = np.stack([set_size[at] for (_, set_size), at in zip(some, of_used, strict=True)])
        of_used = np.stack([kinds[at] for (kinds, _), at in zip(some, of_used, strict=True)])
        taken = sum(counts[site] * stage[site][kinds] for site, kinds in zip(used, of_used, strict=True))
        set_size = np.lcm.reduce([*sets, *(unit // np.gcd(unit, taken)).T])
        set_devices = set_size[:, None] * taken // unit
        fits = (set_devices <= available).all(axis=1)
        kinds = np.zeros((int(fits.sum()), len(stage_devices)), dtype=np.int64)
        kinds[:, used] = of_used[:, fits].T
        found.append(
            PipelineShapes(kinds, np.tile(counts, (len(kinds), 1)), set_devices[fits], set_size[fits])
        )
    return PipelineShapes(
        *(
            np.concatenate([getattr(some, name) for some in found])
            for name in ("kinds", "counts", "devices", "set_size")
        )
    )


def families_of(spread: tuple[tuple[StageSpread | None, ...], ...], shapes: PipelineShapes) -> Ints:
    """Numbers the families of shapes that differ only in how their stages are spread; -1 for a shape that is
    alone."""
    # For each kind, the kind before it that is not spread.
    whole = [
        np.maximum.accumulate([kind * (one is None) for kind, one in enumerate(some)]) for some in spread
    ]
    kinds = np.stack([of[shapes.kinds[:, site]] for site, of in enumerate(whole)], axis=1)
    keys = np.concatenate([kinds, shapes.counts], axis=1)
    _, family, sizes = np.unique(keys, axis=0, return_inverse=True, return_counts=True)
    found: Ints = np.where(sizes[family.ravel()] > 1, family.ravel(), -1)
    return found


def spread_set_size(spread: Sequence[Sequence[StageSpread | None]], shape: PipelineShape) -> int:
    """How many identical pipelines fill the nodes of each of their groups of spread stages."""
    of = [(some[kind], count) for some, kind, count in zip(spread, shape.kinds, shape.counts, strict=True)]
    return lcm(
        *(one.set_size(count) for one, count in of if count and one is not None and one.has_effect(count))
    )


def _distinct_spreads(spread: Sequence[StageSpread | None], stages: int) -> tuple[Ints, Ints]:
    """The kinds in which `stages` stages have distinct node slots, and the set size of each."""
    kinds = [kind for kind, one in enumerate(spread) if one is None or one.has_effect(stages)]
    of = [spread[kind] for kind in kinds]
    return np.array(kinds), np.array([1 if one is None else one.set_size(stages) for one in of])


def _counts(
    stage_devices: Sequence[Sequence[IntTuple]], devices: IntTuple, most_stages: int
) -> list[IntTuple]:
    """How many stages a pipeline may have on each site, those with few stages first. A pipeline has
    mixed-pool stages on at most one pair. The first kind of each site takes the fewest devices of every pool.
    """
    most = [
        min(most_stages, *(there // need for there, need in zip(devices, some[0], strict=True) if need))
        for some in stage_devices
    ]
    pools, pairs = len(devices), len(stage_devices) - len(devices)
    found = []
    for alone in product(*(range(count + 1) for count in most[:pools])):
        left = most_stages - sum(alone)
        if left < 0:
            continue
        found.append((*alone, *(0,) * pairs))
        for pair in range(pairs):
            after = (0,) * (pairs - pair - 1)
            mixed_pool_stages = range(1, min(left, most[pools + pair]) + 1)
            found += [(*alone, *(0,) * pair, count, *after) for count in mixed_pool_stages]
    return sorted((one for one in found if sum(one)), key=lambda counts: (sum(counts), counts))


def max_stages_per_node(devices: int, stage: int) -> int:
    """Stages of `stage` devices each that divide a node of `devices`: the largest such power of two."""
    most = 1
    while devices % (2 * most * stage) == 0:
        most *= 2
    return most
