"""Prices of the stages and hops of an uneven plan from its record, each worked out once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from shardwise.cluster import Cluster
from shardwise.cost import (
    NodeSlot,
    Problem,
    StageCosts,
    StageKinds,
    StageShape,
    hop_s,
    stage_costs,
    stage_kinds_of,
)
from shardwise.model import Model
from shardwise.plan import Pipeline, Stage, UnevenResult
from shardwise.search.uneven.lying import HopEndpoint, NodeLookup, StagesPerNode, hop_endpoints
from shardwise.search.uneven.space import UnevenLimits, UnevenSpace
from shardwise.strategy import RECOMPUTES, Job
from shardwise.ties import first_largest


@dataclass(frozen=True, slots=True, kw_only=True)
class StageFigures:
    """One stage by itself: seconds of a forward and a backward of a microbatch, of gathering and reducing,
    and of the end of the step; and bytes on its devices, of one on two pools on those of the part that is
    fullest."""

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


class RecordCostModel:
    """Prices for one model, cluster and job, whatever its batch is. Stages are told without their ranks."""

    def __init__(self, model: Model, cluster: Cluster, job: Job) -> None:
        self.model, self.cluster, self.job = model, cluster, job
        self._space = UnevenSpace(model, cluster, job)
        self._names = [pool.name for pool in self._space.pools]
        self.nodes = NodeLookup(self._space)
        self._kinds: dict[tuple[object, ...], StageKinds] = {}
        self._figures: dict[tuple[object, ...], StageFigures] = {}
        self._hops: dict[tuple[object, ...], list[float]] = {}

    def space(self, rows: int) -> UnevenSpace:
        """Plans with up to so many replicas in a stage."""
        return UnevenSpace(self.model, self.cluster, self.job, UnevenLimits(stage_dp=rows))

    def union(self, result: UnevenResult) -> tuple[int, ...]:
        """The pools that the plan is priced as one of."""
        return tuple(sorted(self._names.index(name) for name in result.pools))

    def figures(
        self, result: UnevenResult, pipeline: Pipeline, ways: Sequence[str], stages_per_node: StagesPerNode
    ) -> list[StageFigures]:
        """The stages of a pipeline, each by itself, on two pools what its slower part takes; `ways` says what
        they recompute, `stages_per_node` how many lie in a node (`stages_per_node_of`)."""
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
        """Of a stage among those of its pipeline; parts of one on two pools are by themselves."""
        mine = endpoints[index][0]
        if not mine.is_whole:
            return NodeSlot()
        has_others = any(one != mine for some in endpoints for one in some)
        devices = self._space.pools[mine.pool].node.devices
        return NodeSlot(mine.stages_per_node, devices, is_whole=len(endpoints) > 1 and not has_others)

    def hops(self, result: UnevenResult, pipeline: Pipeline, stages_per_node: StagesPerNode) -> list[float]:
        """Seconds from each stage to the next: inside their node, or what the slowest end needs to leave it,
        all groups of its node sending at once."""
        key = self.union(result), result.micro_batch_size, pipeline, stages_per_node
        if key not in self._hops:
            self._hops[key] = self._hops_of(*key)
        return self._hops[key]

    def _stage_figures(
        self, result: UnevenResult, stage: Stage, way: str, place: tuple[int, int], node_slot: NodeSlot
    ) -> StageFigures:
        union = self.union(result)
        from_end, stages = place
        replicas = len(result.layout.pipelines) * (len(stage.parts) or 1)
        shape = StageShape(
            layers=np.array([[sum(stage.layers)]]),
            in_flight=np.array([[from_end]]),
            is_first=np.array([[1.0 * (from_end == stages)]]),
            is_last=np.array([[1.0 * (from_end == 1)]]),
            replicas=(replicas,),
            groups=1 if result.is_alike or len(union) == 1 else 2,
        )
        found = []
        for pool, kind, rows in _kinds(self._names, stage, result.micro_batch_size):
            kinds = self._kinds_of(pool, union, result.is_alike, kind, rows)
            found.append(
                _figures_of(stage_costs(kinds, shape, node_slot), RECOMPUTES.index(way), kinds.problem)
            )
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
    """The pool, (tp, dp) and rows of a stage, or of each part of one; a microbatch has `size` rows."""
    if stage.parts:
        return [(names.index(part.device_class), (part.tp, 1), part.rows) for part in stage.parts]
    return [(names.index(stage.device_class), (stage.tp, stage.dp), size)]


def _figures_of(price: StageCosts, way: int, problem: Problem) -> StageFigures:
    return StageFigures(
        forward_s=float(price.forward_s[0, 0]),
        backward_s=float(price.backward_s[way, 0, 0, 0]),
        gather_s=float(price.gather_s[0, 0, 0]),
        reduce_s=float(price.reduce_s[way, 0, 0, 0]),
        end_s=float(price.end_s[0, 0, 0]),
        allocated_bytes=float(price.allocated_bytes[way, 0, 0, 0]),
        device_bytes=float(price.device_bytes[way, 0, 0, 0]),
        usable_bytes=problem.usable_bytes,
        capacity_bytes=problem.capacity_bytes,
        fragmentation_ratio=problem.efficiency.fragmentation_ratio,
    )
