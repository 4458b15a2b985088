"""A traced step of an operator graph: passes of its blocks and operators, its traffic, its collectives."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from tests.property.layout_instances import chain
from tests.runtime.graph_counted_collectives import Times, predicted, predicted_in_stages
from tests.runtime.graph_equality import batches
from tests.runtime.graph_plans import (
    by_rules,
    estimated,
    plan_with,
    sampled,
    sampled_in_stages,
    without_recomputation,
)
from torch.profiler import ProfilerActivity, profile, record_function

from shardwise.app.cli.main import main
from shardwise.cluster import load_cluster
from shardwise.graph import OpGraph, block_labels, operator_label
from shardwise.plans import Plan, write_plan
from shardwise.runtime import WorkerPool, graph_module, parallelize
from shardwise.runtime.graphs.parameters import ShardedParameter, publish
from shardwise.runtime.graphs.placements import ProcessMesh
from shardwise.runtime.private import ProfiledEvent
from shardwise.runtime.profiling import OPERATOR, operator_spans, profiled_range, traced
from shardwise.runtime.workers import Report
from shardwise.sim import BLOCKS, COMMUNICATION, COMPUTE, OPERATORS, TRAFFIC, Span, read_trace

CHAIN = chain(16, 8, 16, 4)
"""All dims divide evenly, also those of a micro-batch. Every operator has a backward pass."""

MICROBATCHES = 4


def traced_steps(report: Report, plans: list[Plan], mutant: str | None) -> list[tuple[Span, ...]]:
    """The spans of this rank's second step under each plan."""
    with ExitStack() as stack:
        if mutant is not None:
            stack.enter_context(patch(mutant, MUTANTS[mutant]))
        return [_traced(plan) for plan in plans]


def _traced(plan: Plan) -> tuple[Span, ...]:
    job = parallelize(graph_module(plan.graph, seed=0), plan)
    batch = batches(plan.graph, 0)
    job.step(batch)
    with traced(torch.distributed.get_rank()) as trace:
        job.step(batch)
    return trace.spans


def names(spans: Sequence[Span], track: str, word: str) -> list[str]:
    """Names on a track in order of time, after a prefix such as `F0 `."""
    own = sorted((span for span in spans if span.track == track), key=lambda span: span.start_s)
    return [span.name.removeprefix(word) for span in own if span.name.startswith(word)]


def is_whole(spans: Sequence[Span], graph: OpGraph, first: int, end: int, microbatches: int) -> bool:
    """Whether each block and operator of a stage has one forward pass per micro-batch, in order, and one
    backward pass, in reverse order, each within its action."""
    labels = block_labels(graph)[first:end]
    blocks = [block for block in graph.blocks for _ in range(block.repeat)][first:end]
    operators = [
        operator_label(label, op.name)
        for label, block in zip(labels, blocks, strict=True)
        for op in block.operators
    ]
    for number in range(microbatches):
        for kind, step in (("F", 1), ("B", -1)):
            word = f"{kind}{number} "
            if names(spans, BLOCKS, word) != list(labels)[::step]:
                return False
            if names(spans, OPERATORS, word) != operators[::step]:
                return False
            (action,) = [s for s in spans if s.track == COMPUTE and s.name.endswith(word.strip())]
            own = [s for s in spans if s.track in (BLOCKS, OPERATORS) and s.name.startswith(word)]
            if any(s.start_s < action.start_s or s.finish_s > action.finish_s for s in own):
                return False
    return True


def test_each_block_has_one_forward_and_one_backward_pass(team: WorkerPool) -> None:
    """Any layout of a whole graph on two ranks, without recomputation."""
    plans = list(map(without_recomputation, sampled(CHAIN, (2,), range(4))))
    for of_rank in team.run(2, traced_steps, plans, None):
        assert all(is_whole(spans, CHAIN, 0, 5, 1) for spans in of_rank)


def test_each_stage_runs_its_blocks_once_for_each_micro_batch(team: WorkerPool) -> None:
    plans = list(map(without_recomputation, sampled_in_stages(CHAIN, (1,), (2,), MICROBATCHES, range(2))))
    for (first, end), of_rank in zip(((0, 2), (2, 5)), team.run(2, traced_steps, plans, None), strict=True):
        assert all(is_whole(spans, CHAIN, first, end, MICROBATCHES) for spans in of_rank)


def _constant(mark: ProfiledEvent, made: Sequence[tuple[float, int]]) -> int:
    return 0


def _twice(grid: ProcessMesh, parameters: Sequence[ShardedParameter]) -> None:
    publish(grid, parameters)
    publish(grid, parameters)


PASSES = "shardwise.runtime.profiling._first_node", "shardwise.runtime.profiling.is_profiled"

