"""Operators that their kinds refuse, by name."""

from __future__ import annotations

import pytest
from tests.unit.graph.operators import operator

from shardwise.errors import ConfigError
from shardwise.graph import OpNode, check_op

SIZES = {
    "b": 4,
    "s": 8,
    "t": 6,
    "k": 6,
    "n": 10,
    "h": 4,
    "g": 3,
    "d": 3,
    "e": 5,
    "v": 12,
    "p": 5,
    "q": 6,
    "r": 4,
}
ATTENTION = "b s h d, b t h d, b t h e -> b s h e"

WRONG: dict[str, tuple[OpNode, str]] = {
    "unknown kind": (operator("conv9", "b -> b", SIZES), "not an operator kind"),
    "no weight": (operator("linear", "b k -> b n", SIZES), "number of parameters"),
    "weight of another width": (
        operator("linear", "b k -> b n", SIZES, parameters="n d"),
        "weight with dims",
    ),
    "output from nowhere": (operator("einsum", "b k -> b n", SIZES), "none of its operands"),
    "nothing summed": (operator("matmul", "b k, n -> b k n", SIZES), "sums over no dim"),
    "unknown function": (
        operator("elementwise", "b -> b", SIZES, function="gelo"),
        "cannot have this value",
    ),
    "no function": (operator("elementwise", "b -> b", SIZES), "needs this attribute"),
    "unknown attribute": (
        operator("attention", ATTENTION, SIZES, windw=3),
        "did you mean window",
    ),
    "two operands of gelu": (
        operator("elementwise", "b, b -> b", SIZES, function="gelu"),
        "wrong number of operands",
    ),
    "lost dim": (operator("elementwise", "b k -> b", SIZES, function="gelu"), "loses dims"),
    "twice in one tensor": (operator("einsum", "b b -> b", SIZES), "twice"),
    "causal across": (operator("attention", ATTENTION, SIZES, causal=True), "causal"),
    "heads in no whole groups": (
        operator("attention", "b s h d, b t g d, b t g e -> b s h e", SIZES, heads="h", kv_heads="g"),
        "whole groups",
    ),
    "unnamed heads": (
        operator("attention", "b s h d, b t g d, b t g e -> b s h e", SIZES),
        "one dim for queries",
    ),
    "a number of no use": (
        operator("elementwise", "b s -> b s", SIZES, function="relu", number=2.0),
        "a number, which relu does not take",
    ),
    "no number": (
        operator("elementwise", "b s -> b s", SIZES, function="scale", number=float("nan")),
        "cannot have this value",
    ),
    "elements lost": (operator("reshape", "b s -> b n", SIZES), "as many elements"),
    "other dims": (operator("transpose", "b s -> s n", SIZES), "another order"),
    "parts that do not add up": (operator("concat", "b d, b e -> b n", SIZES), "differ in one dim"),
    "cut beyond the end": (operator("slice", "b n -> b e", SIZES, start=6), "beyond the end"),
    "nothing reduced": (operator("reduce", "b -> b", SIZES, function="sum"), "some of the dims of its input"),
    "no classes": (operator("cross_entropy", "b s, b s -> ", SIZES), "one dim more"),
    "groups of unequal size": (
        operator("group_norm", "b n s -> b n s", SIZES, parameters="n, n", groups=3),
        "whole groups",
    ),
    "too many windows": (
        operator("convolution", "b s n -> b e n", SIZES, parameters="e s d"),
        "has 8 windows in 10 rows of n",
    ),
    "channels and rows mixed up": (
        operator("convolution", "b s n -> b e n", SIZES, parameters="s e d"),
        "does not have the dims of a convolution",
    ),
    "another number of windows": (
        operator("pool", "b s n -> b s t", SIZES, function="average", kernel=2, spatial=1),
        "wrong number of windows",
    ),
    "three gates of an lstm": (
        operator("lstm", "b s n -> b s h", SIZES, parameters="g h n, g h r", time="s"),
        "other dims than its state",
    ),
    "a state of another size": (
        operator("gru_cell", "b n, b t -> b h", SIZES, parameters="g h n, g h t"),
        "do not fit its state",
    ),
    "no elements": (operator("einsum", "b k -> b", SIZES | {"k": 0}), "without elements"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_operators_are_refused_by_name(name: str) -> None:
    op, message = WRONG[name]
    with pytest.raises(ConfigError, match=message) as caught:
        check_op(op)
    assert "'op'" in caught.value.message and caught.value.allowed


def test_a_sound_operator_passes() -> None:
    check_op(operator("attention", ATTENTION, SIZES, window=4))
    check_op(operator("concat", "b p, b e -> b n", SIZES))
    check_op(operator("slice", "b n -> b q", SIZES, start=4))
    check_op(operator("embedding", "b s -> b s e", SIZES, parameters="v e"))
