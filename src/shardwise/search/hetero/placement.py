"""Node slots read from the ranks of a plan, and the faults of a plan's record.

`NodeLookup` finds which stages of a pipeline share a node. `faults_of` lists contradictions to the space, the
cluster, or the plan's own figures.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate

from shardwise.plans import Pipeline, Result, Stage, StagePart
from shardwise.search.hetero.space import UnevenSpace
from shardwise.search.hetero.stage_costs import group_sizes

StagesPerNode = tuple[tuple[str, int], ...]
"""For each pool (by name) on which a pipeline has stages, how many of these share a node, at most."""


@dataclass(frozen=True, slots=True)
class HopEndpoint:
    """A stage, or a part of one, as an end of hops: its pool, the group of stages that it shares a node with,
    and the stages of that group. `is_whole` is false for a part of a mixed-pool stage."""

    pool: int
    group: int
    stages_per_node: int
    is_whole: bool = True


def ranks_of(stage: Stage | StagePart, devices: int) -> range | None:
    """The stage's ranks; None where the text has another form, or a rank is not below `devices`."""
    first, dash, last = stage.ranks.partition("-")
    last = last if dash else first
    if not all(text.isascii() and text.isdecimal() and len(text) < 10 for text in (first, last)):
        return None
    return range(int(first), int(last) + 1) if int(last) < devices else None


def stages_by_pool(pipeline: Pipeline) -> dict[str, list[int]]:
    """Indices of the stages on one pool each, in order, by the pool's name."""
    found: dict[str, list[int]] = {}
    for index, stage in enumerate(pipeline.stages):
        if not stage.parts:
            found.setdefault(stage.device_class, []).append(index)
    return found


def stage_groups(pipeline: Pipeline, stages_per_node: StagesPerNode) -> Iterator[tuple[str, tuple[int, ...]]]:
    """The groups of stages that share a node, from the last stage on, with the name of their pool (see
    `stage_costs.group_sizes`)."""
    mine = stages_by_pool(pipeline)
    for name, most in stages_per_node:
        left = mine[name]
        for many in group_sizes(len(left), most):
            yield name, tuple(left[-many:])
            left = left[:-many]


def hop_endpoints(
    space: UnevenSpace, pipeline: Pipeline, stages_per_node: StagesPerNode
) -> list[tuple[HopEndpoint, ...]]:
    """The endpoints of each stage, in order; two of a mixed-pool stage, one for each part."""
    places = {pool.name: place for place, pool in enumerate(space.pools)}
    found = {
        index: tuple(HopEndpoint(places[part.device_class], 0, 1, False) for part in stage.parts)
        for index, stage in enumerate(pipeline.stages)
    }
    for group, (name, stages) in enumerate(stage_groups(pipeline, stages_per_node)):
        for index in stages:
            found[index] = (HopEndpoint(places[name], group, len(stages)),)
    return [found[index] for index in range(len(pipeline.stages))]


class NodeLookup:
    """The node of each rank of a cluster."""

    def __init__(self, space: UnevenSpace) -> None:
        self._space = space
        self._of = [node for node, one in enumerate(space.cluster.nodes) for _ in range(one.devices)]

    def node(self, stage: Stage | StagePart) -> int | None:
        """The node of a stage's first rank; None where it has none."""
        ranks = ranks_of(stage, len(self._of))
        return self._of[ranks[0]] if ranks else None

    def stages_per_node_of(self, pipeline: Pipeline) -> StagesPerNode:
        """The stages per node on each pool of a pipeline: the largest power of two, up to a node's capacity,
        with which every group of stages is in one node. It is less than the capacity where stages are spread.
        """
        known = {pool.name: place for place, pool in enumerate(self._space.pools)}
        found = []
        for name, mine in stages_by_pool(pipeline).items():
            stages = [pipeline.stages[index] for index in mine]
            most = self._space.stages_per_node(known[name], stages[0].devices) if name in known else 1
            while most > 1 and not _share_nodes([self.node(stage) for stage in stages], most):
                most //= 2
            found.append((name, most))
        return tuple(found)


def spread_stages(space: UnevenSpace, result: Result) -> dict[str, tuple[int, ...]]:
    """The pools on which stages are spread, in order, with the stages per node there."""
    nodes, places = NodeLookup(space), {pool.name: place for place, pool in enumerate(space.pools)}
    found: dict[str, set[int]] = {}
    for pipeline in result.layout.pipelines:
        mine = stages_by_pool(pipeline)
        for name, stages_per_node in nodes.stages_per_node_of(pipeline):
            stage = pipeline.stages[mine[name][0]]
            if stages_per_node < space.stages_per_node(
                places[name], stage.devices
            ) and 2 * stages_per_node <= len(mine[name]):
                found.setdefault(name, set()).add(stages_per_node)
    return {name: tuple(sorted(found[name])) for name in places if name in found}


def _share_nodes(nodes: Sequence[int | None], stages_per_node: int) -> bool:
    """Whether each group of stages is in one node; `nodes` has the node of each stage."""
    ends = list(accumulate(group_sizes(len(nodes), stages_per_node)))
    reversed_nodes = nodes[::-1]
    return all(
        len(set(reversed_nodes[first:last])) == 1 for first, last in zip([0, *ends[:-1]], ends, strict=True)
    )


# Faults of a record


