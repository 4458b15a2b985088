"""Graph plans in stages are obeyed: a step has the collectives and messages that the cost model counts for
each stage, with equal kinds, bytes and numbers."""

from __future__ import annotations

from collections import Counter
from contextlib import nullcontext
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from tests.property.layout_instances import chain, without_first_weights
from tests.reference.one_layout import layout
from tests.reference.one_layout.rank import owned_shards
from tests.runtime.graph_counted_collectives import Times, predicted_in_stages
from tests.runtime.graph_equality import batches
from tests.runtime.graph_plans import sampled_in_stages, staged_by_rules, with_blocks, without_recomputation
from tests.runtime.jobs import of_graph
from tests.runtime.test_runtime_graph_plan_is_followed import as_predicted, second_step
from tests.runtime.test_runtime_graph_stages import columns, data, whole

from shardwise.cost.layouts.parameters import storage_placements
from shardwise.plans import Plan
from shardwise.runtime import WorkerPool, graph_module, parallelize
from shardwise.runtime.graphs.interpreter import _Passes
from shardwise.runtime.graphs.parameters import reduce_gradients
from shardwise.runtime.workers import Report

CHAIN = chain(16, 8, 16, 4)
"""All dims divide evenly, also those of a micro-batch; otherwise shards would be padded to the largest."""

MICROBATCHES = 4


def steps_of(report: Report, plans: list[Plan], early: bool) -> list[Times]:
    """The collectives of this rank's second step under each plan. With `early`, gradients are reduced after
    every micro-batch."""
    mutant: Any = patch.object(_Passes, "_backward", _settled) if early else nullcontext()
    with mutant:
        return [
            second_step(of_graph(parallelize(graph_module(plan.graph, seed=0), plan)), batches(plan.graph, 0))
            for plan in plans
        ]


def _settled(passes: _Passes, number: int) -> None:
    BACKWARD(passes, number)
    for block in passes.stage.interpreter.parameter_groups:
        reduce_gradients(passes.stage.grid, block)


BACKWARD = _Passes._backward


def is_obeyed(team: WorkerPool, plans: list[Plan], *, early: bool = False) -> list[bool]:
    """For each plan, whether the first rank of every stage has the predicted collectives."""
    found = team.run(plans[0].devices, steps_of, plans, early)
    return [
        all(
            as_predicted(found[stage * plan.mesh.devices][place]) == estimated
            for stage, estimated in enumerate(predicted_in_stages(plan))
        )
        for place, plan in enumerate(plans)
    ]


@pytest.mark.parametrize(("ranks", "cuts"), [((1,), (1, 2, 3)), ((2,), (2,)), ((2,), (1, 3)), ((4,), (4,))])
def test_any_layouts_of_stages_communicate_as_predicted(
    team: WorkerPool, ranks: tuple[int, ...], cuts: tuple[int, ...], full: bool
) -> None:
    """Any rule, any placement of tensors, also across cuts, any storage of parameters; no recomputation."""
    plans = [
        without_recomputation(plan)
        for plan in sampled_in_stages(CHAIN, ranks, cuts, MICROBATCHES, range(6 if full else 3))
    ]
    assert all(is_obeyed(team, plans))


def test_stages_on_two_axes_communicate_as_predicted(team: WorkerPool) -> None:
    assert all(
        is_obeyed(team, [staged_by_rules(CHAIN, (2, 2), (2,), MICROBATCHES, *required)])
        for required in ((data, columns), (columns, data))
    )


def stored_anyhow(plan: Plan, seed: int) -> Plan:
    """The plan with a random storage of each parameter."""
    random = np.random.default_rng(seed)
    operators = [op for block in plan.graph.blocks for op in block.operators]
    shapes = {own.name: op.shape(own.dims) for op in operators for own in op.parameters}
    blocks = []
    for block in plan.operators.blocks:
        forms = {name: storage_placements(shapes[name], plan.mesh.ranks).named for name in block.stored}
        sampled_forms = {name: among[random.integers(len(among))] for name, among in forms.items()}
        blocks.append(replace(block, stored=sampled_forms))
    return with_blocks(plan, blocks)


def test_gradients_along_two_axes_are_reduced_as_often_as_predicted(team: WorkerPool) -> None:
    """Any storage of parameters on 2 x 2 ranks with a sharded batch, in four micro-batches. Where one axis
    shards a parameter, its gradient is reduce-scattered along it after each pass, and reduced along the other
    axis once."""
    plain = staged_by_rules(CHAIN, (2, 2), (), MICROBATCHES, data, data)
    plans = [stored_anyhow(plain, seed) for seed in range(5)]
    assert all(is_obeyed(team, plans))
    with patch.object(layout, "_after_backward", lambda use, used: owned_shards(use.stored)):
        assert not all(is_obeyed(team, plans))  # the mutant counts all of it for each micro-batch
    assert not all(is_obeyed(team, plans[:2], early=True))


def test_stages_in_bf16_communicate_as_predicted(team: WorkerPool) -> None:
    """Tensors that cross cuts have 2 bytes a number, gradients of weights 4."""
    plans = [
        replace(plan, job=replace(plan.job, dtype="bf16"))
        for plan in (
            staged_by_rules(CHAIN, (2,), (2,), MICROBATCHES, data),
            *map(without_recomputation, sampled_in_stages(CHAIN, (2,), (2,), MICROBATCHES, range(3))),
        )
    ]
    assert all(is_obeyed(team, plans))


def test_the_mutant_that_reduces_gradients_of_every_micro_batch_is_caught(team: WorkerPool) -> None:
    plan = staged_by_rules(CHAIN, (2,), (2,), MICROBATCHES, data)
    assert is_obeyed(team, [plan]) == [True]
    assert is_obeyed(team, [plan], early=True) == [False]


def test_messages_by_hand(team: WorkerPool) -> None:
    """4 micro-batches of 4 samples with 16 numbers: 4 * 16 * 4 bytes forward, as many backward. Each of two
    ranks sends its half to its peer."""
    for ranks, nbytes in (((1,), 256), ((2,), 128)):
        plan = staged_by_rules(CHAIN, ranks, (2,), MICROBATCHES, data if ranks == (2,) else whole)
        for found in team.run(plan.devices, steps_of, [plan], False):
            sent = {key: times for key, times in found[0].items() if key[0] in ("send", "recv")}
            assert sent == {("send", nbytes): 4, ("recv", nbytes): 4}
        assert all(estimated["send", nbytes] == 4 for estimated in predicted_in_stages(plan))


def test_no_gradient_is_sent_to_stages_without_trained_parameters(team: WorkerPool) -> None:
    """Four messages forward and none backward; the planner counts both (docs/concepts/pareto-search.md)."""
    graph = without_first_weights(CHAIN)
    plan = staged_by_rules(graph, (1,), (1,), MICROBATCHES, whole)
    there, back = team.run(2, steps_of, [plan], False)
    assert there[0]["send", 256] == 4 and not there[0]["recv", 256]
    assert back[0]["recv", 256] == 4 and not back[0]["send", 256]
    assert predicted_in_stages(plan) == [Counter({("send", 256): 4}), Counter()]
