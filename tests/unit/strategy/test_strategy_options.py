"""Options of the software: their values, defaults and limits in capability files, and what they act on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from shardwise.inputs import Fields
from shardwise.model import load_model
from shardwise.strategy import (
    NEWEST_MEGATRON_LM,
    Job,
    Strategy,
    acting_options,
    complete,
    job_record,
    option_values,
    parse_fields,
    profile_from_record,
    target_names,
    target_of,
    target_of_options,
)
from shardwise.strategy.target import target_from_record

JOB = Job(seq_len=1024, global_batch_size=8, dtype="bf16", profile=NEWEST_MEGATRON_LM)
MEGATRON = target_of("megatron-lm-0.19")
NVIDIA = ("NVIDIA",)

RECORD: Mapping[str, Any] = {
    "target": "some", "version": 1, "command": "some train", "devices": [], "dtypes": ["bf16", "fp32"],
    "optimizers": ["adamw", "sgd"], "families": ["gpt2"], "software": {}, "axes": {}, "limits": [],
    "options": {
        "speed": {
            "fast": {"profile": {"tensor_overlap": 0.5}, "source": "a measurement", "dtypes": ["bf16"],
                     "accelerators": ["NVIDIA"], "acts_on": {"tp": {"above": 1}}},
            "slow": {"profile": {"tensor_overlap": 0.0}},
        },
        "states": {
            "wide": {"profile": {"moment_bytes": 4.0}},
            "narrow": {
                "profile": {"moment_bytes": 2.0}, "optimizers": ["adamw"],
                "limits": [{"field": "offload", "where": {"offload": ["optimizer"]}, "allowed": "none"}],
            },
        },
    },
}  # fmt: skip
SOME = target_from_record(RECORD)


def strategy(text: str) -> Strategy:
    return complete(parse_fields(text), devices=8, layers=12, experts=None, global_batch_size=8)


def test_the_first_value_that_supports_the_job_is_the_default() -> None:
    fast = SOME.profile_for(JOB, NVIDIA)
    assert (fast.tensor_overlap, fast.moment_bytes) == (0.5, 4.0)
    assert fast.options == {"speed": "fast"}  # `wide` changes nothing
    assert fast.provenance["tensor_overlap"] == "a measurement"
    slow = SOME.own_profile
    assert SOME.profile_for(replace(JOB, dtype="fp32"), NVIDIA) == slow
    assert SOME.profile_for(JOB, ("AMD", "NVIDIA")) == slow
    assert slow.tensor_overlap == 0.0 and not slow.options


def test_options_replace_fields_and_are_remembered() -> None:
    fast = SOME.profile_for(JOB, NVIDIA)
    found = SOME.with_options(fast, {"speed": "slow", "states": "narrow"})
    assert (found.tensor_overlap, found.moment_bytes) == (0.0, 2.0)
    assert found.options == {"speed": "slow", "states": "narrow"}
    assert SOME.with_options(fast, {"states": "wide"}) == fast


def test_limits_of_an_option_hold_while_it_has_the_value() -> None:
    model = load_model("gpt2")
    narrow = replace(JOB, profile=SOME.with_options(JOB.profile, {"states": "narrow"}))
    offloaded = strategy("dp=8,offload=optimizer")
    assert SOME.for_job(model, JOB).broken_limit(offloaded) is None
    broken = SOME.for_job(model, narrow).broken_limit(offloaded)
    assert broken is not None and broken.field == "offload"


def test_an_option_acts_on_some_strategies() -> None:
    profile = MEGATRON.profile_for(JOB, NVIDIA)
    assert profile.options == {"tp_comm_overlap": "on"}
    for text, acts in (
        ("tp=2,sequence_parallel=yes", True),
        ("tp=2,sequence_parallel=no", False),
        ("tp=1,dp=8", False),
    ):
        found = acting_options(MEGATRON.name, profile, strategy(text))
        assert found == ({"tp_comm_overlap": "on"} if acts else {})
    assert acting_options(None, profile, None) == {"tp_comm_overlap": "on"}  # stages that are not alike
    assert acting_options("megatron-lm-9.9", profile, strategy("tp=1,dp=8")) == {"tp_comm_overlap": "on"}


def test_any_has_the_options_of_the_newest_megatron_lm() -> None:
    assert target_of_options(None) == target_of_options("any") == MEGATRON
    assert not NEWEST_MEGATRON_LM.options


@pytest.mark.parametrize("name", target_names())
def test_every_value_changes_fields_of_a_profile_and_says_why(name: str) -> None:
    target, known = target_of(name), option_values()
    base = target.own_profile
    for option, values in target.options.items():
        assert set(values) <= set(known[option])
        set_by_default = target.profile_for(JOB, NVIDIA).options.get(option)
        by_default = set() if set_by_default is None else set(values[set_by_default].profile)
        for value, own in values.items():
            # Every value fixes the fields of the default, so that it replaces that.
            assert by_default <= set(own.profile), value
            replace(base, **own.profile)
            changes = any(getattr(base, field) != found for field, found in own.profile.items())
            assert own.source or not changes, (option, value)


def test_a_record_has_what_an_option_changed_and_no_more() -> None:
    plain = job_record(JOB)["profile"]
    assert not {"needs_sequence_parallel", "moment_bytes", "master_bytes", "options"} & set(plain)
    assert profile_from_record(Fields(plain)) == JOB.profile
    chosen = {"moment_dtype": "bf16", "tp_comm_overlap": "on"}
    profile = MEGATRON.with_options(JOB.profile, chosen)
    record = job_record(replace(JOB, profile=profile))["profile"]
    assert record["options"] == chosen and record["needs_sequence_parallel"] is True
    assert (record["moment_bytes"], record["master_bytes"]) == (2.0, 2.0)
    assert profile_from_record(Fields(record)) == profile


@pytest.mark.parametrize("name", ["megatron-lm-0.19", "megatron-fsdp-0.19", "fsdp2", "deepspeed-0.19"])
def test_attention_is_an_option(name: str) -> None:
    target = target_of(name)
    own = target.profile_for(JOB, NVIDIA)
    kernels = ("cudnn", "flash-2", *(("efficient",) if name in ("fsdp2", "deepspeed-0.19") else ()))
    assert own.attention == kernels and "attention" not in own.options
    unfused = target.with_options(own, {"attention": "unfused"})
    assert unfused.attention == () and unfused.options["attention"] == "unfused"
    assert target.with_options(unfused, {"attention": "flash"}).attention == own.attention


@pytest.mark.parametrize("name", ["fsdp2", "deepspeed-0.19"])
def test_the_loss_of_eager_software_is_an_option(name: str) -> None:
    target = target_of(name)
    own = target.profile_for(JOB, NVIDIA)
    assert own.loss == "eager" and "loss" not in own.options
    chosen = target.with_options(own, {"loss": "fused", "attention": "efficient"})
    assert (chosen.loss, chosen.attention) == ("fused", ("efficient",))


def test_megatron_lm_has_no_other_loss() -> None:
    # Its parser refuses --cross-entropy-fusion-impl te; the native fusion has the same tensors.
    assert "loss" not in MEGATRON.options
