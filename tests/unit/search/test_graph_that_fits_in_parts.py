"""Where the whole batch of a graph does not fit at once, the error names micro-batches that do."""

from __future__ import annotations

import re
from dataclasses import replace

from shardwise.cluster import Cluster, load_cluster
from shardwise.cost import Training
from shardwise.graph import load_graph, scaled
from shardwise.search import GraphCurves, StagedCurves

CLUSTER = load_cluster("1x4xV100-32G")
TRAINING = Training(dtype="fp16")
BATCH = 1 << 20


def of_memory(gib: float) -> Cluster:
    classes = {
        name: replace(device, memory_bytes=int(gib * 2**30)) for name, device in CLUSTER.classes.items()
    }
    return replace(CLUSTER, classes=classes)


def curves(batch: int, *, gib: float = 31.7) -> GraphCurves:
    return GraphCurves(scaled(load_graph("graph:mlp"), batch), of_memory(gib), TRAINING, 0.05)


def test_the_named_micro_batches_fit_and_half_as_many_do_not() -> None:
    whole = curves(BATCH)
    error = whole.nothing_fits(whole.curve(whole.cluster, epsilon=0.5))
    assert "with the whole batch at once" in error.message
    (text,) = error.relaxations
    found = re.search(r"([0-9,]+) micro-batches of ([0-9,]+) .*--global-batch-size ([0-9]+)", text)
    assert found is not None
    many, size, shown = (int(one.replace(",", "")) for one in found.groups())
    assert many * size == BATCH and size == shown
    part, larger = curves(size), curves(2 * size)
    assert part.curve(part.cluster, epsilon=0.5).points
    assert not larger.curve(larger.cluster, epsilon=0.5).points


def test_a_batch_that_cannot_be_halved_has_none() -> None:
    """An odd batch, a device that even one sample does not fit on, and stages, which have micro-batches."""
    odd = curves(BATCH - 1)
    assert odd.nothing_fits(odd.curve(odd.cluster, epsilon=0.5)).relaxations == ()
    small = curves(8, gib=0.5)
    assert small.nothing_fits(small.curve(small.cluster, epsilon=0.5)).relaxations == ()
    graph = scaled(load_graph("graph:mlp"), BATCH)
    staged = StagedCurves(graph, of_memory(31.7), TRAINING, 0.05, 2, (2,))
    curve = staged.curve(staged.cluster, epsilon=0.5)
    assert not curve.points and staged.nothing_fits(curve).relaxations == ()
