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
from shardwise.cost import StagePrice, StageShape, hop_s, kinds_of, stage_price
from shardwise.model import Model
from shardwise.plan import Pipeline, Stage, StagePart, UnevenResult
from shardwise.search.uneven.space import Limits, UnevenSpace
from shardwise.sim import Durations
from shardwise.strategy import RECOMPUTES, Job


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineTimes:
    """What the stages of a pipeline take: `durations` of their actions (one case), and `end_s` behind the
    last of them, for the gradient norm, the optimizer and the host."""

    durations: Durations
    end_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PricedAgain:
    """What a plan is found to be: `faults` that make it none (then nothing is priced), seconds of each
    pipeline and of what it does, bytes on the device that is fullest for what it has, and what that may
    use."""

    faults: tuple[str, ...]
    pipeline_s: tuple[float, ...] = ()
    pipelines: tuple[PipelineTimes, ...] = ()
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
    stages = [stage for pipeline in result.layout.pipelines for stage in pipeline.stages]
    replicas = max((stage.dp for stage in stages if not stage.parts), default=1)
    space = UnevenSpace(model, cluster, job, Limits(rows=replicas))
    faults = tuple(_faults(space, result))
    if faults:
        return PricedAgain(faults=faults)
    names = [pool.name for pool in space.pools]
    union = tuple(sorted(names.index(name) for name in result.pools))
    known: dict[tuple[object, ...], tuple[float, list[_Figures], PipelineTimes]] = {}
    for pipeline, ways, share in _pipelines(result):
        if (pipeline.stages, ways, share) not in known:
            figures = [
                _figures(space, union, result, stage, way, (len(ways) - index, len(ways)))
                for index, (stage, way) in enumerate(zip(pipeline.stages, ways, strict=True))
            ]
            hops = _hops(space, union, result.micro_batch_size, pipeline)
            step_s = _walked_s(figures, hops, share)
            known[pipeline.stages, ways, share] = step_s, figures, _times(figures, hops)
    tightest = max(
        (one for _, figures, _ in known.values() for one in figures),
        key=lambda one: one.device_bytes / one.usable_bytes,
    )
    return PricedAgain(
        faults=(),
        pipeline_s=tuple(known[pipeline.stages, *rest][0] for pipeline, *rest in _pipelines(result)),
        pipelines=tuple(known[pipeline.stages, *rest][2] for pipeline, *rest in _pipelines(result)),
        device_bytes=tightest.device_bytes,
        usable_bytes=tightest.usable_bytes,
    )


def _pipelines(result: UnevenResult) -> Iterator[tuple[Pipeline, tuple[str, ...], int]]:
    """Every pipeline with what its stages recompute and its microbatches; ranks, which are told apart
    elsewhere, are left out."""
    for pipeline, ways, share in zip(
        result.layout.pipelines, result.recompute, result.microbatches, strict=True
    ):
        stages = tuple(
            replace(stage, ranks="", share=0.0, parts=tuple(replace(part, ranks="") for part in stage.parts))
            for stage in pipeline.stages
        )
        yield Pipeline(stages=stages), ways, share


def _ranks(stage: Stage | StagePart) -> range | None:
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
            faults_of = _faults_of_braid if stage.parts else _faults_of_stage
            yield from faults_of(space, result, stage, taken)
        if len({_kind_of_braid(stage) for stage in pipeline.stages if stage.parts}) > 1:
            yield f"pipeline {place} has stages on two pools of several kinds"
        yield from _faults_of_groups(space, place, pipeline)
    used = space.cluster.devices - len(taken)
    if used != result.idle_devices:
        yield f"{used} devices are idle, not {result.idle_devices}"
    if result.is_alike and not _are_alike(result.layout.pipelines, result.recompute, result.microbatches):
        yield "the pipelines differ"


def _faults_of_stage(
    space: UnevenSpace, result: UnevenResult, stage: Stage, taken: set[int]
) -> Iterator[str]:
    """What is wrong with a stage on one pool; its ranks are taken."""
    if sum(stage.layers) < 1:
        yield f"ranks {stage.ranks} have no layers"
    if stage.devices != stage.tp * stage.dp:
        yield f"{stage.devices} devices are not tp {stage.tp} x dp {stage.dp}"
    pool = _pool(space, result, stage)
    if pool is not None and (stage.tp, stage.dp) not in space.kinds(pool, result.micro_batch_size):
        yield f"no stage has tp {stage.tp}, dp {stage.dp} on {stage.device_class}"
    yield from _faults_of_ranks(space, result, stage, stage.tp * stage.dp, taken)


