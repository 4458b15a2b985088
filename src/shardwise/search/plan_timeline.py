"""The timeline of one step of a plan, as the cost model predicts it (`plan_timelines`), and its trace.

Each pipeline is the table of its schedule with the durations of its stages, run by `sim`. Only the estimate
of a stage depends on the kind of plan.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from math import isclose

from shardwise.cost import Charge, LayoutEstimate, Training, bind, estimate_layout
from shardwise.errors import ConfigError, Infeasible
from shardwise.graph import OpGraph, StagedLayout, block_labels, operator_label
from shardwise.plans import Plan, PlanKind, Result, StepParts
from shardwise.schedule import Schedule
from shardwise.search.answer import evaluate, stage_activation_bytes, step_durations
from shardwise.search.graph_parts import graph_parts
from shardwise.search.graph_pipeline import estimate_pipeline
from shardwise.search.graph_result import graph_result
from shardwise.search.hetero.record_costs import RecordCostModel, predict_record, predicted_result
from shardwise.search.hetero.result import UNEVEN_EVALUATOR, UNEVEN_SCHEDULE
from shardwise.search.hetero.step_parts import uneven_parts
from shardwise.search.stage_memory import StageMemory, graph_memory, uneven_memory, uniform_memory
from shardwise.search.step_parts import uniform_parts
from shardwise.sim import (
    BLOCKS,
    COMPUTE,
    DATA_PARALLEL,
    OPERATORS,
    TRAFFIC,
    Arrow,
    Counter,
    Durations,
    Span,
    Timeline,
    Trace,
    activation_bytes,
    simulate,
    task_graph,
    trace_of,
)
from shardwise.strategy import MEMORY
from shardwise.ties import TIE

TRAFFIC_PARTS = ("gathers", "conversions", "exchanges", "gradients")
"""Parts of a breakdown in which tensors are redistributed (their JSON names), in the order in which an
operator has them."""

_END = ("gradients", "norm", "optimizer", "gathers", "host")
"""Parts after the last backward pass of a stage, in order."""

_ACTION = re.compile(r"\d+([FB])(\d+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineTimeline:
    """The actions of a step of one pipeline over time, a row per stage.

    `end_s` are the seconds after the last action (gradient norm, optimizer, host), and `ranks` the global
    ranks of each stage. A uniform strategy has the `activation_bytes` that each stage saves for a
    micro-batch; an operator graph has the `estimates` of its stages, which include the work after the last
    action."""

    schedule: Schedule
    timeline: Timeline
    end_s: float
    ranks: tuple[tuple[int, ...], ...]
    activation_bytes: tuple[float, ...] | None = None
    estimates: tuple[LayoutEstimate, ...] = ()


def plan_timelines(plan: Plan) -> tuple[PipelineTimeline, ...]:
    """One step of each pipeline of `plan`, estimated again.

    Raises ConfigError if the plan is not one of its cluster, or if this version estimates it otherwise.
    """
    stages_of = _estimator(plan).pipelines
    known: dict[tuple[int, int], Timeline] = {}
    found = []
    for pipeline, schedule, estimate in zip(
        plan.best.layout.pipelines, plan.schedules, stages_of(plan), strict=True
    ):
        key = id(estimate.durations), schedule.microbatches  # equal pipelines have one estimate
        if key not in known:
            known[key] = simulate(task_graph(schedule, estimate.durations))
        end_s = estimate.end_s
        found.append(
            PipelineTimeline(
                schedule=schedule,
                timeline=known[key],
                end_s=plan.step_time_s - known[key].makespan_s if end_s is None else end_s,
                ranks=tuple(stage.rank_numbers for stage in pipeline.stages),
                activation_bytes=estimate.activation_bytes,
                estimates=estimate.stages,
            )
        )
    return tuple(found)


@dataclass(frozen=True, slots=True)
class _Estimate:
    """The durations of the stages of a pipeline, the seconds after its last action (None: what is left of the
    step), and what `PipelineTimeline` says of the stages."""

    durations: Durations
    end_s: float | None = None
    activation_bytes: tuple[float, ...] | None = None
    stages: tuple[LayoutEstimate, ...] = ()


@dataclass(frozen=True, slots=True)
class _Estimator:
    """How plans of a kind are estimated: the stages of their pipelines, the whole result, the parts of a step
    on its critical rank, and the memory of their stages."""

    pipelines: Callable[[Plan], list[_Estimate]]
    result: Callable[[Plan], Result]
    parts: Callable[[Plan], StepParts]
    memory: Callable[[Plan], tuple[StageMemory, ...]]


def predicted_again(plan: Plan) -> Result:
    """The result of the plan's layout, predicted again. Raises ConfigError if the plan is not one of its
    cluster, Infeasible if it does not fit."""
    return _estimator(plan).result(plan)


def step_parts_of(plan: Plan) -> StepParts:
    """Computation, communication, overlap and idle time of a step of the plan, estimated again. Raises
    ConfigError if the plan is not one of its cluster."""
    return _estimator(plan).parts(plan)


def stage_memory_of(plan: Plan) -> tuple[StageMemory, ...]:
    """The memory of every stage of every pipeline of the plan, estimated again. Raises ConfigError if the
    plan is not one of its cluster."""
    return _estimator(plan).memory(plan)


def _uniform(plan: Plan) -> list[_Estimate]:
    schedule, durations = step_durations(plan.model, plan.cluster, plan.job, plan.strategy)
    if schedule != plan.schedule:
        raise ConfigError("is not the schedule of the strategy", key="schedule")
    nbytes = stage_activation_bytes(plan.model, plan.cluster, plan.job, plan.strategy)
    return [_Estimate(durations, activation_bytes=nbytes)]


def _uneven(plan: Plan) -> list[_Estimate]:
    found = predict_record(plan.model, plan.cluster, plan.job, plan.best)
    if found.faults:
        raise ConfigError("is not a plan of its cluster", key="best", found="; ".join(found.faults[:3]))
    return [_Estimate(times.durations, times.end_s) for times in found.pipelines]


def _graph(plan: Plan) -> list[_Estimate]:
    given = (plan.graph, plan.cluster, _training(plan), plan.mesh)
    layout = plan.operators
    stages: tuple[LayoutEstimate, ...]
    hops_s: tuple[float, ...] = ()
    if isinstance(layout, StagedLayout):
        pipeline = estimate_pipeline(*given, layout)
        stages, hops_s, step_s = pipeline.stages, pipeline.hops_s, pipeline.time_s
    else:
        estimate = estimate_layout(*given, layout)
        stages, step_s = (estimate,), estimate.time_s
    if not isclose(step_s, plan.step_time_s, rel_tol=TIE):
        raise ConfigError(
            "is not what this version of shardwise predicts for the layout", key="best.step_time_s",
            found=repr(plan.step_time_s), allowed=repr(step_s),
        )  # fmt: skip
    durations = Durations.of(
        stages=len(stages),
        forward_s=[stage.forward_s for stage in stages],
        backward_s=[stage.backward_s for stage in stages],
        hop_forward_s=hops_s,
        hop_backward_s=hops_s,
    )
    return [_Estimate(durations, max(stage.end_s for stage in stages), stages=stages)]


def _uniform_parts(plan: Plan) -> StepParts:
    return uniform_parts(bind(plan.model, plan.cluster, plan.job), plan.strategy)


def _uneven_parts(plan: Plan) -> StepParts:
    return uneven_parts(plan.model, plan.cluster, plan.job, plan.best)


def _graph_parts(plan: Plan) -> StepParts:
    return graph_parts(plan.graph, plan.cluster, _training(plan), plan.operators)


def _graph_memory(plan: Plan) -> tuple[StageMemory, ...]:
    return graph_memory(plan, _graph(plan)[0].stages)


def _uniform_result(plan: Plan) -> Result:
    return evaluate(plan.model, plan.cluster, plan.job, plan.strategy)


def _uneven_result(plan: Plan) -> Result:
    """Only the costs of single stages are those of the search (docs/concepts/mixed-clusters.md)."""
    faults = predict_record(plan.model, plan.cluster, plan.job, plan.best).faults
    if faults:
        raise ConfigError("is not a plan of its cluster", key="best", found="; ".join(faults[:3]))
    costs = RecordCostModel(plan.model, plan.cluster, plan.job)
    predicted = predicted_result(costs, plan.best, plan.job.global_batch_size)
    if predicted is None:
        raise Infeasible("the plan does not fit", reasons={MEMORY: 1})
    layout = replace(predicted.layout, schedule=UNEVEN_SCHEDULE)
    return replace(predicted, evaluator=UNEVEN_EVALUATOR, layout=layout)


def _graph_result(plan: Plan) -> Result:
    return graph_result(plan.graph, plan.cluster, _training(plan), plan.operators)


def _training(plan: Plan) -> Training:
    return Training(dtype=plan.job.dtype, optimizer=plan.job.optimizer, profile=plan.job.profile)


_ESTIMATORS: Mapping[PlanKind, _Estimator] = {
    "uniform": _Estimator(_uniform, _uniform_result, _uniform_parts, uniform_memory),
    "uneven": _Estimator(_uneven, _uneven_result, _uneven_parts, uneven_memory),
    "graph": _Estimator(_graph, _graph_result, _graph_parts, _graph_memory),
}
"""The estimators by kind of plan."""


def _estimator(plan: Plan) -> _Estimator:
    """That of the plan's kind; the search asks for the kind of a plan here."""
    return _ESTIMATORS[plan.kind]


