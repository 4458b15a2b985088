"""Megatron-LM 0.19.2 reads flags of Megatron-FSDP: its parser and configuration agree with the plan."""

from __future__ import annotations

import pytest
from tests.targets.megatron import environment
from tests.targets.mutants import mutants
from tests.targets.random_plans import FAMILIES, MEGATRON_FSDP, plan_of_text, random_plans

from shardwise.errors import ConfigError
from shardwise.plans import Plan
from shardwise.strategy import target_of
from shardwise.targets.megatron_fsdp import (
    megatron_fsdp_files,
    megatron_fsdp_flags,
    read_back,
    read_files_back,
)
from shardwise.targets.megatron_lm_read_back import Reading, read_by_megatron_lm, reader_request

pytestmark = pytest.mark.xdist_group("megatron-fsdp")

PLANS = 50


@pytest.fixture(scope="module")
def plans() -> list[Plan]:
    return random_plans(PLANS, seed=19, target=MEGATRON_FSDP)


@pytest.fixture(scope="module")
def readings(plans: list[Plan]) -> list[Reading]:
    requests = [reader_request(plan, megatron_fsdp_flags(plan)) for plan in plans]
    return read_by_megatron_lm(requests, environment=environment())


def test_plans_are_of_every_family_and_use_every_value_of_the_target(plans: list[Plan]) -> None:
    strategies = [plan.best.strategy for plan in plans]
    assert {plan.model.name for plan in plans} == set(FAMILIES)
    for name in ("tp", "cp", "pp", "vpp", "ep", "dp"):
        assert max(getattr(one, name) for one in strategies) > 1, name
    shards = {
        (one.param_shard > 1, one.grad_shard > 1, one.grad_shard == one.optim_shard) for one in strategies
    }
    # optim; optim_grads; optim_grads_params; and that with states sharded further.
    assert shards == {
        (False, False, False), (False, True, True), (True, True, True), (True, True, False),
    }  # fmt: skip
    assert {one.dp * one.cp > one.optim_shard for one in strategies} == {True, False}
    target = target_of(MEGATRON_FSDP)
    for plan in plans:
        assert list(target.for_job(plan.model, plan.job).refusals(plan.best.strategy)) == []


def test_megatron_lm_reads_the_plan_back(plans: list[Plan], readings: list[Reading]) -> None:
    for plan, reading in zip(plans, readings, strict=True):
        assert read_back(plan, reading).differences == (), plan.best.strategy


NOT_READ_BACK = {
    "--vocab-size",  # `--padded-vocab-size` decides the sizes of the tables
    "--accumulate-allreduce-grads-in-fp32",  # bf16 turns it on
    "--moe-grouped-gemm",  # a kernel, which no field of a plan says
    "--use-distributed-optimizer",  # Megatron-FSDP turns it on
}
"""Flags whose change the comparison need not notice."""


def test_a_broken_flag_is_noticed(plans: list[Plan]) -> None:
    """One changed flag at a time, for every flag of a plan of each family."""
    few = plans[: len(FAMILIES)]
    cases = [(plan, name, flags) for plan in few for name, flags in mutants(megatron_fsdp_flags(plan))]
    requests = [reader_request(plan, flags) for plan, _, flags in cases]
    readings = read_by_megatron_lm(requests, environment=environment())
    unnoticed = {
        name
        for (plan, name, _), reading in zip(cases, readings, strict=True)
        if not read_back(plan, reading).differences
    }
    assert unnoticed <= NOT_READ_BACK
    assert sum(reading.error is None for reading in readings) > len(cases) // 2


TRAPS = {
    # Flags that Megatron-LM's parser accepts although they cannot run, and the plan that has them.
    "states sharded further than gradients alone": (
        {"--data-parallel-sharding-strategy": "optim_grads", "--outer-dp-sharding-strategy": "optim",
         "--num-distributed-optimizer-instances": "4"},
        "dp=8,grad_shard=2,optim_shard=8", "grad_shard",
    ),
    "instances that do not divide the ranks": (
        {"--num-distributed-optimizer-instances": "3"}, "dp=8,param_shard=8,grad_shard=8,optim_shard=8", None,
    ),
    "states sharded further in one instance": (
        {"--outer-dp-sharding-strategy": "optim"},
        "dp=8,param_shard=2,grad_shard=2,optim_shard=4", "optim_shard",
    ),
}  # fmt: skip


def test_wrong_flags_that_the_parser_accepts_are_refused_or_noticed() -> None:
    own = megatron_fsdp_flags(plan_of_text("llama-2-7b", "dp=8,zero_stage=3"))
    plans = {name: plan_of_text("llama-2-7b", text) for name, (_, text, _) in TRAPS.items()}
    requests = [
        reader_request(plans[name], (*(flag for flag in own if flag[0] not in changed), *changed.items()))
        for name, (changed, _, _) in TRAPS.items()
    ]
    readings = read_by_megatron_lm(requests, environment=environment())
    for (name, (_, _, field)), reading in zip(TRAPS.items(), readings, strict=True):
        assert reading.error is None, name
        if field is None:
            assert "strategy.optim_shard" in {
                each.field for each in read_back(plans[name], reading).differences
            }
            continue
        with pytest.raises(ConfigError) as refused:
            megatron_fsdp_flags(plans[name])
        assert refused.value.key == f"best.strategy.{field}", name


def test_the_command_reads_its_own_files_back() -> None:
    plan = plan_of_text("llama-3.1-8b", "tp=2,dp=4,param_shard=2,grad_shard=2,optim_shard=4")
    assert read_files_back(plan, megatron_fsdp_files(plan), environment=environment()).differences == ()
