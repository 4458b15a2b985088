"""What runs where: a strategy laid over nodes, and how many microbatches each of its pipelines does."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from math import gcd

import numpy as np
from numpy.typing import NDArray

from shardwise.strategy import Strategy, node_slots

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]


NO_NODE = ""
"""In a slot: no node."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrangement:
    """A strategy on nodes. Node `slots[k]` holds ranks k * devices per node and on; the dp-th pipeline does
    `microbatches[dp]` of the step's microbatches. Where a slot is `NO_NODE`, the microbatches of its stages
    are re-routed to their peers in other pipelines."""

    strategy: Strategy
    slots: tuple[str, ...]
    microbatches: tuple[int, ...]

    @property
    def is_rerouted(self) -> bool:
        """Whether nodes are missing and others do their work."""
        return NO_NODE in self.slots

    @property
    def nodes(self) -> tuple[str, ...]:
        """The nodes that it runs on."""
        return tuple(name for name in self.slots if name != NO_NODE)

    @property
    def has_unreplicated_states(self) -> bool:
        """Whether every part of the optimizer's states lies on one node only, and others on others."""
        shards = self.strategy.dp * self.strategy.cp
        return len(self.slots) > 1 and self.strategy.optim_shard == shards

    @property
    def shape(self) -> Strategy:
        """What makes two layouts the same: the strategy but for its number of pipelines and the layers of its
        stages. A key, not a strategy that runs."""
        return shape_of(self.strategy)


def shape_of(strategy: Strategy) -> Strategy:
    """The shape of arrangements of a strategy."""
    return replace(with_dp(strategy, 1), first_stage_layers=0, last_stage_layers=0)


def with_dp(strategy: Strategy, dp: int) -> Strategy:
    """The strategy with `dp` pipelines. What is sharded over all replicas stays so; other degrees become what
    they have in common with the new number of ranks that share parameters. One replica alone is widened to
    ZeRO-1, which it cannot be told from."""
    if dp == strategy.dp:
        return strategy
    old, new = strategy.dp * strategy.cp, dp * strategy.cp

    def shard(degree: int) -> int:
        return new if degree == old and old > 1 else gcd(degree, new)

    return replace(
        strategy,
        dp=dp,
        param_shard=shard(strategy.param_shard),
        grad_shard=shard(strategy.grad_shard),
        optim_shard=new if old == 1 else shard(strategy.optim_shard),
    )


def dp_multiple(strategy: Strategy) -> int:
    """Pipelines that must come and go together: those that share experts."""
    return max(strategy.ep * strategy.etp // (strategy.tp * strategy.cp), 1)


def microbatch_unit(strategy: Strategy) -> tuple[int, int]:
    """Microbatches of a pipeline are a multiple of the first, and no fewer than the second."""
    if strategy.schedule == "interleaved_1f1b":
        return strategy.pp, strategy.pp
    if strategy.schedule in ("zb_v", "dualpipe_v"):
        return 1, 2 * strategy.pp
    return 1, 1


@lru_cache(maxsize=4096)
def pipeline_order(strategy: Strategy, devices_per_node: int) -> tuple[int, ...]:
    """Slots in the order in which pipelines meet them first: nodes that are alike and follow each other in it
    are in the same pipelines."""
    met = node_slots(strategy, devices_per_node).reshape(-1)
    _, first = np.unique(met, return_index=True)
    return tuple(int(slot) for slot in np.argsort(first))
