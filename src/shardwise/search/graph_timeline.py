"""The timeline of one step of a graph plan, as the cost model predicts it, and its trace."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from math import isclose

from shardwise.cost import Charge, LayoutEstimate, Training, estimate_layout
from shardwise.errors import ConfigError
from shardwise.graph import OpGraph, StagedLayout, block_labels, operator_label
from shardwise.plans import GraphPlan
from shardwise.schedule import Schedule, generate
from shardwise.search.graph_pipeline import estimate_pipeline
from shardwise.search.staged import SCHEDULE
from shardwise.sim import (
    BLOCKS,
    COMPUTE,
    DATA_PARALLEL,
    OPERATORS,
    TRAFFIC,
    Durations,
    Span,
    Timeline,
    Trace,
    simulate,
    task_graph,
    trace_of,
)

TRAFFIC_PARTS = ("gathers", "conversions", "exchanges", "gradients")
"""Parts of a breakdown in which tensors are redistributed (their JSON names), in the order in which an
operator has them."""

_END = ("gradients", "norm", "optimizer", "gathers", "host")
"""Parts after the last backward pass of a stage, in order."""


_ACTION = re.compile(r"\d+([FB])(\d+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphTimeline:
    """The actions of a step over time, and the estimate of each stage, which includes the work after the last
    action (`end_s`). A graph without stages is one stage whose single micro-batch is the batch."""

    schedule: Schedule
    timeline: Timeline
    stages: tuple[LayoutEstimate, ...]


def graph_timeline(plan: GraphPlan) -> GraphTimeline:
    """The step of `plan`, estimated again from its layout.

    Raises ConfigError if the estimate differs from the step time in the plan.
    """
    training = Training(dtype=plan.job.dtype, optimizer=plan.job.optimizer, profile=plan.job.profile)
    given = (plan.graph, plan.cluster, training, plan.mesh)
    stages: tuple[LayoutEstimate, ...]
    hops_s: tuple[float, ...] = ()
    name = SCHEDULE
    if isinstance(plan.layout, StagedLayout):
        pipeline = estimate_pipeline(*given, plan.layout)
        stages, hops_s, step_s = pipeline.stages, pipeline.hops_s, pipeline.time_s
        name = plan.layout.schedule
    else:
        estimate = estimate_layout(*given, plan.layout)
        stages, step_s = (estimate,), estimate.time_s
    if not isclose(step_s, plan.step_time_s, rel_tol=1e-9):
        raise ConfigError(
            "is not what this version of shardwise predicts for the layout", key="step_time_s",
            found=repr(plan.step_time_s), allowed=repr(step_s),
        )  # fmt: skip
    schedule = generate(name, pp=len(stages), microbatches=plan.microbatches, vpp=1)
    durations = Durations.of(
        stages=len(stages),
        forward_s=[stage.forward_s for stage in stages],
        backward_s=[stage.backward_s for stage in stages],
        hop_forward_s=hops_s,
        hop_backward_s=hops_s,
    )
    return GraphTimeline(schedule=schedule, timeline=simulate(task_graph(schedule, durations)), stages=stages)


def graph_trace(graph: OpGraph, found: GraphTimeline) -> Trace:
    """The spans of a step, one rank per stage: actions, the passes of blocks and operators within them with
    their communication, and the work after the last action. Communication comes first in the pass of an
    operator."""
    whole = trace_of(found.timeline)
    labels = block_labels(graph)
    spans = list(whole.spans)
    for stage, estimate in enumerate(found.stages):
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
