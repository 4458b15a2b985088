"""Uneven plans as a search finds them: pipelines side by side, and the best so far."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from heapq import heapify, heappop, heappush

from shardwise.search.uneven.grown import StagePlacement
from shardwise.search.uneven.options import StageCostModel, StageOptions
from shardwise.search.uneven.partitions import pipeline_s
from shardwise.search.uneven.proving import EvaluatedPipeline
from shardwise.search.uneven.shapes import PipelineShape, spread_set_size
from shardwise.search.uneven.space import UnevenSubproblem

IMPROVEMENT_FACTOR = 1.0 - 5e-13
"""A plan is better where it takes less than this share of the time: closer than what counts as proven."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UnevenPipeline:
    """One pipeline of a plan: kind of stage per pool of the union, stages in order, its microbatches, and the
    seconds of its step."""

    kinds: tuple[int, ...]
    stages: tuple[StagePlacement, ...]
    microbatches: int
    time_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class UnevenPlan:
    """Pipelines side by side, the slowest of which takes `time_s`; `subproblem` says on which pools, with
    which micro-batch size, and how many there are."""

    subproblem: UnevenSubproblem
    pipelines: tuple[UnevenPipeline, ...]
    time_s: float


@dataclass(slots=True)
class UnevenIncumbent:
    """The best plan so far, and the time to beat, which may be less than its own at first; `laid` are blocks
    of one number of pipelines each in which a plan was laid out that was the best then."""

    plan: UnevenPlan | None
    time_s: float
    improving: set[UnevenSubproblem] = field(default_factory=set)

    def improve(
        self,
        pricing: StageCostModel,
        subproblem: UnevenSubproblem,
        found: Sequence[tuple[EvaluatedPipeline, int]],
    ) -> None:
        """Takes over what was found where it is better at the prices of its own number of pipelines."""
        pipelines = _capped(found, pricing.options(subproblem))
        if pipelines is None:
            return
        own = replace(subproblem, least=len(pipelines), most=len(pipelines))
        options = pricing.options(own)
        trimmed = _trimmed(options, pipelines, options.microbatches)
        time_s = max(pipeline.time_s for pipeline in trimmed)
        if time_s < self.time_s * IMPROVEMENT_FACTOR:
            self.improving.add(own)
            self.plan = UnevenPlan(subproblem=own, pipelines=tuple(trimmed), time_s=time_s)
            self.time_s = time_s


_Pipeline = tuple[PipelineShape, tuple[StagePlacement, ...], int]
"""Its shape, its stages and its microbatches."""


def _capped(found: Sequence[tuple[EvaluatedPipeline, int]], options: StageOptions) -> list[_Pipeline] | None:
    """No more pipelines than there are microbatches, of those whose stages are spread only as many as fill
    their nodes; None where these do not do all."""
    required, pipelines = options.microbatches, list[_Pipeline]()
    for evaluated, count in found:
        set_size = spread_set_size(options.spread, evaluated.shape)
        count = min(count, required - len(pipelines)) // set_size * set_size
        pipelines += [(evaluated.shape, evaluated.found.stages, evaluated.microbatches)] * count
    return pipelines if sum(microbatches for _, _, microbatches in pipelines) >= required else None


def _trimmed(options: StageOptions, pipelines: Sequence[_Pipeline], required: int) -> list[UnevenPipeline]:
    """The pipelines with no more microbatches than wanted: what is too much is taken from the slowest."""
    known: dict[_Pipeline, float] = {}

    def time_s(one: _Pipeline) -> float:
        if one not in known:
            known[one] = pipeline_s(options, one[0].kinds, one[1], one[2])
        return known[one]

    entries = [(-time_s(one), place, one) for place, one in enumerate(pipelines)]
    heap = [entry for entry in entries if entry[2][2] > 1]
    done = [entry for entry in entries if entry[2][2] == 1]
    heapify(heap)
    for _ in range(sum(one[2] for one in pipelines) - required):
        _, place, (shape, stages, microbatches) = heappop(heap)
        one = (shape, stages, microbatches - 1)
        if one[2] > 1:
            heappush(heap, (-time_s(one), place, one))
        else:
            done.append((-time_s(one), place, one))
    return [
        UnevenPipeline(kinds=shape.kinds, stages=stages, microbatches=microbatches, time_s=-negative_s)
        for negative_s, _, (shape, stages, microbatches) in sorted(heap + done, key=lambda entry: entry[1])
    ]
