"""An uneven plan priced again from its record alone: stage by stage, and 1F1B walked action by action.

Only the prices of single stages are those of the search; what stages a plan has, where they lie and how they
follow each other is read from the plan.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from shardwise.cluster import Cluster
from shardwise.cost import StageShape, hop_s, kinds_of, stage_price
from shardwise.model import Model
from shardwise.plan import Pipeline, Stage, UnevenResult
from shardwise.search.uneven.space import UnevenSpace
from shardwise.strategy import RECOMPUTES, Job


@dataclass(frozen=True, slots=True, kw_only=True)
class PricedAgain:
    """What a plan is found to be: `faults` that make it none (then nothing is priced), seconds of each
    pipeline, bytes on the device that is fullest for what it has, and what that may use."""

    faults: tuple[str, ...]
    pipeline_s: tuple[float, ...] = ()
    device_bytes: float = 0.0
    usable_bytes: float = 0.0


@dataclass(frozen=True, slots=True)
class _Figures:
    forward_s: float
    backward_s: float
    gather_s: float
    reduce_s: float
    end_s: float
    device_bytes: float
    usable_bytes: float


def priced_again(model: Model, cluster: Cluster, job: Job, result: UnevenResult) -> PricedAgain:
    """The plan's price, or what is wrong with it."""
    space = UnevenSpace(model, cluster, job)
    faults = tuple(_faults(space, result))
    if faults:
        return PricedAgain(faults=faults)
    names = [pool.name for pool in space.pools]
    union = tuple(sorted(names.index(name) for name in result.pools))
    known: dict[tuple[object, ...], tuple[float, list[_Figures]]] = {}
    for pipeline, ways, share in _pipelines(result):
        if (pipeline.stages, ways, share) not in known:
            figures = [
                _figures(space, union, result, stage, way, (len(ways) - index, len(ways)))
                for index, (stage, way) in enumerate(zip(pipeline.stages, ways, strict=True))
            ]
            ends = [(names.index(stage.device_class), stage) for stage in pipeline.stages]
            hops = [
                _hop_s(space, union, result.micro_batch_size, one, other) for one, other in pairwise(ends)
            ]
            known[pipeline.stages, ways, share] = _walked_s(figures, hops, share), figures
    tightest = max(
        (one for _, figures in known.values() for one in figures),
        key=lambda one: one.device_bytes / one.usable_bytes,
    )
    return PricedAgain(
        faults=(),
        pipeline_s=tuple(known[pipeline.stages, *rest][0] for pipeline, *rest in _pipelines(result)),
        device_bytes=tightest.device_bytes,
        usable_bytes=tightest.usable_bytes,
    )


def _pipelines(result: UnevenResult) -> Iterator[tuple[Pipeline, tuple[str, ...], int]]:
    """Every pipeline with what its stages recompute and its microbatches; ranks, which are told apart
    elsewhere, are left out."""
    for pipeline, ways, share in zip(
        result.layout.pipelines, result.recompute, result.microbatches, strict=True
    ):
        stages = tuple(replace(stage, ranks="", share=0.0) for stage in pipeline.stages)
        yield Pipeline(stages=stages), ways, share


def _ranks(stage: Stage) -> range | None:
    """The stage's ranks; None where the text has another form."""
    first, _, last = stage.ranks.partition("-")
    if not first.isdecimal() or not (last or "0").isdecimal():
        return None
    return range(int(first), int(last or first) + 1)


def _faults(space: UnevenSpace, result: UnevenResult) -> Iterator[str]:
    """What is against the space or the cluster."""
    model, job = space.model, space.job
    done = sum(result.microbatches) * result.micro_batch_size
    if done != job.global_batch_size:
        yield f"{done} sequences of {job.global_batch_size}"
    names = {pool.name for pool in space.pools}
    if unknown := sorted(set(result.pools) - names):
        yield f"no pool {unknown[0]}"
    taken: set[int] = set()
    for place, pipeline in enumerate(result.layout.pipelines):
        layers = sum(sum(stage.layers) for stage in pipeline.stages)
        if layers != model.layers:
            yield f"pipeline {place} has {layers} layers of {model.layers}"
        if len(pipeline.stages) > space.most_stages:
            yield f"pipeline {place} has {len(pipeline.stages)} stages, at most {space.most_stages}"
        for stage in pipeline.stages:
            yield from _faults_of_stage(space, result, stage, taken)
    used = space.cluster.devices - len(taken)
    if used != result.idle_devices:
        yield f"{used} devices are idle, not {result.idle_devices}"
    if result.is_alike and not _are_alike(result.layout.pipelines, result.recompute, result.microbatches):
        yield "the pipelines differ"


