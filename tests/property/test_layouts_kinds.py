"""The chain and the walk price shipped networks alike, with kinds that random graphs have not: convolutions,
pooling, batch norms, recurrent layers."""

from __future__ import annotations

import pytest
from tests.property.test_layouts_one import both

from shardwise.cost.training import Training
from shardwise.graph import load_graph


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", ["vgg16", "resnet50", "lstm-2x2048", "two-tower"])
def test_they_agree_on_shipped_networks(name: str, seed: int) -> None:
    graph = load_graph(f"graph:{name}")
    (time_s, memory_bytes), price = both(graph, "2x4xV100-32G", (2, 4), Training(dtype="fp16"), seed)
    assert price.time_s == pytest.approx(time_s, rel=1e-9)
    assert price.memory_bytes == pytest.approx(memory_bytes, rel=1e-9)
