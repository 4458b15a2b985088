"""Computation, communication, overlap and idle time of a step of an uneven plan: `uneven_parts`."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from shardwise.cluster import Cluster
from shardwise.cost import (
    cluster_without_slowdown,
    end_parts,
    host_waits_s,
    single_stage_traffic,
    stage_costs,
    stage_end,
)
from shardwise.errors import ConfigError
from shardwise.model import Model
from shardwise.plans import Result, StepParts
from shardwise.search.hetero.record_costs import (
    PlacedStage,
    RecordCostModel,
    RecordPrediction,
    StageFigures,
    predict_with,
)
from shardwise.search.step_parts import EndSeconds, RankTraffic, Seconds, TimedPipeline, joined, number
from shardwise.strategy import RECOMPUTES, Job
from shardwise.ties import first_largest


def uneven_parts(model: Model, cluster: Cluster, job: Job, result: Result) -> StepParts:
    """The parts of a step on the busiest stage of the slowest pipeline; of a mixed-pool stage on the slower
    of its parts. Raises ConfigError if the plan is not one of `cluster`."""
    costs = RecordCostModel(model, cluster, job)
    prediction = _predicted(costs, result)
    place = int(first_largest(prediction.pipeline_s))
    figures, times = prediction.stages[place], prediction.pipelines[place]
    index = int(first_largest([one.forward_s + one.backward_s for one in figures]))
    pipeline = result.layout.pipelines[place]
    stage = pipeline.stages[index]
    way = RECOMPUTES.index(stage.recompute)
    placed = costs.placed_stage(result, pipeline, index)
    part = _slower_part(placed, way)
    shape, kinds = placed.shape, placed.parts[part]
    traffic, end = _traffic(costs, result, (place, index, part), way), _end(placed, part)
    hops_s = np.array(costs.hops(result, pipeline, costs.nodes.stages_per_node_of(pipeline)))
    blocked_s = (1.0 - job.profile.pipeline_overlap) * hops_s
    timed = TimedPipeline(
        "1f1b", len(figures), 1, times.durations, (np.append(blocked_s, 0.0), np.append(0.0, blocked_s))
    )
    work = timed.work(index, pipeline.microbatches)
    counts = (shape.layers, *(0.0 for _ in kinds.grid.kinds[1:]), shape.is_first, shape.is_last)
    waits_s = number(host_waits_s(kinds.grid, counts))
    ranks = stage.parts[part].ranks if stage.parts else stage.ranks
    return joined(
        (place, index, int(ranks.partition("-")[0])),
        work,
        traffic,
        pipeline.microbatches,
        host_s=pipeline.microbatches * waits_s + work.actions * job.profile.host_action_s,
        end=end,
        step_time_s=prediction.pipeline_s[place],
    )


def _predicted(costs: RecordCostModel, result: Result) -> RecordPrediction:
    rows = sum(pipeline.rows for pipeline in result.layout.pipelines)
    prediction = predict_with(costs, result, rows)
    if prediction.faults:
        raise ConfigError("is not a plan of its cluster", key="best", found="; ".join(prediction.faults[:3]))
    return prediction


def _slower_part(placed: PlacedStage, way: int) -> int:
    """The first part of a stage that takes longest for a micro-batch."""
    prices = [stage_costs(kinds, placed.shape, placed.node_slot) for kinds in placed.parts]
    return int(first_largest([number(one.forward_s) + number(one.backward_s[way]) for one in prices]))


def _traffic(costs: RecordCostModel, result: Result, place: tuple[int, int, int], way: int) -> RankTraffic:
    """The communication of one part of a stage at `place` (pipeline, stage, part)."""
    number_of_pipeline, index, part = place
    pipeline = result.layout.pipelines[number_of_pipeline]

    def of(other: RecordCostModel) -> Seconds:
        placed = other.placed_stage(result, pipeline, index)
        found = single_stage_traffic(placed.parts[part], placed.shape, way)
        return {name: number(seconds) for name, seconds in found.items()}

    alone = RecordCostModel(
        costs.model, costs.cluster, replace(costs.job, profile=costs.job.profile.without_overlap())
    )
    undisturbed = RecordCostModel(costs.model, cluster_without_slowdown(costs.cluster), costs.job)
    exposed, slowed = of(undisturbed), of(costs)
    whole: StageFigures = _predicted(alone, result).stages[number_of_pipeline][index]
    return RankTraffic(
        total_s=of(alone),
        exposed_s=exposed,
        slowdown_s=sum(slowed.values()) - sum(exposed.values()),
        gathering_s=whole.gather_s,
        reduction_s=whole.reduce_s,
    )


def _end(placed: PlacedStage, part: int) -> EndSeconds:
    """The end of the step of one part of a stage."""
    kinds = placed.parts[part]
    devices = kinds.problem.tiers[-1].span
    return EndSeconds.of(end_parts(kinds.problem, stage_end(kinds, placed.shape, placed.node_slot), devices))