def plan_trace(plan: Plan, pipelines: Sequence[PipelineTimeline]) -> Trace:
    """One trace of all pipelines, in which a stage appears as its first rank."""
    spans: list[Span] = []
    arrows: list[Arrow] = []
    counters: list[Counter] = []
    for pipeline in pipelines:
        own = pipeline_trace(plan, pipeline)
        firsts = [ranks[0] for ranks in pipeline.ranks]
        arrows += [Arrow(one.source + len(spans), one.target + len(spans)) for one in own.arrows]
        spans += [replace(span, rank=firsts[span.rank]) for span in own.spans]
        counters += [replace(counter, rank=firsts[counter.rank]) for counter in own.counters]
    return Trace(spans=tuple(spans), arrows=tuple(arrows), counters=tuple(counters))


def pipeline_trace(plan: Plan, pipeline: PipelineTimeline) -> Trace:
    """The trace of one pipeline, whose ranks are the numbers of its stages: with the saved activations of a
    uniform strategy, and with the blocks and operators of a graph."""
    if pipeline.estimates:
        return graph_trace(plan.graph, pipeline)
    if pipeline.activation_bytes is None:
        return trace_of(pipeline.timeline)
    saved = activation_bytes(pipeline.schedule, pipeline.timeline, pipeline.activation_bytes)
    return trace_of(pipeline.timeline, activations=saved)