def _faults_of_braid(
    space: UnevenSpace, result: UnevenResult, stage: Stage, taken: set[int]
) -> Iterator[str]:
    """What is wrong with a stage on two pools; its ranks are taken."""
    parts = stage.parts
    if sum(stage.layers) < 1:
        yield f"ranks {stage.ranks} have no layers"
    if result.is_alike:
        yield "alike pipelines have stages on one pool only"
    if len({part.device_class for part in parts}) != 2 or len(parts) != 2:
        yield f"ranks {stage.ranks} are not of two pools"
    if sum(part.rows for part in parts) != result.micro_batch_size or min(part.rows for part in parts) < 1:
        rows = " + ".join(str(part.rows) for part in parts)
        yield f"{rows} rows of a microbatch of {result.micro_batch_size}"
    whole = (
        sum(part.tp for part in parts), ",".join(part.ranks for part in parts),
        " + ".join(part.device_class for part in parts), parts[0].tp, len(parts),
    )  # fmt: skip
    if whole != (stage.devices, stage.ranks, stage.device_class, stage.tp, stage.dp):
        yield f"ranks {stage.ranks} are not those of their parts"
    for part in parts:
        pool = _pool(space, result, part)
        if pool is not None and (part.tp, 1) not in space.kinds(pool, 1):
            yield f"no stage has tp {part.tp} on {part.device_class}"
        yield from _faults_of_ranks(space, result, part, part.tp, taken)


def _kind_of_braid(stage: Stage) -> tuple[tuple[str, int, int], ...]:
    """Where its parts lie, their tp and their rows."""
    return tuple((part.device_class, part.tp, part.rows) for part in stage.parts)


def _pool(space: UnevenSpace, result: UnevenResult, stage: Stage | StagePart) -> int | None:
    """The pool that it is on; None where that is none of the plan's."""
    if stage.device_class not in result.pools:
        return None
    return next((i for i, one in enumerate(space.pools) if one.name == stage.device_class), None)


def _faults_of_ranks(
    space: UnevenSpace, result: UnevenResult, stage: Stage | StagePart, size: int, taken: set[int]
) -> Iterator[str]:
    """Where a stage, or a part of one, is not on so many free ranks of a node of its pool; they are taken."""
    ranks, pool = _ranks(stage), _pool(space, result, stage)
    if ranks is None or not len(ranks) or pool is None:
        yield f"a stage on {stage.device_class}, ranks {stage.ranks}"
        return
    if len(ranks) != size:
        yield f"ranks {stage.ranks} are not {size}"
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
    plain = [stage for stage in pipeline.stages if not stage.parts]
    known = {part.device_class for stage in pipeline.stages for part in (stage.parts or (stage,))}
    if not known <= names or any(_ranks(stage) is None for stage in plain):
        return
    nodes: dict[tuple[int, int], set[int]] = defaultdict(set)
    of = [node for node, one in enumerate(space.cluster.nodes) for _ in range(one.devices)]
    for stage, ends in zip(pipeline.stages, _ends(space, pipeline), strict=True):
        if not stage.parts:
            ranks = _ranks(stage) or range(0)
            nodes[ends[0].pool, ends[0].group] |= {of[rank] for rank in ranks if rank < len(of)}
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
    """One stage by itself, on two pools what its slower part takes; `place` counts it from the end, of so
    many."""
    names = [one.name for one in space.pools]
    from_end, stages = place
    replicas = len(result.layout.pipelines) * (len(stage.parts) or 1)
    shape = StageShape(
        layers=np.array([[sum(stage.layers)]]),
        held=np.array([[from_end]]),
        is_first=np.array([[1.0 * (from_end == stages)]]),
        is_last=np.array([[1.0 * (from_end == 1)]]),
        replicas=(replicas,),
        groups=1 if result.is_alike or len(union) == 1 else 2,
    )
    found = []
    for pool, kind, rows in _kinds(names, stage, result.micro_batch_size):
        problem = space.problem(pool, union, result.is_alike)
        price = stage_price(kinds_of(problem, [kind], rows), shape)
        found.append(_figures_of(price, RECOMPUTES.index(way), problem.usable_bytes))
    fullest = max(found, key=lambda one: one.device_bytes / one.usable_bytes)
    return _Figures(
        forward_s=max(one.forward_s for one in found),
        backward_s=max(one.backward_s for one in found),
        gather_s=max(one.gather_s for one in found),
        reduce_s=max(one.reduce_s for one in found),
        end_s=max(one.end_s for one in found),
        device_bytes=fullest.device_bytes,
        usable_bytes=fullest.usable_bytes,
    )


