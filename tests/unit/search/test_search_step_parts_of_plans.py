"""Parts of a step of uneven plans and of operator graphs: they are those of the simulated timeline."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from tests.runtime.uneven_plans import make_uneven
from tests.unit.search.test_search_graph_timeline import staged_plans, whole_plans, with_overlap

import shardwise as sw
from shardwise.cost import bind, single_stage_traffic
from shardwise.errors import ConfigError
from shardwise.plans import Plan, StepParts
from shardwise.search import plan_timelines
from shardwise.search.hetero import predict_record
from shardwise.search.hetero import step_parts as uneven
from shardwise.search.step_parts import uniform_parts
from shardwise.sim import COMPUTE, DATA_PARALLEL
from shardwise.strategy import complete, parse_fields

TOLERANCE = 1e-9

OVERLAP = 0.5
"""Share of messages that software overlaps; the rest blocks at the end of an action."""


def alone_s(kinds: list[list[tuple[float, float]]]) -> list[float]:
    """Seconds that each kind of intervals covers and no kind before it, cut at every start and finish."""
    found = [0.0] * len(kinds)
    cuts = sorted({cut for one in kinds for interval in one for cut in interval})
    for start, finish in pairwise(cuts):
        middle = (start + finish) / 2.0
        covering = (
            place for place, one in enumerate(kinds) if any(first < middle < last for first, last in one)
        )
        place = next(covering, None)
        if place is not None:
            found[place] += finish - start
    return found


def check_timeline(plan: Plan) -> StepParts:
    """Of a plan whose messages block for (1 - OVERLAP) / OVERLAP times the time that they overlap."""
    parts = plan.step_parts
    found = plan_timelines(plan)[parts.pipeline]
    timeline, graph = found.timeline, found.timeline.graph
    actions, once, messages = [], [], []
    for task, name in enumerate(graph.names):
        start, finish = float(timeline.start_s[task]), float(timeline.finish_s[task])
        rank = graph.ranks[task]
        if graph.streams[task] == COMPUTE and rank == parts.stage:
            actions.append((start, finish))
        elif graph.streams[task] == DATA_PARALLEL and rank == parts.stage:
            once.append((start, finish))
        elif " to " in name and str(parts.stage) in name.split()[:3:2]:
            messages.append((start, finish))
    if found.estimates:  # its end is not in the timeline
        last = max(finish for _, finish in actions)
        once.append((last, last + found.estimates[parts.stage].end_s))
    blocked = [(start - (finish - start) * (1 - OVERLAP) / OVERLAP, start) for start, finish in messages]
    own = {start for start, _ in messages} & {finish for _, finish in actions}
    actions = [
        (start, next((first for first, last in blocked if last == finish and finish in own), finish))
        for start, finish in actions
    ]
    covered = alone_s([actions, once, [*messages, *blocked]])
    step_s, one = parts.step_time_s, parts.communication["pipeline"]
    assert one.exposed_s == pytest.approx(covered[2], abs=TOLERANCE * step_s)
    total_s = sum(finish - start for start, finish in (*messages, *blocked))
    assert one.total_s == pytest.approx(total_s, rel=TOLERANCE)
    passes_s = covered[0] - sum(
        each.exposed_s
        for name, each in parts.communication.items()
        if name in ("tensor", "context", "expert", "redistribution")
    )
    assert parts.computation_s + parts.host_s > passes_s - TOLERANCE * step_s
    if found.estimates:
        assert parts.bubble_s == pytest.approx(step_s - sum(covered), abs=TOLERANCE * step_s)
    else:  # the other stages may need longer for the end of the step
        assert parts.bubble_s >= timeline.makespan_s - sum(covered) - TOLERANCE * step_s
        assert parts.bubble_s <= timeline.makespan_s - sum(covered) + found.end_s
    return parts


UNEVEN = ("6 tp2l4+2 l2 l2", "5 l2 l1full l1+3 l4", "4 tp2l2 tp2l2+4 l1 l1 l1 l1")


@pytest.mark.parametrize("text", UNEVEN)
def test_uneven_plans_agree_with_their_timelines(text: str) -> None:
    plan = with_overlap(make_uneven(text), OVERLAP)
    parts = check_timeline(plan)
    predicted = predict_record(plan.model, plan.cluster, plan.job, plan.best)
    assert parts.step_time_s == pytest.approx(max(predicted.pipeline_s), rel=1e-12)
    assert predicted.pipeline_s[parts.pipeline] == max(predicted.pipeline_s)
    stage = plan.best.layout.pipelines[parts.pipeline].stages[parts.stage]
    assert parts.rank == stage.rank_numbers[0]
    for each in parts.communication.values():
        assert 0.0 <= each.hidden_s <= each.total_s


@pytest.mark.parametrize("text", ["4 tp2l4+4 tp2l4", "8 l4", "4 l2 l2+4 l2 l2"])
def test_an_even_uneven_plan_has_the_parts_of_the_strategy(text: str) -> None:
    """Pipelines of equal stages are data parallelism with ZeRO-1; tensor parallelism is that of sequences."""
    plan = make_uneven(text)
    plan = replace(plan, best=replace(plan.best, is_alike=True))
    stages, pipelines = plan.best.layout.pipelines[0].stages, len(plan.best.layout.pipelines)
    strategy = complete(
        parse_fields(f"tp={stages[0].tp},pp={len(stages)},dp={pipelines},zero_stage=1,micro_batch_size=1"),
        devices=plan.devices, layers=4, experts=None, global_batch_size=plan.job.global_batch_size,
    )  # fmt: skip
    own = uniform_parts(bind(plan.model, plan.cluster, plan.job), strategy)
    found = plan.step_parts
    assert found.computation_s == pytest.approx(own.computation_s, rel=TOLERANCE)
    assert found.slowdown_s == pytest.approx(own.slowdown_s, rel=TOLERANCE)
    assert found.host_s == pytest.approx(own.host_s, rel=TOLERANCE)
    for name, one in own.communication.items():
        each = found.communication[name]
        assert (each.total_s, each.hidden_s) == pytest.approx((one.total_s, one.hidden_s), rel=1e-6), name


def test_a_mutant_that_counts_exposed_communication_only_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def half(kinds: Any, shape: Any, way: int) -> dict[str, Any]:
        return {name: 0.5 * seconds for name, seconds in single_stage_traffic(kinds, shape, way).items()}

    monkeypatch.setattr(uneven, "single_stage_traffic", half)
    with pytest.raises(AssertionError):
        test_an_even_uneven_plan_has_the_parts_of_the_strategy("4 tp2l4+4 tp2l4")


def test_an_uneven_plan_of_another_cluster_is_refused() -> None:
    plan = make_uneven("8 l2 l2")
    other = replace(plan, best=replace(plan.best, layout=make_uneven("8 l2 l2 l2").best.layout))
    with pytest.raises(ConfigError, match="cluster"):
        sw.step_parts(other)


def test_graph_plans_agree_with_their_timelines() -> None:
    plans = [*whole_plans(), *staged_plans()]
    for plan in plans:
        parts = check_timeline(plan)
        assert parts.step_time_s == pytest.approx(plan.step_time_s, rel=1e-12)
        (found,) = plan_timelines(plan)
        estimate, one = found.estimates[parts.stage], parts.communication
        m, rows = plan.microbatches, estimate.seconds
        # A row of the breakdown is exposed, or slows computation down.
        gathers_s, gradients_s = one["parameter_gathering"].exposed_s, one["gradient_reduction"].exposed_s
        redistribution_s = rows.get("conversions", 0.0) + rows.get("exchanges", 0.0)
        assert one["redistribution"].exposed_s <= redistribution_s + TOLERANCE
        exposed_s = gathers_s + gradients_s + one["redistribution"].exposed_s
        rows_s = rows.get("gathers", 0.0) + rows["gradients"] + redistribution_s
        assert exposed_s <= rows_s + TOLERANCE
        assert exposed_s + parts.slowdown_s >= rows_s - TOLERANCE
        # What is hidden of the gradients during the last backward pass is known.
        assert one["gradient_reduction"].hidden_s >= estimate.hidden_s - TOLERANCE
        work_s = m * (estimate.forward_s + estimate.backward_s) + rows["optimizer"]
        blocked_s = rows.get("sends", 0.0)
        once_s = sum(
            each.seconds
            for each in estimate.charges
            if each.when == "step" and each.what in ("gathers", "gradients")
        )
        assert parts.computation_s == pytest.approx(work_s - blocked_s - exposed_s + once_s, rel=TOLERANCE)
    assert any(plan.step_parts.overlap_s > 0.0 for plan in plans[:3])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "cluster", "batch", "limits"),
    [
        ("opt-350m", "1x2xA100-40G+1x2xV100-16G", 64, {}),
        ("llama-2-7b", "1x2xA100-80G+1x4xA10G", 16, {"stage_dp": 2, "mixed_pool_stages": 2}),
    ],
    ids=("two pools", "mixed-pool stages"),
)
def test_unlike_devices(model: str, cluster: str, batch: int, limits: dict[str, Any]) -> None:
    found = sw.plan(
        model, cluster=cluster, seq_len=1024, global_batch_size=batch, dtype="fp16", target="any", **limits
    )
    assert found.kind == "uneven"
    plan = with_overlap(found, OVERLAP)
    parts = check_timeline(plan)
    assert found.step_parts.step_time_s == pytest.approx(found.step_time_s, rel=1e-9)
    stage = plan.best.layout.pipelines[parts.pipeline].stages[parts.stage]
    assert parts.rank in stage.rank_numbers
    assert parts.communication["pipeline"].total_s > 0.0 < parts.computation_s
