"""The frontier over all meshes, compared with every layout on every mesh, one by one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TypeVar

import numpy as np
import pytest
from tests.property.layout_instances import op, random_graph
from tests.property.stage_instances import solutions
from tests.property.test_layouts_one import random_solution
from tests.sampling import sample_of

from shardwise.cluster import load_cluster, mesh_of, meshes_of
from shardwise.cost import Training, estimate_layout, layout_chain
from shardwise.errors import ConfigError
from shardwise.graph import Block, GraphLayout, OpGraph
from shardwise.pareto import non_dominated
from shardwise.search import GraphCurves, MeshChoice
from shardwise.search.pareto.solution import measure

T = TypeVar("T")

TRAINING = Training(dtype="fp16")
CLUSTERS = ("1x4xV100-32G", "2x2xV100-32G", "1x8xV100-32G", "2x4xV100-32G")


def small_graph(seed: int) -> OpGraph:
    """An operator with a weight, and half of the time a loss, on random sizes."""
    random = np.random.default_rng(seed)
    sizes = {
        "b": int(random.choice([6, 16, 64])), "e": int(random.choice([64, 512, 2048])),
        "f": int(random.choice([100, 1024, 4096])),
    }  # fmt: skip
    operators = [op("a", "linear", sizes, [("x", "be")], "bf", [("w", "ef")])]
    inputs = {"x": (sizes["b"], sizes["e"])}
    if seed % 2:
        operators.append(op("loss", "mean_square", sizes, [("a", "bf"), ("target", "bf")], ""))
        inputs["target"] = (sizes["b"], sizes["f"])
    block = Block(name="all", operators=tuple(operators))
    return OpGraph(name=f"small {seed}", inputs=inputs, blocks=(block,), batch=sizes["b"])


def by_definition(graph: OpGraph, cluster_text: str) -> np.ndarray:
    """The frontier (n, 2) of all layouts on all meshes of one to three axes that follow the tiers."""
    cluster = load_cluster(cluster_text)
    points = []
    for mesh in meshes_of(cluster, cluster.devices):
        chain = layout_chain(graph, cluster, TRAINING, mesh).chain
        points += [measure(chain, solution) for solution in solutions(chain)]
    every = np.array(points)
    return every[non_dominated(every)]


def found_on(graph: OpGraph, cluster_text: str, choice: str) -> np.ndarray:
    cluster = load_cluster(cluster_text)
    curve = GraphCurves(graph, cluster, TRAINING, 0.05, MeshChoice(choice)).curve(cluster)
    assert curve.epsilon == 0.0
    return np.array([(point.time_s, point.memory_bytes) for point in curve.points])


@pytest.mark.parametrize("seed", sample_of(range(20), range(8)))
def test_all_meshes_find_the_enumerated_frontier(seed: int) -> None:
    # Two operators on 2x2x2 have too many layouts to enumerate here.
    text = CLUSTERS[seed // 2 % 2] if seed % 2 else CLUSTERS[seed // 2 % 4]
    graph = small_graph(seed)
    found, expected = found_on(graph, text, "all"), by_definition(graph, text)
    assert found.shape == expected.shape
    assert found == pytest.approx(expected, rel=1e-12)


@pytest.mark.slow
def test_a_mesh_left_out_is_noticed() -> None:
    differs = []
    for seed in range(0, 24, 2):
        text = CLUSTERS[seed // 2 % 2]
        found, expected = found_on(small_graph(seed), text, "tiers"), by_definition(small_graph(seed), text)
        differs.append(found.shape != expected.shape or not np.allclose(found, expected, rtol=1e-12))
    assert sum(differs) >= 3


@pytest.mark.slow
def test_axes_in_another_order_are_another_mesh() -> None:
    """The same rules, in the order of the axes: the order decides how the parts of a dim shift where an outer
    axis begins to split it.
    """
    apart = [time_ratio_in_other_order(seed) for seed in range(12)]
    assert sum(abs(ratio - 1.0) > 1e-6 for ratio in apart) >= 3
    assert sum(abs(ratio - 1.0) < 1e-9 for ratio in apart) >= 1


def time_ratio_in_other_order(seed: int) -> float:
    """The step time of a random layout with the rules of two axes exchanged, over its original step time."""
    cluster = load_cluster(("1x8xV100-32G", "4x8xH100-SXM")[seed % 2])
    training = Training(dtype=("fp16", "bf16")[seed % 2])
    shape, order = (((2, 4), (1, 0)), ((4, 2, 4), (0, 2, 1)))[seed % 2]
    graph, mesh = random_graph(seed), mesh_of(cluster, shape)
    other = mesh_of(cluster, tuple(shape[axis] for axis in order))
    laid = layout_chain(graph, cluster, training, mesh)
    layout = laid.layout(random_solution(np.random.default_rng(seed), laid.chain))
    turned = estimate_layout(graph, cluster, training, other, reordered(layout, order))
    return turned.time_s / estimate_layout(graph, cluster, training, mesh, layout).time_s


def reordered(layout: GraphLayout, order: tuple[int, ...]) -> GraphLayout:
    """The rules of a layout for each axis, in another order of the axes."""

    def words(named: Mapping[str, tuple[T, ...]]) -> dict[str, tuple[T, ...]]:
        return {name: tuple(each[axis] for axis in order) for name, each in named.items()}

    blocks = tuple(
        replace(
            block, rules=words(block.rules), tensors=words(block.tensors),
            stored=words(block.stored), used=words(block.used),
        )
        for block in layout.blocks
    )  # fmt: skip
    return replace(layout, ranks=tuple(layout.ranks[axis] for axis in order), blocks=blocks)


def test_no_order_of_axes_is_left_out_or_taken_twice() -> None:
    cluster = load_cluster("1x8xV100-32G")
    assert [mesh.name for mesh in MeshChoice("all").of(cluster, 8)] == ["8", "2x4", "4x2", "2x2x2"]
    assert [mesh.name for mesh in MeshChoice("4x2,2x4").of(cluster, 8)] == ["4x2", "2x4"]
    with pytest.raises(ConfigError, match="twice"):
        MeshChoice("2x4,2x4").of(cluster, 8)
