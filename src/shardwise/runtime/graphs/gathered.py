"""The whole of a dim inside an operator whose ranks make or need a part of it each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.autograd import Function

from shardwise.runtime.graphs.bring import moved
from shardwise.runtime.graphs.forms import Form, Held
from shardwise.runtime.graphs.grid import Grid
from shardwise.runtime.graphs.work import Work
from shardwise.runtime.marks import EXCHANGES, TRAFFIC, marked


def gathered(work: Work, value: Tensor, at: int, dim: str) -> Tensor:
    """The whole of `dim`, dim `at` of `value`, on every rank that splits it; gradients are summed and
    scattered."""
    return _brought(work, value, at, dim, ("part", "whole"), ("partial", "part"))


def own_part(work: Work, value: Tensor, at: int, dim: str) -> Tensor:
    """The part of its own that a rank takes of what all have; gradients are gathered."""
    return _brought(work, value, at, dim, ("whole", "part"), ("part", "whole"))


def _brought(
    work: Work, value: Tensor, at: int, dim: str, there: tuple[str, str], back: tuple[str, str]
) -> Tensor:
    axes = work.axes((dim,))
    if not axes:
        return value
    shape = list(value.shape)
    shape[at] = work.op.dims[dim]
    units = [work.unit(dim, rule) for rule in work.rules]
    forms = [_form(word, axes, at, units) for word in (*there, *back)]
    result: Tensor = _Through.apply(value, work.grid, tuple(shape), *forms)
    return result


def _form(word: str, axes: Sequence[int], at: int, units: Sequence[int]) -> Form:
    """What is held along `axes`; along all others nothing changes, and a rank's tensor counts as whole."""
    along: Held = at if word == "part" else "partial" if word == "partial" else "whole"
    held = tuple(along if axis in axes else "whole" for axis in range(len(units)))
    return Form(
        held, tuple(unit if isinstance(each, int) else 1 for each, unit in zip(held, units, strict=True))
    )


class _Through(Function):
    """From one form to another, and gradients between two others."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, grid: Grid, shape: tuple[int, ...], *forms: Form) -> Tensor:
        start, end, *back = forms
        ctx.way = (grid, shape, *back)
        with marked(TRAFFIC, EXCHANGES):
            return moved(grid, value, shape, start, end)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        grid, shape, late, first = ctx.way
        with marked(TRAFFIC, EXCHANGES):
            gradient = moved(grid, gradients[0].contiguous(), shape, late, first)
        return gradient, None, None, None, None, None, None
