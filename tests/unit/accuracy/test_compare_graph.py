"""A measured step of an operator graph compared with its plan: parts by hand, parts that sum, operators."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.property.layout_instances import chain
from tests.runtime.graph_plans import estimated, sampled, sampled_in_stages, without_recomputation
from tests.unit.search.test_search_graph_timeline import estimates_of, with_overlap

from shardwise.accuracy import PARTS, Comparison, OperatorComparison, compare
from shardwise.accuracy.stage_breakdown import measured_parts, measured_passes, predicted_parts
from shardwise.errors import ConfigError
from shardwise.plans import Plan, plan_hash
from shardwise.search import pipeline_trace, plan_timelines
from shardwise.sim import COMMUNICATION, COMPUTE, DATA_PARALLEL, OPERATORS, TRAFFIC, Span, Trace

CHAIN = chain(16, 8, 16, 4)


def span(track: str, name: str, start_s: float, finish_s: float) -> Span:
    return Span(0, track, name, start_s, finish_s)


STEP = (
    span(COMPUTE, "0F0", 1.0, 5.0),
    span(OPERATORS, "F0 a/up", 1.0, 3.0),
    span(TRAFFIC, "conversions", 1.0, 1.25),
    span(COMMUNICATION, "all_gather", 1.1, 1.2),
    span(OPERATORS, "F0 b/loss", 3.0, 5.0),
    span(TRAFFIC, "exchanges", 4.0, 4.5),
    span(COMPUTE, "0B0", 5.0, 11.0),
    span(OPERATORS, "B0 b/loss", 5.0, 6.0),
    span(OPERATORS, "B0 a/up", 6.0, 11.0),
    span(OPERATORS, "R0 a/up", 6.5, 8.5),  # recomputed, within the pass that needs it
    span(TRAFFIC, "conversions", 6.5, 7.0),  # has its own traffic
    span(TRAFFIC, "gradients", 10.0, 10.75),
    span(COMMUNICATION, "0REDUCE_GRAD", 11.0, 12.0),
    span(TRAFFIC, "gradients", 11.25, 11.5),  # in the sum already
    span(COMPUTE, "norm", 12.0, 12.5),
    span(COMPUTE, "optimizer", 13.0, 15.0),
    span(TRAFFIC, "gathers", 14.0, 14.5),
)
"""One rank in a step from 0 to 16."""

BY_HAND = {
    "forward": 3.25,  # 4.0 - 0.25 - 0.5
    "backward": 3.25,  # 6.0 - 2.0 of recomputation - 0.75 of gradients
    "recomputation": 2.0,
    "exchanges": 0.5,
    "conversions": 0.25,
    "gathers": 0.5,
    "gradients": 1.75,  # 0.75 + 1.0
    "optimizer": 2.0,  # 0.5 + 2.0 - 0.5
    "rest": 2.5,  # 0 to 1, 12.5 to 13, 15 to 16
}


def test_the_parts_of_a_step_by_hand() -> None:
    parts = measured_parts(STEP, start_s=0.0, finish_s=16.0)
    assert parts == pytest.approx(BY_HAND)
    assert sum(parts.values()) == pytest.approx(16.0)
    assert tuple(parts) == PARTS


def test_waiting_for_an_input_does_not_count_as_computation() -> None:
    """The input arrives at 2.5: 1.5 s of the first pass are waiting, and 3.25 - 1.5 computing."""
    late = (span(COMMUNICATION, "0RECV_F0", 0.5, 0.75), span(COMMUNICATION, "recv", 0.6, 2.5))
    shifted = [replace(each, start_s=2.5, finish_s=2.75) if each == STEP[2] else each for each in STEP]
    parts = measured_parts([*shifted, *late], start_s=0.0, finish_s=16.0)
    assert parts["forward"] == pytest.approx(1.75) and parts["rest"] == pytest.approx(4.0)
    assert sum(parts.values()) == pytest.approx(16.0)


def test_recomputed_operators_count_as_their_own() -> None:
    """The mutant leaves recomputation in the pass around it, and charges the loss for another operator."""
    other = [replace(each, name="R0 b/loss") if each.name == "R0 a/up" else each for each in STEP]
    assert measured_passes(STEP) == pytest.approx({
        ("forward", "a/up"): 2.0, ("forward", "b/loss"): 2.0,
        ("backward", "a/up"): 5.0, ("backward", "b/loss"): 1.0,
    })  # fmt: skip
    assert measured_passes(other)[("backward", "b/loss")] == pytest.approx(3.0)
    assert measured_passes(other)[("backward", "a/up")] == pytest.approx(3.0)


def measured_like(plan: Plan, *, slower: float = 1.0) -> Trace:
    """The trace that all ranks of the plan leave if it runs as predicted, `slower` times as long."""
    timeline = pipeline_trace(plan, plan_timelines(plan)[0])
    devices = plan.mesh.devices
    spans = [
        replace(one, rank=rank, start_s=7.0 + slower * one.start_s, finish_s=7.0 + slower * one.finish_s)
        for one in timeline.spans
        if one.track != DATA_PARALLEL
        for rank in range(one.rank * devices, (one.rank + 1) * devices)
    ]
    spans += [
        Span(rank, COMPUTE, "host", 7.0, 7.0 + slower * plan.step_time_s) for rank in range(plan.devices)
    ]
    return Trace(spans=tuple(spans), plan_hash=plan_hash(plan))


def whole_plans() -> list[Plan]:
    return [estimated(without_recomputation(plan)) for plan in sampled(CHAIN, (2,), range(5))]


def staged_plans() -> list[Plan]:
    """Three stages; half of each message overlaps with other work."""
    plans = map(without_recomputation, sampled_in_stages(CHAIN, (2,), (1, 3), 4, range(3)))
    return [estimated(with_overlap(plan, 0.5)) for plan in plans]


def test_predicted_parts_are_the_plans_breakdown_and_sum_to_the_step() -> None:
    """Also with recomputed blocks."""
    for plan in [*(estimated(plan) for plan in sampled(CHAIN, (2,), range(6))), *staged_plans()]:
        found = estimates_of(plan)
        for price in found:
            parts = predicted_parts(price, plan.step_time_s)
            assert sum(parts.values()) == pytest.approx(plan.step_time_s, rel=1e-9)
        seconds = plan.breakdown
        busy = max(found, key=lambda price: price.time_s)
        parts = predicted_parts(busy, plan.step_time_s)
        for part in PARTS[:-2]:
            assert parts[part] == pytest.approx(seconds.get(part, 0.0), rel=1e-9)
        assert parts["optimizer"] == pytest.approx(seconds["optimizer"] + seconds["norm"], rel=1e-9)
        rest_s = seconds["host"] + seconds.get("sends", 0.0) + seconds.get("waiting", 0.0)
        assert parts["rest"] == pytest.approx(rest_s, rel=1e-9, abs=1e-9 * plan.step_time_s)


def parts_of(found: Comparison) -> OperatorComparison:
    """The parts and operators of a comparison."""
    assert found.operators is not None
    return found.operators


def test_overlapped_gradient_reduction_is_reported_and_counts_in_no_part() -> None:
    """Software without overlap exposes the whole reduction: the difference is the overlapped part."""
    (plan,) = [plan for plan in whole_plans() if estimates_of(plan)[0].hidden_s > 0.0][:1]
    found = compare(plan, measured_like(plan))
    none = replace(plan.job.profile, data_overlap=0.0, shard_overlap=0.0)
    shown = estimated(replace(plan, job=replace(plan.job, profile=none)))
    assert parts_of(compare(shown, measured_like(shown))).hidden_s == (0.0,)
    sums = estimates_of(plan)[0].charges[-1].seconds + parts_of(found).hidden_s[0]
    assert estimates_of(shown)[0].charges[-1].seconds == pytest.approx(sums, rel=1e-9)


@pytest.mark.parametrize("slower", [1.0, 2.5])
def test_a_step_as_predicted_has_no_difference(slower: float) -> None:
    for plan in [*whole_plans(), *staged_plans()]:
        found = compare(plan, measured_like(plan, slower=slower))
        assert found.error == pytest.approx(1 / slower - 1) and found.order_violation is None
        assert [each.step_s for each in found.predicted] == pytest.approx([plan.step_time_s] * plan.stages)
        small = 1e-9 * plan.step_time_s
        for expected, seen in zip(
            parts_of(found).predicted_parts, parts_of(found).measured_parts, strict=True
        ):
            sends = plan.breakdown.get("sends", 0.0)
            for part in PARTS:
                # The time for which a send occupies a rank is part of its actions, and belongs to no
                # operator.
                slack = slower * sends if part in ("forward", "backward", "rest") else 0.0
                assert seen[part] == pytest.approx(slower * expected[part], rel=1e-6, abs=small + slack)
        for each in parts_of(found).operators:
            assert each.measured_s == pytest.approx(slower * each.predicted_s, abs=small)
        assert {each.operator for each in parts_of(found).operators} == {
            op.name for block in CHAIN.blocks for op in block.operators
        }


def test_the_slowest_operator_is_listed_first() -> None:
    """The loss's forward pass takes a second more than predicted."""
    plan = whole_plans()[0]
    trace = measured_like(plan)
    longer = [
        replace(one, finish_s=one.finish_s + 1.0) if one.name == "F0 head/loss" else one
        for one in trace.spans
    ]
    found = compare(plan, replace(trace, spans=tuple(longer)))
    first = parts_of(found).operators[0]
    assert (first.block, first.operator, first.direction) == ("head", "loss", "forward")
    assert first.difference_s == pytest.approx(1.0)


