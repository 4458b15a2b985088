"""Small operators of every kind, with sizes that divide evenly and sizes that do not."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from tests.property.op_functions import ELEMENT_FUNCTIONS, NUMBERS
from tests.unit.graph.operators import operator

from shardwise.graph import OpNode

EVEN = {
    "b": 4, "s": 4, "t": 4, "k": 6, "n": 6, "h": 4, "g": 2, "d": 2, "e": 4, "v": 8, "m": 12, "x": 8, "y": 8,
    "p": 4, "c": 4, "o": 4, "i": 3, "j": 3, "q": 2, "r": 4, "four": 4, "three": 3, "k2": 2, "a": 3, "z": 6,
}  # fmt: skip

UNEVEN = EVEN | {"b": 3, "s": 5, "t": 5, "k": 5, "n": 7, "h": 6, "g": 3, "v": 7, "r": 6, "e": 2, "m": 12}


SMALL_MAPS = EVEN | {"b": 2, "c": 2, "o": 2, "x": 4, "y": 4}


def _common(sizes: dict[str, int]) -> dict[str, OpNode]:
    """Operators for any sizes."""
    return {
        "matmul": operator("matmul", "b s k, b k n -> b s n", sizes),
        "einsum of three": operator("einsum", "b s k, k h, h n -> b n", sizes),
        "einsum of one": operator("einsum", "b s k -> k b", sizes),
        "einsum with a parameter": operator("einsum", "b s k -> b n s", sizes, parameters="k n"),
        "linear": operator("linear", "b s k -> b s n", sizes, parameters="n k, n"),
        "linear of heads": operator("linear", "b s h d -> b s n", sizes, parameters="n h d"),
        "linear to heads": operator("linear", "b s k -> b s h d", sizes, parameters="h d k, h d"),
        "embedding": operator("embedding", "b s -> b s n", sizes, parameters="v n"),
        "embedding of tables": operator("embedding", "b h -> b h n", sizes, parameters="h v n"),
        "embedding bag": operator("embedding", "b s -> b n", sizes, parameters="v n"),
        "sum of three": operator("elementwise", "b n, n, b -> b n", sizes, function="add"),
        "sum with a parameter": operator(
            "elementwise", "b s n -> b s n", sizes, parameters="s n", function="add"
        ),
        "dropout": operator("elementwise", "b n -> b n", sizes, function="dropout"),
        "expand": operator("elementwise", "b n -> b s n", sizes, function="identity"),
        "product with a parameter": operator(
            "elementwise", "b n -> b n", sizes, parameters="n", function="multiply"
        ),
        "rotary": operator("rotary", "b s h e, s e, s e -> b s h e", sizes),
        "layer norm": operator("layer_norm", "b s n -> b s n", sizes, parameters="n, n"),
        "layer norm of two dims": operator("layer_norm", "b s n -> b s n", sizes, parameters="s n"),
        "plain layer norm": operator("layer_norm", "b s n -> b s n", sizes),
        "rms norm": operator("rms_norm", "b s n -> b s n", sizes, parameters="n"),
        "batch norm": operator("batch_norm", "b n s k -> b n s k", sizes, parameters="n, n"),
        "softmax": operator("softmax", "b s t -> b s t", sizes),
        "log softmax": operator("softmax", "b n -> b n", sizes, function="log_softmax"),
        "attention": operator("attention", "b s h d, b t h d, b t h e -> b s h e", sizes),
        "causal attention": operator(
            "attention", "b h s d, b h t d, b h t e, h s t -> b h s e", sizes, causal=True
        ),
        "windowed attention of grouped heads": operator(
            "attention",
            "b s h d, b t g d, b t g e -> b s h e",
            sizes,
            heads="h",
            kv_heads="g",
            causal=True,
            window=2,
        ),
        "attention of many heads to one": operator(
            "attention", "b s h d, b t d, b t e -> b s h e", sizes, heads="h"
        ),
        "sum": operator("reduce", "b s n -> b n", sizes, function="sum"),
        "mean": operator("reduce", "b s n -> b", sizes, function="mean"),
        "maximum of dims": operator("reduce", "b s n -> s", sizes, function="maximum"),
        "minimum": operator("reduce", "b n -> b", sizes, function="minimum"),
        "reshape to heads": operator("reshape", "b m -> b g2 z", sizes | {"g2": 2}),
        "reshape of heads": operator("reshape", "b h q s -> b hq s", sizes | {"hq": 2 * sizes["h"]}),
        "reshape across": operator("reshape", "four three n -> z q n", sizes),
        "reshape to one": operator(
            "reshape", "b s n -> bsn", sizes | {"bsn": sizes["b"] * sizes["s"] * sizes["n"]}
        ),
        "transpose": operator("transpose", "b s n -> n b s", sizes),
        "concat": operator("concat", "b k s, b n s -> b kn s", sizes | {"kn": sizes["k"] + sizes["n"]}),
        "slice of another order": operator("slice", "b m s -> s b n", sizes, start=3),
        "one element of another order": operator("slice", "b m s -> s b", sizes, start=3),
        "slice": operator("slice", "b m s -> b n s", sizes, start=3),
        "one element": operator("slice", "b m s -> b s", sizes, start=3),
        "cross entropy": operator("cross_entropy", "b s v, b s -> ", sizes),
        "cross entropy of rows": operator("cross_entropy", "b s v, b s -> b", sizes),
        "mean square": operator("mean_square", "b n, b n -> ", sizes),
        "binary cross entropy": operator("binary_cross_entropy", "b n, b n -> ", sizes),
        "lstm": operator("lstm", "b a n -> b a h", sizes, parameters="four h n, four h r, four h", time="a"),
        "lstm of two dims of batch": operator(
            "lstm", "a b s n -> a b s h", sizes, parameters="four h n, four h r", time="a"
        ),
        "lstm cell": operator(
            "lstm_cell", "b n, q b r -> q b h", sizes, parameters="four h n, four h r, four h"
        ),
        "gru cell": operator(
            "gru_cell", "b n, b r -> b h", sizes, parameters="three h n, three h r, three h, three h"
        ),
        "gru": operator(
            "gru", "a b n -> a b h", sizes, parameters="three h n, three h r, three h, three h", time="a"
        ),
    }


def _spatial() -> dict[str, OpNode]:
    """Operators with windows, whose rows and windows are split evenly."""
    return {
        "convolution": operator(
            "convolution", "b c x y -> b o x y", SMALL_MAPS, parameters="o c i j, o", padding=1
        ),
        "strided convolution": operator(
            "convolution", "b c x -> b o p", EVEN, parameters="o c i", stride=2, padding=1
        ),
        "valid convolution": operator("convolution", "b c x -> b o z", EVEN, parameters="o c i"),
        "patches": operator("convolution", "b c x -> b o p", EVEN, parameters="o c q, o", stride=2),
        "dilated convolution": operator(
            "convolution", "b c x -> b o x", EVEN, parameters="o c i", padding=2, dilation=2
        ),
        "grouped convolution": operator(
            "convolution", "b c x -> b o x", EVEN, parameters="o k2 i, o", padding=1, groups=2
        ),
        "depthwise convolution": operator("convolution", "b c x -> b c x", EVEN, parameters="c i", padding=1),
        "maxima of windows": operator(
            "pool", "b c x y -> b c p p2", EVEN | {"p2": 4}, function="maximum", kernel=2
        ),
        "overlapping maxima": operator(
            "pool", "b c x -> b c p", EVEN, function="maximum", kernel=3, stride=2, padding=1, spatial=1
        ),
        "averages of windows": operator(
            "pool", "b c x -> b c p", EVEN, function="average", kernel=3, stride=2, padding=1, spatial=1
        ),
        "adaptive averages": operator("pool", "b c x -> b c p", EVEN, function="average", spatial=1),
        "adaptive averages of unequal windows": operator(
            "pool", "b c x -> b c z", EVEN, function="average", spatial=1
        ),
        "group norm": operator("group_norm", "b o x -> b o x", EVEN, parameters="o, o", groups=2),
        "group norm of maps": operator("group_norm", "b c x y -> b c x y", EVEN | {"x": 2, "y": 3}, groups=4),
    }


def _elementwise(sizes: dict[str, int]) -> dict[str, OpNode]:
    """Every function, with operands of different dims."""
    operands = ("b n", "b n, n", "n, b n, b n")
    return {
        name: _with_number(
            operator("elementwise", f"{operands[len(slopes) - 1]} -> b n", sizes, function=name)
        )
        for name, (_, slopes) in ELEMENT_FUNCTIONS.items()
    }


def _with_number(op: OpNode) -> OpNode:
    name = str(op.attributes["function"])
    return replace(op, attributes={**op.attributes, "number": NUMBERS[name]}) if name in NUMBERS else op


EVEN_INSTANCES: Mapping[str, OpNode] = {**_common(EVEN), **_spatial(), **_elementwise(EVEN)}

INSTANCES: Mapping[str, OpNode] = {
    **_common(EVEN),
    **{f"{name}, uneven": op for name, op in _common(UNEVEN).items()},
    **_spatial(),
    **_elementwise(UNEVEN),
}