def _kinds(names: Sequence[str], stage: Stage, size: int) -> list[tuple[int, tuple[int, int], int]]:
    """The pool, (tp, dp) and rows of a stage, or of each part of one; a microbatch has `size` rows."""
    if stage.parts:
        return [(names.index(part.device_class), (part.tp, 1), part.rows) for part in stage.parts]
    return [(names.index(stage.device_class), (stage.tp, stage.dp), size)]


def _figures_of(price: StagePrice, way: int, usable_bytes: float) -> _Figures:
    return _Figures(
        forward_s=float(price.forward_s[0, 0]),
        backward_s=float(price.backward_s[way, 0, 0, 0]),
        gather_s=float(price.gather_s[0, 0, 0]),
        reduce_s=float(price.reduce_s[way, 0, 0, 0]),
        end_s=float(price.end_s[0, 0, 0]),
        device_bytes=float(price.device_bytes[way, 0, 0, 0]),
        usable_bytes=usable_bytes,
    )


@dataclass(frozen=True, slots=True)
class _End:
    """A stage, or a part of one, as an end of hops: its pool, and which node-filling group of the pipeline's
    stages there it is of, how many stages that has, and whether it is all of the stage."""

    pool: int
    group: int
    together: int
    is_whole: bool = True


def _ends(space: UnevenSpace, pipeline: Pipeline) -> list[tuple[_End, ...]]:
    """Of the stages in order. Those on one pool are grouped from the last on: a group has 1, 2, 4, ...
    stages, as many as there still are and as divide a node. Parts of a stage on two pools are by
    themselves."""
    names = [pool.name for pool in space.pools]
    found: dict[int, tuple[_End, ...]] = {}
    for index, stage in enumerate(pipeline.stages):
        found[index] = tuple(_End(names.index(part.device_class), 0, 1, False) for part in stage.parts)
    plain = {i: names.index(one.device_class) for i, one in enumerate(pipeline.stages) if not one.parts}
    for pool in set(plain.values()):
        mine = [index for index, one in plain.items() if one == pool]
        group = 0
        while mine:
            size = pipeline.stages[mine[0]].devices
            fitting = [n for n in (1 << e for e in range(len(mine).bit_length())) if n <= len(mine)]
            together = max(n for n in fitting if space.pools[pool].node.devices % (n * size) == 0)
            for index in mine[-together:]:
                found[index] = (_End(pool, group, together),)
            mine, group = mine[:-together], group + 1
    return [found[index] for index in range(len(pipeline.stages))]


def _hops(space: UnevenSpace, union: tuple[int, ...], size: int, pipeline: Pipeline) -> list[float]:
    """Seconds from each stage to the next: inside their node, or what the slowest end needs to leave it, all
    groups of its node sending at once."""
    names = [pool.name for pool in space.pools]
    ends = _ends(space, pipeline)
    hops = []
    for index, (mine, theirs) in enumerate(pairwise(ends)):
        is_near = mine[0].is_whole and theirs[0].is_whole and mine[0].pool == theirs[0].pool
        is_inside = is_near and mine[0].group == theirs[0].group
        found = []
        for stage, some in zip(pipeline.stages[index : index + 2], (mine, theirs), strict=True):
            for end, (pool, kind, rows) in zip(some, _kinds(names, stage, size), strict=True):
                problem = space.problem(pool, (pool,) if is_near else union, False)
                devices = space.pools[pool].node.devices
                tier, senders = len(problem.tiers) - 1, devices // end.together
                if is_inside:
                    tier = max(i for i, inner in enumerate(problem.tiers) if inner.span <= devices)
                    senders = stage.devices
                found.append(float(hop_s(kinds_of(problem, [kind], rows), tier, senders)[0]))
        hops.append(max(found))
    return hops


def _times(stages: Sequence[_Figures], hops: Sequence[float]) -> PipelineTimes:
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
