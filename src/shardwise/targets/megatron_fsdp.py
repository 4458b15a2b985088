"""Export of a uniform plan to Megatron-LM 0.19 with Megatron-FSDP: the files of `megatron_lm`, with the flags
that shard parameters, gradients and optimizer states, and their comparison with what Megatron-LM read."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping

from shardwise.plans import Plan
from shardwise.strategy import Strategy
from shardwise.targets.megatron_lm import (
    ARGS,
    CONNECTIONS,
    Flag,
    files_of_flags,
    flags_with_states,
    overlaps,
    settings_with_states,
)
from shardwise.targets.megatron_lm_read_back import Reading, read_by_megatron_lm, reader_request
from shardwise.targets.megatron_lm_read_back import read_back as read_back_without_fsdp
from shardwise.targets.read_back import ReadBack, compared

TARGET = "megatron-fsdp-0.19"


def megatron_fsdp_flags(plan: Plan) -> tuple[Flag, ...]:
    """The flags of `plan`. Raises ConfigError, with the key of the plan file, for a field that has none."""
    return flags_with_states(plan, TARGET, _state_flags(plan))


def megatron_fsdp_files(plan: Plan) -> dict[str, str]:
    """The texts of the files, by name. Raises ConfigError, with the key of the plan file, for a value that
    cannot be exported."""
    setup = ("# Megatron-FSDP refuses the value 1.", f"unset {CONNECTIONS}", "")
    return files_of_flags(plan, TARGET, megatron_fsdp_flags(plan), setup)


def fsdp_settings(plan: Plan) -> dict[str, str]:
    """The flags of the plan's strategy with their values, also where it cannot be exported."""
    return settings_with_states(plan, TARGET, _state_flags(plan))


def sharding(strategy: Strategy) -> str:
    """The value of `--data-parallel-sharding-strategy`."""
    if strategy.param_shard > 1:
        return "optim_grads_params"
    return "optim_grads" if strategy.grad_shard > 1 else "optim"


def gradient_dtype(plan: Plan) -> str:
    """The dtype in which gradients are accumulated and reduced."""
    return "fp32" if plan.job.profile.reduce_in_fp32 else plan.job.dtype


def overlapped(plan: Plan) -> tuple[bool, bool]:
    """Whether gradients are reduced, and parameters gathered, during computation: always where they are
    sharded (Megatron-FSDP then turns it on), else as the prediction assumes."""
    strategy = plan.best.strategy
    reduces, gathers = overlaps(strategy, plan.job)
    return reduces or strategy.grad_shard > 1, gathers or strategy.param_shard > 1


def _state_flags(plan: Plan) -> Iterator[Flag]:
    strategy = plan.best.strategy
    shard = strategy.optim_shard if strategy.grad_shard == 1 else strategy.grad_shard
    instances = strategy.dp * strategy.cp // shard
    yield ("--use-megatron-fsdp",)
    yield ("--use-distributed-optimizer",)
    yield "--data-parallel-sharding-strategy", sharding(strategy)
    if instances > 1:
        yield "--num-distributed-optimizer-instances", str(instances)
    if strategy.optim_shard > shard:
        yield "--outer-dp-sharding-strategy", "optim"
    yield "--megatron-fsdp-main-grads-dtype", gradient_dtype(plan)
    yield "--megatron-fsdp-grad-comm-dtype", gradient_dtype(plan)
    yield "--ckpt-format", "fsdp_dtensor"
    reduces, gathers = overlapped(plan)
    if reduces:
        yield ("--overlap-grad-reduce",)
    if gathers:
        yield ("--overlap-param-gather",)


def read_files_back(
    plan: Plan, files: Mapping[str, str], *, environment: Mapping[str, str] | None = None
) -> ReadBack:
    """Compare `plan` with what Megatron-LM reads in its file of flags. Raises as `Reader.answers`."""
    words = tuple(shlex.split(files[ARGS], comments=True))
    (reading,) = read_by_megatron_lm([reader_request(plan, (words,))], environment=environment)
    return read_back(plan, reading)


def read_back(plan: Plan, reading: Reading) -> ReadBack:
    """Compare every exported value of `plan` with the value that Megatron-LM read."""
    found = read_back_without_fsdp(plan, reading, overlapped=overlapped(plan))
    if reading.error is not None:
        return found
    read = reading.arguments
    dtypes = {"torch.float32": "fp32", "torch.bfloat16": "bf16", None: "auto"}
    own = compared(
        {
            "Megatron-FSDP": True,
            "checkpoint format": "fsdp_dtensor",
            "dtype of accumulated gradients": gradient_dtype(plan),
            "dtype of reduced gradients": gradient_dtype(plan),
        },
        {
            "Megatron-FSDP": read["use_megatron_fsdp"],
            "checkpoint format": read["ckpt_format"],
            "dtype of accumulated gradients": dtypes.get(read["megatron_fsdp_main_grads_dtype"]),
            "dtype of reduced gradients": dtypes.get(read["megatron_fsdp_grad_comm_dtype"]),
        },
    )
    return ReadBack(values=found.values + own.values, differences=found.differences + own.differences)
