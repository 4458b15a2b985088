"""The shortest text that names a strategy, and contradictory fields."""

from __future__ import annotations

import pytest

from shardwise.errors import ConfigError
from shardwise.strategy import Strategy, brief_text, complete, parse_fields, strategy_text


def completed(text: str) -> Strategy:
    return complete(parse_fields(text), devices=16, layers=12, experts=None, global_batch_size=32)


@pytest.mark.parametrize(
    "text",
    [
        "tp=2,pp=4",
        "tp=4,pp=2,vpp=3,recompute=full,recompute_layers=1,micro_batch_size=2",
        "zero_stage=3,dp_shard=4,offload=both",
        "pp=4,first_stage_layers=2,last_stage_layers=1,axis_order=pp-tp,schedule=zb_h1",
        "cp=2,cp_kind=all_to_all,tp=2,sequence_parallel=false",
    ],
)
def test_a_brief_text_gives_the_same_strategy_and_is_minimal(text: str) -> None:
    strategy = completed(text)
    brief = brief_text(strategy, devices=16, layers=12, experts=None, global_batch_size=32)
    assert completed(brief) == strategy
    assert len(brief) < len(strategy_text(strategy))
    pairs = brief.split(",")
    for left_out in range(len(pairs)):
        fewer = ",".join(pairs[:left_out] + pairs[left_out + 1 :])
        try:
            assert completed(fewer) != strategy
        except ConfigError:
            continue


def test_a_degree_that_contradicts_an_alias_is_refused() -> None:
    with pytest.raises(ConfigError, match="optim_shard and zero_stage") as caught:
        completed("zero_stage=1,optim_shard=2")
    assert caught.value.found == "2"
    assert caught.value.allowed is not None and caught.value.allowed.startswith("16")


def test_a_degree_that_agrees_with_an_alias_is_accepted() -> None:
    assert completed("zero_stage=1,optim_shard=16") == completed("zero_stage=1")
