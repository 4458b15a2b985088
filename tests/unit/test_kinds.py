"""Kinds of runner-ups, and the words for what differs."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest

from shardwise.app.cli import words
from shardwise.strategy import FIELDS, Strategy, complete, groups_of
from shardwise.strategy.kinds import kind_of, zero_stage_of

LAYERS = 32
BEST = complete(
    {"tp": 2, "cp": 2, "pp": 4, "zero_stage": 1, "micro_batch_size": 1, "schedule": "1f1b",
     "offload": "optimizer", "recompute": "selective"},
    devices=128, layers=LAYERS, experts=None, global_batch_size=256,
)  # fmt: skip


def changed(**values: Any) -> Strategy:
    return replace(BEST, **values)


SMALL: list[dict[str, Any]] = [
    {"micro_batch_size": 2},
    {"cp": 4, "dp": 2},
    {"cp_kind": "all_to_all"},
    {"axis_order": "tp-cp-pp-dp"},
    {"optim_shard": 4},
    {"offload": "both"},
    {"sequence_parallel": False},
    {"first_stage_layers": 7, "last_stage_layers": 9},
    {"vpp": 2},
    {"recompute_layers": 3},
]
LARGE: list[dict[str, Any]] = [
    {"tp": 4, "dp": 2},
    {"pp": 8, "dp": 2},
    {"ep": 2},
    {"etp": 4},
    {"cp": 1, "dp": 8},
    {"schedule": "interleaved_1f1b", "vpp": 2},
    {"grad_shard": 8},
    {"optim_shard": 1},
    {"recompute": "full", "recompute_layers": 8},
    {"offload": "none"},
]


@pytest.mark.parametrize("values", SMALL, ids=str)
def test_small_choices_are_of_one_kind(values: dict[str, Any]) -> None:
    assert kind_of(changed(**values)) == kind_of(BEST)


@pytest.mark.parametrize("values", LARGE, ids=str)
def test_large_choices_are_of_another_kind(values: dict[str, Any]) -> None:
    assert kind_of(changed(**values)) != kind_of(BEST)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_the_zero_stage_is_what_is_sharded_over_any_ranks(stage: int) -> None:
    whole = complete(
        {"zero_stage": stage}, devices=8, layers=LAYERS, experts=None, global_batch_size=8
    )  # fmt: skip
    sharded: dict[str, Any] = dict.fromkeys(("optim_shard", "grad_shard", "param_shard")[:stage], 2)
    assert zero_stage_of(whole) == zero_stage_of(replace(whole, **sharded)) == stage


def test_groups_count_kinds_in_the_order_in_which_they_come() -> None:
    other, third = changed(tp=4, dp=2), changed(offload="none")
    others = [changed(micro_batch_size=2), other, third, replace(other, micro_batch_size=4), BEST]
    assert groups_of(BEST, others) == (0, 1, 2, 1, 0)
    assert groups_of(BEST, []) == ()


# What differs


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"offload": "none"}, "no offload"),
        ({"offload": "both"}, "offload both"),
        ({"sequence_parallel": False}, "no sequence parallelism"),
        ({"cp": 1, "dp": 16, "optim_shard": 16}, "no context parallelism"),
        ({"cp_kind": "all_to_all"}, "cp by all_to_all"),
        ({"optim_shard": 1}, "states replicated"),
        ({"optim_shard": 4}, "ZeRO: parameters / gradients / optimizer sharded over 1 / 1 / 4"),
        ({"grad_shard": 16}, "ZeRO-2 over 16 ranks"),
        ({"recompute": "none"}, "no recompute"),
        ({"recompute": "full", "recompute_layers": 1}, "recompute 1 layer in full"),
        ({"pp": 1, "dp": 32, "optim_shard": 64, "first_stage_layers": 32, "last_stage_layers": 32},
         "ZeRO-1 over 64 ranks, no pipeline"),
        ({"schedule": "interleaved_1f1b", "vpp": 2, "first_stage_layers": 4, "last_stage_layers": 4},
         "interleaved_1f1b × 2"),
        ({"micro_batch_size": 2}, "micro-batch size 2"),
        ({"first_stage_layers": 7, "last_stage_layers": 9}, "ends of 7 and 9 layers"),
        ({"axis_order": "tp-cp-pp-dp"}, "axes tp-cp-pp-dp"),
        ({"tp": 1, "cp": 1, "dp": 1, "optim_shard": 1, "sequence_parallel": False},
         "ZeRO-0, no sequence parallelism, no context parallelism"),
        ({}, ""),
    ],
)  # fmt: skip
def test_what_differs_says_also_what_the_alternative_lacks(values: dict[str, Any], text: str) -> None:
    assert BEST.dp * BEST.cp == 16 and BEST.optim_shard == 16
    assert words.difference_text(changed(**values), BEST, LAYERS) == text


def test_the_difference_of_uneven_ends_is_said_both_ways() -> None:
    uneven = changed(first_stage_layers=7, last_stage_layers=9)
    assert words.difference_text(BEST, uneven, LAYERS) == "even stages"
    order = changed(axis_order="tp-cp-pp-dp")
    assert words.difference_text(BEST, order, LAYERS) == f"axes {BEST.axis_order}"


def test_narrow_columns_leave_out_the_ranks_of_shards() -> None:
    sharded = changed(grad_shard=16, offload="none")
    assert words.short_difference_text(sharded, BEST, LAYERS) == "ZeRO-2, no offload"


DEGREES = {"tp", "cp", "ep", "etp", "pp", "dp"}
OTHER_VALUES: dict[str, Any] = {
    "vpp": 2, "schedule": "zb_h1", "micro_batch_size": 4, "recompute": "none", "sequence_parallel": False,
    "cp_kind": "all_to_all", "param_shard": 16, "grad_shard": 16, "optim_shard": 1, "offload": "none",
    "recompute_modules": "mlp", "axis_order": "tp-cp-pp-dp", "first_stage_layers": 7, "last_stage_layers": 7,
}  # fmt: skip


def test_every_field_but_the_degrees_is_a_difference() -> None:
    """A new field of a strategy needs a value here; it differs by its name until it has words."""
    recomputed = changed(recompute="full", recompute_layers=4)
    for name in {field.name for field in fields(Strategy)} - DEGREES:
        if name == "recompute_layers":
            text = words.difference_text(replace(recomputed, recompute_layers=5), recomputed, LAYERS)
        else:
            text = words.difference_text(changed(**{name: OTHER_VALUES[name]}), BEST, LAYERS)
        assert text, name
    assert set(FIELDS) == DEGREES | set(OTHER_VALUES) | {"recompute_layers"}


def test_a_field_without_words_differs_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(words, "_CHOICES", words._CHOICES[1:])
    monkeypatch.setattr(words, "_NAMED", words._NAMED - {"param_shard", "grad_shard", "optim_shard"})
    assert words.difference_text(changed(grad_shard=16), BEST, LAYERS) == "grad_shard 16"
