"""The layouts that PyTorch's DTensor allows along one mesh axis: the only module that uses its
private names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._op_schema import OpSchema
from torch.distributed.tensor.placement_types import _MaskPartial, _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._pytree import tree_leaves

Layout = tuple[tuple[str, ...], str]
"""Placements of an operator's operands, and of its first result."""

RANKS = 2


@contextmanager
def fake_mesh() -> Iterator[DeviceMesh]:
    """A mesh of two ranks without communication."""
    dist.init_process_group("fake", rank=0, world_size=RANKS, store=FakeStore())
    try:
        yield init_device_mesh("cpu", (RANKS,))
    finally:
        dist.destroy_process_group()


def legal_layouts(
    mesh: DeviceMesh,
    call: Any,
    tensors: list[torch.Tensor],
    arguments: Callable[[list[Any]], tuple[Any, ...]],
) -> set[Layout]:
    """Every placement of `tensors` with which DTensor runs `call` without redistribution, and that of the
    result.

    `arguments` inserts the tensors among the other arguments. Empty where DTensor does not know the operator.
    """
    propagator = DTensor._op_dispatcher.sharding_propagator
    info = propagator.op_to_schema_info.get(call) or propagator.op_to_schema_info_for_single_dim_strategy.get(
        call
    )
    found: set[Layout] = set()
    for placements in product(*(_placements(tensor) for tensor in tensors)):
        specs = [
            DTensorSpec(mesh, (placement,), TensorMeta(tensor.shape, tensor.stride(), tensor.dtype))
            for placement, tensor in zip(placements, tensors, strict=True)
        ]
        try:
            given = arguments(specs)
            schema = OpSchema(call, given, {}, schema_info=info)
            sharding = propagator.propagate_op_sharding_non_cached(schema)
        except (RuntimeError, NotImplementedError, AssertionError, ValueError):
            continue
        output = sharding.output_spec
        if output is None or not _stay(given, sharding.redistribute_schema):
            continue
        first = output[0] if isinstance(output, tuple | list) else output
        found.add((tuple(map(_text, placements)), _text(first.placements[0])))
    return found


def _placements(tensor: torch.Tensor) -> list[Any]:
    partial = [] if tensor.dtype in (torch.int64, torch.bool) else [Partial()]
    return [*(Shard(dim) for dim in range(tensor.ndim)), Replicate(), *partial]


def _stay(given: tuple[Any, ...], expected_schema: OpSchema | None) -> bool:
    """Whether the operator takes its tensors as they are placed; indices of a split table are
    masked locally.
    """
    if expected_schema is None:
        return True
    before, after = (
        [spec.placements[0] for spec in tree_leaves(arguments) if isinstance(spec, DTensorSpec)]
        for arguments in (given, expected_schema.args_schema)
    )
    return all(
        own == other or (own.is_replicate() and isinstance(other, _MaskPartial))
        for own, other in zip(before, after, strict=True)
    )


def _text(placement: Any) -> str:
    """`S(0)`, `R`, `P`; `P(max)` for another reduction. Partial means of means are partial sums in which each
    rank has already divided by the whole count.
    """
    if isinstance(placement, _StridedShard):
        return f"strided S({placement.dim})"
    if isinstance(placement, Shard):
        return f"S({placement.dim})"
    if isinstance(placement, Replicate):
        return "R"
    if isinstance(placement, Partial):
        return "P" if placement.reduce_op in ("sum", "avg") else f"P({placement.reduce_op})"
    raise AssertionError(f"{placement} is no placement that tests know")
