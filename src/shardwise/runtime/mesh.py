"""Rank coordinates along the plan's axes, device meshes and process groups.

`device_mesh` has the axes `AXES`, `expert_mesh` those of expert weights (`EXPERT_AXES`). Few process groups
are created: each gloo group has three threads, one of which wakes a hundred times a second and slows
computation.
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

# Process groups


def group_among(rows: Sequence[Sequence[int]]) -> ProcessGroup | None:
    """This rank's process group among disjoint `rows` of ranks, None if it is in no row.

    All ranks must call it with the same rows. A single row of all ranks gives the default group.
    """
    if len(rows) == 1 and len(rows[0]) == distributed.get_world_size():
        return distributed.group.WORLD
    own, _ = distributed.new_subgroups_by_enumeration([list(row) for row in rows])
    return own


def mesh_of(ranks: Tensor, names: tuple[str, ...], device_type: str) -> DeviceMesh:
    """A device mesh of all ranks in the shape of `ranks`, with axes `names`. Call it on every rank.

    Axes of size 1 share one process group; `DeviceMesh` itself would create one for each.
    """
    singleton = group_among(ranks.reshape(-1, 1).tolist()) if 1 in ranks.shape else None
    groups = [
        singleton if size == 1 else group_among(ranks.movedim(axis, -1).reshape(-1, size).tolist())
        for axis, size in enumerate(ranks.shape)
    ]
    return DeviceMesh.from_group(groups, device_type, ranks.contiguous(), mesh_dim_names=names)


# Axes and coordinates

AXES = ("pp", "replicate", "shard", "tp")
"""Axes of the mesh. `replicate` x `shard` are the dp * cp ranks of a stage: `shard` neighbours shard the
optimizer states, and `replicate` groups of them hold replicas."""

EXPERT_AXES = ("pp", "replicate", "shard", "ep", "etp")
"""Axes of the mesh of expert weights. `etp` neighbours hold shards of the same experts, `ep` groups different
experts, and `replicate` x `shard` ranks the same weights."""


def rank_grid(strategy: Strategy) -> torch.Tensor:
    """Ranks as a tensor of shape (pp, dp, cp, tp). Ranks count along `axis_order`, fastest axis first."""
    order = strategy.axis_order.split("-")
    sizes = [getattr(strategy, axis) for axis in reversed(order)]
    slowest_first = list(reversed(order))
    ranks = torch.arange(strategy.tp * strategy.cp * strategy.dp * strategy.pp).reshape(sizes)
    return ranks.permute([slowest_first.index(axis) for axis in ("pp", "dp", "cp", "tp")])


@dataclass(frozen=True, slots=True, kw_only=True)
class RankCoordinates:
    """Coordinates of one rank along pp, dp, cp and tp."""

    rank: int
    pp: int
    dp: int
    cp: int
    tp: int


def coordinates_of(strategy: Strategy, rank: int) -> RankCoordinates:
    """Coordinates of `rank` under `strategy`."""
    pp, dp, cp, tp = ((rank_grid(strategy) == rank).nonzero()[0]).tolist()
    return RankCoordinates(rank=rank, pp=pp, dp=dp, cp=cp, tp=tp)


def device_mesh(strategy: Strategy, device_type: str) -> DeviceMesh:
    """The mesh with axes `AXES`. Creates process groups; call it on every rank.

    The dp * cp ranks of a stage are in the order of `axis_order`. `optim_shard` neighbours form a shard
    group, as the cost model assumes (docs/concepts/cost-model.md, section 11).
    """
    grid = rank_grid(strategy)
    order = strategy.axis_order.split("-")
    if order.index("dp") < order.index("cp"):
        grid = grid.transpose(1, 2)
    shard = strategy.optim_shard
    ranks = grid.reshape(strategy.pp, strategy.dp * strategy.cp // shard, shard, strategy.tp)
    return mesh_of(ranks, AXES, device_type)


def expert_mesh(strategy: Strategy, device_type: str) -> DeviceMesh:
    """The mesh with axes `EXPERT_AXES`. Creates process groups; call it on every rank.

    The ranks of a stage are ordered with etp fastest, then ep, then the ranks with the same weights.
    Neighbours among the latter shard the optimizer states (docs/concepts/cost-model.md, section 4).
    """
    ranks = rank_grid(strategy).flatten(1).sort(dim=1).values
    same = expert_ranks(strategy)
    shard = expert_degree(strategy, strategy.optim_shard)
    grid = ranks.reshape(strategy.pp, same // shard, shard, strategy.ep, strategy.etp)
    return mesh_of(grid, EXPERT_AXES, device_type)


def expert_ranks(strategy: Strategy) -> int:
    """Number of ranks of a stage that hold the same expert weights."""
    return strategy.tp * strategy.cp * strategy.dp // (strategy.etp * strategy.ep)


def expert_degree(strategy: Strategy, degree: int) -> int:
    """Sharding degree of expert weights if that of other weights is `degree` (docs/concepts/cost-model.md,
    section 11)."""
    return gcd(degree, expert_ranks(strategy))