def _faults_of_stage(
    space: UnevenSpace, result: UnevenResult, stage: Stage, taken: set[int]
) -> Iterator[str]:
    """What is wrong with a stage; its ranks are taken."""
    ranks = _ranks(stage)
    pool = next((i for i, one in enumerate(space.pools) if one.name == stage.device_class), None)
    if ranks is None or not len(ranks) or pool is None or stage.device_class not in result.pools:
        yield f"a stage on {stage.device_class}, ranks {stage.ranks}"
        return
    if sum(stage.layers) < 1:
        yield f"ranks {stage.ranks} have no layers"
    if len(ranks) != stage.devices or stage.devices != stage.tp * stage.dp:
        yield f"ranks {stage.ranks} are not tp {stage.tp} x dp {stage.dp}"
    if (stage.tp, stage.dp) not in space.kinds(pool, result.micro_batch_size):
        yield f"no stage has tp {stage.tp}, dp {stage.dp} on {stage.device_class}"
    if taken & set(ranks):
        yield f"ranks {stage.ranks} are taken twice"
    taken |= set(ranks)
    first = 0
    for node in space.cluster.nodes:
        if first <= ranks.start and ranks.stop <= first + node.devices:
            if replace(node, name="") != replace(space.pools[pool].node, name=""):
                yield f"ranks {stage.ranks} are not of {stage.device_class}"
            return
        first += node.devices
    yield f"ranks {stage.ranks} are in no one node"


def _are_alike(
    pipelines: Sequence[Pipeline], recompute: Sequence[tuple[str, ...]], microbatches: Sequence[int]
) -> bool:
    stages = {
        tuple((stage.device_class, stage.tp, stage.dp, stage.layers) for stage in pipeline.stages)
        for pipeline in pipelines
    }
    return len(stages) == 1 and len(set(recompute)) == 1 and max(microbatches) - min(microbatches) <= 1


def _figures(
    space: UnevenSpace,
    union: tuple[int, ...],
    result: UnevenResult,
    stage: Stage,
    way: str,
    place: tuple[int, int],
) -> _Figures:
    """One stage by itself; `place` counts it from the end, of so many."""
    pool = next(i for i, one in enumerate(space.pools) if one.name == stage.device_class)
    problem = space.problem(pool, union, result.is_alike)
    from_end, stages = place
    shape = StageShape(
        layers=np.array([[sum(stage.layers)]]),
        held=np.array([[from_end]]),
        is_first=np.array([[1.0 * (from_end == stages)]]),
        is_last=np.array([[1.0 * (from_end == 1)]]),
        replicas=(len(result.layout.pipelines),),
        groups=1 if result.is_alike or len(union) == 1 else 2,
    )
    price = stage_price(kinds_of(problem, [(stage.tp, stage.dp)], result.micro_batch_size), shape)
    index = RECOMPUTES.index(way)
    return _Figures(
        forward_s=float(price.forward_s[0, 0]),
        backward_s=float(price.backward_s[index, 0, 0, 0]),
        gather_s=float(price.gather_s[0, 0, 0]),
        reduce_s=float(price.reduce_s[index, 0, 0, 0]),
        end_s=float(price.end_s[0, 0, 0]),
        device_bytes=float(price.device_bytes[index, 0, 0, 0]),
        usable_bytes=problem.usable_bytes,
    )


def _hop_s(
    space: UnevenSpace, union: tuple[int, ...], size: int, one: tuple[int, Stage], other: tuple[int, Stage]
) -> float:
    """Seconds between two stages: what the slower end needs, over the tiers of one pool or of all."""
    over = (one[0],) if one[0] == other[0] else union
    ends = [
        kinds_of(space.problem(pool, over, False), [(stage.tp, stage.dp)], size)
        for pool, stage in (one, other)
    ]
    return max(float(hop_s(kinds)[0]) for kinds in ends)


def _walked_s(stages: Sequence[_Figures], hops: Sequence[float], microbatches: int) -> float:
    """Seconds of a step: every stage does as many forwards as there are stages from it on, then a backward
    and a forward by turns; each action as soon as its stage is free and what it needs has come."""
    count = len(stages)
    todo: list[list[tuple[str, int]]] = []
    for stage in range(count):
        warm = min(count - stage, microbatches)
        turns = [("F", j) for j in range(warm)]
        for j in range(microbatches):
            turns.append(("B", j))
            turns += [("F", j + warm)] if j + warm < microbatches else []
        todo.append(turns)
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