MUTANTS: dict[str, Any] = {
    PASSES[0]: _constant,
    PASSES[1]: lambda: False,
    "shardwise.runtime.graphs.job.publish": _twice,
}
"""All nodes are assigned to the last operator; nothing is marked; updated shards are gathered twice."""


@pytest.mark.parametrize("mutant", PASSES)
def test_mutants_that_omit_passes_are_caught(team: WorkerPool, mutant: str) -> None:
    plan = without_recomputation(next(sampled(CHAIN, (2,), [0])))
    (spans,) = team.run(2, traced_steps, [plan], mutant)[0]
    assert not is_whole(spans, CHAIN, 0, 5, 1)


def test_recomputed_operators_are_distinguished_in_the_trace(team: WorkerPool) -> None:
    """Each operator of a recomputed block runs once more, within the backward pass of its block."""
    found = 0
    for plan in sampled(CHAIN, (2,), range(4)):
        again = [
            operator_label(label, op.name)
            for label, block_layout, block in zip(
                block_labels(CHAIN), plan.operators.blocks,
                [block for block in CHAIN.blocks for _ in range(block.repeat)], strict=True,
            )
            if block_layout.mode == "recomputed"
            for op in block.operators
        ]  # fmt: skip
        (spans,) = team.run(2, traced_steps, [plan], None)[0]
        reported = names(spans, OPERATORS, "R0 ")
        assert set(reported) <= set(again) and len(reported) == len(set(reported))
        found += len(reported)
        for span in spans:
            if span.name.startswith("R0 "):
                block = span.name[3:].partition("/")[0]
                (whole,) = [s for s in spans if s.track == BLOCKS and s.name == f"B0 {block}"]
                assert whole.start_s <= span.start_s and span.finish_s <= whole.finish_s
    assert found


KINDS = {"all_gather": "pass", "reduce_scatter": "all_reduce", "broadcast": "broadcast"}


def by_kind(spans: Sequence[Span]) -> Counter[str]:
    """The number of collectives of each kind on a rank, in the cost model's kinds: over gloo a reduce-scatter
    is an all-reduce."""
    return Counter(
        KINDS.get(span.name, span.name)
        for span in spans
        if span.track == COMMUNICATION and span.name in (*KINDS, "all_reduce", "all_to_all", "send")
    )


def predicted_by_kind(times: Times) -> Counter[str]:
    found: Counter[str] = Counter()
    for (kind, _), count in times.items():
        found[kind] += count
    return found


def is_as_predicted(spans: Sequence[Span], plan: Plan) -> bool:
    """Whether collectives are as many as predicted, with one more all-reduce for the norm, and one for the
    reported loss where that is a sum over ranks."""
    found, reported = by_kind(spans), predicted_by_kind(predicted(plan))
    extra_reduces = found.pop("all_reduce", 0) - reported.pop("all_reduce", 0)
    return extra_reduces in (1, 2) and +found == +reported


def test_the_number_of_collectives_is_as_predicted(team: WorkerPool) -> None:
    plans = list(map(without_recomputation, sampled(CHAIN, (2,), range(4))))
    right = team.run(2, traced_steps, plans, None)[0]
    assert all(is_as_predicted(spans, plan) for spans, plan in zip(right, plans, strict=True))
    twice = team.run(2, traced_steps, plans, "shardwise.runtime.graphs.job.publish")[0]
    assert not all(is_as_predicted(spans, plan) for spans, plan in zip(twice, plans, strict=True))


def test_the_number_of_messages_between_stages_is_as_predicted(team: WorkerPool) -> None:
    plan = without_recomputation(next(sampled_in_stages(CHAIN, (1,), (2,), MICROBATCHES, [0])))
    for estimated_kinds, (spans,) in zip(
        predicted_in_stages(plan), team.run(2, traced_steps, [plan], None), strict=True
    ):
        assert by_kind(spans)["send"] == predicted_by_kind(estimated_kinds)["send"] == MICROBATCHES


def test_traffic_is_labelled_by_its_kind(team: WorkerPool) -> None:
    """Columns then rows: the logits are partial sums, which are redistributed for the loss. Gradients of
    whole weights are not summed there; those of a sharded batch are."""
    graph = CHAIN
    columns = plan_with(graph, (2,), by_rules(graph, (2,), lambda op: ("split f", "split g", "split v")))
    data = plan_with(graph, (2,), by_rules(graph, (2,), lambda op: ("split b",)))
    by_columns, by_data = team.run(2, traced_steps, [columns, data], None)[0]
    assert "conversions" in names(by_columns, TRAFFIC, "")
    assert "conversions" not in names(by_data, TRAFFIC, "")
    (sums,) = [span for span in by_data if span.name == "0REDUCE_GRAD"]
    summed = [s for s in by_data if s.name == "all_reduce" and sums.start_s <= s.start_s <= sums.finish_s]
    assert len(summed) == 4  # one for each block with parameters