def graph_trace(graph: OpGraph, found: PipelineTimeline) -> Trace:
    """The spans of a step, one rank per stage: actions, the passes of blocks and operators within them with
    their communication, and the work after the last action. Communication comes first in the pass of an
    operator."""
    whole = trace_of(found.timeline)
    labels = block_labels(graph)
    spans = list(whole.spans)
    for stage, estimate in enumerate(found.estimates):
        actions = [span for span in whole.spans if span.rank == stage and span.track == COMPUTE]
        for action in actions:
            spans += _pass_spans(labels, action, estimate.charges)
        spans += _end_spans(stage, estimate, max(action.finish_s for action in actions))
    return replace(whole, spans=tuple(spans))


def _pass_spans(labels: Sequence[str], action: Span, charges: Iterable[Charge]) -> Iterator[Span]:
    """The operators of an action in order; in a backward pass, from the last operator to the first."""
    kind, number = _ACTION.findall(action.name)[0]
    when = "forward" if kind == "F" else "backward"
    own = [each for each in charges if each.when == when and each.place is not None]
    operators = [(place, list(those)) for place, those in groupby(own, key=lambda each: each.place)]
    at_s = action.start_s
    block_start_s = at_s
    ordered = operators if kind == "F" else operators[::-1]
    for place, (where, those) in enumerate(ordered):
        if where is None:
            continue
        block, operator = where
        start_s = at_s
        for part in TRAFFIC_PARTS:
            seconds = sum(each.seconds for each in those if each.what == part)
            if seconds > 0.0:
                yield Span(action.rank, TRAFFIC, part, at_s, at_s + seconds)
                at_s += seconds
        at_s += sum(each.seconds for each in those if each.what not in TRAFFIC_PARTS)
        if at_s > start_s:
            name = f"{kind}{number} {operator_label(labels[block], operator)}"
            yield Span(action.rank, OPERATORS, name, start_s, at_s)
        following = ordered[place + 1][0] if place + 1 < len(ordered) else None
        if following is None or following[0] != block:
            if at_s > block_start_s:
                yield Span(action.rank, BLOCKS, f"{kind}{number} {labels[block]}", block_start_s, at_s)
            block_start_s = at_s


def _end_spans(stage: int, estimate: LayoutEstimate, at_s: float) -> Iterator[Span]:
    """The work of a stage after its last action, which ends at `at_s`, and the gradient reduction that
    overlaps with actions."""
    if estimate.hidden_s > 0.0:
        yield Span(stage, DATA_PARALLEL, "gradients", at_s - estimate.hidden_s, at_s)
    for part in _END:
        seconds = sum(each.seconds for each in estimate.charges if each.when == "step" and each.what == part)
        if seconds > 0.0:
            track = TRAFFIC if part in TRAFFIC_PARTS else COMPUTE
            yield Span(stage, track, part, at_s, at_s + seconds)
            at_s += seconds
