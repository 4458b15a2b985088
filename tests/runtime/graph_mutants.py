"""Mutants of the runtime of graph plans."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from shardwise.runtime.graphs.interpreter import Interpreter
from shardwise.runtime.graphs.parameters import ShardedParameter
from shardwise.runtime.graphs.placements import value_placements
from shardwise.runtime.graphs.redistribute import RedistributeStep, redistribute_path


def _without(kind: str) -> Callable[..., tuple[RedistributeStep, ...]]:
    """Redistributes tensors without one kind of step."""

    def mutant(*arguments: Any) -> tuple[RedistributeStep, ...]:
        return tuple(step for step in redistribute_path(*arguments) if step.kind != kind)

    return mutant


def _nothing(*arguments: Any) -> None:
    pass


MADE = ShardedParameter.made

SECTION = Interpreter._section


def _alone(
    interpreter: Interpreter, section: Any, entry: Any, skip_inputs: Mapping[str, torch.Tensor], data: Any
) -> tuple[torch.Tensor, ...]:
    """Runs a section whose gradients for earlier sections' tensors are dropped."""
    return SECTION(
        interpreter, section, entry, {name: each.detach() for name, each in skip_inputs.items()}, data
    )


GRAPH_MUTANTS: Mapping[str, tuple[str, Any]] = {
    "partial sums are not added up": (
        "shardwise.runtime.graphs.redistribute.redistribute_path",
        _without("all_reduce"),
    ),
    "every rank takes the whole for its part of a sum": (
        "shardwise.runtime.graphs.redistribute.redistribute_path",
        _without("first_only"),
    ),
    "gradients lie as their tensors do": (
        "shardwise.runtime.graphs.redistribute.gradient_placements",
        value_placements,
    ),
    "states that others updated are not gathered": ("shardwise.runtime.graphs.job.publish", _nothing),
    "what is gathered for a backward pass is zeros": (
        "shardwise.runtime.graphs.parameters.ShardedParameter.made",
        lambda param, used: torch.zeros_like(MADE(param, used)),
    ),
    "every rank begins with the whole gradient": (
        "shardwise.runtime.graphs.interpreter.seed_gradient",
        lambda grid, spec, loss: torch.ones_like(loss),
    ),
    "copies count once for each rank in the norm": (
        "shardwise.runtime.graphs.parameters.ShardedParameter.replica_count",
        property(lambda param: 1),
    ),
}
"""Mutants by name: the dotted name that is patched, and its replacement."""

SKIP_TENSOR_MUTANTS: Mapping[str, tuple[str, Any]] = {
    "a skip tensor has the gradient of its own block alone": (
        "shardwise.runtime.graphs.interpreter.Interpreter._section",
        _alone,
    ),
}
"""Mutants of skip tensors."""

KERNEL_MUTANTS: Mapping[str, tuple[str, Any]] = {
    "gradients of sums are not summed": (
        "shardwise.runtime.graphs.sharded_operator._Summed.backward",
        staticmethod(lambda ctx, *gradients: (gradients[0], None, None)),
    ),
    "rows of neighbours are zeros": (
        "shardwise.runtime.graphs.sharded_operator._passed",
        lambda work, axes, first, last: (torch.zeros_like(first), torch.zeros_like(last)),
    ),
    "a rank takes its own maximum for that of all": (
        "shardwise.runtime.graphs.sharded_operator.ShardedOperator.largest",
        lambda work, tensor, split: tensor.detach(),
    ),
    "a rank knows its own state alone": (
        "shardwise.runtime.graphs.kernels.all_gather_dim",
        lambda work, value, at, dim: torch.cat((value, torch.zeros_like(value)), dim=at),
    ),
}
"""Mutants of operators."""
