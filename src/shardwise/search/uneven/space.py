"""The space of uneven plans: pipelines side by side, whose stages lie on pools of alike devices.

docs/concepts/mixed-clusters.md declares it. A *kind* of stage is tp and dp on one pool, with how many of a
pipeline's stages lie together in a node, or a braid of two pools. A *site* is where the stages of a pipeline
lie that are of one kind: a pool, or a pair of pools. A *block* holds all plans that use no other pools, have
one micro-batch size and a number of pipelines within a range."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from itertools import combinations
from math import isqrt
from typing import NamedTuple

from shardwise.cluster import Cluster, Pool, Tier, cluster_of_pools, pools_of, tier_of_pool
from shardwise.cost import Problem, bind, limits_of
from shardwise.model import Model
from shardwise.search.uneven.hops import max_stages_per_node
from shardwise.strategy import Job

Degrees = tuple[int, int]
"""tp and dp of a stage."""

Site = tuple[int, ...]
"""A pool or a pair of pools, by place."""


class StageKind(NamedTuple):
    """A kind of stage on one pool, of whose pipeline up to so many lie `stages_per_node` in a node (see
    `hops`). Where more would fit, stages are *spread*: each group has nodes of its own, full of its
    replicas."""

    tp: int
    dp: int
    stages_per_node: int


class StageSpread(NamedTuple):
    """How stages are spread over nodes: up to so many of a pipeline lie `stages_per_node`, where a node has
    room for `node_capacity`."""

    stages_per_node: int
    node_capacity: int

    def has_effect(self, stages: int) -> bool:
        """Whether so many stages of a pipeline lie otherwise than if they were not spread."""
        return 2 * self.stages_per_node <= stages

    def set_size(self, stages: int) -> int:
        """Alike pipelines with so many stages on the pool that fill nodes with each of their groups: as many
        as with the smallest."""
        return self.node_capacity // min(self.stages_per_node, stages & -stages)


@dataclass(frozen=True, slots=True)
class MixedPoolKind:
    """A kind of stage that lies on two pools at once: on each of them `tp` devices of one node, which have
    all of its layers and do `rows` of every microbatch."""

    tp: tuple[int, int]
    rows: tuple[int, int]


def devices_by_pool(kind: StageKind | MixedPoolKind) -> tuple[int, ...]:
    """What a stage of the kind takes of each pool of its site."""
    return kind.tp if isinstance(kind, MixedPoolKind) else (kind.tp * kind.dp,)


@dataclass(frozen=True, slots=True, kw_only=True)
class UnevenLimits:
    """How far the space reaches: stages of a pipeline, replicas that share the rows of a stage's microbatch,
    and rows of a microbatch that a braid splits, at most. On pools of more than `whole_node_threshold` nodes
    alike pipelines fill whole nodes."""

    stages: int = 8
    stage_dp: int = 1
    mixed_stage_rows: int = 1
    whole_node_threshold: int = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class UnevenSubproblem:
    """Plans on these `pools` (places in the cluster's), with microbatches of `micro_batch_size` sequences, in
    `least` to `most` pipelines; where `is_alike`, these have the same stages, and their shares differ by no
    more than one microbatch."""

    pools: tuple[int, ...]
    micro_batch_size: int
    least: int
    most: int
    is_alike: bool = False

    @property
    def size(self) -> int:
        """Numbers of pipelines in its range."""
        return self.most - self.least + 1

    def halves(self) -> tuple[UnevenSubproblem, UnevenSubproblem]:
        """The block in two, by its number of pipelines: as many times as many in either."""
        middle = isqrt(self.least * self.most)
        return replace(self, most=middle), replace(self, least=middle + 1)


class UnevenSpace:
    """The space of one model on one mixed cluster; nothing is priced yet."""

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
        """Those of the stages on the pool; of each tp and dp those with most stages together first."""
        return tuple(
            StageKind(tp, dp, stages_per_node)
            for tp, dp in self.degrees(pool, micro_batch_size)
            for stages_per_node in _powers_of_two(self.stages_per_node(pool, tp * dp))[::-1]
        )

    def stages_per_node(self, pool: int, stage: int) -> int:
        """Stages of a pipeline, of so many devices each, that lie together in a node of the pool, at most."""
        most = max_stages_per_node(self.pools[pool].node.devices, stage)
        return min(most, _powers_of_two(self.most_stages)[-1])

    def spread(self, pool: int, kind: StageKind) -> StageSpread | None:
        """How stages of the kind are spread; None where as many as a node holds lie together."""
        stage = kind.tp * kind.dp
        if kind.stages_per_node == self.stages_per_node(pool, stage):
            return None
        return StageSpread(kind.stages_per_node, self.pools[pool].node.devices // stage)

    def degrees(self, pool: int, micro_batch_size: int) -> tuple[Degrees, ...]:
        """Of the stages that fit inside a node of the pool and that the model allows.

        A stage has a power of two of devices that divides the node's, so that stages of any sizes fill
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
        """The pairs of pools on which the block has braids; alike pipelines have none."""
        if subproblem.is_alike or not 2 <= subproblem.micro_batch_size <= self.limits.mixed_stage_rows:
            return ()
        return tuple(combinations(subproblem.pools, 2))

    def mixed_pool_stages(self, pair: Site, micro_batch_size: int) -> tuple[MixedPoolKind, ...]:
        """Every braid of the two pools: a row or more for each, and any tp that a stage of its own has."""
        one, other = ([tp for tp, _ in self.degrees(pool, 1)] for pool in pair)
        return tuple(
            MixedPoolKind((a, b), (rows, micro_batch_size - rows))
            for rows in range(1, micro_batch_size)
            for a in one
            for b in other
        )

    def subproblems(self) -> list[UnevenSubproblem]:
        """All plans of the space, in disjoint blocks but that plans on fewer pools are in those of more too,
        where their links cost no less."""
        found = []
        for union in self.unions():
            for size in self.micro_batch_sizes:
                subproblem = self.widest(union, size)
                found.append(subproblem)
                if len(union) > 1 and subproblem.most > 1:
                    found.append(replace(subproblem, least=2, is_alike=True))
        return found

    def widest(self, union: tuple[int, ...], micro_batch_size: int) -> UnevenSubproblem:
        """All plans on these pools with one micro-batch size."""
        devices = sum(self.pools[pool].devices for pool in union)
        most = min(devices, self.job.global_batch_size // micro_batch_size)
        return UnevenSubproblem(pools=union, micro_batch_size=micro_batch_size, least=1, most=most)

    def problem(self, pool: int, union: tuple[int, ...], is_alike: bool) -> Problem:
        """The cost model's view of a pool that works together with the others of a union: its own devices and
        inner links; what leaves a node goes at the pace of the union's slowest end, and where pipelines
        are alike only what leaves the pool does."""
        own = cluster_of_pools(self.cluster, [self.pools[pool]])
        if len(union) == 1:
            return bind(self.model, own, self.job)
        whole = cluster_of_pools(self.cluster, [self.pools[place] for place in union])
        inside = own.tiers if is_alike else _inside(own)
        return bind(
            self.model, replace(own, tiers=(*inside, tier_of_pool(self.pools[pool], whole))), self.job
        )

    def unit(self, pool: int) -> int:
        """Devices of the pool that a set of alike pipelines fills beside others: a node's on a large pool."""
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
