"""Compares a measured step with the prediction of its plan.

`compare` takes plans of transformer models: it checks the order of the actions and compares the breakdown of
every stage. `compare_graph` takes plans of operator graphs and compares parts of the step and single
operators as well. A measured step is a trace that `train --trace` wrote.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from statistics import fmean

from shardwise.accuracy.stage_breakdown import (
    PARTS,
    Passes,
    StageBreakdown,
    action_spans,
    measured_parts,
    measured_passes,
    predicted_parts,
    predicted_passes,
    stage_breakdown,
)
from shardwise.errors import ConfigError
from shardwise.graph import OpGraph, StagedLayout, block_labels, operator_label
from shardwise.plans import Plan, StepParts, plan_hash
from shardwise.schedule import Schedule
from shardwise.search import TRAFFIC_PARTS, PipelineTimeline, pipeline_trace, plan_timelines, step_parts_of
from shardwise.sim import Span, Trace
from shardwise.ties import first_largest

# Plans of transformer models
COLLECTIVES = ("tensor_communication", "context_communication", "expert_communication", "shard_communication",
               "parameter_gathering", "gradient_reduction")  # fmt: skip
"""Parts of a plan's breakdown in which the device waits for a collective (exposed communication)."""


StageKey = tuple[int, int]
"""Index of a pipeline of a plan, and index of a stage in it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorComparison:
    """The parts of the step of each stage of an operator graph, and the times of single operators.

    `predicted_parts` and `measured_parts` have one mapping per stage; its parts sum to the step time.
    `operators` comes in the order of decreasing difference. `busiest` is the stage with the longest predicted
    time. `hidden_s` is the predicted gradient reduction of each stage that the last backward pass hides; no
    part counts it."""

    busiest: int
    hidden_s: tuple[float, ...]
    predicted_parts: tuple[Mapping[str, float], ...]
    measured_parts: tuple[Mapping[str, float], ...]
    operators: tuple[OperatorTimes, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """The predicted step of a plan and a measured step.

    `places` lists the stages. `predicted` and `measured` have one breakdown per place; a measured one is the
    mean over the ranks of the stage. `order_violation` describes the first action that a rank ran out of the
    order of the schedule; None where there is none. `predicted_collectives_s`, `predicted_copies_s` and
    `predicted_optimizer_s` are those of the busiest stage; None for uneven plans, which do not have them.
    `critical` is the place of the critical rank, whose predicted `parts` are in `predicted` as far as they
    are measured; other places have no predicted communication and idle time.
    `both` is one trace with both timelines. Of an operator graph, `operators` has parts and operators.
    """

    predicted_s: float
    measured_s: float
    places: tuple[StageKey, ...]
    predicted: tuple[StageBreakdown, ...]
    measured: tuple[StageBreakdown, ...]
    predicted_collectives_s: float | None
    predicted_copies_s: float | None
    predicted_optimizer_s: float | None
    order_violation: str | None
    both: Trace
    parts: StepParts
    operators: OperatorComparison | None = None

    @property
    def critical(self) -> int:
        """The index, in `places`, of the stage of the critical rank."""
        return self.places.index((self.parts.pipeline, self.parts.stage))

    @property
    def error(self) -> float:
        """Relative error of the step time: predicted over measured, minus 1."""
        return self.predicted_s / self.measured_s - 1.0


@dataclass(frozen=True, slots=True)
class PredictedPipeline:
    """The prediction for a pipeline: its schedule, the timeline of its actions, and the ranks of each
    stage."""

    schedule: Schedule
    timeline: Trace
    ranks: tuple[tuple[int, ...], ...]

    def times(self, stage: int, step_s: float) -> StageBreakdown:
        """The predicted breakdown of a stage in a step of `step_s`."""
        spans = [span for span in self.timeline.spans if span.rank == stage]
        times = stage_breakdown(spans, start_s=0.0, finish_s=step_s)
        # The timeline has actions only: it does not show collectives, copies and the optimizer separately.
        return replace(
            times, collectives_s=None, copies_s=None, optimizer_s=None, communication_s=None, idle_s=None
        )


def compare(plan: Plan, measured: Trace) -> Comparison:
    """Compares `measured`, a trace of one step by `train --trace`, with the prediction of `plan`.

    Raises ConfigError where the trace is of another plan: its hash (if any), its ranks or its actions differ;
    or where this version predicts another step time for the plan's layout. Idle devices of an uneven plan
    have no actions.
    """
    found = plan_timelines(plan)
    pipelines = [PredictedPipeline(one.schedule, pipeline_trace(plan, one), one.ranks) for one in found]
    steps = measured_steps(plan, pipelines, measured, devices=plan.cluster.devices)
    step_s = plan.step_time_s
    operators = _operator_comparison(plan, found[0], steps) if found[0].estimates else None
    parts = step_parts_of(plan)
    return Comparison(
        predicted_s=step_s,
        measured_s=steps.finish_s - steps.start_s,
        places=steps.places,
        predicted=tuple(
            _with_parts(pipelines[one].times(stage, step_s), parts, (one, stage))
            for one, stage in steps.places
        ),
        measured=steps.times,
        **_predicted_sums(plan, operators),
        order_violation=steps.order_violation,
        both=steps.both,
        parts=parts,
        operators=operators,
    )


def _with_parts(times: StageBreakdown, parts: StepParts, place: StageKey) -> StageBreakdown:
    """The predicted times of a stage with its communication and idle time, if it has the critical rank. A
    measured step does not tell messages between stages from waiting for them."""
    if place != (parts.pipeline, parts.stage):
        return times
    messages = parts.communication["pipeline"]
    return replace(
        times,
        communication_s=parts.communication_s - messages.total_s,
        idle_s=parts.idle_s + messages.exposed_s,
    )


def _predicted_sums(plan: Plan, operators: OperatorComparison | None) -> dict[str, float | None]:
    """The predicted seconds in collectives, host copies and the optimizer, as far as the plan is estimated in
    such parts; of a graph those of the busiest stage."""
    parts = plan.breakdown if operators is None else operators.predicted_parts[operators.busiest]
    collectives = [part for part in (*COLLECTIVES, *TRAFFIC_PARTS) if part in parts]
    optimizer_s = parts.get("optimizer")
    return {
        "predicted_collectives_s": sum(parts[part] for part in collectives) if collectives else None,
        "predicted_copies_s": None if optimizer_s is None else parts.get("offload", 0.0),
        "predicted_optimizer_s": optimizer_s,
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredSteps:
    """A measured step of all ranks that have a stage.

    `by_rank` has the spans of each rank; `times` has the mean breakdown of each of the `places`.
    `order_violation` and `both` are those of `Comparison`."""

    by_rank: Mapping[int, Sequence[Span]]
    start_s: float
    finish_s: float
    places: tuple[StageKey, ...]
    times: tuple[StageBreakdown, ...]
    order_violation: str | None
    both: Trace


def measured_steps(
    plan: Plan,
    pipelines: Sequence[PredictedPipeline],
    measured: Trace,
    *,
    devices: int,
) -> MeasuredSteps:
    """The measured step of each rank of `plan`, which runs these `pipelines` on a number of `devices`.

    Raises ConfigError where the trace is of another plan.
    """
    if measured.plan_hash is not None and measured.plan_hash != plan_hash(plan):
        raise ConfigError(
            "is a trace of another plan", key="plan_hash", found=measured.plan_hash,
            allowed=plan_hash(plan),
        )  # fmt: skip
    place_of = {
        rank: (number, stage)
        for number, pipeline in enumerate(pipelines)
        for stage, ranks in enumerate(pipeline.ranks)
        for rank in ranks
    }
    by_rank = _spans_of_ranks(measured, place_of, devices=devices)
    order_violation = _disorder(pipelines, by_rank, place_of)
    start_s = min(span.start_s for spans in by_rank.values() for span in spans)
    finish_s = max(span.finish_s for spans in by_rank.values() for span in spans)
    times = {
        rank: stage_breakdown(spans, start_s=start_s, finish_s=finish_s) for rank, spans in by_rank.items()
    }
    places = tuple(sorted(set(place_of.values())))
    return MeasuredSteps(
        by_rank=by_rank,
        start_s=start_s,
        finish_s=finish_s,
        places=places,
        times=tuple(
            _mean([times[rank] for rank in sorted(times) if place_of[rank] == place]) for place in places
        ),
        order_violation=order_violation,
        both=_both(pipelines, by_rank, place_of, start_s),
    )


def _spans_of_ranks(
    measured: Trace, place_of: Mapping[int, StageKey], *, devices: int
) -> dict[int, list[Span]]:
    """The spans of each rank that has a stage.

    Raises ConfigError where such a rank has no spans, or where another rank has actions or is not a device of
    the plan."""
    by_rank: dict[int, list[Span]] = {}
    for span in measured.spans:
        by_rank.setdefault(span.rank, []).append(span)
    idle = {
        rank
        for rank in by_rank
        if rank < devices and rank not in place_of and not action_spans(by_rank[rank])
    }
    if set(by_rank) - idle != set(place_of):
        raise ConfigError(
            "is a trace of another plan: its ranks differ", key="traceEvents",
            found=f"{len(by_rank) - len(idle)} ranks with actions", allowed=f"the plan's {len(place_of)}",
        )  # fmt: skip
    return {rank: spans for rank, spans in by_rank.items() if rank in place_of}


def _disorder(
    pipelines: Sequence[PredictedPipeline],
    by_rank: Mapping[int, Sequence[Span]],
    place_of: Mapping[int, StageKey],
) -> str | None:
    """The first order violation of any rank, None where there is none. ConfigError where a rank ran other
    actions than the schedule has."""
    found = None
    for rank in sorted(by_rank):
        ran = [span.name for span in action_spans(by_rank[rank])]
        number, stage = place_of[rank]
        expected = [str(action) for action in pipelines[number].schedule.ranks[stage]]
        if sorted(ran) != sorted(expected):
            other = sorted(set(ran) ^ set(expected)) or ["an action twice"]
            raise ConfigError(
                "is a trace of another plan: a rank ran other actions", key="traceEvents",
                found=f"rank {rank}: {', '.join(other[:4])}", allowed="the actions of the plan's schedule",
            )  # fmt: skip
        if found is None and ran != expected:
            place = next(
                index for index, pair in enumerate(zip(ran, expected, strict=True)) if len({*pair}) > 1
            )
            found = (
                f"rank {rank} ran {ran[place]} as action {place + 1}, where the plan has {expected[place]}"
            )
    return found


def _mean(times: Sequence[StageBreakdown]) -> StageBreakdown:
    def mean(name: str) -> float:
        return fmean(float(getattr(each, name)) for each in times)

    return StageBreakdown(**{field.name: mean(field.name) for field in fields(StageBreakdown)})


def stage_label(place: StageKey, places: Sequence[StageKey]) -> str:
    """The label of a stage; it names the pipeline where `places` has several."""
    pipeline, stage = place
    return f"pipeline {pipeline}, stage {stage}" if any(one for one, _ in places) else f"stage {stage}"


def _both(
    pipelines: Sequence[PredictedPipeline],
    by_rank: Mapping[int, Sequence[Span]],
    place_of: Mapping[int, StageKey],
    start_s: float,
) -> Trace:
    """One trace with a row per predicted stage, each followed by the rows of its measured ranks; both start
    at time 0."""
    row_of: dict[StageKey | int, int] = {}
    names: dict[int, str] = {}
    places = sorted(set(place_of.values()))
    for place in places:
        names[len(row_of)] = f"predicted: {stage_label(place, places)}"
        row_of[place] = len(row_of)
        for rank in sorted(rank for rank in place_of if place_of[rank] == place):
            names[len(row_of)] = f"measured: rank {rank}"
            row_of[rank] = len(row_of)
    spans = [
        replace(span, rank=row_of[number, span.rank])
        for number, pipeline in enumerate(pipelines)
        for span in pipeline.timeline.spans
    ]
    for span in (span for spans in by_rank.values() for span in spans):
        shifted = replace(span, start_s=span.start_s - start_s, finish_s=span.finish_s - start_s)
        spans.append(replace(shifted, rank=row_of[span.rank]))
    return Trace(spans=tuple(spans), names=names)


# Plans of operator graphs
@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorTimes:
    """Seconds of a step that an operator takes on its stage in one `direction`, communication included.

    `forward` is the sum of all forward passes, `backward` of all backward passes with their recomputation.
    The sum covers all `repetitions` of the operator's `block` on the stage."""

    stage: int
    block: str
    operator: str
    repetitions: int
    direction: str
    predicted_s: float
    measured_s: float

    @property
    def difference_s(self) -> float:
        """Absolute difference of predicted and measured time."""
        return abs(self.predicted_s - self.measured_s)


