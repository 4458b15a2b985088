"""Graphs that can be computed by micro-batches, and the weight of the loss of one."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from tests.property.layout_instances import chain, op

from shardwise.errors import ConfigError
from shardwise.graph import Block, OpGraph, OpNode, SizeGrowth, loss_weight, samples_dim

SIZES = {"b": 8, "s": 4, "e": 6, "f": 6, "v": 5}


def graph(*operators: OpNode, inputs: Sequence[tuple[str, str]] = (("x", "be"), ("target", "b"))) -> OpGraph:
    return OpGraph(
        name="one", inputs={name: tuple(SIZES[dim] for dim in dims) for name, dims in inputs},
        blocks=(Block(name="all", operators=operators),), batch=8, growth={"b": SizeGrowth(batch=1)},
    )  # fmt: skip


HEAD = op("down", "linear", SIZES, [("x", "be")], "bv", [("w", "ev")])
MEAN = op("loss", "cross_entropy", SIZES, [("down", "bv"), ("target", "b")], "")
EACH = op("each", "cross_entropy", SIZES, [("down", "bv"), ("target", "b")], "b")


def summed(function: str) -> OpNode:
    return op("loss", "reduce", SIZES, [("each", "b")], "", function=function)


def test_means_of_micro_batches_count_their_share_and_sums_in_full() -> None:
    assert loss_weight(graph(HEAD, MEAN), 4) == 0.25
    assert loss_weight(graph(HEAD, EACH, summed("mean")), 4) == 0.25
    assert loss_weight(graph(HEAD, EACH, summed("sum")), 4) == 1.0
    assert loss_weight(chain(8, 6, 12, 5), 2) == 0.5


def test_linear_operators_after_a_sum_keep_the_loss_weight() -> None:
    scaled = op("half", "elementwise", SIZES, [("loss", "")], "", function="scale", number=0.5)
    assert loss_weight(graph(HEAD, EACH, summed("sum"), scaled), 4) == 1.0
    assert loss_weight(graph(HEAD, MEAN, scaled), 4) == 0.25


def test_tensors_read_by_all_micro_batches_are_whole() -> None:
    """Positions without a batch dim: each micro-batch adds all of them."""
    added = op("add", "elementwise", SIZES, [("x", "bse"), ("places", "se")], "bse", function="add")
    loss = op("loss", "mean_square", SIZES, [("add", "bse"), ("x", "bse")], "")
    found = graph(added, loss, inputs=(("x", "bse"), ("places", "se")))
    assert loss_weight(found, 2) == 0.5
    assert samples_dim(found, "x") == 0 and samples_dim(found, "places") is None


REFUSED = {
    "a norm over the batch": (
        op("norm", "batch_norm", SIZES, [("x", "be")], "be", [("scale", "e")]),
        op("loss", "mean_square", SIZES, [("norm", "be"), ("x", "be")], ""),
    ),
    "a distribution over the batch": (
        op("norm", "softmax", SIZES, [("x", "be")], "be", over="b"),
        op("loss", "mean_square", SIZES, [("norm", "be"), ("x", "be")], ""),
    ),
    "the largest of the batch": (HEAD, EACH, summed("maximum")),
    "the root of a mean": (
        HEAD,
        MEAN,
        op("root", "elementwise", SIZES, [("loss", "")], "", function="sqrt"),
    ),
    "a sum and a mean": (
        HEAD,
        EACH,
        op("one", "reduce", SIZES, [("each", "b")], "", function="mean"),
        op("two", "reduce", SIZES, [("each", "b")], "", function="sum"),
        op("loss", "elementwise", SIZES, [("one", ""), ("two", "")], "", function="add"),
    ),
    "samples against samples": (
        op("pairs", "matmul", {**SIZES, "c": 8}, [("x", "be"), ("x", "ce")], "bc"),
        op("loss", "reduce", {**SIZES, "c": 8}, [("pairs", "bc")], "", function="mean"),
    ),
    "a bias added to a sum over samples": (
        op("sum", "linear", SIZES, [("x", "be")], "v", [("w", "ev"), ("bias", "v")]),
        op("loss", "reduce", SIZES, [("sum", "v")], "", function="mean"),
    ),
    "one sample": (
        op("first", "slice", SIZES, [("x", "be")], "e"),
        op("loss", "reduce", SIZES, [("first", "e")], "", function="mean"),
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_operators_across_samples_are_refused_by_name(name: str) -> None:
    refused = graph(*REFUSED[name])
    with pytest.raises(ConfigError, match="computes across samples") as caught:
        loss_weight(refused, 2)
    assert caught.value.key == "layout.microbatches" and caught.value.found == "2"
    assert loss_weight(refused, 1) == 1.0


def test_two_dims_that_grow_with_the_batch_are_refused() -> None:
    pairs = op("pairs", "matmul", {**SIZES, "c": 8}, [("x", "be"), ("y", "ce")], "bc")
    loss = op("loss", "reduce", {**SIZES, "c": 8}, [("pairs", "bc")], "", function="mean")
    found = OpGraph(
        name="pairs", inputs={"x": (8, 6), "y": (8, 6)}, blocks=(Block(name="all", operators=(pairs, loss)),),
        batch=8, growth={"b": SizeGrowth(batch=1), "c": SizeGrowth(batch=1)},
    )  # fmt: skip
    with pytest.raises(ConfigError, match="matmul operator pairs"):
        loss_weight(found, 2)


def flattened(dims: str, *operators: OpNode, others: tuple[int, ...] = ()) -> OpGraph:
    growth = {"b": SizeGrowth(batch=1), "n": SizeGrowth(batch=1)}
    inputs = {"x": tuple(FLAT[dim] for dim in dims), **({"y": others} if others else {})}
    blocks = (Block(name="all", operators=operators),)
    return OpGraph(name="flat", inputs=inputs, blocks=blocks, batch=8, growth=growth)


FLAT = {**SIZES, "n": 32}
MIX = op("mix", "linear", FLAT, [("flat", "ne")], "nf", [("w", "ef")])
LOSS = op("loss", "reduce", FLAT, [("mix", "nf")], "", function="mean")


@pytest.mark.parametrize("dims", ["bse", "sbe"])
def test_rows_of_a_flattened_batch_are_computed_by_themselves(dims: str) -> None:
    """Samples by steps or steps by samples: in both orders a micro-batch has its own rows, and can be
    reshaped back.
    """
    flat = op("flat", "reshape", FLAT, [("x", dims)], "ne")
    again = op("again", "reshape", FLAT, [("mix", "nf")], dims.replace("e", "f"))
    loss = op("loss", "reduce", FLAT, [("again", dims.replace("e", "f"))], "", function="mean")
    assert loss_weight(flattened(dims, flat, MIX, LOSS), 4) == 0.25
    assert loss_weight(flattened(dims, flat, MIX, again, loss), 4) == 0.25


def test_rows_in_different_orders_are_refused() -> None:
    """Steps by samples do not match samples by steps, nor data of which a micro-batch has the first rows."""
    flat = op("flat", "reshape", FLAT, [("x", "sbe")], "ne")
    swapped = op("again", "reshape", FLAT, [("mix", "nf")], "bsf")
    loss = op("loss", "reduce", FLAT, [("again", "bsf")], "", function="mean")
    with pytest.raises(ConfigError, match="reshape operator again"):
        loss_weight(flattened("sbe", flat, MIX, swapped, loss), 4)
    targets = op("loss", "mean_square", FLAT, [("mix", "nf"), ("y", "nf")], "")
    with pytest.raises(ConfigError, match="mean_square operator loss"):
        loss_weight(flattened("sbe", flat, MIX, targets, others=(32, 6)), 4)
    right = op("flat", "reshape", FLAT, [("x", "bse")], "ne")
    assert loss_weight(flattened("bse", right, MIX, targets, others=(32, 6)), 4) == 0.25
