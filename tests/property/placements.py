"""Distribute tensors over a mesh by their placements, and assemble them again."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from tests.property.spmd import Array, Dims, Mesh, Rank

from shardwise.graph import PARTIAL, REPLICATE, REPLICATE_SUM_GRAD, Placement


def place(
    mesh: Mesh, dims: Dims, whole: Array, placements: Sequence[Placement], *, partial: Placement, seed: int
) -> dict[Rank, Array]:
    """The local shard of each rank. `partial` is the placement whose parts are random and sum to the whole
    tensor (PARTIAL of a tensor, REPLICATE_SUM_GRAD of a gradient); under the other one every rank has the
    whole tensor.
    """
    rng = np.random.default_rng(seed)
    held: dict[Rank, tuple[Array, dict[str, int]]] = {(): (whole, {})}
    for axis, placement in enumerate(placements):
        split: dict[Rank, tuple[Array, dict[str, int]]] = {}
        for rank, (array, starts) in held.items():
            rest = array
            for index in range(mesh.counts[axis]):
                is_last = index == mesh.counts[axis] - 1
                if placement >= 0:
                    dim = dims[placement]
                    start = starts.get(dim, 0)
                    low, high = mesh.part(axis, dim, start, start + array.shape[placement], index)
                    part = np.take(array, range(low - start, high - start), axis=placement)
                    split[(*rank, index)] = (part, starts | {dim: low})
                elif placement == partial:
                    part = rest if is_last else np.asarray(rng.normal(size=array.shape))
                    rest = rest - part
                    split[(*rank, index)] = (part, starts)
                else:
                    split[(*rank, index)] = (array, starts)
        held = split
    return {rank: array for rank, (array, _) in held.items()}


def assemble(
    mesh: Mesh, parts: dict[Rank, Array], placements: Sequence[Placement], *, partial: Placement
) -> Array:
    """The whole tensor from the shards of all ranks, inner axes first; copies must be equal."""
    for axis in reversed(range(len(mesh.counts))):
        joined: dict[Rank, Array] = {}
        for rank in {rank[:axis] for rank in parts}:
            line = [parts[(*rank, index)] for index in range(mesh.counts[axis])]
            placement = placements[axis]
            if placement >= 0:
                joined[rank] = np.concatenate(line, axis=placement)
            elif placement == partial:
                joined[rank] = np.sum(line, axis=0)
            else:
                for copy in line[1:]:
                    np.testing.assert_allclose(copy, line[0], rtol=1e-9, atol=1e-9)
                joined[rank] = line[0]
        parts = joined
    return parts[()]


TENSOR = PARTIAL
"""The placement whose parts sum to a tensor."""

GRADIENT = REPLICATE_SUM_GRAD
"""The placement whose parts sum to a gradient."""

COPIES = REPLICATE
