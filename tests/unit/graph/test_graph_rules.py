"""Sharding rules of the main kinds, written by hand."""

from __future__ import annotations

import pytest
from tests.unit.graph.operators import operator, rule_text

from shardwise.graph import OpNode, ShardingRule, allows, check_op, local_sizes, rules_of

SIZES = {
    "b": 4, "s": 8, "t": 8, "k": 6, "n": 10, "h": 4, "g": 2, "d": 3, "e": 5, "v": 12, "m": 20, "one": 1,
    "c": 6, "o": 4, "x": 9, "y": 16, "p": 8, "i": 3, "q": 3, "z": 4, "gates": 4, "r": 4, 
    "z_tap": 4, "ten": 10, "tap": 7, "k2": 3,
}  # fmt: skip

LINEAR = operator("linear", "b s k -> b s n", SIZES, parameters="n k, n")
GROUPED = operator("attention", "b s h d, b t g d, b t g e -> b s h e", SIZES, heads="h", kv_heads="g")

CASES: dict[str, tuple[OpNode, tuple[str, ...]]] = {
    "linear": (
        LINEAR,
        (
            "replicate: R / R R -> R",
            "replicate, gradients summed: R+ / R+ R+ -> R+",
            "split b: S(0) / R+ R+ -> S(0)",
            "split s: S(1) / R+ R+ -> S(1)",
            "split n: R+ / S(0) S(0) -> S(2)",
            "split k: S(2) / S(1) P -> P",
            "partial: P / R+ P -> P",
        ),
    ),
    "matmul": (
        operator("matmul", "b s k, b k n -> b s n", SIZES),
        (
            "replicate: R R -> R",
            "replicate, gradients summed: R+ R+ -> R+",
            "split b: S(0) S(0) -> S(0)",
            "split s: S(1) R+ -> S(1)",
            "split n: R+ S(2) -> S(2)",
            "split k: S(2) S(1) -> P",
            "partial 0: P R+ -> P",
            "partial 1: R+ P -> P",
        ),
    ),
    "add": (
        operator("elementwise", "b n, n -> b n", SIZES, function="add"),
        (
            "replicate: R R -> R",
            "replicate, gradients summed: R+ R+ -> R+",
            "split b: S(0) R+ -> S(0)",
            "split n: S(1) S(0) -> S(1)",
            "partial: P P -> P",
        ),
    ),
    "multiply": (
        operator("elementwise", "b n, b n -> b n", SIZES, function="multiply"),
        (
            "replicate: R R -> R",
            "replicate, gradients summed: R+ R+ -> R+",
            "split b: S(0) S(0) -> S(0)",
            "split n: S(1) S(1) -> S(1)",
            "partial 0: P R+ -> P",
            "partial 1: R+ P -> P",
        ),
    ),
    "gelu": (
        operator("elementwise", "b n -> b n", SIZES, function="gelu"),
        (
            "replicate: R -> R",
            "replicate, gradients summed: R+ -> R+",
            "split b: S(0) -> S(0)",
            "split n: S(1) -> S(1)",
        ),
    ),
    "attention of grouped heads": (
        GROUPED,
        (
            "replicate: R R R -> R",
            "replicate, gradients summed: R+ R+ R+ -> R+",
            "split b: S(0) S(0) S(0) -> S(0)",
            "split h: S(2) S(2) S(2) -> S(2)",
            "split h, keys whole: S(2) R+ R+ -> S(2)",
            "split s: S(1) R+ R+ -> S(1)",
            "split e: R+ R+ S(3) -> S(3)",
            "split t: R+ S(1) S(1) -> P",
            "partial 2: R+ R+ P -> P",
        ),
    ),
    "layer norm": (
        operator("layer_norm", "b s n -> b s n", SIZES, parameters="n, n"),
        (
            "replicate: R / R R -> R",
            "replicate, gradients summed: R+ / R+ R+ -> R+",
            "split b: S(0) / R+ R+ -> S(0)",
            "split s: S(1) / R+ R+ -> S(1)",
            "split n: S(2) / S(0) S(0) -> S(2)",
        ),
    ),
    "embedding": (
        operator("embedding", "b s -> b s e", SIZES, parameters="v e"),
        (
            "replicate: R / R -> R",
            "replicate, gradients summed: R+ / R+ -> R+",
            "split b: S(0) / R+ -> S(0)",
            "split s: S(1) / R+ -> S(1)",
            "split e: R+ / S(1) -> S(2)",
            "split v: R+ / S(0) -> P",
        ),
    ),
    "cross entropy": (
        operator("cross_entropy", "b s v, b s -> ", SIZES),
        (
            "replicate: R R -> R",
            "replicate, gradients summed: R+ R+ -> R+",
            "split b: S(0) S(0) -> P",
            "split s: S(1) S(1) -> P",
            "split v: S(2) R -> R",
        ),
    ),
    "reshape": (
        operator("reshape", "b m -> b h e", SIZES),
        (
            "replicate: R -> R",
            "replicate, gradients summed: R+ -> R+",
            "split b: S(0) -> S(0)",
            "split h: S(1) -> S(1)",
            "partial: P -> P",
        ),
    ),
    "sum": (
        operator("reduce", "b n -> b", SIZES, function="sum"),
        (
            "replicate: R -> R",
            "replicate, gradients summed: R+ -> R+",
            "split b: S(0) -> S(0)",
            "split n: S(1) -> P",
            "partial: P -> P",
        ),
    ),
    "convolution": (
        operator("convolution", "b c x y -> b o x y", SIZES, parameters="o c i q, o", padding=1),
        (
            "replicate: R / R R -> R",
            "replicate, gradients summed: R+ / R+ R+ -> R+",
            "split b: S(0) / R+ R+ -> S(0)",
            "split o: R+ / S(0) S(0) -> S(1)",
            "split x: S(2) / R+ R+ -> S(2)",
            "split y: S(3) / R+ R+ -> S(3)",
            "split c: S(1) / S(1) P -> P",
            "split i: R+ / S(2) P -> P",
            "split q: R+ / S(3) P -> P",
            "partial: P / R+ P -> P",
        ),
    ),
    "depthwise convolution": (
        operator("convolution", "b c y -> b c p", SIZES, parameters="c i", stride=2, padding=1),
        (
            "replicate: R / R -> R",
            "replicate, gradients summed: R+ / R+ -> R+",
            "split b: S(0) / R+ -> S(0)",
            "split c: S(1) / S(0) -> S(1)",
            "split p: S(2) / R+ -> S(2)",
            "split i: R+ / S(1) -> P",
            "partial: P / R+ -> P",
        ),
    ),
    "average of windows": (
        operator("pool", "b c y -> b c p", SIZES, function="average", kernel=2, spatial=1),
        (
            "replicate: R -> R",
            "replicate, gradients summed: R+ -> R+",
            "split b: S(0) -> S(0)",
            "split c: S(1) -> S(1)",
            "split p: S(2) -> S(2)",
            "partial: P -> P",
        ),
    ),
    "lstm": (
        operator("lstm", "b s k -> b s h", SIZES, parameters="gates h k, gates h r, gates h", time="s"),
        (
            "replicate: R / R R R -> R",
            "replicate, gradients summed: R+ / R+ R+ R+ -> R+",
            "split b: S(0) / R+ R+ R+ -> S(0)",
            "split h: R+ / S(1) S(1) S(1) -> S(2)",
            "split k: S(2) / S(2) R R -> R",
            "split r: R / R S(2) R -> R",
        ),
    ),
    "maximum": (
        operator("reduce", "b n -> b", SIZES, function="maximum"),
        (
            "replicate: R -> R",
            "replicate, gradients summed: R+ -> R+",
            "split b: S(0) -> S(0)",
            "split n: S(1) -> R",
        ),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_operators_of_the_cases_pass_their_checks(name: str) -> None:
    check_op(CASES[name][0])


@pytest.mark.parametrize("name", CASES)
def test_rules_are_those_written_by_hand(name: str) -> None:
    op, expected = CASES[name]
    assert tuple(map(rule_text, rules_of(op))) == expected


def test_dims_named_whole_and_of_one_element_are_not_split() -> None:
    op = operator("elementwise", "b one n -> b one n", SIZES, function="gelu", whole=("n",))
    assert [rule.split for rule in rules_of(op)] == [None, None, "b"]


def _named(op: OpNode, *names: str) -> list[ShardingRule]:
    by_name = {rule.name: rule for rule in rules_of(op)}
    return [by_name[name] for name in names]


def test_heads_divide_into_their_groups_and_then_further_with_whole_keys() -> None:
    grouped = _named(GROUPED, "split h")
    assert allows(GROUPED, grouped, [2])
    assert not allows(GROUPED, grouped, [4])  # 2 key heads
    assert allows(GROUPED, _named(GROUPED, "split h, keys whole"), [4])
    assert allows(GROUPED, _named(GROUPED, "split h", "split h, keys whole"), [2, 2])
    # Parts of heads that are no whole groups cannot be divided by groups again.
    assert not allows(GROUPED, _named(GROUPED, "split h, keys whole", "split h"), [2, 2])


def test_a_dim_is_divided_into_no_more_parts_than_it_has_elements() -> None:
    rules = _named(LINEAR, "split b", "split b")
    assert allows(LINEAR, rules, [2, 2])
    assert not allows(LINEAR, rules, [2, 4])  # 8 parts of 4


def test_sizes_are_those_of_the_rank_that_has_most() -> None:
    # 10 outputs on 4 ranks: 3, 3, 2, 2; 6 summed on 2: 3.
    sizes = local_sizes(LINEAR, _named(LINEAR, "split n", "split k"), [4, 2])
    assert sizes == {"b": 4, "s": 8, "k": 3, "n": 3}
    # 3 groups of 2 heads on 2 ranks: 2 groups, so 4 heads.
    uneven = operator(
        "attention", "b s h d, b t g d, b t g e -> b s h e", SIZES | {"h": 6, "g": 3}, heads="h", kv_heads="g"
    )
    sizes = local_sizes(uneven, _named(uneven, "split h"), [2])
    assert (sizes["h"], sizes["g"]) == (4, 2)


def _halo(op: OpNode, split: str) -> tuple[float, ...]:
    (rule,) = _named(op, f"split {split}")
    return tuple(call.copies for call in rule.collectives)


def test_halos_are_the_rows_of_a_window_beyond_its_part() -> None:
    same = operator("convolution", "b c x -> b o x", SIZES, parameters="o c i", padding=1)
    assert _halo(same, "x") == (1.0,)  # one tap on either side
    patches = operator("convolution", "b c y -> b o z", SIZES, parameters="o c z_tap", stride=4)
    assert _halo(patches, "z") == ()  # windows of four rows, stride four
    valid = operator("convolution", "b c ten -> b o p", SIZES, parameters="o c i")
    # 8 windows in 10 rows: the last part of n begins at row 10 (1 - 1/n), its windows at 8 (1 - 1/n).
    assert _halo(valid, "p") == (2.0,)
    strided = operator("convolution", "b c y -> b o p", SIZES, parameters="o c i", stride=2, padding=1)
    # Part of windows [a, e) of 16 rows: rows 2 a - 1 to 2 (e - 1) - 1 + 2 = 2 e - 1, so one row before.
    assert _halo(strided, "p") == (1.0,)
    halves = operator("pool", "b c y -> b c p", SIZES, function="maximum", kernel=2, spatial=1)
    assert _halo(halves, "p") == ()  # windows of two rows, stride two


def test_a_part_has_the_rows_that_its_neighbour_needs() -> None:
    wide = operator("convolution", "b c x -> b o x", SIZES, parameters="o c tap", padding=3)
    assert _halo(wide, "x") == (3.0,)
    assert allows(wide, _named(wide, "split x"), [3])  # parts of 3 rows
    assert not allows(wide, _named(wide, "split x"), [4])  # parts of 2


def test_groups_of_channels_divide_first() -> None:
    op = operator("convolution", "b c x -> b o x", SIZES, parameters="o k2 i", padding=1, groups=2)
    check_op(op)
    assert [rule_text(rule) for rule in rules_of(op)][3:5] == [
        "split o: S(1) / S(0) -> S(1)",
        "split o, c whole: R+ / S(0) -> S(1)",
    ]
    by_groups, by_channels = _named(op, "split o", "split o, c whole")
    assert allows(op, [by_groups, by_channels], [2, 2])
    assert not allows(op, [by_channels, by_groups], [2, 2])
    assert not allows(op, [by_groups], [3])
