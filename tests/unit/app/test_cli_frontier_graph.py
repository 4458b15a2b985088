"""`shardwise frontier` about operator graphs, small enough for every run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from tests.unit.app.test_cli_frontier import answer, refused

from shardwise.cluster import load_cluster, part_of, tier_mesh
from shardwise.cost import Training, price_layout
from shardwise.frontier import frontier_of
from shardwise.graph import layout_from_record, load_graph, scaled

if TYPE_CHECKING:
    from tests.unit.app.conftest import Run

CLUSTER = "2x2xV100-32G"
QUESTION = ("frontier", "graph:vgg16", "--cluster", CLUSTER, "--global-batch-size", "256")


def price_of(point: Any, batch: int) -> tuple[float, float]:
    """Seconds and bytes of the layout of a point, priced from its names by code of its own."""
    graph = scaled(load_graph("graph:vgg16"), batch)
    cluster = part_of(load_cluster(CLUSTER), point["devices"])
    mesh = tier_mesh(cluster, point["devices"])
    layout = layout_from_record(point["layout"], graph, mesh.ranks)
    price = price_layout(graph, cluster, Training(dtype="fp16"), mesh, layout)
    return price.time_s, price.memory_bytes


def test_every_point_costs_what_its_layout_does(run: Run) -> None:
    document = answer(run, *QUESTION, "--mode", "profile", "--devices", "2,4")
    assert {point["devices"] for point in document["points"]} == {2, 4}
    for point in document["points"]:
        price = price_of(point, 256)
        assert price == pytest.approx((point["time_s"], point["memory_bytes"]), rel=1e-9)
    other = dict(document["points"][0], layout=document["points"][-1]["layout"], devices=4)
    assert price_of(other, 256) != pytest.approx((other["time_s"], other["memory_bytes"]), rel=1e-9)


def test_the_modes_pick_from_the_points(run: Run) -> None:
    fastest = answer(run, *QUESTION)
    assert fastest["chosen"] == min(fastest["points"], key=lambda point: point["time_s"])
    assert fastest["certificate"]["meshes"] == {"4": [2, 2]}
    assert fastest["certificate"]["epsilon"] <= fastest["epsilon"] == 0.001
    assert fastest["operators"] == scaled(load_graph("graph:vgg16"), 256).operators
    assert all(count >= 1 for count in fastest["layouts_per_operator"].values())
    figures = [(point["time_s"], point["memory_bytes"]) for point in fastest["points"]]
    assert len(frontier_of(figures).points) == len(figures)


def test_a_fine_frontier_is_matched_by_a_coarse_one(run: Run) -> None:
    fine = answer(run, *QUESTION, "--epsilon", "0.002")
    coarse = answer(run, *QUESTION, "--epsilon", "0.05")
    assert fine["certificate"]["epsilon"] == 0.002 and coarse["certificate"]["epsilon"] == 0.05
    assert len(coarse["points"]) < len(fine["points"])
    for point in fine["points"]:
        limits = {key: 1.05 * point[key] for key in ("time_s", "memory_bytes")}
        assert any(all(other[key] <= limits[key] for key in limits) for other in coarse["points"])


def test_what_is_about_strategies_is_refused(run: Run) -> None:
    refused(run(*QUESTION, "--fix", "tp=2"), "--fix", "tp=2", "layout for each operator")
    refused(run(*QUESTION, "--save", "folder"), "--save")
    refused(
        run("frontier", "graph:nothing", "--cluster", CLUSTER, "--global-batch-size", "8"), "graph:nothing"
    )


def test_a_graph_file_that_does_not_hold_together_names_its_operator(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "graph.yaml"
    path.write_text(
        "schema: shardwise.graph\nversion: 1\nname: g\nbatch: 8\nsizes: {b: batch, i: 4}\n"
        "inputs: {x: [batch, 4]}\nblocks:\n- name: all\n  operators:\n"
        "  - {name: first, kind: nonsense, inputs: [{from: x, dims: [b, i]}], output: [b, i]}\n"
    )
    refused(run("frontier", str(path), "--cluster", CLUSTER, "--global-batch-size", "8"), "nonsense", "first")


def test_too_little_memory_tells_the_smallest_point(run: Run) -> None:
    ran = run(*QUESTION, "--memory-limit", "1MiB")
    assert ran.code == 3 and "the smallest takes" in ran.err
    ran = run("frontier", "graph:llama-3.1-8b", "--cluster", "1x1xV100-32G", "--global-batch-size", "64")
    assert ran.code == 3 and "no layout of llama-3.1-8b fits on 1 devices" in ran.err
