"""What is against an uneven plan: its space, its cluster, or its own figures."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

from shardwise.plan import Pipeline, Stage, StagePart, UnevenResult
from shardwise.search.uneven.lying import NodeLookup, ranks_of, stage_groups, stages_by_pool
from shardwise.search.uneven.space import UnevenSpace


def faults_of(space: UnevenSpace, result: UnevenResult, global_batch_size: int) -> Iterator[str]:
    """What is against the space, the cluster or a batch of so many sequences."""
    model = space.model
    done = sum(result.microbatches) * result.micro_batch_size
    if done != global_batch_size:
        yield f"{done} sequences of {global_batch_size}"
    names = {pool.name for pool in space.pools}
    if unknown := sorted(set(result.pools) - names):
        yield f"no pool {unknown[0]}"
    if len(set(result.pools)) < len(result.pools):
        yield "a pool is named twice"
    taken: set[int] = set()
    for place, pipeline in enumerate(result.layout.pipelines):
        layers = sum(sum(stage.layers) for stage in pipeline.stages)
        if layers != model.layers:
            yield f"pipeline {place} has {layers} layers of {model.layers}"
        if len(pipeline.stages) > space.most_stages:
            yield f"pipeline {place} has {len(pipeline.stages)} stages, at most {space.most_stages}"
        for stage in pipeline.stages:
            faults_of = _faults_of_mixed_stage if stage.parts else _faults_of_stage
            yield from faults_of(space, result, stage, taken)
        if len({_mixed_stage_kind(stage) for stage in pipeline.stages if stage.parts}) > 1:
            yield f"pipeline {place} has stages on two pools of several kinds"
    yield from faults_of_spread(space, result.layout.pipelines)
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
    if pool is not None and (stage.tp, stage.dp) not in space.degrees(pool, result.micro_batch_size):
        yield f"no stage has tp {stage.tp}, dp {stage.dp} on {stage.device_class}"
    yield from _faults_of_ranks(space, result, stage, stage.tp * stage.dp, taken)


def _faults_of_mixed_stage(
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
        if pool is not None and (part.tp, 1) not in space.degrees(pool, 1):
            yield f"no stage has tp {part.tp} on {part.device_class}"
        yield from _faults_of_ranks(space, result, part, part.tp, taken)


def _mixed_stage_kind(stage: Stage) -> tuple[tuple[str, int, int], ...]:
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
    ranks, pool = ranks_of(stage, space.cluster.devices), _pool(space, result, stage)
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


def faults_of_spread(space: UnevenSpace, pipelines: Sequence[Pipeline]) -> Iterator[str]:
    """Where stages are spread over nodes that are not full of the same stages of like pipelines."""
    nodes = NodeLookup(space)
    lying: dict[int | None, list[tuple[object, ...]]] = defaultdict(list)
    taken: dict[int | None, int] = defaultdict(int)
    spread: dict[int | None, int] = {}
    most_of = {pool.name: partial(space.stages_per_node, place) for place, pool in enumerate(space.pools)}
    for place, pipeline in enumerate(pipelines):
        stages_per_node = nodes.stages_per_node_of(pipeline)
        mine = stages_by_pool(pipeline)
        shape = tuple((stage.device_class, stage.devices) for stage in pipeline.stages)
        for name, group in stage_groups(pipeline, stages_per_node):
            first = pipeline.stages[group[0]]
            node, most = nodes.node(first), dict(stages_per_node)[name]
            lying[node].append((shape, group))
            taken[node] += sum(pipeline.stages[index].devices for index in group)
            size = pipeline.stages[mine[name][0]].devices  # as where it is read how they lie together
            if name in most_of and most < most_of[name](size) and 2 * most <= len(mine[name]):
                spread.setdefault(node, place)
        for part in (part for stage in pipeline.stages for part in stage.parts):
            lying[nodes.node(part)].append((place, part.ranks))
    for node, place in spread.items():
        full = node is not None and taken[node] == space.cluster.nodes[node].devices
        if not full or len(set(lying[node])) > 1:
            yield f"pipeline {place} is spread over nodes that its like do not fill"
            return


def _are_alike(
    pipelines: Sequence[Pipeline], recompute: Sequence[tuple[str, ...]], microbatches: Sequence[int]
) -> bool:
    stages = {
        tuple((stage.device_class, stage.tp, stage.dp, stage.layers) for stage in pipeline.stages)
        for pipeline in pipelines
    }
    return len(stages) == 1 and len(set(recompute)) == 1 and max(microbatches) - min(microbatches) <= 1
