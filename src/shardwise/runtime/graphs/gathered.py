"""The whole of a dim inside an operator whose ranks make or need a part of it each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.autograd import Function

from shardwise.runtime.graphs.bring import redistribute_local_tensor
from shardwise.runtime.graphs.forms import AxisPlacement, MeshPlacements
from shardwise.runtime.graphs.grid import ProcessMesh
from shardwise.runtime.graphs.work import ShardedOperator
from shardwise.runtime.marks import OPERATOR_COLLECTIVES, TRAFFIC_MARK, profiled_range


def all_gather_dim(work: ShardedOperator, value: Tensor, at: int, dim: str) -> Tensor:
    """The whole of `dim`, dim `at` of `value`, on every rank that splits it; gradients are summed and
    scattered."""
    return _redistributed(work, value, at, dim, ("part", "whole"), ("partial", "part"))


def local_part(work: ShardedOperator, value: Tensor, at: int, dim: str) -> Tensor:
    """The part of its own that a rank takes of what all have; gradients are gathered."""
    return _redistributed(work, value, at, dim, ("whole", "part"), ("part", "whole"))


def _redistributed(
    work: ShardedOperator, value: Tensor, at: int, dim: str, there: tuple[str, str], back: tuple[str, str]
) -> Tensor:
    axes = work.axes((dim,))
    if not axes:
        return value
    shape = list(value.shape)
    shape[at] = work.op.dims[dim]
    units = [work.unit(dim, rule) for rule in work.rules]
    placements_list = [_placements_of(word, axes, at, units) for word in (*there, *back)]
    result: Tensor = _RedistributeBothWays.apply(value, work.grid, tuple(shape), *placements_list)
    return result


def _placements_of(word: str, axes: Sequence[int], at: int, units: Sequence[int]) -> MeshPlacements:
    """What is held along `axes`; along all others nothing changes, and a rank's tensor counts as whole."""
    along: AxisPlacement = at if word == "part" else "partial" if word == "partial" else "whole"
    by_axis = tuple(along if axis in axes else "whole" for axis in range(len(units)))
    return MeshPlacements(
        by_axis,
        tuple(unit if isinstance(each, int) else 1 for each, unit in zip(by_axis, units, strict=True)),
    )


class _RedistributeBothWays(Function):
    """From one form to another, and gradients between two others."""

    @staticmethod
    def forward(
        ctx: Any, value: Tensor, grid: ProcessMesh, shape: tuple[int, ...], *placements_list: MeshPlacements
    ) -> Tensor:
        start, end, *back = placements_list
        ctx.way = (grid, shape, *back)
        with profiled_range(TRAFFIC_MARK, OPERATOR_COLLECTIVES):
            return redistribute_local_tensor(grid, value, shape, start, end)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        grid, shape, late, first = ctx.way
        with profiled_range(TRAFFIC_MARK, OPERATOR_COLLECTIVES):
            gradient = redistribute_local_tensor(grid, gradients[0].contiguous(), shape, late, first)
        return gradient, None, None, None, None, None, None
