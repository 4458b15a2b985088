"""Graph plans are obeyed: a step has the collectives that the cost model counts for its layout, with equal
kinds, bytes and numbers.

All-gathers of parameters count in both passes, and happen in both where the backward pass reads the
parameter. Once-per-step collectives of a block's parameters are batched, as the cost model assumes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
from tests.property.layout_instances import mlp
from tests.runtime import graph_modules
from tests.runtime.graph_counted_collectives import Times, predicted
from tests.runtime.graph_equality import batches
from tests.runtime.graph_modules import data_of, module_of
from tests.runtime.graph_plans import by_rules, plan_with, sampled, with_blocks, without_recomputation
from tests.runtime.jobs import of_graph
from tests.runtime.recorded_collectives import record_collectives
from tests.runtime.test_runtime_graphs import BY_HAND
from torch import Tensor

from shardwise.graph import REPLICATE_SHARD_STATES, OpNode, rules_of
from shardwise.plans import Plan
from shardwise.runtime import WorkerPool, capture, graph_module, parallelize
from shardwise.runtime.graphs import GraphTrainingJob, interpreter
from shardwise.runtime.graphs.parameters import ShardedParameter
from shardwise.runtime.graphs.placements import ProcessMesh
from shardwise.runtime.graphs.program import program_of
from shardwise.runtime.graphs.redistribute import CollectiveCoroutine, TensorSpec, run_alone
from shardwise.runtime.workers import Report

MLP = mlp(8, 8, 16, 4)
"""All dims divide evenly; otherwise shards would be padded to the largest."""

KINDS = {"all_gather": "pass", "reduce_scatter": "all_reduce"}
"""The cost model's kinds of collectives: over gloo a reduce-scatter is an all-reduce."""

EXTRA = {
    ("all_reduce", 8): "the gradient norm",
    ("all_reduce", 4): "the reported loss",
    ("broadcast", 8): "the reported loss, from the last stage",
}
"""Collectives of which the cost model counts the latency only (docs/concepts/pareto-search.md)."""


def steps_of(report: Report, plans: list[Plan], broken: str | None = None) -> list[Times]:
    """The collectives of this rank's second step under each plan; `broken` names a mutant to run."""
    with patch(broken, MUTANTS[broken]) if broken else nullcontext():
        return [_step_of(plan) for plan in plans]


def _step_of(plan: Plan) -> Times:
    return second_step(of_graph(parallelize(graph_module(plan.graph, seed=0), plan)), batches(plan.graph, 0))


def second_step(job: GraphTrainingJob, batch: Any) -> Times:
    job.step(batch)
    with record_collectives() as record:
        job.step(batch)
    return Counter({(found.kind, found.nbytes): times for found, times in record.counts.items()})


def _with_flat_shares(*arguments: Any) -> Any:
    program = program_of(*arguments)
    parameters = {name: replace(stored, parts=None) for name, stored in program.parameters.items()}
    return replace(program, parameters=parameters)


def _one_by_one(grid: ProcessMesh, coroutines: Iterable[CollectiveCoroutine]) -> list[Tensor]:
    return [run_alone(grid, coroutine) for coroutine in coroutines]


FLAT, APART = "shardwise.runtime.graphs.job.program_of", "shardwise.runtime.graphs.parameters.run_batched"

MOST = "shardwise.runtime.graphs.redistribute.MAX_BATCH_BYTES"

MUTANTS: Mapping[str, Any] = {FLAT: _with_flat_shares, APART: _one_by_one, MOST: 767}
"""State shards are ranges of elements, whatever shards their gradients have; each parameter is sent by
itself; messages are shorter."""


def as_predicted(found: Times) -> Times:
    """The collectives of a step in the cost model's kinds, without those that it does not count."""
    words: Times = Counter()
    for (kind, nbytes), times in found.items():
        if kind != "recv" and (kind, nbytes) not in EXTRA:  # each has its send
            words[KINDS.get(kind, kind), nbytes] += times
    return words


def _modules_steps(report: Report, name: str, plans: list[Plan], early: bool) -> list[Times]:
    """The same for a captured module in fp32. With `early`, a parameter's gradient is reduced once for each
    reader. Gathered parameters are kept here, so that none is gathered again."""
    data = tuple(each.float() if each.is_floating_point() else each for each in data_of(name, 0))
    mutant: Any = patch.object(ShardedParameter, "receive", _receive_early) if early else nullcontext()
    with mutant, patch.object(interpreter, "rematerialize", lambda made: nullcontext()):
        return [
            second_step(of_graph(parallelize(module_of(name, 1).float(), plan, data)), data) for plan in plans
        ]


def _receive_early(param: ShardedParameter, gradient: Tensor, used: TensorSpec) -> None:
    run_alone(param.grid, param._scatter_steps(gradient, used))
    receive(param, gradient, used)


receive = ShardedParameter.receive


