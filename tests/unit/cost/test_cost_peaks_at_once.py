"""Live tensors at one instant of a step, by hand: saved activations are allocated and freed with the
operators.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any
from unittest.mock import patch

import pytest
from tests.property.layout_instances import op

from shardwise.cluster import load_cluster, mesh_of
from shardwise.cost import LayoutEstimate, StepCounts, Training, estimate_stage
from shardwise.cost.layouts.context import CostColumns
from shardwise.graph import REPLICATE, Block, BlockLayout, GraphLayout, Mode, OpGraph, rules_of

ROWS, FIRST, SECOND, CLASSES = 1000, 1024, 512, 8

# In bytes, four per element, rows of 1,000. Saved: x 4 x 1,000 x 4 = 16,000 by the first layer, the
# results of both relus, 4 x 1,000 x 1,024 = 4,096,000 and 4 x 1,000 x 512 = 2,048,000, and by the loss its
# targets, 4 x 1,000, and as many bytes as the logits, 4 x 1,000 x 8 = 32,000.
SAVED_BYTES = 16_000 + 4_096_000 + 2_048_000 + 4_000 + 32_000

# At the first relu: its input and its result, 2 x 4,096,000, and x and the saved result. At the second layer
# x and both relus' results, 4,112,000, with 4,096,000 + 2,048,000, are 10,256,000: less.
MOST = 16_000 + 4_096_000 + 8_192_000


def narrowing() -> OpGraph:
    """Three linear layers of decreasing width with relus between; one block."""
    sizes = {"b": ROWS, "i": 4, "f": FIRST, "s": SECOND, "v": CLASSES}
    layers = []
    for at, (read, made) in enumerate(pairwise("ifsv")):
        source = f"relu{at - 1}" if at else "x"
        layers.append(
            op(f"layer{at}", "linear", sizes, [(source, f"b{read}")], f"b{made}", [(f"w{at}", read + made)])
        )
        if made != "v":
            layers.append(
                op(
                    f"relu{at}",
                    "elementwise",
                    sizes,
                    [(f"layer{at}", f"b{made}")],
                    f"b{made}",
                    function="relu",
                )
            )
    loss = op("loss", "cross_entropy", sizes, [("layer2", "bv"), ("target", "b")], "")
    return OpGraph(
        name="narrowing",
        inputs={"x": (ROWS, 4), "target": (ROWS,)},
        blocks=(Block(name="all", operators=(*layers, loss)),),
        batch=ROWS,
    )


def estimate_on_one(mode: Mode, counts: StepCounts) -> LayoutEstimate:
    """The estimate on one process."""
    graph, cluster = narrowing(), load_cluster("1x1xcpu")
    (block,) = graph.blocks
    replicated = {
        each.name: (next(rule for rule in rules_of(each) if rule.name == "replicate"),)
        for each in block.operators
    }
    layout = BlockLayout(
        name="all",
        mode=mode,
        rules=replicated,
        tensors={},
        stored={parameter.name: (REPLICATE,) for each in block.operators for parameter in each.parameters},
        used={},
    )
    graph_layout, mesh = GraphLayout(ranks=(1,), blocks=(layout,)), mesh_of(cluster, (1,))
    return estimate_stage(
        graph, cluster, Training(dtype="fp32"), mesh, graph_layout, first=0, end=1, counts=counts
    )


def peak_tensor_bytes(estimate: LayoutEstimate) -> float:
    """Without parameters, gradients and states, and without the overhead of allocators and the driver."""
    parts = dict(estimate.nbytes)
    more, context = parts.pop("fragmentation"), parts.pop("context")
    ratio = more / sum(parts.values())
    static = sum(parts[name] for name in ("parameters", "gradients", "optimizer"))
    return (estimate.at_once_bytes - context) / (1.0 + ratio) - static


def test_peak_excludes_activations_saved_later() -> None:
    estimate = estimate_on_one("kept", StepCounts())
    assert estimate.nbytes["activations"] + estimate.nbytes["temporaries"] == pytest.approx(
        SAVED_BYTES + 8_192_000
    )
    assert peak_tensor_bytes(estimate) == pytest.approx(MOST, abs=1.0)


def test_peak_excludes_tensors_recomputed_later() -> None:
    """The block's x and targets are saved, the rest is recomputed: at the first relu, x and its own result
    are live.
    """
    estimate = estimate_on_one("recomputed", StepCounts())
    assert peak_tensor_bytes(estimate) == pytest.approx(MOST, abs=1.0)


def test_other_micro_batches_count_in_full() -> None:
    estimate = estimate_on_one("kept", StepCounts(microbatches=3, in_flight=2))
    assert peak_tensor_bytes(estimate) == pytest.approx(MOST + SAVED_BYTES, abs=1.0)


def test_a_mutant_that_counts_all_tensors_from_the_start_is_larger() -> None:
    save = CostColumns.save

    def early(columns: CostColumns, nbytes: Any, mode: Mode, since: int) -> None:
        save(columns, nbytes, mode, -1)

    with patch.object(CostColumns, "save", early):
        assert peak_tensor_bytes(estimate_on_one("kept", StepCounts())) == pytest.approx(
            SAVED_BYTES + 8_192_000, abs=1.0
        )
