"""The space of uneven plans: pipelines side by side, whose stages lie on pools of alike devices.

docs/mixed.md declares it. A *kind* of stage is tp and dp on one pool, with how many of a pipeline's stages
lie together in a node, or a braid of two pools. A *site* is where the stages of a pipeline lie that are of
one kind: a pool, or a pair of pools. A *block* holds all plans that use no other pools, have one micro-batch
size and a number of pipelines within a range.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from itertools import combinations
from math import isqrt
from typing import NamedTuple

from shardwise.cluster import Cluster, Pool, Tier, cluster_of_pools, pools_of, tier_seen_by
from shardwise.cost import Problem, bind, limits_of
from shardwise.model import Model
from shardwise.search.uneven.hops import most_together
from shardwise.strategy import Job

Degrees = tuple[int, int]
"""tp and dp of a stage."""

Site = tuple[int, ...]
"""A pool or a pair of pools, by place."""


class Kind(NamedTuple):
    """A kind of stage on one pool, of whose pipeline up to so many lie `together` in a node (see `hops`).
    Where more would fit, stages are *spread*: each group has nodes of its own, full of its replicas."""

    tp: int
    dp: int
    together: int


class Spread(NamedTuple):
    """How stages are spread over nodes: up to so many of a pipeline lie `together`, where a node has room for
    `filling`."""

    together: int
    filling: int

    def is_other(self, stages: int) -> bool:
        """Whether so many stages of a pipeline lie otherwise than if they were not spread."""
        return 2 * self.together <= stages

    def alike(self, stages: int) -> int:
        """Alike pipelines with so many stages on the pool that fill nodes with each of their groups: as many
        as with the smallest."""
        return self.filling // min(self.together, stages & -stages)


@dataclass(frozen=True, slots=True)
class Braid:
    """A kind of stage that lies on two pools at once: on each of them `tp` devices of one node, which have
    all of its layers and do `rows` of every microbatch."""

    tp: tuple[int, int]
    rows: tuple[int, int]


def devices_of(kind: Kind | Braid) -> tuple[int, ...]:
    """What a stage of the kind takes of each pool of its site."""
    return kind.tp if isinstance(kind, Braid) else (kind.tp * kind.dp,)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """How far the space reaches: stages of a pipeline, replicas that share the rows of a stage's microbatch,
    and rows of a microbatch that a braid splits, at most. On pools of more than `loose_nodes` nodes alike
    pipelines fill whole nodes."""

    stages: int = 8
    rows: int = 1
    braid: int = 1
    loose_nodes: int = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
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

    def halves(self) -> tuple[Block, Block]:
        """The block in two, by its number of pipelines: as many times as many in either."""
        middle = isqrt(self.least * self.most)
        return replace(self, most=middle), replace(self, least=middle + 1)


class UnevenSpace:
    """The space of one model on one mixed cluster; nothing is priced yet."""

    def __init__(self, model: Model, cluster: Cluster, job: Job, limits: Limits | None = None) -> None:
        self.model, self.cluster, self.job = model, cluster, job
        self.limits = limits or Limits()
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

    def kinds(self, pool: int, micro_batch_size: int) -> tuple[Kind, ...]:
        """Those of the stages on the pool; of each tp and dp those with most stages together first."""
        return tuple(
            Kind(tp, dp, together)
            for tp, dp in self.degrees(pool, micro_batch_size)
            for together in _powers(self.together(pool, tp * dp))[::-1]
        )

    def together(self, pool: int, stage: int) -> int:
        """Stages of a pipeline, of so many devices each, that lie together in a node of the pool, at most."""
        most = most_together(self.pools[pool].node.devices, stage)
        return min(most, _powers(self.most_stages)[-1])

    def spread(self, pool: int, kind: Kind) -> Spread | None:
        """How stages of the kind are spread; None where as many as a node holds lie together."""
        stage = kind.tp * kind.dp
        if kind.together == self.together(pool, stage):
            return None
        return Spread(kind.together, self.pools[pool].node.devices // stage)

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
            for dp in (d for d in _powers(size) if d <= self.limits.rows and micro_batch_size % d == 0):
                tp = size // dp
                splits_kv = limits.kv_heads % tp == 0 or tp % limits.kv_heads == 0
                splits = (limits.heads, limits.ffn_splits, limits.seq_len)
                if splits_kv and all(count % tp == 0 for count in splits):
                    found.append((tp, dp))
            size *= 2
        return tuple(found)

    def pairs(self, block: Block) -> tuple[Site, ...]:
        """The pairs of pools on which the block has braids; alike pipelines have none."""
        if block.is_alike or not 2 <= block.micro_batch_size <= self.limits.braid:
            return ()
        return tuple(combinations(block.pools, 2))

    def braids(self, pair: Site, micro_batch_size: int) -> tuple[Braid, ...]:
        """Every braid of the two pools: a row or more for each, and any tp that a stage of its own has."""
        one, other = ([tp for tp, _ in self.degrees(pool, 1)] for pool in pair)
        return tuple(
            Braid((a, b), (rows, micro_batch_size - rows))
            for rows in range(1, micro_batch_size)
            for a in one
            for b in other
        )

    def blocks(self) -> list[Block]:
        """All plans of the space, in disjoint blocks but that plans on fewer pools are in those of more too,
        where their links cost no less."""
        found = []
        for union in self.unions():
            for size in self.micro_batch_sizes:
                block = self.widest(union, size)
                found.append(block)
                if len(union) > 1 and block.most > 1:
                    found.append(replace(block, least=2, is_alike=True))
        return found

    def widest(self, union: tuple[int, ...], micro_batch_size: int) -> Block:
        """All plans on these pools with one micro-batch size."""
        devices = sum(self.pools[pool].devices for pool in union)
        most = min(devices, self.job.global_batch_size // micro_batch_size)
        return Block(pools=union, micro_batch_size=micro_batch_size, least=1, most=most)

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
            self.model, replace(own, tiers=(*inside, tier_seen_by(self.pools[pool], whole))), self.job
        )

    def unit(self, pool: int) -> int:
        """Devices of the pool that a set of alike pipelines fills beside others: a node's on a large pool."""
        return self.pools[pool].node.devices if self.pools[pool].nodes > self.limits.loose_nodes else 1


def _inside(own: Cluster) -> tuple[Tier, ...]:
    """The tiers inside a node of `own`."""
    devices = own.nodes[0].devices
    return tuple(tier for tier in own.tiers if tier.span <= devices and not tier.is_network)


def _powers(most: int) -> list[int]:
    """1, 2, 4, ... up to `most`."""
    return [1 << exponent for exponent in range(most.bit_length()) if 1 << exponent <= most]