def faults_of(space: UnevenSpace, result: Result, global_batch_size: int) -> Iterator[str]:
    """Yields every contradiction to the space, the cluster, or a batch of `global_batch_size` sequences."""
    model = space.model
    done = sum(result.microbatches) * result.micro_batch_size
    if done != global_batch_size:
        yield f"the micro-batches have {done} of {global_batch_size} sequences"
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
            yield f"pipeline {place} has mixed-pool stages of several kinds"
    yield from faults_of_spread(space, result.layout.pipelines)
    if result.is_alike and not _are_alike(result.layout.pipelines, result.recompute, result.microbatches):
        yield "the pipelines are not identical"


def _faults_of_stage(space: UnevenSpace, result: Result, stage: Stage, taken: set[int]) -> Iterator[str]:
    """Faults of a stage on one pool; adds its ranks to `taken`."""
    if sum(stage.layers) < 1:
        yield f"ranks {stage.ranks} have no layers"
    if stage.devices != stage.tp * stage.dp:
        yield f"{stage.devices} devices are not tp {stage.tp} x dp {stage.dp}"
    pool = _pool(space, result, stage)
    if pool is not None and (stage.tp, stage.dp) not in space.degrees(pool, result.micro_batch_size):
        yield f"no stage has tp {stage.tp}, dp {stage.dp} on {stage.device_class}"
    yield from _faults_of_ranks(space, result, stage, stage.tp * stage.dp, taken)


def _faults_of_mixed_stage(
    space: UnevenSpace, result: Result, stage: Stage, taken: set[int]
) -> Iterator[str]:
    """Faults of a mixed-pool stage; adds its ranks to `taken`."""
    parts = stage.parts
    if sum(stage.layers) < 1:
        yield f"ranks {stage.ranks} have no layers"
    if result.is_alike:
        yield "identical pipelines have no mixed-pool stages"
    if len({part.device_class for part in parts}) != 2 or len(parts) != 2:
        yield f"ranks {stage.ranks} are not of two pools"
    if sum(part.rows for part in parts) != result.micro_batch_size or min(part.rows for part in parts) < 1:
        rows = " + ".join(str(part.rows) for part in parts)
        yield f"the parts have {rows} rows of a micro-batch of {result.micro_batch_size}"
    whole = (
        sum(part.tp for part in parts), ",".join(part.ranks for part in parts),
        " + ".join(part.device_class for part in parts), parts[0].tp, len(parts),
    )  # fmt: skip
    if whole != (stage.devices, stage.ranks, stage.device_class, stage.tp, stage.dp):
        yield f"the stage on ranks {stage.ranks} does not match its parts"
    for part in parts:
        pool = _pool(space, result, part)
        if pool is not None and (part.tp, 1) not in space.degrees(pool, 1):
            yield f"no stage has tp {part.tp} on {part.device_class}"
        yield from _faults_of_ranks(space, result, part, part.tp, taken)


def _mixed_stage_kind(stage: Stage) -> tuple[tuple[str, int, int], ...]:
    """Pools, tp and rows of the parts."""
    return tuple((part.device_class, part.tp, part.rows) for part in stage.parts)


def _pool(space: UnevenSpace, result: Result, stage: Stage | StagePart) -> int | None:
    """The pool of a stage; None where it is none of the plan's."""
    if stage.device_class not in result.pools:
        return None
    return next((i for i, one in enumerate(space.pools) if one.name == stage.device_class), None)


def _faults_of_ranks(
    space: UnevenSpace, result: Result, stage: Stage | StagePart, size: int, taken: set[int]
) -> Iterator[str]:
    """Faults of the ranks of a stage or part: it must be on `size` free ranks of one node of its pool. Adds
    them to `taken`."""
    ranks, pool = ranks_of(stage, space.cluster.devices), _pool(space, result, stage)
    if ranks is None or not len(ranks) or pool is None:
        yield f"a stage on {stage.device_class}, ranks {stage.ranks}: no such pool or ranks"
        return
    if len(ranks) != size:
        yield f"ranks {stage.ranks} are not {size} ranks"
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
    yield f"ranks {stage.ranks} are not in one node"


def faults_of_spread(space: UnevenSpace, pipelines: Sequence[Pipeline]) -> Iterator[str]:
    """Yields a fault where spread stages are in nodes that are not full of the same stages of pipelines of
    the same shape."""
    nodes = NodeLookup(space)
    stages_of_node: dict[int | None, list[tuple[object, ...]]] = defaultdict(list)
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
            stages_of_node[node].append((shape, group))
            taken[node] += sum(pipeline.stages[index].devices for index in group)
            size = pipeline.stages[mine[name][0]].devices  # as in `stages_per_node_of`
            if name in most_of and most < most_of[name](size) and 2 * most <= len(mine[name]):
                spread.setdefault(node, place)
        for part in (part for stage in pipeline.stages for part in stage.parts):
            stages_of_node[nodes.node(part)].append((place, part.ranks))
    for node, place in spread.items():
        full = node is not None and taken[node] == space.cluster.nodes[node].devices
        if not full or len(set(stages_of_node[node])) > 1:
            yield f"pipeline {place} is spread over nodes that identical pipelines do not fill"
            return


def _are_alike(
    pipelines: Sequence[Pipeline], recompute: Sequence[tuple[str, ...]], microbatches: Sequence[int]
) -> bool:
    stages = {
        tuple((stage.device_class, stage.tp, stage.dp, stage.layers) for stage in pipeline.stages)
        for pipeline in pipelines
    }
    return len(stages) == 1 and len(set(recompute)) == 1 and max(microbatches) - min(microbatches) <= 1
