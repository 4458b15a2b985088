"""What is against an uneven plan: its space, its cluster, or its own figures."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace

from shardwise.plan import Pipeline, Stage, StagePart, UnevenResult
from shardwise.search.uneven.space import UnevenSpace
from shardwise.search.uneven.stage_record import ends_of


def faults_of(space: UnevenSpace, result: UnevenResult, global_batch_size: int) -> Iterator[str]:
    """What is against the space, the cluster or a batch of so many sequences."""
    model = space.model
    done = sum(result.microbatches) * result.micro_batch_size
    if done != global_batch_size:
        yield f"{done} sequences of {global_batch_size}"
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


def _ranks(stage: Stage | StagePart, devices: int) -> range | None:
    """The stage's ranks; None where the text has another form, or names none of so many devices."""
    first, dash, last = stage.ranks.partition("-")
    last = last if dash else first
    if not all(text.isascii() and text.isdecimal() and len(text) < 10 for text in (first, last)):
        return None
    return range(int(first), int(last) + 1) if int(last) < devices else None


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
    ranks, pool = _ranks(stage, space.cluster.devices), _pool(space, result, stage)
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
    devices = space.cluster.devices
    if not known <= names or any(_ranks(stage, devices) is None for stage in plain):
        return
    nodes: dict[tuple[int, int], set[int]] = defaultdict(set)
    of = [node for node, one in enumerate(space.cluster.nodes) for _ in range(one.devices)]
    for stage, ends in zip(pipeline.stages, ends_of(space, pipeline), strict=True):
        if not stage.parts:
            ranks = _ranks(stage, devices) or range(0)
            nodes[ends[0].pool, ends[0].group] |= {of[rank] for rank in ranks}
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
