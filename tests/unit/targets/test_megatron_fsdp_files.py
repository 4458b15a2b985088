"""The export to Megatron-FSDP: its flags, the script, and the refused sharding degrees."""

from __future__ import annotations

import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.targets.random_plans import MEGATRON_FSDP, WITHIN, random_plans
from tests.unit.targets.small_plans import LLAMA, MIXTRAL, small_plan, with_fields

from shardwise.errors import ConfigError
from shardwise.plans import Plan
from shardwise.strategy import Target, target_of
from shardwise.targets.megatron_fsdp import megatron_fsdp_files, megatron_fsdp_flags

SHARDS = ("param_shard", "grad_shard", "optim_shard")


def state_flags(plan: Plan) -> list[str]:
    """The flags from the first of Megatron-FSDP on, as text."""
    flags = [" ".join(flag) for flag in megatron_fsdp_flags(plan)]
    return flags[flags.index("--use-megatron-fsdp") :]


def sharded(*shards: int, config: dict[str, Any] = LLAMA) -> Plan:
    degrees = ",".join(f"{name}={degree}" for name, degree in zip(SHARDS, shards, strict=True))
    return small_plan(config, f"tp=1,dp=8,{degrees}")


@pytest.mark.parametrize(
    ("shards", "own"),
    [
        ((1, 1, 8), ["optim"]),
        ((1, 1, 4), ["optim", "--num-distributed-optimizer-instances 2"]),
        ((1, 8, 8), ["optim_grads"]),
        ((8, 8, 8), ["optim_grads_params"]),
        ((2, 2, 2), ["optim_grads_params", "--num-distributed-optimizer-instances 4"]),
        (
            (2, 2, 8),
            [
                "optim_grads_params",
                "--num-distributed-optimizer-instances 4",
                "--outer-dp-sharding-strategy optim",
            ],
        ),
    ],
)
def test_sharding_degrees_are_the_strategy_and_the_instances(shards: tuple[int, ...], own: list[str]) -> None:
    """Instances are 8 ranks over the degree of the strategy."""
    strategy, *others = own
    assert state_flags(sharded(*shards)) == [
        "--use-megatron-fsdp",
        "--use-distributed-optimizer",
        f"--data-parallel-sharding-strategy {strategy}",
        *others,
        "--megatron-fsdp-main-grads-dtype fp32",
        "--megatron-fsdp-grad-comm-dtype fp32",
        "--ckpt-format fsdp_dtensor",
        "--overlap-grad-reduce",
        "--overlap-param-gather",
    ]


def test_the_profile_decides_the_dtype_of_gradients_and_the_overlap_that_is_free() -> None:
    def unoverlapped(plan: Plan) -> list[str]:
        profile = replace(plan.job.profile.without_overlap(), reduce_in_fp32=False)
        return state_flags(replace(plan, job=replace(plan.job, profile=profile)))

    flags = unoverlapped(sharded(1, 1, 8))
    assert "--megatron-fsdp-main-grads-dtype bf16" in flags and "--overlap-grad-reduce" not in flags
    # Megatron-FSDP itself turns them on where gradients, or parameters, are sharded.
    flags = unoverlapped(sharded(1, 8, 8))
    assert "--overlap-grad-reduce" in flags and "--overlap-param-gather" not in flags
    assert "--overlap-param-gather" in unoverlapped(sharded(8, 8, 8))


