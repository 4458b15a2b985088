"""Capability files: their errors, and the subspaces that their limits allow."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from shardwise.model import load_model
from shardwise.strategy import (
    FIELD_VALUES,
    FIELDS,
    MEGATRON_2024,
    Job,
    Strategy,
    complete,
    is_value,
    parse_fields,
    target_names,
    target_of,
)
from shardwise.strategy.target import Axes, Limit, sizes_of, target_from_record

DEGREES = (1, 2, 4, 8)
JOB = Job(seq_len=1024, global_batch_size=8, dtype="bf16")
SIZES = frozenset(sizes_of(load_model("gpt2"), JOB))


def strategy(**changes: Any) -> Strategy:
    plain = complete(parse_fields("dp=8"), devices=8, layers=4, experts=None, global_batch_size=8)
    return replace(plain, **changes)


RECORD: Mapping[str, Any] = {
    "target": "some", "version": 3, "command": "some train",
    "devices": ["cpu"], "dtypes": ["fp32"], "optimizers": ["sgd"], "families": ["llama"],
    "software": {"reduces_by_block": True},
    "axes": {"offload": ["none", "optimizer"]},
    "limits": [
        {"field": "schedule", "where": {"schedule": ["gpipe", "zb_v"], "grad_shard": {"above": 1}},
         "allowed": "1f1b"},
        {"field": "param_shard", "where": {"param_shard": {"above": 1, "below": "optim_shard"}},
         "allowed": "1 or optim_shard"},
    ],
}  # fmt: skip


def test_a_target_does_some_things_in_its_own_way() -> None:
    target = target_from_record(RECORD)
    assert target.run_by(MEGATRON_2024) == replace(MEGATRON_2024, reduces_by_block=True)
    assert target.knows_devices(["cpu"]) and not target.knows_devices(["cpu", "T4"])
    own = target_of("shardwise").run_by(MEGATRON_2024)
    assert own == replace(
        MEGATRON_2024,
        reduces_by_block=True,
        keeps_gathered_inputs=True,
        keeps_split_graphs=True,
        recompute_stops_early=True,
        applies_dropout=False,
    )


def test_default_axes_hold_on_its_devices_unless_requested() -> None:
    defaults = {"offload": ["none"], "tp": [1, 2]}
    target = target_from_record({**RECORD, "default_axes": defaults})
    assert target.axes_for(["cpu"]) == {"offload": ("none", "optimizer"), "tp": (1, 2)}  # `axes` apply always
    assert target.axes_for(["cpu"], {"tp"}) == {"offload": ("none", "optimizer")}
    assert target.axes_for(["T4"]) == {"offload": ("none", "optimizer")}
    assert list(target.refusals(strategy(offload="none", tp=4))) == []
    assert target_of("shardwise").axes_for(["cpu"]) == {"offload": ("none",)}


def test_a_target_runs_on_devices_that_it_knows_or_on_those_of_its_vendors() -> None:
    target = target_from_record({**RECORD, "accelerators": ["NVIDIA", "AMD"]})
    assert target.runs_on({"cpu": "host"})
    assert target.runs_on({"T4": "NVIDIA", "MI300X": "AMD"})
    assert not target.runs_on({"cpu": "host", "T4": "NVIDIA"})
    assert not target.runs_on({"TPU-v4": "Google"})
    assert not target.knows_devices(["T4"])
    assert target.known_devices == "cpu, or devices of NVIDIA and AMD"
    assert target_from_record(RECORD).known_devices == "cpu"
    assert not target_from_record(RECORD).runs_on({"T4": "NVIDIA"})


def test_refusals_name_the_field_and_the_found_and_supported_values() -> None:
    target = target_from_record(RECORD)
    assert [str(r) for r in target.refusals(strategy())] == []
    assert [str(r) for r in target.refusals(strategy(offload="both"))] == [
        "offload=both (it runs none, optimizer)"
    ]
    excluded = strategy(schedule="gpipe", param_shard=2, grad_shard=4, optim_shard=8)
    assert [str(r) for r in target.refusals(excluded)] == [
        "schedule=gpipe (it runs 1f1b)",
        "param_shard=2 (it runs 1 or optim_shard)",
    ]
    assert target.broken_limit(excluded) == target.limits[0]
    assert target.broken_limit(replace(excluded, schedule="1f1b")) == target.limits[1]
    assert target.broken_limit(strategy(schedule="gpipe")) is None


def is_in_subspace(found: Strategy, part: Axes) -> bool:
    return all(getattr(found, name) in values for name, values in part.items())


LIMITS = [
    pytest.param(limit, id=f"{name}: {limit.field}, {limit.allowed[:6]}")
    for name, limits in (
        ("some", target_from_record(RECORD).limits),
        *(
            (name, target_of(name).for_job(load_model(model), JOB).limits)
            for name in target_names()
            for model in ("gpt2", "mixtral-8x7b")
        ),
    )
    for limit in limits
    if limit.level is None or name == "some"
]


@pytest.mark.slow
@pytest.mark.parametrize("limit", LIMITS)
def test_the_parts_within_a_limit_are_complete_and_disjoint(limit: Limit) -> None:
    """Every strategy with any schedule, recomputation, offload and chain of shards, with and without cp and
    empty stages, is in exactly one subspace, or excluded.
    """
    parts, seen = list(limit.allowed_subspaces(DEGREES, 4)), set()
    shapes = ((1, 1, 2), (8, 1, 0), (2, 4, 2), (2, 4, 0))
    kinds = product(FIELD_VALUES["schedule"], FIELD_VALUES["recompute"], FIELD_VALUES["offload"], shapes)
    for (schedule, recompute, offload, (dp, cp, end)), optim in product(kinds, DEGREES):
        for grad in (g for g in DEGREES if g <= optim):
            for param in (p for p in DEGREES if p <= grad):
                found = strategy(
                    schedule=schedule, recompute=recompute, offload=offload, dp=dp, cp=cp,
                    param_shard=param, grad_shard=grad, optim_shard=optim,
                    first_stage_layers=end, last_stage_layers=end,
                )  # fmt: skip
                satisfied = [part for part in parts if is_in_subspace(found, part)]
                assert len(satisfied) == (0 if limit.excludes(found) else 1)
                seen.add(limit.excludes(found))
    assert seen == {True, False}


def test_a_limit_on_virtual_stages_allows_numbers_that_divide_no_devices() -> None:
    """3 and 5 chunks are no divisors of 8 devices; 4 layers have at most 6 stages."""
    limit = {"field": "vpp", "where": {"pp": {"above": 1}, "vpp": [1]}, "allowed": "above 1"}
    target = target_from_record({**RECORD, "limits": [limit]})
    parts = list(target.limits[0].allowed_subspaces(DEGREES, 4))
    for pp, vpp in product((1, 2), (1, 2, 3, 5, 6)):
        found = strategy(pp=pp, vpp=vpp)
        allowed = sum(is_in_subspace(found, part) for part in parts)
        assert allowed == (0 if (pp, vpp) == (2, 1) else 1)


@pytest.mark.parametrize("name", target_names())
def test_a_capability_file_names_existing_fields_and_values(name: str) -> None:
    target = target_of(name)
    assert target.name == name and target.command
    axes = (target.axes, target.windowed_axes, target.default_axes)
    for field, values in (item for each in axes for item in each.items()):
        assert field in FIELDS and values
        assert all(is_value(field, value) or value in SIZES for value in values)
    for limit in target.limits:
        assert limit.field in limit.fields and limit.models in ("all", "dense", "experts")
        for condition in limit.where:
            assert condition.fields <= {*FIELDS, *SIZES}
            for value in condition.values:
                (field,) = condition.left.fields
                assert is_value(field, value)
