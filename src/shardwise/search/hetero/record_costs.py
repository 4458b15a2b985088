"""Prediction of an uneven plan from its record alone, without the search.

`RecordCostModel` estimates single stages and hops with the same cost functions as the search, each once. The
stages, their order and their nodes are read from the record. `predict_record` predicts each pipeline by the
evaluator of the search.
`predicted_result` gives all figures of a record whose layers, shares or devices have changed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from shardwise.cluster import Cluster, pools_of
from shardwise.cost import (
    NodeSlot,
    StageKinds,
    StageShape,
    find_recipe,
    hop_s,
    stage_bytes,
    stage_costs,
    stage_kinds_of,
    with_sends,
)
from shardwise.equations import memory
from shardwise.model import Model, model_flop_per_token
from shardwise.plans import PeakMemory, Pipeline, Result, Stage, StagePart
from shardwise.search.hetero.placement import HopEndpoint, NodeLookup, StagesPerNode, faults_of, hop_endpoints
from shardwise.search.hetero.space import UnevenLimits, UnevenSpace
from shardwise.search.result import band_of
from shardwise.sim import Durations, makespan_s
from shardwise.strategy import RECOMPUTES, Job, Profile
from shardwise.ties import first_largest


@dataclass(frozen=True, slots=True, kw_only=True)
class StageFigures:
    """One stage by itself: seconds of a forward and a backward of a micro-batch, of gathering and reduction,
    and of the end of the step; and bytes on its devices. Of a mixed-pool stage, bytes are those of the fuller
    part."""

    forward_s: float
    backward_s: float
    gather_s: float
    reduce_s: float
    end_s: float
    allocated_bytes: float
    device_bytes: float
    usable_bytes: float
    capacity_bytes: float
    fragmentation_ratio: float
    fullest_part: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedStage:
    """A stage as the cost functions take it; a mixed-pool stage has a kind for each of its parts."""

    parts: tuple[StageKinds, ...]
    shape: StageShape
    node_slot: NodeSlot


class RecordCostModel:
    """Costs for one model, cluster and job, whatever the job's batch. Stages are identified without their
    ranks."""

    def __init__(self, model: Model, cluster: Cluster, job: Job) -> None:
        self.model, self.cluster, self.job = model, cluster, job
        self._space = UnevenSpace(model, cluster, job)
        self._names = [pool.name for pool in self._space.pools]
        self.nodes = NodeLookup(self._space)
        self._kinds: dict[tuple[object, ...], StageKinds] = {}
        self._figures: dict[tuple[object, ...], StageFigures] = {}
        self._hops: dict[tuple[object, ...], list[float]] = {}

    def space(self, rows: int) -> UnevenSpace:
        """The space of plans with up to `rows` replicas in a stage."""
        return UnevenSpace(self.model, self.cluster, self.job, UnevenLimits(stage_dp=rows))

    def union(self, result: Result) -> tuple[int, ...]:
        """The pools on which the plan is estimated."""
        return tuple(sorted(self._names.index(name) for name in result.pools))

    def figures(
        self, result: Result, pipeline: Pipeline, ways: Sequence[str], stages_per_node: StagesPerNode
    ) -> list[StageFigures]:
        """The stages of a pipeline, each by itself; of a mixed-pool stage the times of its slower part.
        `ways` has the recomputation of each stage, `stages_per_node` is that of
        `NodeLookup.stages_per_node_of`."""
        union, pipelines = self.union(result), len(result.layout.pipelines)
        stages, endpoints = len(ways), hop_endpoints(self._space, pipeline, stages_per_node)
        found = []
        for index, (stage, way) in enumerate(zip(pipeline.stages, ways, strict=True)):
            place, node_slot = (stages - index, stages), self._node_slot(endpoints, index)
            key = union, pipelines, result.is_alike, result.micro_batch_size, stage, way, place, node_slot
            if key not in self._figures:
                self._figures[key] = self._stage_figures(result, stage, way, place, node_slot)
            found.append(self._figures[key])
        return found

    def _node_slot(self, endpoints: Sequence[tuple[HopEndpoint, ...]], index: int) -> NodeSlot:
        """The node slot of a stage; parts of a mixed-pool stage are by themselves."""
        mine = endpoints[index][0]
        if not mine.is_whole:
            return NodeSlot()
        has_others = any(one != mine for some in endpoints for one in some)
        devices = self._space.pools[mine.pool].node.devices
        return NodeSlot(mine.stages_per_node, devices, is_whole=len(endpoints) > 1 and not has_others)

    def hops(self, result: Result, pipeline: Pipeline, stages_per_node: StagesPerNode) -> list[float]:
        """Seconds from each stage to the next. A hop that leaves the node takes the time of its slower end,
        with all groups of the node sending at once."""
        key = self.union(result), result.micro_batch_size, pipeline, stages_per_node
        if key not in self._hops:
            self._hops[key] = self._hops_of(*key)
        return self._hops[key]

    def _stage_figures(
        self, result: Result, stage: Stage, way: str, place: tuple[int, int], node_slot: NodeSlot
    ) -> StageFigures:
        shape = self._shape(result, stage, place)
        found = [
            _figures_of(kinds, shape, node_slot, RECOMPUTES.index(way))
            for kinds in self._stage_kinds(result, stage)
        ]
        part = int(first_largest([one.device_bytes / one.usable_bytes for one in found]))
        return replace(
            found[part],
            forward_s=max(one.forward_s for one in found),
            backward_s=max(one.backward_s for one in found),
            gather_s=max(one.gather_s for one in found),
            reduce_s=max(one.reduce_s for one in found),
            end_s=max(one.end_s for one in found),
            fullest_part=part,
        )

    def placed_stage(self, result: Result, pipeline: Pipeline, index: int) -> PlacedStage:
        """Stage number `index` of a pipeline, as the cost functions take it."""
        stages, stage = len(pipeline.stages), pipeline.stages[index]
        endpoints = hop_endpoints(self._space, pipeline, self.nodes.stages_per_node_of(pipeline))
        return PlacedStage(
            parts=tuple(self._stage_kinds(result, stage)),
            shape=self._shape(result, stage, (stages - index, stages)),
            node_slot=self._node_slot(endpoints, index),
        )

    def _shape(self, result: Result, stage: Stage, place: tuple[int, int]) -> StageShape:
        from_end, stages = place
        return StageShape(
            layers=np.array([[sum(stage.layers)]]),
            in_flight=np.array([[from_end]]),
            is_first=np.array([[1.0 * (from_end == stages)]]),
            is_last=np.array([[1.0 * (from_end == 1)]]),
            replicas=(len(result.layout.pipelines) * (len(stage.parts) or 1),),
            groups=1 if result.is_alike or len(self.union(result)) == 1 else 2,
        )

    def _stage_kinds(self, result: Result, stage: Stage) -> Iterator[StageKinds]:
        """The kind of the stage, or of each part of one."""
        union = self.union(result)
        for pool, kind, rows in _kinds(self._names, stage, result.micro_batch_size):
            yield self._kinds_of(pool, union, result.is_alike, kind, rows)

    def _kinds_of(
        self, pool: int, union: tuple[int, ...], is_alike: bool, kind: tuple[int, int], rows: int
    ) -> StageKinds:
        key = pool, union, is_alike, kind, rows
        if key not in self._kinds:
            self._kinds[key] = stage_kinds_of(self._space.problem(pool, union, is_alike), [kind], rows)
        return self._kinds[key]

    def _hops_of(
        self, union: tuple[int, ...], size: int, pipeline: Pipeline, stages_per_node: StagesPerNode
    ) -> list[float]:
        endpoints = hop_endpoints(self._space, pipeline, stages_per_node)
        hops = []
        for index, (mine, theirs) in enumerate(pairwise(endpoints)):
            is_near = mine[0].is_whole and theirs[0].is_whole and mine[0].pool == theirs[0].pool
            is_inside = is_near and mine[0].group == theirs[0].group
            found = []
            for stage, some in zip(pipeline.stages[index : index + 2], (mine, theirs), strict=True):
                for end, (pool, kind, rows) in zip(some, _kinds(self._names, stage, size), strict=True):
                    kinds = self._kinds_of(pool, (pool,) if is_near else union, False, kind, rows)
                    tiers, devices = kinds.problem.tiers, self._space.pools[pool].node.devices
                    tier, senders = len(tiers) - 1, devices // end.stages_per_node
                    if is_inside:
                        inside = (i for i, inner in enumerate(tiers) if inner.span <= devices)
                        tier = max(inside, default=len(tiers) - 1)
                        senders = stage.devices
                    found.append(float(hop_s(kinds, tier, senders)[0]))
            hops.append(max(found))
        return hops


def _kinds(names: Sequence[str], stage: Stage, size: int) -> list[tuple[int, tuple[int, int], int]]:
    """The pool, (tp, dp) and rows of a stage, or of each part of one; a micro-batch has `size` rows."""
    if stage.parts:
        return [(names.index(part.device_class), (part.tp, 1), part.rows) for part in stage.parts]
    return [(names.index(stage.device_class), (stage.tp, stage.dp), size)]


def _figures_of(kinds: StageKinds, shape: StageShape, node_slot: NodeSlot, way: int) -> StageFigures:
    price, nbytes = stage_costs(kinds, shape, node_slot), stage_bytes(kinds, shape)
    problem = kinds.problem
    return StageFigures(
        forward_s=float(price.forward_s[0, 0]),
        backward_s=float(price.backward_s[way, 0, 0, 0]),
        gather_s=float(price.gather_s[0, 0, 0]),
        reduce_s=float(price.reduce_s[way, 0, 0, 0]),
        end_s=float(price.end_s[0, 0, 0]),
        allocated_bytes=float(nbytes.allocated[way, 0, 0, 0]),
        device_bytes=float(nbytes.device[way, 0, 0, 0]),
        usable_bytes=problem.usable_bytes,
        capacity_bytes=problem.capacity_bytes,
        fragmentation_ratio=problem.efficiency.fragmentation_ratio,
    )


# Prediction of a record

_Pipeline = tuple[Pipeline, tuple[str, ...], int, StagesPerNode]


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineTimes:
    """Times of a pipeline: `durations` of its actions (one case), and `end_s` after the last of them, for
    gradient norm, optimizer and host."""

    durations: Durations
    end_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordPrediction:
    """The prediction of a record. If there are `faults`, it is no valid plan, and nothing is predicted.

    Else the seconds of each pipeline, its times and stages, and the bytes and usable bytes of the fullest
    device.
    """

    faults: tuple[str, ...]
    pipeline_s: tuple[float, ...] = ()
    pipelines: tuple[PipelineTimes, ...] = ()
    stages: tuple[tuple[StageFigures, ...], ...] = ()
    device_bytes: float = 0.0
    usable_bytes: float = 0.0


def predict_record(model: Model, cluster: Cluster, job: Job, result: Result) -> RecordPrediction:
    """The prediction of the plan, or the faults in its record."""
    return predict_with(RecordCostModel(model, cluster, job), result, job.global_batch_size)


def predict_with(prices: RecordCostModel, result: Result, global_batch_size: int) -> RecordPrediction:
    """The same with a given cost model, which keeps known costs, for a batch of `global_batch_size`
    sequences."""
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
            times = _times(figures, hops, prices.job.profile.pipeline_overlap)
            known[one] = _step_s(times, share), figures, times
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


def _pipelines(nodes: NodeLookup, result: Result) -> Iterator[_Pipeline]:
    """Every pipeline with the recomputation of its stages, its micro-batches, and its stages per node. Ranks
    have no further effect and are left out."""
    for pipeline, ways, share in zip(
        result.layout.pipelines, result.recompute, result.microbatches, strict=True
    ):
        stages_per_node = nodes.stages_per_node_of(pipeline)
        stages = tuple(
            replace(stage, ranks="", share=0.0, parts=tuple(replace(part, ranks="") for part in stage.parts))
            for stage in pipeline.stages
        )
        yield (
            replace(pipeline, stages=stages, microbatches=1, rows=1, makespan_s=0.0),
            ways,
            share,
            stages_per_node,
        )


def _times(stages: Sequence[StageFigures], hops: Sequence[float], overlap: float) -> PipelineTimes:
    forward_s, backward_s, hops = with_sends(
        [stage.forward_s for stage in stages], [stage.backward_s for stage in stages], hops, overlap
    )
    durations = Durations.of(
        stages=len(stages),
        forward_s=forward_s,
        backward_s=backward_s,
        gather_s=[stage.gather_s for stage in stages],
        reduce_s=[stage.reduce_s for stage in stages],
        hop_forward_s=hops,
        hop_backward_s=hops,
    )
    return PipelineTimes(durations=durations, end_s=max(stage.end_s for stage in stages))


def _step_s(times: PipelineTimes, microbatches: int) -> float:
    """Seconds of a step under 1F1B."""
    stages = times.durations.stages
    drained_s = makespan_s("1f1b", pp=stages, microbatches=microbatches, vpp=1, durations=times.durations)
    return float(drained_s[0]) + times.end_s


# Figures of a record


def predicted_result(prices: RecordCostModel, result: Result, global_batch_size: int) -> Result | None:
    """The plan with all figures predicted by `predict_with`, for a batch of `global_batch_size` sequences;
    None where it is no valid plan or does not fit."""
    model, cluster, job = prices.model, prices.cluster, prices.job
    prediction = predict_with(prices, result, global_batch_size)
    if prediction.faults or prediction.device_bytes > prediction.usable_bytes:
        return None
    step_s = max(prediction.pipeline_s)
    tokens_per_s = global_batch_size * job.seq_len / step_s
    peak_flop_per_s = _peak_flop_per_s(cluster, job, result)
    mfu, mfu_full_attention = (
        model_flop_per_token(model, job.attention_len, causal_half=is_causal) * tokens_per_s / peak_flop_per_s
        for is_causal in (True, False)
    )
    low, high = widest_band(cluster, job.profile, result.pools)
    tightest, peak = tightest_of(stage_peaks(prediction, result))
    return replace(
        result,
        layout=result.layout.with_times(prediction.pipeline_s),
        step_time_s=step_s,
        band_s=(low * step_s, high * step_s),
        tokens_per_s_per_device=tokens_per_s / cluster.devices,
        mfu=mfu,
        mfu_full_attention=mfu_full_attention,
        peak_memory=peak,
        memory_band_bytes=job.profile.peak_errors.band_bytes(peak.device),
        fits_probability=job.profile.peak_errors.fits_probability(peak.device, peak.capacity),
        breakdown=_breakdown(prediction, result),
        memory=peak.parts,
        tightest_rank=tightest,
    )


def widest_band(cluster: Cluster, profile: Profile, pools: Sequence[str]) -> tuple[float, float]:
    """The band of measured over predicted step time (two factors) on any of these pools: the widest."""
    devices = [cluster.classes[pool.node.device_class] for pool in pools_of(cluster) if pool.name in pools]
    bands = [band_of(profile, device.efficiency) for device in devices]
    return min(low for low, _ in bands), max(high for _, high in bands)


def _peak_flop_per_s(cluster: Cluster, job: Job, result: Result) -> float:
    """The dense peak rates of all devices used."""
    classes = {pool.name: cluster.classes[pool.node.device_class] for pool in pools_of(cluster)}
    matmul = find_recipe(job.dtype).matmul
    return sum(size * classes[name].peak_flop_per_s[matmul] for name, size in _devices(result))


def _devices(result: Result) -> Iterator[tuple[str, int]]:
    """The pool and the devices of every stage, or of every part of one."""
    for stage in result.layout.stages:
        if stage.parts:
            yield from ((part.device_class, part.tp) for part in stage.parts)
        else:
            yield stage.device_class, stage.devices


def stage_peaks(prediction: RecordPrediction, result: Result) -> list[tuple[int, PeakMemory]]:
    """Of every stage in order, the first rank of it, or of its fullest part, with its peak memory."""
    found: list[tuple[int, PeakMemory]] = []
    figures = (one for pipeline in prediction.stages for one in pipeline)
    for stage, one in zip(result.layout.stages, figures, strict=True):
        peak = PeakMemory(
            allocated=one.allocated_bytes,
            reserved=memory.reserved_bytes(one.allocated_bytes, one.fragmentation_ratio),
            device=one.device_bytes,
            capacity=one.capacity_bytes,
        )
        on: Stage | StagePart = stage.parts[one.fullest_part] if stage.parts else stage
        found.append((int(on.ranks.partition("-")[0]), peak))
    return found


def tightest_of(peaks: Sequence[tuple[int, PeakMemory]]) -> tuple[int, PeakMemory]:
    """Of first ranks with their peak memory, the one with the fullest device; of ties the lowest rank."""
    in_order = sorted(peaks, key=lambda one: one[0])
    return in_order[int(first_largest([peak.device / peak.capacity for _, peak in in_order]))]


def _breakdown(prediction: RecordPrediction, result: Result) -> dict[str, float]:
    """Seconds of the slowest pipeline: work of its busiest stage, the rest of the pipeline with gradients,
    and the end of the step."""
    place = int(first_largest(prediction.pipeline_s))
    stages: tuple[StageFigures, ...] = prediction.stages[place]
    busy_s = result.microbatches[place] * max(one.forward_s + one.backward_s for one in stages)
    end_s = max(one.end_s for one in stages)
    return {
        "busiest_stage": busy_s,
        "pipeline_and_gradients": prediction.pipeline_s[place] - busy_s - end_s,
        "end_of_step": end_s,
    }
