"""Strategies as text: round trips, defaults, and the message of every error."""

from __future__ import annotations

from typing import Any

import pytest

from shardwise.errors import ConfigError
from shardwise.strategy import FIELDS, Strategy, complete, parse_fields, shards_of, strategy_text

JOB: dict[str, Any] = {"devices": 16, "layers": 10, "experts": None, "global_batch_size": 48}
MOE: dict[str, Any] = {**JOB, "experts": 8}


def completed(text: str, **changes: Any) -> Strategy:
    return complete(parse_fields(text), **{**JOB, **changes})


def test_text_of_a_strategy_reads_back() -> None:
    text = (
        "tp=2,pp=2,vpp=2,cp=2,cp_kind=all_to_all,ep=1,etp=1,dp=2,param_shard=1,grad_shard=2,optim_shard=4,"
        "micro_batch_size=3,schedule=interleaved_1f1b,sequence_parallel=true,recompute=full,recompute_layers=2,"
        "offload=both,axis_order=cp-tp-pp-dp,first_stage_layers=2,last_stage_layers=1"
    )
    strategy = completed(text)
    assert strategy_text(strategy) == text
    assert completed(strategy_text(strategy)) == strategy


def test_fields_have_types() -> None:
    assert parse_fields(" tp = 8 , sequence_parallel=no,schedule=gpipe,zero_stage=0, ") == {
        "tp": 8,
        "sequence_parallel": False,
        "schedule": "gpipe",
        "zero_stage": 0,
    }
    assert parse_fields("") == {}


@pytest.mark.parametrize(
    ("word", "value"), [("TRUE", True), ("yes", True), ("1", True), ("No", False), ("0", False)]
)
def test_flags(word: str, value: bool) -> None:
    assert parse_fields(f"sequence_parallel={word}") == {"sequence_parallel": value}


@pytest.mark.parametrize(
    ("order", "whole"), [("pp-tp", "pp-tp-cp-dp"), ("dp", "dp-tp-cp-pp"), ("tp-cp-dp-pp", "tp-cp-dp-pp")]
)
def test_axes_that_are_not_named_follow_in_the_default_order(order: str, whole: str) -> None:
    assert parse_fields(f"axis_order={order}") == {"axis_order": whole}