@pytest.mark.parametrize(("ranks", "layouts"), [(2, 16), (4, 6)])
def test_any_layout_has_the_predicted_collectives(team: WorkerPool, ranks: int, layouts: int) -> None:
    """Any rule of each operator, any placement of each tensor, any storage of each parameter; no
    recomputation."""
    plans = list(map(without_recomputation, sampled(MLP, (ranks,), range(layouts))))
    kinds: set[str] = set()
    for plan, found in zip(plans, team.run(ranks, steps_of, plans)[0], strict=True):
        assert found[("all_reduce", 8)] == 1
        assert as_predicted(found) == predicted(plan), plan.operators
        kinds |= {kind for kind, _ in found}
    assert kinds >= {"all_reduce", "all_gather", "reduce_scatter", "all_to_all"}


def test_layouts_of_two_axes_have_the_predicted_collectives(team: WorkerPool) -> None:
    plans = [
        plan_with(MLP, ranks, by_rules(MLP, ranks, *required))
        for ranks, required in BY_HAND.values()
        if ranks == (2, 2)
    ]
    assert len(plans) > 1
    for plan, found in zip(plans, team.run(4, steps_of, plans)[0], strict=True):
        assert as_predicted(found) == predicted(plan), plan.operators


def test_lstm_states_are_gathered_as_often_as_predicted(team: WorkerPool) -> None:
    """With split units, each of two layers gathers 5 states of 4 x 32 forward and reduce-scatters their
    gradients (over gloo, all-reduces)."""
    graph = capture(graph_modules.__file__, "lstm")
    split = plan_with(graph, (2,), by_rules(graph, (2,), _with_exchanges))
    plans = [split, *map(without_recomputation, sampled(graph, (2,), range(3)))]
    found = team.run(2, _modules_steps, "lstm", plans, False)[0]
    for plan, each in zip(plans, found, strict=True):
        assert as_predicted(each) == predicted(plan), plan.operators
    state = 4 * 32 * 4
    assert found[0]["reduce_scatter", state] >= 2 * 5 and found[0]["all_gather", state] >= 2 * 5
    assert any(each["reduce_scatter", state] < 2 * 5 for each in found[1:])


def _with_exchanges(op: OpNode) -> list[str]:
    return [rule.name for rule in rules_of(op) if op.kind == "lstm" and rule.collectives]


def reductions(times: Times) -> Times:
    return Counter({key: count for key, count in times.items() if key[0] == "all_reduce"})


def test_gradients_of_a_parameter_with_several_readers_are_reduced_once(team: WorkerPool) -> None:
    """One layer three times, nothing recomputed. (Each reader gathers the parameter, as predicted.)"""
    graph = capture(graph_modules.__file__, "again")
    plans = [without_recomputation(plan) for plan in sampled(graph, (2,), range(12))]
    right, wrong = (team.run(2, _modules_steps, "again", plans, early)[0] for early in (False, True))
    estimated = [reductions(predicted(plan)) for plan in plans]
    assert [reductions(as_predicted(each)) for each in right] == estimated
    assert [reductions(as_predicted(each)) for each in wrong] != estimated


def test_columns_then_rows_by_hand(team: WorkerPool) -> None:
    """8 samples with 4 classes: the all-reduce of partial logits has 8 * 4 * 4 bytes; nothing else is
    sent."""
    ranks, required = BY_HAND["columns then rows on 2"]
    plan = plan_with(MLP, ranks, by_rules(MLP, ranks, *required))
    ((found,), _) = team.run(2, steps_of, [plan])
    assert as_predicted(found) == predicted(plan) == Counter({("all_reduce", 128): 1})


def test_the_mutant_that_gathers_gradients_of_parts_whole_is_caught(team: WorkerPool) -> None:
    """Where a parameter's states are sharded and its use is sharded too."""
    plans = list(map(without_recomputation, sampled(MLP, (2,), range(16))))
    found = team.run(2, steps_of, plans, FLAT)[0]
    assert any(as_predicted(each) != predicted(plan) for plan, each in zip(plans, found, strict=True))


def test_parameters_of_a_block_share_one_collective(team: WorkerPool) -> None:
    """By hand, a sharded batch on two ranks: the gradients of weights of 8 x 16 and 16 x 4 are one message of
    768 bytes. With sharded states, so are the updated shards. The mutants send two messages each; one of them
    has a lower limit for a message."""
    weights = {"w_up": 8 * 16 * 4, "w_down": 16 * 4 * 4}
    plain = plan_with(MLP, (2,), by_rules(MLP, (2,), lambda op: ("split b",)))
    (block,) = plain.operators.blocks
    split = replace(block, stored=dict.fromkeys(weights, (REPLICATE_SHARD_STATES,)))
    plans = [plain, with_blocks(plain, (split,))]
    assert [predicted(plan) for plan in plans] == [
        Counter({("all_reduce", 768): 1}),
        Counter({("all_reduce", 768): 1, ("pass", 768): 1}),
    ]
    for mutant in (None, APART, MOST):
        found = [as_predicted(each) for each in team.run(2, steps_of, plans, mutant)[0]]
        assert all(each == predicted(plan) for plan, each in zip(plans, found, strict=True)) == (
            mutant is None
        )
        if mutant:
            assert found[1] == Counter(
                {(kind, n): 1 for kind in ("all_reduce", "pass") for n in weights.values()}
            )
