"""Plans of operator graphs for tests: from frontiers, drawn at random, and by hand."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import product

import numpy as np
from tests.property.test_layouts_one import random_solution

from shardwise.cluster import load_cluster, mesh_of
from shardwise.cost import Training
from shardwise.cost.layouts.chain import layout_chain
from shardwise.graph import GraphLayout, OpGraph, OpNode, Rule, allows, rules_of
from shardwise.graph.customary.together import laid_by
from shardwise.plan import GraphJob, GraphPlan
from shardwise.search import GraphCurves
from shardwise.strategy import PROFILES, Optimizer

Wanted = Callable[[OpNode], Sequence[str]]
"""Names of the rules that an operator is to have, the first that it has and that goes is taken."""


def plan_with(
    graph: OpGraph,
    ranks: Sequence[int],
    layout: GraphLayout,
    *,
    optimizer: Optimizer = "adamw",
    dtype: str = "fp32",
) -> GraphPlan:
    """A plan of `layout` on so many processes; its prices are not of interest."""
    devices = int(np.prod(ranks))
    cluster = load_cluster(f"1x{devices}xcpu")
    return GraphPlan(
        graph=graph,
        cluster=cluster,
        job=GraphJob(dtype=dtype, optimizer=optimizer, memory_margin=0.05, profile=PROFILES["megatron-2024"]),
        mesh=mesh_of(cluster, tuple(ranks)),
        layout=layout,
        step_time_s=1.0,
        device_bytes=1.0,
        seconds={"forward": 1.0},
        nbytes={"parameters": 1.0},
        epsilon=0.0,
    )


def alone(graph: OpGraph, *, optimizer: Optimizer = "adamw", dtype: str = "fp32") -> GraphPlan:
    """Everything on one process."""
    layout = by_rules(graph, (1,), lambda op: ("replicate",))
    return plan_with(graph, (1,), layout, optimizer=optimizer, dtype=dtype)


def by_rules(graph: OpGraph, ranks: Sequence[int], *wanted: Wanted) -> GraphLayout:
    """The layout in which each operator has, along each axis, the first rule that is wanted and goes."""
    found = []
    for block in graph.blocks:
        rules: dict[str, tuple[Rule, ...]] = {}
        for op in block.operators:
            along = [
                [rule for name in (*want(op), "replicate") for rule in rules_of(op) if rule.name == name]
                for want in wanted
            ]
            rules[op.name] = next(each for each in product(*along) if allows(op, each, ranks))
        found.append(rules)
    return laid_by(graph, tuple(ranks), found)


def drawn(graph: OpGraph, ranks: Sequence[int], seeds: Sequence[int]) -> Iterator[GraphPlan]:
    """Layouts with any rule of each operator, any place of each tensor, any storage of each parameter."""
    devices = int(np.prod(ranks))
    cluster = load_cluster(f"1x{devices}xcpu")
    mesh = mesh_of(cluster, tuple(ranks))
    laid = layout_chain(graph, cluster, Training(dtype="fp32"), mesh)
    for seed in seeds:
        random = np.random.default_rng(seed)
        yield plan_with(graph, ranks, laid.layout(random_solution(random, laid.chain)))


def on_frontier(graph: OpGraph, devices: int, count: int) -> list[GraphPlan]:
    """Plans of so many points of the frontier on processes of this machine, its ends among them."""
    cluster = load_cluster(f"1x{devices}xcpu")
    curve = GraphCurves(graph, cluster, Training(dtype="fp32"), 0.05).curve(devices, epsilon=0.01)
    places = sorted({round(at * (len(curve.points) - 1) / max(count - 1, 1)) for at in range(count)})
    return [plan_with(graph, curve.meshes[0].ranks, curve.points[place].layout) for place in places]
