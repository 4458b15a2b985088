"""A measured step of an operator graph held against its plan: as for other plans, and part by part and
operator by operator."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from shardwise.accuracy.compare import Comparison, MeasuredSteps, PredictedPipeline, measured_steps
from shardwise.accuracy.graph_parts import (
    PARTS,
    Passes,
    measured_parts,
    measured_passes,
    predicted_parts,
    predicted_passes,
)
from shardwise.graph import OpGraph, StagedLayout, block_labels, operator_label
from shardwise.plan import GraphPlan
from shardwise.search import TRAFFIC_PARTS, graph_timeline, graph_trace
from shardwise.sim import Trace
from shardwise.ties import first_largest


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorTimes:
    """Seconds of a step that an operator takes on its stage in all passes of one kind (`forward`, `backward`
    with what is computed again), in all repetitions of its `block` that lie there, traffic included."""

    stage: int
    block: str
    operator: str
    repetitions: int
    direction: str
    predicted_s: float
    measured_s: float

    @property
    def difference_s(self) -> float:
        """How far predicted and measured are apart."""
        return abs(self.predicted_s - self.measured_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphComparison(Comparison):
    """The same, with the parts of the step of each of the `places`, which sum to it, and the passes of
    operators, those that are furthest apart first. The stage `busiest` is predicted to work longest; of each
    the sums of gradients are predicted to be beside the last backward pass for `hidden_s`, which count in no
    part."""

    busiest: int
    hidden_s: tuple[float, ...]
    predicted_parts: tuple[Mapping[str, float], ...]
    measured_parts: tuple[Mapping[str, float], ...]
    operators: tuple[OperatorTimes, ...]


def compare_graph(plan: GraphPlan, measured: Trace) -> GraphComparison:
    """`measured`, a trace of one step by `train --trace`, against what `plan` says.

    Raises ConfigError where it is a trace of another plan, or the step time is not what this version finds
    for the plan's layout.
    """
    found = graph_timeline(plan)
    devices = plan.mesh.devices
    pipeline = PredictedPipeline(
        found.schedule,
        graph_trace(plan.graph, found),
        tuple(tuple(range(stage * devices, (stage + 1) * devices)) for stage in range(plan.stages)),
    )
    steps = measured_steps(plan, [pipeline], measured, devices=plan.devices)
    predictions = [predicted_parts(estimate, plan.step_time_s) for estimate in found.stages]
    measurements = [_mean_parts([_parts_of(steps, rank) for rank in ranks]) for ranks in pipeline.ranks]
    operators: list[OperatorTimes] = []
    for stage, (estimate, ranks) in enumerate(zip(found.stages, pipeline.ranks, strict=True)):
        passes = [measured_passes(steps.by_rank[rank]) for rank in ranks]
        operators += _operators(
            plan, stage, predicted_passes(plan.graph, estimate, plan.microbatches), passes
        )
    operators.sort(key=lambda each: -each.difference_s)
    busiest_stage = int(first_largest([estimate.time_s for estimate in found.stages]))
    return GraphComparison(
        predicted_s=plan.step_time_s,
        measured_s=steps.finish_s - steps.start_s,
        places=steps.places,
        predicted=tuple(pipeline.times(stage, plan.step_time_s) for _, stage in steps.places),
        measured=steps.times,
        predicted_collectives_s=sum(predictions[busiest_stage][part] for part in TRAFFIC_PARTS),
        predicted_copies_s=0.0,
        predicted_optimizer_s=predictions[busiest_stage]["optimizer"],
        order_violation=steps.order_violation,
        both=steps.both,
        busiest=busiest_stage,
        hidden_s=tuple(estimate.hidden_s for estimate in found.stages),
        predicted_parts=tuple(predictions),
        measured_parts=tuple(measurements),
        operators=tuple(operators),
    )


def _mean_parts(several: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {part: fmean(parts[part] for parts in several) for part in PARTS}


def _parts_of(steps: MeasuredSteps, rank: int) -> dict[str, float]:
    return measured_parts(steps.by_rank[rank], start_s=steps.start_s, finish_s=steps.finish_s)


def _operators(
    plan: GraphPlan, stage: int, predictions: Passes, measurements: Sequence[Passes]
) -> list[OperatorTimes]:
    """All passes of the operators of a stage of which something is predicted or was measured."""
    first, end = plan.layout.spans[stage] if isinstance(plan.layout, StagedLayout) else (0, None)
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
    """Every operator of the blocks from `first` to before `end`, repetitions counted: its block, its name,
    and what the repetitions of its block there are called."""
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