def test_repetitions_of_a_block_count_together_on_each_stage() -> None:
    (plan,) = staged_plans()[:1]  # cut before blocks 1 and 3: the two middle blocks are one stage
    found = compare(plan, measured_like(plan))
    mix = [
        each for each in parts_of(found).operators if each.operator == "mix" and each.direction == "forward"
    ]
    assert [(each.stage, each.repetitions) for each in mix] == [(1, 2)]


def test_a_rank_that_violates_the_order_is_reported() -> None:
    plan = staged_plans()[0]
    trace = measured_like(plan)
    names = {"2B0": "2F1", "2F1": "2B0"}
    swapped = [
        replace(one, name=names.get(one.name, one.name)) if one.rank == 5 else one for one in trace.spans
    ]
    found = compare(plan, replace(trace, spans=tuple(swapped)))
    assert found.order_violation == "rank 5 ran 2F1 as action 2, where the plan has 2B0"


def test_the_trace_of_another_plan_is_refused() -> None:
    plan, other, *_ = whole_plans()
    with pytest.raises(ConfigError, match=r"plan_hash: is a trace of another plan"):
        compare(plan, measured_like(other))
    fewer = tuple(one for one in measured_like(plan).spans if one.rank == 0)
    with pytest.raises(ConfigError, match="its ranks differ"):
        compare(plan, Trace(spans=fewer))


def test_both_timelines_are_in_one_trace() -> None:
    plan = staged_plans()[0]
    found = compare(plan, measured_like(plan))
    names = [found.both.name_of(rank) for rank in found.both.ranks]
    assert names[:4] == ["predicted: stage 0", "measured: rank 0", "measured: rank 1", "predicted: stage 1"]
    assert {one.track for one in found.both.spans if one.rank == 0} >= {COMPUTE, OPERATORS}
