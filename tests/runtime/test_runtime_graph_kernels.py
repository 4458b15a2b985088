"""Every sharding rule of every kind of operator: the shards that processes compute make up what numpy
computes on one."""

from __future__ import annotations

from itertools import product
from math import prod

import pytest
import torch
from tests.property.layout_instances import op as operator
from tests.property.op_instances import INSTANCES
from tests.property.test_graph_kinds import SPATIAL, evenly
from tests.runtime.graph_kernels import Case, carried_out, errors
from tests.runtime.graph_mutants import KERNEL_MUTANTS
from torch import Tensor
from torch.nn import functional

from shardwise.graph import allows, rules_of
from shardwise.graph.kinds import KINDS
from shardwise.runtime import WorkerPool
from shardwise.runtime.graphs.kernels import KERNELS
from shardwise.runtime.graphs.placements import ProcessMesh
from shardwise.runtime.graphs.sharded_operator import ShardedOperator
from shardwise.runtime.workers import Report

TOLERANCE = 1e-9
"""In fp64."""


def cases_on(counts: tuple[int, ...]) -> list[Case]:
    """All combinations of rules of all operators on that mesh; windows only where rows divide evenly, and
    each dim along one axis."""
    found = []
    for name, op in INSTANCES.items():
        rules = rules_of(op)
        for chosen in product(range(len(rules)), repeat=len(counts)):
            own = [rules[at] for at in chosen]
            if not allows(op, own, counts):
                continue
            if op.kind in SPATIAL and not all(evenly(op, rule, max(counts) ** len(counts)) for rule in own):
                continue
            found.append((name, chosen))
    return found


def wrong(
    team: WorkerPool, counts: tuple[int, ...], cases: list[Case], broken: str | None = None
) -> list[tuple[str, tuple[str, ...], float]]:
    """The cases that differ from numpy, with their error."""
    outcomes = list(zip(*team.run(prod(counts), carried_out, counts, cases, broken), strict=True))
    found = []
    for case, parts in zip(cases, outcomes, strict=True):
        error = errors(case, counts, parts)
        if error > TOLERANCE:
            names = tuple(rules_of(INSTANCES[case[0]])[at].name for at in case[1])
            found.append((case[0], names, error))
    return found


STEP = {(2,): 1, (3,): 4, (4,): 3, (2, 2): 20}
"""Every n-th case on a mesh is run; all of them with `--full`."""


@pytest.mark.parametrize("counts", STEP)
def test_ranks_compute_the_results_of_one_rank(team: WorkerPool, counts: tuple[int, ...], full: bool) -> None:
    assert wrong(team, counts, cases_on(counts)[:: 1 if full else STEP[counts]]) == []


@pytest.mark.parametrize("mutant", KERNEL_MUTANTS)
def test_a_broken_kernel_is_caught(team: WorkerPool, mutant: str) -> None:
    name, rule = SHOWN_BY[mutant]
    case = (name, ([each.name for each in rules_of(INSTANCES[name])].index(rule),))
    assert wrong(team, (2,), [case]) == []
    assert wrong(team, (2,), [case], broken=mutant) != []


SHOWN_BY = {
    "gradients of sums are not summed": ("softmax", "split t"),
    "rows of neighbours are zeros": ("convolution", "split x"),
    "a rank takes its own maximum for that of all": ("cross entropy", "split v"),
    "a rank knows its own state alone": ("lstm", "split h"),
}
"""An operator and a rule for each mutant."""


def test_every_kind_is_computed() -> None:
    assert set(KERNELS) == set(KINDS)


def ignoring(report: Report, rule: str) -> tuple[float, Tensor]:
    """On each of two ranks: the loss of four rows of six classes, two of them without a target (a partial sum
    where rows are split), and the gradient of its shard of the logits."""
    sizes = {"b": 4, "v": 6}
    loss = operator("loss", "cross_entropy", sizes, [("x", "bv"), ("target", "b")], "")
    work = ShardedOperator(
        loss, (next(each for each in rules_of(loss) if each.name == rule),), ProcessMesh((2,))
    )
    own = [slice(*work.interval(dim)) for dim in "bv"]
    rows = LOGITS[own[0], own[1]].clone().requires_grad_()
    result = KERNELS["cross_entropy"](work, [rows, TARGETS[own[0]]], [])
    result.backward()
    return float(result.detach()), rows.grad if rows.grad is not None else torch.zeros(0)


LOGITS, TARGETS = torch.arange(24.0, dtype=torch.float64).view(4, 6).sin(), torch.tensor([1, -100, 5, -100])


@pytest.mark.parametrize(("rule", "dim"), [("split b", 0), ("split v", 1)])
def test_rows_without_a_target_have_no_loss(team: WorkerPool, rule: str, dim: int) -> None:
    """They count in the mean (docs/concepts/graph-plans.md): the sum over the other rows is divided by
    four."""
    rows = LOGITS.clone().requires_grad_()
    expected = functional.cross_entropy(rows, TARGETS, reduction="sum") / 4
    expected.backward()
    (first, left), (second, right) = team.run(2, ignoring, rule)
    assert (first + second if dim == 0 else first) == pytest.approx(float(expected.detach()), rel=1e-12)
    assert rows.grad is not None and torch.allclose(torch.cat((left, right), dim), rows.grad, atol=1e-12)
