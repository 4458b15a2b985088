"""Process groups, as few as there can be: one of gloo has three threads, one of which wakes a hundred times a
second for as long as the group is there, and takes what computes on the same cores a little of it."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, distributed
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh


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