@pytest.mark.parametrize(
    ("shards", "field"),
    [
        ((1, 1, 1), "optim_shard"),
        ((1, 2, 4), "grad_shard"),
        ((1, 4, 8), "grad_shard"),
        ((2, 4, 4), "param_shard"),
        ((2, 2, 4), "optim_shard"),
        ((2, 4, 8), "param_shard"),
    ],
)
def test_other_sharding_degrees_are_refused(shards: tuple[int, ...], field: str) -> None:
    with pytest.raises(ConfigError) as refused:
        megatron_fsdp_flags(sharded(*shards))
    assert refused.value.key == f"best.strategy.{field}"
    assert "Megatron-FSDP" in str(refused.value)


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"offload": "optimizer"}, "best.strategy.offload"),
        ({"axis_order": "tp-cp-pp-dp"}, "best.strategy.axis_order"),
        ({"recompute": "selective"}, "best.strategy.recompute"),
    ],
)
def test_fields_without_a_flag_are_refused(changes: dict[str, str], key: str) -> None:
    with pytest.raises(ConfigError) as refused:
        megatron_fsdp_flags(with_fields(sharded(8, 8, 8), **changes))
    assert refused.value.key == key


def test_experts_are_sharded_over_all_ranks() -> None:
    assert megatron_fsdp_flags(small_plan(MIXTRAL, "dp=8,ep=4,zero_stage=3"))
    with pytest.raises(ConfigError) as refused:
        megatron_fsdp_flags(small_plan(MIXTRAL, "dp=8,ep=2,param_shard=4,grad_shard=4,optim_shard=4"))
    assert refused.value.key == "best.strategy.grad_shard"


def test_the_script_unsets_the_variable_that_is_refused(tmp_path: Path) -> None:
    text = megatron_fsdp_files(sharded(8, 8, 8))["megatron-lm.sh"]
    assert "target megatron-fsdp-0.19 (Megatron-LM 0.19 with Megatron-FSDP)" in text
    script = tmp_path / "megatron-lm.sh"
    script.write_text(text)
    program = '. "$1"; echo "${CUDA_DEVICE_MAX_CONNECTIONS-unset} ${megatron_lm_args[*]}"'
    done = subprocess.run(
        ["bash", "-c", program, "bash", str(script)], capture_output=True, text=True, check=True,
        env={"CUDA_DEVICE_MAX_CONNECTIONS": "1"},
    )  # fmt: skip
    assert done.stdout.startswith("unset ") and "--use-megatron-fsdp" in done.stdout


def _is_exported(plan: Plan) -> bool:
    try:
        return bool(megatron_fsdp_flags(plan))
    except ConfigError:
        return False


def _disagreements(target: Target, plans: list[Plan]) -> list[object]:
    is_within = WITHIN[MEGATRON_FSDP]
    return [
        plan.best.strategy
        for plan in plans
        if any(target.for_job(plan.model, plan.job).refusals(plan.best.strategy))
        == is_within(plan.best.strategy, plan.model, plan.job)
    ]


@pytest.mark.slow
def test_exactly_the_strategies_of_the_search_are_exported() -> None:
    plans = random_plans(120, seed=7, is_free=True, target=MEGATRON_FSDP)
    target = target_of(MEGATRON_FSDP)
    assert _disagreements(target, plans) == []
    for plan in plans:
        is_within = WITHIN[MEGATRON_FSDP](plan.best.strategy, plan.model, plan.job)
        assert _is_exported(plan) == is_within, plan.best.strategy


ALONE = [
    (LLAMA, (1, 1, 1)), (LLAMA, (2, 4, 4)), (LLAMA, (1, 4, 8)), (LLAMA, (2, 2, 4)), (MIXTRAL, (2, 2, 8)),
    (MIXTRAL, (1, 1, 4)),
]  # fmt: skip
"""Sharding degrees over 8 ranks that one limit alone excludes."""


def test_each_limit_of_sharding_degrees_is_needed() -> None:
    target = target_of(MEGATRON_FSDP)
    own = [limit for limit in target.limits if limit not in target_of("megatron-lm-0.19").limits]
    excluding = []
    for config, shards in ALONE:
        plan = sharded(*shards, config=config)
        limits = target.for_job(plan.model, plan.job).limits
        (only,) = (limit for limit in limits if limit.excludes(plan.best.strategy))
        excluding.append(only)
    assert {limit.allowed for limit in excluding} == {limit.allowed for limit in own}
