"""References for the curves of graphs: which baseline layouts exist, and whether they fit."""

from __future__ import annotations

from shardwise.cluster import Cluster, load_cluster, part_of
from shardwise.cost import Training
from shardwise.graph import load_graph, scaled
from shardwise.search import GraphCurves

CLUSTER = load_cluster("2x4xV100-32G")


def part(devices: int) -> Cluster:
    return part_of(CLUSTER, devices)


def curves(name: str, batch: int, *, margin: float = 0.05) -> GraphCurves:
    graph = scaled(load_graph(f"graph:{name}"), batch)
    return GraphCurves(graph, CLUSTER, Training(dtype="fp16"), margin)


def test_a_transformer_has_both_and_others_data_parallelism() -> None:
    both = curves("transformer-big", 256).references(part(8))
    assert [reference.name for reference in both] == ["data parallel", "Megatron"]
    assert all(reference.fits and reference.point.devices == 8 for reference in both)
    assert [reference.name for reference in curves("vgg16", 256).references(part(8))] == ["data parallel"]


def test_one_device_or_too_small_a_batch_has_no_reference() -> None:
    assert curves("vgg16", 256).references(part(1)) == ()
    assert curves("vgg16", 4).references(part(8)) == ()


def test_a_reference_within_the_memory_margin_does_not_fit() -> None:
    (found,) = curves("vgg16", 256).references(part(4))
    for nbytes, fits in ((found.point.memory_bytes * 1.001, True), (found.point.memory_bytes * 0.999, False)):
        capacity = curves("vgg16", 256, margin=0.0).limit_bytes(part(4))
        (again,) = curves("vgg16", 256, margin=1.0 - nbytes / capacity).references(part(4))
        assert again.fits is fits and again.point == found.point