@pytest.mark.parametrize(
    ("text", "key", "words"),
    [
        ("tp", "k", "needs a value"),
        ("tp=", "k", "needs a value"),
        ("tpp=2", "k", "did you mean tp?"),
        ("zebra=2", "k", "is not a field of a strategy; found 'zebra'"),
        ("tp=2,tp=2", "k", "'tp' is given twice"),
        ("sequence_parallel=maybe", "k.sequence_parallel", "not true or false"),
        ("axis_order=tp-tp", "k.axis_order", "not an order"),
        ("axis_order=tp-xp", "k.axis_order", "not an order"),
        ("schedule=1F1B", "k.schedule", "is not a value of this field"),
        ("recompute=some", "k.recompute", "is not a value of this field"),
        ("offload=disk", "k.offload", "is not a value of this field"),
        ("cp_kind=star", "k.cp_kind", "is not a value of this field"),
        ("tp=-1", "k.tp", "not a whole number in range"),
        ("tp=2.0", "k.tp", "not a whole number in range"),
        ("tp=٣", "k.tp", "not a whole number in range"),
        ("tp=99999999", "k.tp", "not a whole number in range"),
        ("tp=123456789", "k.tp", "not a whole number in range"),
        ("tp=0", "k.tp", "too small"),
        ("dp_shard=0", "k.dp_shard", "too small"),
        ("zero_stage=4", "k.zero_stage", "is not a stage"),
    ],
)
def test_malformed_text_of_a_strategy_is_refused(text: str, key: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        parse_fields(text, key="k")
    assert caught.value.key == key


def test_counts_of_layers_may_be_zero() -> None:
    assert parse_fields("first_stage_layers=0,recompute_layers=0") == {
        "first_stage_layers": 0,
        "recompute_layers": 0,
    }


def test_unnamed_fields_have_their_defaults() -> None:
    """16 devices, 10 layers: dp gets the devices that tp leaves; one stage has all layers."""
    assert completed("tp=2") == Strategy(
        tp=2, pp=1, vpp=1, cp=1, cp_kind="ring", ep=1, etp=1, dp=8, param_shard=1, grad_shard=1,
        optim_shard=1, micro_batch_size=1, schedule="1f1b", sequence_parallel=True, recompute="none",
        recompute_layers=0, offload="none", axis_order="tp-cp-dp-pp",
        first_stage_layers=10, last_stage_layers=10,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("text", "fields"),
    [
        ("pp=4", {"first_stage_layers": 2, "last_stage_layers": 2, "sequence_parallel": False}),  # 2 3 3 2
        ("pp=2", {"first_stage_layers": 5, "last_stage_layers": 5}),
        ("pp=2,first_stage_layers=3", {"first_stage_layers": 3, "last_stage_layers": 7}),
        ("pp=2,last_stage_layers=2", {"first_stage_layers": 8, "last_stage_layers": 2}),
        ("pp=4,first_stage_layers=1", {"first_stage_layers": 1, "last_stage_layers": 2}),
        ("pp=2,vpp=2", {"schedule": "interleaved_1f1b", "first_stage_layers": 2, "last_stage_layers": 2}),
        ("pp=2,schedule=interleaved_1f1b", {"vpp": 2}),
        ("pp=2,schedule=zb_v", {"vpp": 2}),
        ("pp=2,schedule=dualpipe_v", {"vpp": 2}),
        ("recompute=full", {"recompute_layers": 10}),
        ("pp=4,recompute=full", {"recompute_layers": 3}),
        ("recompute_layers=4", {"recompute": "full"}),
        ("zero_stage=1", {"optim_shard": 16, "grad_shard": 1, "param_shard": 1}),
        ("tp=2,zero_stage=2,dp_replicate=2", {"optim_shard": 4, "grad_shard": 4, "param_shard": 1}),
        ("dp_shard=4", {"optim_shard": 4, "grad_shard": 4, "param_shard": 4}),
        ("grad_shard=4", {"optim_shard": 4, "grad_shard": 4, "param_shard": 1}),
        ("param_shard=2", {"optim_shard": 2, "grad_shard": 2, "param_shard": 2}),
    ],
)
def test_given_fields_determine_the_others(text: str, fields: dict[str, object]) -> None:
    strategy = completed(text)
    assert {name: getattr(strategy, name) for name in fields} == fields


@pytest.mark.parametrize(
    ("text", "etp"), [("tp=4", 4), ("tp=4,ep=2", 4), ("tp=4,pp=4,ep=2", 1), ("tp=4,ep=2,etp=2", 2)]
)
def test_etp_defaults_to_tp_where_it_divides(text: str, etp: int) -> None:
    """tp * cp * dp is 16, and 4 with pp = 4, where etp = tp = 4 does not allow ep = 2."""
    assert completed(text, **MOE).etp == etp


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("tp=3", "not the number of devices"),
        ("tp=32", "not the number of devices"),
        ("tp=2,dp=4", "not the number of devices"),
        ("param_shard=4,grad_shard=2", "param_shard divides grad_shard"),
        ("grad_shard=4,optim_shard=2", "param_shard divides grad_shard"),
        ("optim_shard=3", "param_shard divides grad_shard"),
        ("micro_batch_size=2", "micro_batch_size divides"),
        ("pp=2,first_stage_layers=11", "stages have all layers"),
        ("pp=2,first_stage_layers=3,last_stage_layers=3", "stages have all layers"),
        ("pp=4,first_stage_layers=6,last_stage_layers=5", "stages have all layers"),
        ("first_stage_layers=5", "stages have all layers"),
        ("schedule=gpipe", "needs pp > 1"),
        ("vpp=2", "needs pp > 1"),
        ("pp=2,schedule=gpipe,vpp=2", "vpp > 1 needs interleaved_1f1b"),
        ("pp=2,schedule=zb_h1,vpp=2", "vpp > 1 needs interleaved_1f1b"),
        ("pp=2,schedule=zb_v,vpp=3", "have vpp = 2"),
        ("pp=2,schedule=dualpipe_v,vpp=1", "have vpp = 2"),
        ("pp=2,schedule=interleaved_1f1b,vpp=1", "vpp of at least 2"),
        ("recompute=selective,recompute_layers=1", "recompute_layers needs"),
        ("recompute=full,recompute_layers=11", "1 to 10"),
        ("pp=4,recompute=full,recompute_layers=4", "1 to 3"),
        ("recompute=full,recompute_layers=0", "1 to 10"),
        ("sequence_parallel=true", "needs tp > 1"),
        ("cp_kind=all_to_all", "needs cp > 1"),
        ("ep=2", "dense model"),
        ("etp=2", "dense model"),
        ("zero_stage=1,dp_shard=3", "dp_shard does not divide"),
        ("dp_replicate=3", "dp_replicate does not divide"),
        ("dp_replicate=4,dp_shard=8", "is not dp \\* cp"),
    ],
)
def test_fields_that_contradict_each_other(text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        completed(text)


def test_experts_need_a_grid() -> None:
    with pytest.raises(ConfigError, match="etp \\* ep divides"):
        completed("ep=3,etp=1", **MOE)


@pytest.mark.parametrize("batch", [7, 48])
def test_a_batch_that_dp_does_not_divide_is_left_to_the_rules(batch: int) -> None:
    assert completed("dp=16", global_batch_size=batch).dp == 16


@pytest.mark.parametrize(
    ("fields", "chain"),
    [
        ({"zero_stage": 0}, (1, 1, 1)),
        ({"zero_stage": 1}, (1, 1, 12)),
        ({"zero_stage": 2}, (1, 12, 12)),
        ({"zero_stage": 3}, (12, 12, 12)),
        ({"dp_shard": 4}, (4, 4, 4)),
        ({"dp_replicate": 4}, (3, 3, 3)),
        ({"dp_replicate": 12}, (1, 1, 1)),
        ({"zero_stage": 1, "dp_shard": 6}, (1, 1, 6)),
        ({"zero_stage": 2, "dp_replicate": 2}, (1, 6, 6)),
        ({"zero_stage": 3, "dp_replicate": 2, "dp_shard": 6}, (6, 6, 6)),
    ],
)
def test_aliases_over_twelve_ranks(fields: dict[str, int], chain: tuple[int, int, int]) -> None:
    shards = shards_of(fields, 12)
    assert (shards["param_shard"], shards["grad_shard"], shards["optim_shard"]) == chain


def test_without_aliases_no_field_is_required() -> None:
    assert shards_of({"tp": 2}, 12) == {}


@pytest.mark.parametrize("fields", [{"dp_shard": 5}, {"dp_replicate": 5}, {"dp_shard": 4, "dp_replicate": 4}])
def test_impossible_aliases_are_refused(fields: dict[str, int]) -> None:
    with pytest.raises(ConfigError):
        shards_of(fields, 12)


def test_every_field_is_written() -> None:
    """Without named modules, the text has no value for them; with some, it has every field."""
    plain = [pair.partition("=")[0] for pair in strategy_text(completed("tp=2")).split(",")]
    assert plain == [name for name in FIELDS if name != "recompute_modules"]
    named = strategy_text(completed("tp=2,recompute_modules=mlp")).split(",")
    assert tuple(pair.partition("=")[0] for pair in named) == FIELDS
    assert "recompute_modules=mlp" in named


@pytest.mark.parametrize(
    ("text", "modules"),
    [("core_attn+mlp", "core_attn+mlp"), ("mlp+core_attn", "core_attn+mlp"), ("moe_act", "moe_act")],
)
def test_named_modules_imply_selective_recomputation(text: str, modules: str) -> None:
    """In any order; they are written in one."""
    strategy = completed(f"tp=2,recompute_modules={text}")
    assert (strategy.recompute, strategy.recompute_modules) == ("selective", modules)
    assert completed(strategy_text(strategy)) == strategy


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("recompute_modules=attention", "'attention'"),
        ("recompute_modules=mlp+mlp", "given twice"),
        ("recompute_modules=mlp,recompute=full", "needs selective"),
        ("recompute_modules=mlp,recompute=none", "needs selective"),
    ],
)
def test_other_sets_of_modules_are_refused(text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        completed(text)
