"""Runs small operators under sharding rules on several processes, and compares them with numpy on one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from tests.property.op_instances import INSTANCES
from tests.property.op_programs import EPSILON
from tests.property.placements import GRADIENT, TENSOR, assemble, place
from tests.property.spmd import Array, Mesh
from tests.property.test_graph_kinds import INTEGERS, operands_of, tensors_of, whole
from tests.runtime.graph_mutants import KERNEL_MUTANTS
from tests.runtime.mutation import with_mutant
from torch import Tensor

from shardwise.graph import OpNode, ShardingRule, rules_of
from shardwise.runtime.graphs.kernels import KERNELS
from shardwise.runtime.graphs.placements import ProcessMesh
from shardwise.runtime.graphs.sharded_operator import ShardedOperator
from shardwise.runtime.workers import Report

Case = tuple[str, tuple[int, ...]]
"""An operator by name, and the number of its rule along each mesh axis."""

Outcome = tuple[Array, list[Array | None]]
"""A rank's shard of the output, and of the gradients of inputs and parameters."""


FUNCTIONS: Mapping[str, Callable[..., Tensor]] = {
    "sqrt": lambda x: x.abs().sqrt(),
    "rsqrt": lambda x: x.abs().rsqrt(),
    "log": lambda x: x.abs().log(),
    "clamp": lambda x: x.clamp(-0.5, 0.5),
    "nonlinear": lambda x, y: x.tanh() * y.tanh(),
}
"""The activation functions of the numpy programs, which a graph leaves open."""


def settings_of(work: ShardedOperator) -> dict[str, Any]:
    op = work.op
    name = op.attributes.get("function")
    settings: dict[str, Any] = {"epsilon": EPSILON}
    if op.kind == "elementwise" and name == "dropout":
        mask = 1.0 * (np.random.default_rng(5).random(op.shape(op.output)) < 0.5)
        own = torch.from_numpy(mask[tuple(slice(*work.interval(dim)) for dim in op.output)])
        settings["function"] = lambda x: x * own
    elif op.kind == "elementwise" and name in FUNCTIONS:
        settings["function"] = FUNCTIONS[str(name)]
    return settings


def carried_out(
    report: Report, counts: tuple[int, ...], cases: Sequence[Case], broken: str | None
) -> list[Outcome]:
    """On every rank: its shards of all cases, on a mesh of `counts`. `broken` names a mutant to run."""
    grid = ProcessMesh(counts)
    with with_mutant(KERNEL_MUTANTS, broken):
        return [
            _case(grid, INSTANCES[name], [rules_of(INSTANCES[name])[at] for at in chosen])
            for name, chosen in cases
        ]


def _case(grid: ProcessMesh, op: OpNode, rules: Sequence[ShardingRule]) -> Outcome:
    mesh = Mesh(op, rules, grid.counts)
    work = ShardedOperator(op, tuple(rules), grid)
    work = ShardedOperator(op, tuple(rules), grid, settings_of(work))
    placements = [
        [(*rule.inputs, *rule.parameters)[at] for rule in rules] for at in range(len(operands_of(op)))
    ]
    operands: list[Tensor] = []
    for at, (dims, array) in enumerate(zip(operands_of(op), tensors_of(op, 1), strict=True)):
        own = place(mesh, dims, array, placements[at], partial=TENSOR, seed=at)[grid.here]
        tensor = torch.from_numpy(np.array(own))
        is_index = INTEGERS.get(op.kind) == at
        operands.append(tensor.long() if is_index else tensor.requires_grad_())
    count = len(op.inputs)
    result = KERNELS[op.kind](work, operands[:count], operands[count:])
    gradient = np.random.default_rng(2).normal(size=op.shape(op.output))
    outputs = [rule.output for rule in rules]
    own = place(mesh, op.output, gradient, outputs, partial=GRADIENT, seed=9)[grid.here]
    result.backward(torch.from_numpy(np.array(own)))
    gradients = [
        None if INTEGERS.get(op.kind) == at else _gradient(operand) for at, operand in enumerate(operands)
    ]
    return result.detach().numpy(), gradients


def _gradient(operand: Tensor) -> Array:
    return np.zeros(operand.shape) if operand.grad is None else operand.grad.numpy()


def errors(case: Case, counts: tuple[int, ...], outcomes: Sequence[Outcome]) -> float:
    """The error of the reassembled shards against numpy on one process; infinite where replicas differ."""
    op = INSTANCES[case[0]]
    rules = [rules_of(op)[at] for at in case[1]]
    mesh = Mesh(op, rules, counts)
    parts = dict(zip(mesh.ranks, outcomes, strict=True))
    expected, expected_gradients = whole(op)
    placements = [
        [(*rule.inputs, *rule.parameters)[at] for rule in rules]
        for at in range(len(operands_of(op)))
        if INTEGERS.get(op.kind) != at
    ]
    try:
        outputs = [rule.output for rule in rules]
        found = [assemble(mesh, {at: own[0] for at, own in parts.items()}, outputs, partial=TENSOR)]
        slots = [at for at in range(len(operands_of(op))) if INTEGERS.get(op.kind) != at]
        for slot, own_placements in zip(slots, placements, strict=True):
            gradients = {at: own[1][slot] for at, own in parts.items()}
            found.append(assemble(mesh, gradients, own_placements, partial=GRADIENT))  # type: ignore[arg-type]
    except (AssertionError, ValueError):
        return float("inf")
    pairs = zip(found, [expected, *expected_gradients], strict=True)
    return max(_error(ours, theirs) for ours, theirs in pairs)


def _error(ours: Array, theirs: Array) -> float:
    if ours.shape != theirs.shape:
        return float("inf")
    return float(
        np.nan_to_num(np.abs(ours - theirs), nan=np.inf).max(initial=0.0)
        / max(1.0, np.abs(theirs).max(initial=0.0))
    )
