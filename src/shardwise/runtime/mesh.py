"""Where a rank stands: its place along every axis of the plan, and the meshes that its collectives run on.

Process groups, as few as there can be: one of gloo has three threads, one of which wakes a hundred times a
second for as long as the group is there, and takes what computes on the same cores a little of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd

import torch
from torch import Tensor, distributed
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from shardwise.strategy import Strategy


def group_among(rows: Sequence[Sequence[int]]) -> ProcessGroup | None:
    """The group of the one of disjoint `rows` of ranks that this rank is in, if any. All ranks call this with
    the same rows, at the same point; a row of all of them is the default group."""
    if len(rows) == 1 and len(rows[0]) == distributed.get_world_size():
        return distributed.group.WORLD
    own, _ = distributed.new_subgroups_by_enumeration([list(row) for row in rows])
    return own


def mesh_of(ranks: Tensor, names: tuple[str, ...], device_type: str) -> DeviceMesh:
    """The mesh of all ranks, `ranks`, with axes of these names; every rank calls this at the same point.

    `DeviceMesh` itself makes a group for every axis, and of one rank for each axis that has only one: here
    those axes have one between them.
    """
    singleton = group_among(ranks.reshape(-1, 1).tolist()) if 1 in ranks.shape else None
    groups = [
        singleton if size == 1 else group_among(ranks.movedim(axis, -1).reshape(-1, size).tolist())
        for axis, size in enumerate(ranks.shape)
    ]
    return DeviceMesh.from_group(groups, device_type, ranks.contiguous(), mesh_dim_names=names)


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
