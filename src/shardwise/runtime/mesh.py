"""Where a rank stands: its place along every axis of the plan, and the meshes that its collectives run on."""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd

import torch
from torch.distributed.device_mesh import DeviceMesh

from shardwise.runtime.groups import mesh_of
from shardwise.strategy import Strategy

AXES = ("pp", "replicate", "shard", "tp")
"""Axes of the mesh. `replicate` x `shard` are the dp * cp ranks of a stage: `shard` neighbours among them
divide optimizer states, `replicate` groups hold copies."""

EXPERT_AXES = ("pp", "replicate", "shard", "ep", "etp")
"""Axes of the mesh of expert weights: `etp` neighbours hold parts of the same experts, `ep` groups different
experts, and the `replicate` x `shard` others the same weights."""


def rank_grid(strategy: Strategy) -> torch.Tensor:
    """The rank at every place; shape (pp, dp, cp, tp). Ranks count along `axis_order`, fastest first."""
    order = strategy.axis_order.split("-")
    sizes = [getattr(strategy, axis) for axis in reversed(order)]
    slowest_first = list(reversed(order))
    ranks = torch.arange(strategy.tp * strategy.cp * strategy.dp * strategy.pp).reshape(sizes)
    return ranks.permute([slowest_first.index(axis) for axis in ("pp", "dp", "cp", "tp")])


@dataclass(frozen=True, slots=True, kw_only=True)
class RankCoordinates:
    """One rank's coordinates."""

    rank: int
    pp: int
    dp: int
    cp: int
    tp: int


def coordinates_of(strategy: Strategy, rank: int) -> RankCoordinates:
    pp, dp, cp, tp = ((rank_grid(strategy) == rank).nonzero()[0]).tolist()
    return RankCoordinates(rank=rank, pp=pp, dp=dp, cp=cp, tp=tp)


def device_mesh(strategy: Strategy, device_type: str) -> DeviceMesh:
    """The mesh with `AXES`; every rank must call this at the same point, for it makes process groups.

    The dp * cp ranks of a stage are taken in the order of `axis_order`; `optim_shard` neighbours form a shard
    group, as the cost model places them (docs/concepts/cost-model.md, section 11).
    """
    grid = rank_grid(strategy)
    order = strategy.axis_order.split("-")
    if order.index("dp") < order.index("cp"):
        grid = grid.transpose(1, 2)
    shard = strategy.optim_shard
    ranks = grid.reshape(strategy.pp, strategy.dp * strategy.cp // shard, shard, strategy.tp)
    return mesh_of(ranks, AXES, device_type)


def expert_mesh(strategy: Strategy, device_type: str) -> DeviceMesh:
    """The mesh with `EXPERT_AXES`; every rank must call this at the same point.

    The ranks of a stage in their own order: etp fastest, then ep, then the ranks that hold the same weights,
    of which neighbours divide optimizer states (docs/concepts/cost-model.md, section 4).
    """
    ranks = rank_grid(strategy).flatten(1).sort(dim=1).values
    same = expert_ranks(strategy)
    shard = expert_degree(strategy, strategy.optim_shard)
    grid = ranks.reshape(strategy.pp, same // shard, shard, strategy.ep, strategy.etp)
    return mesh_of(grid, EXPERT_AXES, device_type)


def expert_ranks(strategy: Strategy) -> int:
    """How many ranks hold the same expert weights."""
    return strategy.tp * strategy.cp * strategy.dp // (strategy.etp * strategy.ep)


def expert_degree(strategy: Strategy, degree: int) -> int:
    """The sharding degree of expert weights where that of all others is `degree` (cost-model.md, section
    11)."""
    return gcd(degree, expert_ranks(strategy))
