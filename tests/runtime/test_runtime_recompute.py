"""What recomputation saves and recomputes, by counting operators."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from tests.runtime.equality import whole_module
from tests.runtime.plans import make_plan, tiny
from torch.utils._python_dispatch import TorchDispatchMode

from shardwise.runtime.recompute import recompute_kinds
from shardwise.runtime.rope import rotation_of
from shardwise.strategy import MEGATRON_2024, target_of


class Counting(TorchDispatchMode):
    """Counts how often each operator runs."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[str(func).split(".")[1]] += 1
        return func(*args, **(kwargs or {}))


def counts_of_a_layer(kind: str, model: str = "llama") -> Counter[str]:
    layer = whole_module(tiny(model), 0).layers["0"]
    layer.recompute = kind
    x = torch.randn(2, 8, 32, requires_grad=True)
    with Counting() as counting:
        layer(x, rotation_of(layer.rope, torch.arange(8))).sum().backward()
    return counting.counts


def test_operators_run_as_often_as_the_recomputation_requires() -> None:
    """A gated layer has 7 matrix products forward (q, k, v, out, gate, up, down) and 14 backward. Full
    recomputation repeats all but the last forward product, whose output is not needed. Selective
    recomputation repeats none, only the activation function, attention and the norms."""
    none, selective, full = (counts_of_a_layer(kind) for kind in ("none", "selective", "full"))
    products = [counts["mm"] for counts in (none, selective, full)]
    assert products == [21, 21, 27]
    assert target_of("shardwise").run_by(MEGATRON_2024).recompute_stops_early  # so does the cost model
    attention = "_scaled_dot_product_flash_attention_for_cpu"
    assert [counts[attention] for counts in (none, selective, full)] == [1, 2, 2]
    # The activation function's output is never saved: each backward pass recomputes it.
    assert [counts["silu"] for counts in (none, selective, full)] == [2, 3, 3]


def test_products_inside_attention_are_computed_again() -> None:
    """Scores and weighted values are 2 products forward; the backward pass repeats them and has 4 more.
    Recomputation, also selective, repeats the 2 of the forward pass once more. Selective repeats none of the
    7 products with weights."""
    none, selective, full = (counts_of_a_layer(kind, "gemma2") for kind in ("none", "selective", "full"))
    assert [counts["bmm"] for counts in (none, selective, full)] == [8, 10, 10]
    assert [counts["mm"] for counts in (none, selective)] == [21, 21]


def test_the_first_layers_of_each_stage_are_recomputed_in_full() -> None:
    strategy = make_plan("recompute=full,recompute_layers=2").best.strategy
    assert recompute_kinds(strategy, 4) == ("full", "full", "none", "none")
    assert recompute_kinds(strategy, 1) == ("full",)
    assert recompute_kinds(make_plan("recompute=selective").best.strategy, 2) == ("selective",) * 2