def test_nodes_belong_to_the_operator_that_made_them() -> None:
    """By hand: two operators, of which the second makes no node itself. The root belongs to the last
    operator, whatever its number."""
    events = [
        ProfiledEvent("PP:0F0", 0.0, 10.0),
        ProfiledEvent("BLOCK:a", 0.5, 9.5),
        ProfiledEvent("OP:a/x", 1.0, 3.0),
        ProfiledEvent("mm", 1.5, 2.0, 40),
        ProfiledEvent("add", 2.0, 2.5, 41),
        ProfiledEvent("OP:a/y", 4.0, 6.0),
        ProfiledEvent("mul", 4.5, 5.0, 42),
        ProfiledEvent("PP:0B0", 10.0, 20.0),
        ProfiledEvent("GraphRoot", 10.0, 10.5, 99, True),
        ProfiledEvent("MulBackward0", 11.0, 12.0, 42, True),
        ProfiledEvent("mul", 11.2, 11.8, 99),
        ProfiledEvent("AddBackward0", 12.5, 13.0, 41, True),
        ProfiledEvent("MmBackward0", 13.0, 15.0, 40, True),
        ProfiledEvent("AccumulateGrad", 15.0, 15.5, -1, True),
    ]
    found = {(span.track, span.name): (span.start_s, span.finish_s) for span in operator_spans(3, events)}
    assert found == {
        (OPERATORS, "F0 a/x"): (1.0, 3.0), (OPERATORS, "F0 a/y"): (4.0, 6.0), (BLOCKS, "F0 a"): (0.5, 9.5),
        (OPERATORS, "B0 a/y"): (10.0, 12.5), (OPERATORS, "B0 a/x"): (12.5, 15.0),
        (BLOCKS, "B0 a"): (10.0, 15.0),
    }  # fmt: skip
    assert operator_spans(0, [event for event in events if not event.name.startswith("OP:")]) == [
        Span(0, BLOCKS, "F0 a", 0.5, 9.5)
    ]


def test_marks_are_made_where_a_profile_is_taken_alone() -> None:
    assert not isinstance(profiled_range(OPERATOR, "x"), record_function)
    with profile(activities=[ProfilerActivity.CPU]):
        assert isinstance(profiled_range(OPERATOR, "x"), record_function)
    assert not isinstance(profiled_range(OPERATOR, "x"), record_function)


def test_the_documented_command_lines_work(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Trains with a trace, then compares: every operator is there, forward and backward, and parts sum to the
    step."""
    path, measured = str(tmp_path / "p.yaml"), str(tmp_path / "m.json")
    write_plan(path, estimated(without_recomputation(next(sampled(CHAIN, (2,), [1])))))
    assert main(["train", path, "--steps", "3", "--trace", measured]) == 0
    trace = read_trace(measured)
    assert trace.ranks == [0, 1] and trace.plan_hash is not None
    capsys.readouterr()
    assert main(["compare", path, measured]) == 0
    shown = capsys.readouterr().out
    assert "every rank ran its actions as planned" in shown and "gradient reduction" in shown
    assert main(["compare", path, measured, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    (parts,) = document["parts"]
    assert sum(parts["measured"].values()) == pytest.approx(document["measured_s"])
    measured_of = {
        (each["block"], each["operator"], each["direction"]): each["measured_s"]
        for each in document["operators"]
    }
    for block in CHAIN.blocks:
        for op in block.operators:
            assert measured_of[block.name, op.name, "forward"] > 0.0
            assert measured_of[block.name, op.name, "backward"] > 0.0
    other = str(tmp_path / "other.yaml")
    write_plan(other, estimated(without_recomputation(next(sampled(CHAIN, (2,), [2])))))
    assert main(["compare", other, measured]) == 2
    assert "plan_hash: is a trace of another plan" in capsys.readouterr().err


def test_traces_are_refused_on_accelerators(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Traces read the host's threads. The refusal comes before anything starts, and nothing is written."""
    plan = plan_with(CHAIN, (2,), by_rules(CHAIN, (2,), lambda op: ("split b",)))
    cluster = load_cluster("1x2xH100-SXM")
    path, trace = str(tmp_path / "p.yaml"), tmp_path / "t.json"
    write_plan(path, estimated(replace(plan, cluster=cluster)))
    assert main(["train", path, "--trace", str(trace)]) == 2
    assert "--trace: is not supported on accelerators" in capsys.readouterr().err
    assert not trace.exists()
