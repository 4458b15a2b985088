"""What a plan of any kind spends its step and its memory on: `overview_of`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from shardwise.cost import Training
from shardwise.plans import Plan
from shardwise.search.graph_curves import GraphCurves
from shardwise.search.plan_timeline import PipelineTimeline, plan_timelines
from shardwise.sim import COMPUTE


@dataclass(frozen=True, slots=True, kw_only=True)
class StageShare:
    """A stage of a pipeline: seconds in which its devices compute, and in which they wait in the pipeline."""

    pipeline: int
    stage: int
    devices: int
    device_class: str
    layers: int
    busy_s: float
    idle_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Baseline:
    """Another way to train the same: its step time in seconds, the bytes of its tightest rank (None if they
    are unknown), and whether it fits."""

    name: str
    step_time_s: float
    device_bytes: float | None
    fits: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOverview:
    """The stages of a plan, other plans that it was compared with, and the memory of its tightest rank: the
    bytes that are usable, and those of them that are free."""

    stages: tuple[StageShare, ...]
    baselines: tuple[Baseline, ...]
    usable_bytes: float
    free_bytes: float

    @property
    def busiest(self) -> StageShare:
        """The first of the stages that compute longest."""
        return max(self.stages, key=lambda stage: stage.busy_s)


def overview_of(plan: Plan) -> PlanOverview:
    """The overview of `plan`, estimated again. Raises ConfigError if this version estimates it otherwise."""
    peak = plan.best.peak_memory
    usable_bytes = peak.capacity * (1.0 - plan.job.memory_margin)
    pipelines = plan_timelines(plan)
    return PlanOverview(
        stages=tuple(
            StageShare(
                pipeline=place,
                stage=number,
                devices=stage.devices,
                device_class=stage.device_class,
                layers=sum(stage.layers),
                busy_s=busy_s,
                idle_s=timeline.timeline.makespan_s - busy_s,
            )
            for place, (pipeline, timeline) in enumerate(
                zip(plan.best.layout.pipelines, pipelines, strict=True)
            )
            for number, (stage, busy_s) in enumerate(zip(pipeline.stages, computing_s(timeline), strict=True))
        ),
        baselines=_baselines(plan, pipelines),
        usable_bytes=usable_bytes,
        free_bytes=usable_bytes - peak.device,
    )


def computing_s(pipeline: PipelineTimeline) -> list[float]:
    """Seconds in which each stage of a pipeline computes."""
    timeline = pipeline.timeline
    lengths_s = timeline.finish_s - timeline.start_s
    is_compute = np.array([stream == COMPUTE for stream in timeline.graph.streams])
    return [
        float(lengths_s[is_compute & (timeline.graph.ranks == stage)].sum())
        for stage in range(len(pipeline.ranks))
    ]


def _baselines(plan: Plan, pipelines: Sequence[PipelineTimeline]) -> tuple[Baseline, ...]:
    """The runners-up are apart. On a mixed cluster: the best uniform strategy, and the best on one device
    class. Of a graph without stages: data parallelism and Megatron's layout."""
    found = []
    mixed = plan.mixed
    if mixed is not None and mixed.uniform_step_time_s not in (None, plan.step_time_s):
        found.append(
            Baseline(name="best uniform strategy", step_time_s=mixed.uniform_step_time_s, device_bytes=None)
        )
    if mixed is not None and mixed.fastest_class_step_time_s is not None:
        name = f"{mixed.fastest_class} alone"
        found.append(Baseline(name=name, step_time_s=mixed.fastest_class_step_time_s, device_bytes=None))
    if pipelines[0].estimates and plan.stages == 1:
        training = Training(dtype=plan.job.dtype, optimizer=plan.job.optimizer, profile=plan.job.profile)
        curves = GraphCurves(plan.graph, plan.cluster, training, plan.job.memory_margin)
        found += [
            Baseline(
                name=one.name,
                step_time_s=one.point.time_s,
                device_bytes=one.point.memory_bytes,
                fits=one.fits,
            )
            for one in curves.references(plan.cluster)
        ]
    return tuple(found)
