"""Memory of a rank of each stage of a plan at its peak: `StageMemory`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shardwise.cost import LayoutEstimate
from shardwise.errors import ConfigError
from shardwise.plans import Plan
from shardwise.search.hetero.record_costs import predict_record, stage_peaks
from shardwise.search.result import memory_by_stage


@dataclass(frozen=True, slots=True, kw_only=True)
class StageMemory:
    """Bytes on the fullest rank of a stage at its peak by part, and those that its device has."""

    pipeline: int
    stage: int
    parts: Mapping[str, float]
    capacity_bytes: float


def uniform_memory(plan: Plan) -> tuple[StageMemory, ...]:
    """The stages of a plan of one strategy."""
    stages = memory_by_stage(plan.model, plan.cluster, plan.job, plan.strategy)
    return tuple(
        StageMemory(
            pipeline=0,
            stage=place,
            parts={name: parts[name] for name in parts if name != "device"},
            capacity_bytes=plan.best.peak_memory.capacity,
        )
        for place, parts in enumerate(stages)
    )


def uneven_memory(plan: Plan) -> tuple[StageMemory, ...]:
    """The stages of all pipelines of an uneven plan. Raises ConfigError if it is not one of its cluster."""
    prediction = predict_record(plan.model, plan.cluster, plan.job, plan.best)
    if prediction.faults:
        raise ConfigError("is not a plan of its cluster", key="best", found="; ".join(prediction.faults[:3]))
    peaks = iter(stage_peaks(prediction, plan.best))
    return tuple(
        StageMemory(pipeline=number, stage=place, parts=peak.parts, capacity_bytes=peak.capacity)
        for number, pipeline in enumerate(plan.best.layout.pipelines)
        for place in range(len(pipeline.stages))
        for _, peak in [next(peaks)]
    )


def graph_memory(plan: Plan, stages: Sequence[LayoutEstimate]) -> tuple[StageMemory, ...]:
    """The stages of the plan of an operator graph, with these estimates."""
    return tuple(
        StageMemory(
            pipeline=0, stage=place, parts=stage.nbytes, capacity_bytes=plan.best.peak_memory.capacity
        )
        for place, stage in enumerate(stages)
    )
