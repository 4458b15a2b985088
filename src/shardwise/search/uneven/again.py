"""An uneven plan priced again from its record alone: stage by stage, and 1F1B walked action by action.

Only the prices of single stages are those of the search; what stages a plan has, where they lie and how they
follow each other is read from the plan.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from shardwise.cluster import Cluster
from shardwise.cost import StageShape, hop_s, kinds_of, stage_price
from shardwise.model import Model
from shardwise.plan import Pipeline, Stage, UnevenResult
from shardwise.search.uneven.space import Limits, UnevenSpace
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
    replicas = max((stage.dp for pipeline in result.layout.pipelines for stage in pipeline.stages), default=1)
    space = UnevenSpace(model, cluster, job, Limits(rows=replicas))
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
            ends = _ends(space, pipeline)
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
        yield from _faults_of_groups(space, place, pipeline)
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


def _faults_of_groups(space: UnevenSpace, place: int, pipeline: Pipeline) -> Iterator[str]:
    """Where stages that are priced as in one node are not."""
    names = {pool.name for pool in space.pools}
    if any(stage.device_class not in names or _ranks(stage) is None for stage in pipeline.stages):
        return
    nodes: dict[tuple[int, int], set[int]] = defaultdict(set)
    of = [node for node, one in enumerate(space.cluster.nodes) for _ in range(one.devices)]
    for end in _ends(space, pipeline):
        ranks = _ranks(end.stage) or range(0)
        nodes[end.pool, end.group] |= {of[rank] for rank in ranks if rank < len(of)}
    if any(len(found) > 1 for found in nodes.values()):
        yield f"stages of pipeline {place} are priced as in one node and lie in several"


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


@dataclass(frozen=True, slots=True)
class _End:
    """A stage as an end of hops: its pool, which node-filling group of the pipeline's stages there it is of,
    and how many stages that has."""

    pool: int
    stage: Stage
    group: int
    together: int


def _ends(space: UnevenSpace, pipeline: Pipeline) -> list[_End]:
    """Stages in order. Those on one pool are grouped from the last on: a group has 1, 2, 4, ... stages, as
    many as there still are and as divide a node."""
    names = [pool.name for pool in space.pools]
    pools = [names.index(stage.device_class) for stage in pipeline.stages]
    found: dict[int, _End] = {}
    for pool in set(pools):
        mine = [index for index, one in enumerate(pools) if one == pool]
        group = 0
        while mine:
            size = pipeline.stages[mine[0]].devices
            fitting = [n for n in (1 << e for e in range(len(mine).bit_length())) if n <= len(mine)]
            together = max(n for n in fitting if space.pools[pool].node.devices % (n * size) == 0)
            for index in mine[-together:]:
                found[index] = _End(pool, pipeline.stages[index], group, together)
            mine, group = mine[:-together], group + 1
    return [found[index] for index in range(len(pools))]


def _hop_s(space: UnevenSpace, union: tuple[int, ...], size: int, one: _End, other: _End) -> float:
    """Seconds between two stages: inside their node, or what the slower end needs to leave it, all groups of
    its node sending at once."""
    over = (one.pool,) if one.pool == other.pool else union
    found = []
    for end in (one, other):
        problem = space.problem(end.pool, over, False)
        kinds = kinds_of(problem, [(end.stage.tp, end.stage.dp)], size)
        devices = space.pools[end.pool].node.devices
        tier, senders = len(problem.tiers) - 1, devices // end.together
        if one.pool == other.pool and one.group == other.group:
            tier = max(i for i, inner in enumerate(problem.tiers) if inner.span <= devices)
            senders = end.stage.devices
        found.append(float(hop_s(kinds, tier, senders)[0]))
    return max(found)


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
