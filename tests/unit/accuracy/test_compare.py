"""A measured step compared with its plan: parts that sum to the step, arithmetic by hand, traces of other
plans.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from tests.runtime.plans import make_plan
from tests.runtime.uneven_plans import make_uneven

from shardwise import search
from shardwise.accuracy import StageBreakdown, compare
from shardwise.accuracy import stage_breakdown as stage_breakdown_module
from shardwise.accuracy.stage_breakdown import stage_breakdown
from shardwise.errors import ConfigError
from shardwise.plans import Plan, plan_hash
from shardwise.schedule import generate
from shardwise.search.hetero import predict_record
from shardwise.sim import COMMUNICATION, COMPUTE, DATA_PARALLEL, Span, Trace, simulate, task_graph, trace_of

PIPELINE = "tp=2,pp=2,micro_batch_size=4"


def compute(name: str, start_s: float, finish_s: float) -> Span:
    return Span(0, COMPUTE, name, start_s, finish_s)


def communicate(name: str, start_s: float, finish_s: float) -> Span:
    return Span(0, COMMUNICATION, name, start_s, finish_s)


STEP = (
    communicate("1RECV_F0", 1.0, 1.1),
    communicate("recv", 1.05, 3.0),
    compute("1F0", 1.2, 5.0),  # waits to 3.0, works for 2.0
    communicate("1RECV_F1", 5.0, 5.1),
    communicate("recv", 5.05, 9.5),
    communicate("all_reduce", 5.5, 6.5),
    communicate("all_gather", 6.0, 7.0),
    compute("1B0", 5.2, 9.0),  # its input is there: works for 3.8, whatever is in transit
    compute("1F1", 9.0, 11.0),  # waits to 9.5, works for 1.5
    compute("1I1", 11.0, 12.0),
    compute("1W1", 12.0, 12.5),
    communicate("1SEND_B1", 12.0, 12.1),
    communicate("send", 12.0, 40.0),
    communicate("to host", 4.0, 4.5),
    communicate("to host", 4.4, 4.7),
    communicate("from host", 7.0, 7.2),
    compute("optimizer", 13.0, 13.25),
    communicate("to host", 13.0, 13.1),
)
"""One rank of the last stage, in a step from 0.5 to 14."""


def test_the_parts_of_a_step_by_hand() -> None:
    times = stage_breakdown(STEP, start_s=0.5, finish_s=14.0)
    assert times.forward_s == pytest.approx(3.5)  # 2.0 + 1.5
    assert times.backward_s == pytest.approx(5.3)  # 3.8 + 1.0 + 0.5
    assert times.waiting_s == pytest.approx(3.2)  # 12.5 - 0.5 - 3.5 - 5.3
    assert times.after_s == pytest.approx(1.5)  # 14.0 - 12.5
    assert times.collectives_s == pytest.approx(1.5)  # 5.5 to 7.0
    assert times.copies_s == pytest.approx(0.9)  # 4.0 to 4.7, 7.0 to 7.2; those of the optimizer are its own
    assert times.optimizer_s == pytest.approx(0.25)
    assert times.step_s == pytest.approx(13.5)
    # Collectives 5.5 to 7.0; copies 4.0 to 4.7, 7.0 to 7.2 and 13.0 to 13.1.
    assert times.communication_s == pytest.approx(2.5)
    # 0.5 to 3.0, 5.0 to 5.2, 9.0 to 9.5, 12.5 to 13.0, 13.25 to 14.0.
    assert times.idle_s == pytest.approx(4.45)


def test_a_transfer_during_an_independent_action_does_not_count_as_waiting() -> None:
    """The mutant counts every transfer as waiting, and leaves the backward pass none of its 3.8 s."""
    later = [replace(s, name="1RECV_F7") if s.name == "1RECV_F1" else s for s in STEP]
    times = stage_breakdown(later, start_s=0.5, finish_s=14.0)
    assert times.backward_s == pytest.approx(5.3)
    assert times.forward_s == pytest.approx(4.0)  # 1F1 no longer waits


def measured_like(plan: Plan, *, slower: float = 1.0) -> Trace:
    """The trace that all ranks of the plan leave if it runs as simulated, `slower` times as long."""
    (only,) = search.plan_timelines(plan)
    timeline = trace_of(only.timeline)
    end_s = plan.best.step_time_s
    spans: list[Span] = []
    for stage, ranks in enumerate(((0, 1), (2, 3))):
        own = [span for span in timeline.spans if span.rank == stage and span.track == COMPUTE]
        for rank in ranks:
            spans += [
                Span(rank, COMPUTE, span.name, slower * span.start_s + 7.0, slower * span.finish_s + 7.0)
                for span in own
            ]
            spans.append(Span(rank, COMPUTE, "optimizer", slower * end_s * 0.99 + 7.0, slower * end_s + 7.0))
    return Trace(spans=tuple(spans), plan_hash=plan_hash(plan))


def sums(times: Sequence[StageBreakdown]) -> list[float]:
    return [each.step_s for each in times]


def measured_unevenly(plan: Plan, *, slower: float = 1.0) -> Trace:
    """As `measured_like`, for all pipelines of an uneven plan."""
    found = predict_record(plan.model, plan.cluster, plan.job, plan.best)
    spans: list[Span] = []
    for pipeline, count, times in zip(
        plan.best.layout.pipelines, plan.best.microbatches, found.pipelines, strict=True
    ):
        schedule = generate("1f1b", pp=len(pipeline.stages), microbatches=count, vpp=1)
        timeline = trace_of(simulate(task_graph(schedule, times.durations)))
        for place, stage in enumerate(pipeline.stages):
            own = [span for span in timeline.spans if span.rank == place and span.track == COMPUTE]
            end_s = plan.best.step_time_s
            own.append(Span(place, COMPUTE, "optimizer", end_s * 0.999, end_s))
            own.append(Span(place, COMMUNICATION, "all_gather", 0.0, 0.0))
            spans += [
                replace(span, rank=rank, start_s=slower * span.start_s, finish_s=slower * span.finish_s)
                for rank in stage.rank_numbers
                for span in own
            ]
    return Trace(spans=tuple(spans), plan_hash=plan_hash(plan))


def test_an_uneven_step_as_planned_has_no_difference() -> None:
    """Two stages of two ranks and one stage of one rank; 5 and 3 micro-batches."""
    plan = make_uneven("5 tp2l1 l3 + 3 l4")
    found = compare(plan, measured_unevenly(plan, slower=2.0))
    assert found.places == ((0, 0), (0, 1), (1, 0))
    assert found.error == pytest.approx(-0.5)
    assert found.order_violation is None
    assert sums(found.predicted) == pytest.approx([plan.best.step_time_s] * 3)
    for expected, seen in zip(found.predicted, found.measured, strict=True):
        for part in ("forward_s", "backward_s", "waiting_s", "after_s"):
            assert getattr(seen, part) == pytest.approx(2.0 * getattr(expected, part), abs=1e-9)
    # Five micro-batches on one pipeline, three on the other, which has all layers.
    assert found.predicted[2].forward_s > found.predicted[0].forward_s
    assert [found.both.name_of(rank) for rank in found.both.ranks] == [
        "predicted: pipeline 0, stage 0", "measured: rank 0", "measured: rank 1",
        "predicted: pipeline 0, stage 1", "measured: rank 2",
        "predicted: pipeline 1, stage 0", "measured: rank 3",
    ]  # fmt: skip
    swapped = renamed(measured_unevenly(plan), 2, {"1B0": "1F1", "1F1": "1B0"})
    assert compare(plan, swapped).order_violation == "rank 2 ran 1F1 as action 2, where the plan has 1B0"
    with pytest.raises(ConfigError, match="its ranks differ"):
        compare(plan, Trace(spans=tuple(s for s in measured_unevenly(plan).spans if s.rank < 3)))


def measured_in_full(plan: Plan) -> Trace:
    """The trace that the critical stage leaves if the plan runs as simulated, with its gathers and reductions
    and the end of the step; the other ranks leave their actions."""
    (only,) = search.plan_timelines(plan)
    parts, spans = plan.step_parts, list[Span]()
    last_s, step_s = only.timeline.makespan_s, plan.step_time_s
    once_s = sum(parts.communication[name].exposed_s for name in ("tied_weights", "gradient_norm"))
    for stage, ranks in enumerate(only.ranks):
        own = [span for span in trace_of(only.timeline).spans if span.rank == stage]
        for rank in ranks:
            spans += [Span(rank, COMPUTE, s.name, s.start_s, s.finish_s) for s in own if s.track == COMPUTE]
            if stage == parts.stage:
                spans += [
                    Span(rank, COMMUNICATION, "all_gather", s.start_s, s.finish_s)
                    for s in own
                    if s.track == DATA_PARALLEL
                ]
                spans.append(Span(rank, COMMUNICATION, "all_reduce", last_s, last_s + once_s))
                ended_s = step_s - plan.job.profile.host_step_s
                spans.append(Span(rank, COMPUTE, "optimizer", last_s + once_s, ended_s))
            spans.append(Span(rank, COMMUNICATION, "recv", 0.0, step_s))
    return Trace(spans=tuple(spans), plan_hash=plan_hash(plan))


def overlapping(text: str) -> Plan:
    """The plan of a strategy on software that overlaps all messages between stages."""
    base = make_plan(text)
    profile = replace(base.job.profile, pipeline_overlap=1.0, dispatch_s=0.0, host_action_s=0.0)
    return search.plan_of_strategy(
        base.model, base.cluster, replace(base.job, profile=profile), base.strategy
    )


def check_idle(plan: Plan) -> None:
    found = compare(plan, measured_in_full(plan))
    predicted, measured = found.predicted[found.critical], found.measured[found.critical]
    assert measured.idle_s == pytest.approx(predicted.idle_s, rel=1e-6)


@pytest.mark.parametrize(
    "text", ["tp=2,pp=2,micro_batch_size=1", "dp=2,pp=2,zero_stage=1,micro_batch_size=1"]
)
def test_parts_of_the_critical_rank_are_measured_as_planned(text: str) -> None:
    plan = overlapping(text)
    check_idle(plan)
    found = compare(plan, measured_in_full(plan))
    predicted, parts = found.predicted[found.critical], plan.step_parts
    assert found.places[found.critical] == (parts.pipeline, parts.stage)
    # Messages between stages are not measured.
    all_s = parts.communication_s - parts.communication["pipeline"].total_s
    assert predicted.communication_s == pytest.approx(all_s)
    others = [one for place, one in enumerate(found.predicted) if place != found.critical]
    assert others and all(one.communication_s is None and one.idle_s is None for one in others)


def test_a_mutant_that_measures_messages_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stage_breakdown_module, "_TRANSFERS", frozenset())
    with pytest.raises(AssertionError):
        check_idle(overlapping("tp=2,pp=2,micro_batch_size=1"))


@pytest.mark.parametrize("slower", [1.0, 2.5])
def test_a_step_as_planned_has_no_difference(slower: float) -> None:
    plan = make_plan(PIPELINE)
    found = compare(plan, measured_like(plan, slower=slower))
    assert found.measured_s == pytest.approx(slower * found.predicted_s)
    assert found.error == pytest.approx(1 / slower - 1)
    assert sums(found.predicted) == pytest.approx([plan.best.step_time_s] * 2)
    assert sums(found.measured) == pytest.approx([slower * plan.best.step_time_s] * 2)
    for expected, seen in zip(found.predicted, found.measured, strict=True):
        for part in ("forward_s", "backward_s", "waiting_s", "after_s"):
            assert getattr(seen, part) == pytest.approx(slower * getattr(expected, part), abs=1e-12)
    assert found.order_violation is None


def test_measured_offload_is_compared_with_the_prediction() -> None:
    plan = make_plan("tp=2,pp=2,micro_batch_size=4,offload=activations")
    copied = [replace(communicate("to host", 7.0, 7.5), rank=rank) for rank in range(4)]
    trace = measured_like(plan)
    found = compare(plan, replace(trace, spans=(*trace.spans, *copied)))
    assert found.predicted_copies_s == plan.best.breakdown["offload"] and found.predicted_copies_s > 0.0
    assert [one.copies_s for one in found.measured] == pytest.approx([0.5, 0.5])
    assert [one.copies_s for one in found.predicted] == [None, None]
    assert compare(make_plan(PIPELINE), measured_like(make_plan(PIPELINE))).predicted_copies_s == 0.0


def test_both_timelines_are_in_one_trace_from_instant_0() -> None:
    plan = make_plan(PIPELINE)
    found = compare(plan, measured_like(plan))
    names = [found.both.name_of(rank) for rank in found.both.ranks]
    assert names == [
        "predicted: stage 0", "measured: rank 0", "measured: rank 1",
        "predicted: stage 1", "measured: rank 2", "measured: rank 3",
    ]  # fmt: skip
    starts = {rank: min(s.start_s for s in found.both.spans if s.rank == rank) for rank in (0, 1)}
    assert starts == pytest.approx({0: 0.0, 1: 0.0})


def renamed(trace: Trace, rank: int, names: dict[str, str]) -> Trace:
    spans = (replace(s, name=names.get(s.name, s.name)) if s.rank == rank else s for s in trace.spans)
    return replace(trace, spans=tuple(spans))


def test_a_rank_that_violates_the_order_is_reported() -> None:
    plan = make_plan(PIPELINE)
    swapped = renamed(measured_like(plan), 3, {"1B0": "1F1", "1F1": "1B0"})
    found = compare(plan, swapped)
    assert found.order_violation == "rank 3 ran 1F1 as action 2, where the plan has 1B0"


@pytest.mark.parametrize(
    ("broken", "words"),
    [
        (lambda trace: renamed(trace, 2, {"1F0": "1F5"}), "rank 2: 1F0, 1F5"),
        (lambda trace: renamed(trace, 2, {"1F0": "1F1"}), "rank 2: 1F0"),
        (lambda trace: Trace(spans=tuple(s for s in trace.spans if s.rank < 3)), "3 ranks"),
        (lambda trace: Trace(spans=tuple(s for s in trace.spans if s.name != "0B1")), "rank 0: 0B1"),
    ],
)
def test_a_trace_of_another_plan_is_refused(broken: object, words: str) -> None:
    plan = make_plan(PIPELINE)
    with pytest.raises(ConfigError, match="is a trace of another plan") as caught:
        compare(plan, broken(measured_like(plan)))  # type: ignore[operator]
    assert words in str(caught.value)


def test_the_trace_of_a_plan_with_the_same_actions_is_refused() -> None:
    """Stages of two and two ranks in both: ranks and actions do not distinguish the plans."""
    plan, other = make_plan(PIPELINE), make_plan("dp=2,pp=2,micro_batch_size=2")
    trace = measured_like(other)
    with pytest.raises(ConfigError, match=f"plan_hash: is a trace of another plan.*found {plan_hash(other)}"):
        compare(plan, trace)
    assert compare(plan, replace(trace, plan_hash=None)).order_violation is None


def test_an_idle_rank_has_no_actions() -> None:
    plan = make_uneven("5 tp2l1 l3 + 3 l4", devices=6)
    trace = measured_unevenly(plan)
    waits = replace(communicate("all_reduce", 0.0, 2.0 * plan.best.step_time_s), rank=4)
    found = compare(plan, replace(trace, spans=(*trace.spans, waits)))
    assert found.measured_s == pytest.approx(plan.best.step_time_s)
    assert found.places == ((0, 0), (0, 1), (1, 0))
    works = replace(compute("0F0", 0.0, 1.0), rank=4)
    with pytest.raises(ConfigError, match="found 5 ranks with actions; allowed: the plan's 4"):
        compare(plan, replace(trace, spans=(*trace.spans, works)))
    unknown = replace(waits, rank=6)
    with pytest.raises(ConfigError, match="its ranks differ"):
        compare(plan, replace(trace, spans=(*trace.spans, unknown)))
