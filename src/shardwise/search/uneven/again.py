"""An uneven plan priced again from its record alone: stage by stage, and 1F1B walked action by action.

Only the prices of single stages are those of the search; what stages a plan has, where they lie and how they
follow each other is read from the plan.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from shardwise.cluster import Cluster
from shardwise.model import Model
from shardwise.plan import Pipeline, UnevenResult
from shardwise.search.uneven.faults import faults_of
from shardwise.search.uneven.lying import NodeLookup, StagesPerNode
from shardwise.search.uneven.stage_record import RecordCostModel, StageFigures
from shardwise.sim import Durations
from shardwise.strategy import Job
from shardwise.ties import first_largest

_Pipeline = tuple[Pipeline, tuple[str, ...], int, StagesPerNode]


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineTimes:
    """What the stages of a pipeline take: `durations` of their actions (one case), and `end_s` behind the
    last of them, for the gradient norm, the optimizer and the host."""

    durations: Durations
    end_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordPrediction:
    """What a plan is found to be: `faults` that make it none (then nothing is priced), seconds of each
    pipeline and of what it does, its stages, bytes on the device that is fullest for what it has, and what
    that may use."""

    faults: tuple[str, ...]
    pipeline_s: tuple[float, ...] = ()
    pipelines: tuple[PipelineTimes, ...] = ()
    stages: tuple[tuple[StageFigures, ...], ...] = ()
    device_bytes: float = 0.0
    usable_bytes: float = 0.0


def predict_record(model: Model, cluster: Cluster, job: Job, result: UnevenResult) -> RecordPrediction:
    """The plan's price, or what is wrong with it."""
    return predict_with(RecordCostModel(model, cluster, job), result, job.global_batch_size)


def predict_with(prices: RecordCostModel, result: UnevenResult, global_batch_size: int) -> RecordPrediction:
    """The same by prices that may be known, for a batch of so many sequences."""
    whole = [stage for pipeline in result.layout.pipelines for stage in pipeline.stages if not stage.parts]
    replicas = max((stage.dp for stage in whole), default=1)
    faults = tuple(faults_of(prices.space(replicas), result, global_batch_size))
    if faults:
        return RecordPrediction(faults=faults)
    known: dict[_Pipeline, tuple[float, list[StageFigures], PipelineTimes]] = {}
    every = list(_pipelines(prices.nodes, result))
    for one in every:
        if one not in known:
            pipeline, ways, share, stages_per_node = one
            figures = prices.figures(result, pipeline, ways, stages_per_node)
            hops = prices.hops(result, pipeline, stages_per_node)
            known[one] = _simulated_step_s(figures, hops, share), figures, _times(figures, hops)
    stages = [one for _, figures, _ in known.values() for one in figures]
    tightest = stages[int(first_largest([one.device_bytes / one.usable_bytes for one in stages]))]
    return RecordPrediction(
        faults=(),
        pipeline_s=tuple(known[one][0] for one in every),
        pipelines=tuple(known[one][2] for one in every),
        stages=tuple(tuple(known[one][1]) for one in every),
        device_bytes=tightest.device_bytes,
        usable_bytes=tightest.usable_bytes,
    )


def _pipelines(nodes: NodeLookup, result: UnevenResult) -> Iterator[_Pipeline]:
    """Every pipeline with what its stages recompute, its microbatches, and how its stages lie together;
    ranks, which tell no more, are left out."""
    for pipeline, ways, share in zip(
        result.layout.pipelines, result.recompute, result.microbatches, strict=True
    ):
        stages_per_node = nodes.stages_per_node_of(pipeline)
        stages = tuple(
            replace(stage, ranks="", share=0.0, parts=tuple(replace(part, ranks="") for part in stage.parts))
            for stage in pipeline.stages
        )
        yield Pipeline(stages=stages), ways, share, stages_per_node


def _times(stages: Sequence[StageFigures], hops: Sequence[float]) -> PipelineTimes:
    durations = Durations.of(
        stages=len(stages),
        forward_s=[stage.forward_s for stage in stages],
        backward_s=[stage.backward_s for stage in stages],
        gather_s=[stage.gather_s for stage in stages],
        reduce_s=[stage.reduce_s for stage in stages],
        hop_forward_s=hops,
        hop_backward_s=hops,
    )
    return PipelineTimes(durations=durations, end_s=max(stage.end_s for stage in stages))


def _simulated_step_s(stages: Sequence[StageFigures], hops: Sequence[float], microbatches: int) -> float:
    """Seconds of a step: every stage does as many forwards as there are stages from it on, then a backward
    and a forward by turns; each action as soon as its stage is free and what it needs has come."""
    count = len(stages)
    todo: list[list[tuple[str, int]]] = []
    for stage in range(count):
        warmup = min(count - stage, microbatches)
        actions = [("F", j) for j in range(warmup)]
        for j in range(microbatches):
            actions.append(("B", j))
            actions += [("F", j + warmup)] if j + warmup < microbatches else []
        todo.append(actions)
    done: dict[tuple[str, int, int], float] = {}
    free = [stage.gather_s for stage in stages]
    at = [0] * count
    while any(at[stage] < len(todo[stage]) for stage in range(count)):
        for stage in range(count):
            while at[stage] < len(todo[stage]):
                kind, j = todo[stage][at[stage]]
                near = stage - 1 if kind == "F" else stage + 1
                is_end = near in (-1, count)
                if not is_end and (kind, near, j) not in done:
                    break
                ready = 0.0 if is_end else done[kind, near, j] + hops[min(stage, near)]
                work_s = stages[stage].forward_s if kind == "F" else stages[stage].backward_s
                free[stage] = max(free[stage], ready) + work_s
                done[kind, stage, j] = free[stage]
                at[stage] += 1
    drained = max(end + stage.reduce_s for end, stage in zip(free, stages, strict=True))
    return drained + max(stage.end_s for stage in stages)
