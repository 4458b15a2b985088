"""Which stages of a pipeline lie together in a node, read from the ranks of a plan."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

from shardwise.plan import Pipeline, Stage, StagePart, UnevenResult
from shardwise.search.uneven.hops import group_sizes
from shardwise.search.uneven.space import UnevenSpace

StagesPerNode = tuple[tuple[str, int], ...]
"""Of a pipeline, by the name of each pool that it has stages on: how many of these lie together in a node, at
most."""


@dataclass(frozen=True, slots=True)
class HopEndpoint:
    """A stage, or a part of one, as an end of hops: its pool, and which node-filling group of the pipeline's
    stages there it is of, how many stages that has, and whether it is all of the stage."""

    pool: int
    group: int
    stages_per_node: int
    is_whole: bool = True


def ranks_of(stage: Stage | StagePart, devices: int) -> range | None:
    """The stage's ranks; None where the text has another form, or names none of so many devices."""
    first, dash, last = stage.ranks.partition("-")
    last = last if dash else first
    if not all(text.isascii() and text.isdecimal() and len(text) < 10 for text in (first, last)):
        return None
    return range(int(first), int(last) + 1) if int(last) < devices else None


def stages_by_pool(pipeline: Pipeline) -> dict[str, list[int]]:
    """The places of the stages on one pool each, in order, by the pool's name."""
    found: dict[str, list[int]] = {}
    for index, stage in enumerate(pipeline.stages):
        if not stage.parts:
            found.setdefault(stage.device_class, []).append(index)
    return found


def stage_groups(pipeline: Pipeline, stages_per_node: StagesPerNode) -> Iterator[tuple[str, tuple[int, ...]]]:
    """The groups of stages that lie in a node each, with the name of their pool: from the last stage on, a
    group has 1, 2, 4, ... stages, as many as there still are and as lie together."""
    mine = stages_by_pool(pipeline)
    for name, most in stages_per_node:
        left = mine[name]
        for many in group_sizes(len(left), most):
            yield name, tuple(left[-many:])
            left = left[:-many]


def hop_endpoints(
    space: UnevenSpace, pipeline: Pipeline, stages_per_node: StagesPerNode
) -> list[tuple[HopEndpoint, ...]]:
    """Of the stages in order. Parts of a stage on two pools are by themselves."""
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
    """Where ranks lie: the node of each device of a cluster."""

    def __init__(self, space: UnevenSpace) -> None:
        self._space = space
        self._of = [node for node, one in enumerate(space.cluster.nodes) for _ in range(one.devices)]

    def node(self, stage: Stage | StagePart) -> int | None:
        """Of a stage's first rank; None where it has none."""
        ranks = ranks_of(stage, len(self._of))
        return self._of[ranks[0]] if ranks else None

    def stages_per_node_of(self, pipeline: Pipeline) -> StagesPerNode:
        """Of the powers of two up to what a node holds the most with which every group of stages has a node:
        less than it holds where stages are spread."""
        known = {pool.name: place for place, pool in enumerate(self._space.pools)}
        found = []
        for name, mine in stages_by_pool(pipeline).items():
            stages = [pipeline.stages[index] for index in mine]
            most = self._space.stages_per_node(known[name], stages[0].devices) if name in known else 1
            while most > 1 and not _share_nodes([self.node(stage) for stage in stages], most):
                most //= 2
            found.append((name, most))
        return tuple(found)


def spread_stages(space: UnevenSpace, result: UnevenResult) -> dict[str, tuple[int, ...]]:
    """By name of the pools on which stages are spread, in order: how many of a pipeline lie together in a
    node there."""
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
    """Whether each group of stages on these nodes is in one."""
    ends = list(accumulate(group_sizes(len(nodes), stages_per_node)))
    reversed_nodes = nodes[::-1]
    return all(
        len(set(reversed_nodes[first:last])) == 1 for first, last in zip([0, *ends[:-1]], ends, strict=True)
    )