def _operator_comparison(plan: Plan, found: PipelineTimeline, steps: MeasuredSteps) -> OperatorComparison:
    """The parts and operators of a graph's stages, as estimated in `found`, and as measured."""
    operators: list[OperatorTimes] = []
    for stage, (estimate, ranks) in enumerate(zip(found.estimates, found.ranks, strict=True)):
        passes = [measured_passes(steps.by_rank[rank]) for rank in ranks]
        operators += _operators(
            plan, stage, predicted_passes(plan.graph, estimate, plan.microbatches), passes
        )
    operators.sort(key=lambda each: -each.difference_s)
    return OperatorComparison(
        busiest=int(first_largest([estimate.time_s for estimate in found.estimates])),
        hidden_s=tuple(estimate.hidden_s for estimate in found.estimates),
        predicted_parts=tuple(predicted_parts(estimate, plan.step_time_s) for estimate in found.estimates),
        measured_parts=tuple(
            _mean_parts([_parts_of(steps, rank) for rank in ranks]) for ranks in found.ranks
        ),
        operators=tuple(operators),
    )


def _mean_parts(several: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {part: fmean(parts[part] for parts in several) for part in PARTS}


def _parts_of(steps: MeasuredSteps, rank: int) -> dict[str, float]:
    return measured_parts(steps.by_rank[rank], start_s=steps.start_s, finish_s=steps.finish_s)


def _operators(
    plan: Plan, stage: int, predictions: Passes, measurements: Sequence[Passes]
) -> list[OperatorTimes]:
    """The times of all operators of a stage that have a predicted or a measured time."""
    first, end = plan.operators.spans[stage] if isinstance(plan.operators, StagedLayout) else (0, None)
    found = []
    for block, operator, labels in _repeated(plan.graph, first, end):
        for direction in ("forward", "backward"):
            keys = [(direction, operator_label(label, operator)) for label in labels]
            predicted_s = sum(predictions.get(key, 0.0) for key in keys)
            measured_s = fmean(sum(passes.get(key, 0.0) for key in keys) for passes in measurements)
            if predicted_s or measured_s:
                found.append(
                    OperatorTimes(
                        stage=stage,
                        block=block,
                        operator=operator,
                        repetitions=len(labels),
                        direction=direction,
                        predicted_s=predicted_s,
                        measured_s=measured_s,
                    )
                )
    return found


def _repeated(graph: OpGraph, first: int, end: int | None) -> list[tuple[str, str, list[str]]]:
    """The operators of the blocks `first` to `end` (exclusive), where each repetition counts as a block.

    Each entry has the name of the block, the name of the operator, and the labels of the block's repetitions
    in that range."""
    labels = iter(block_labels(graph))
    places = range(first, sum(block.repeat for block in graph.blocks) if end is None else end)
    found = []
    place = 0
    for block in graph.blocks:
        own = [next(labels) for _ in range(block.repeat)]
        here = [label for number, label in enumerate(own, start=place) if number in places]
        place += block.repeat
        if here:
            found += [(block.name, op.name, here) for op in block.operators]
    return found
