"""The export to Transformers: the files, the refused fields, and the comparison with a reading."""

from __future__ import annotations

import ast
import copy
import json
from dataclasses import replace
from typing import Any

import pytest
from tests.unit.targets.small_plans import GPT2, LLAMA, MIXTRAL, PLAIN, small_plan, with_fields

from shardwise.errors import ConfigError
from shardwise.model import parameters
from shardwise.plans import Plan, plan_hash
from shardwise.targets import WRITTEN_BY
from shardwise.targets.transformers import ARGUMENTS, CONFIG, read_back, transformers_files


def values_of(text: str) -> dict[str, Any]:
    """The values that the module assigns, those of `DistributedConfig` by its arguments."""
    found: dict[str, Any] = {}
    for line in ast.parse(text).body:
        if isinstance(line, ast.Assign) and isinstance(line.targets[0], ast.Name):
            value = line.value
            found[line.targets[0].id] = (
                {each.arg: ast.literal_eval(each.value) for each in value.keywords}
                if isinstance(value, ast.Call)
                else ast.literal_eval(value)
            )
    return found


def test_the_values_of_a_plan() -> None:
    """16 devices: tp 2 x dp 8, of which 2 replicas of 4 shards; 32 sequences: 2 micro-batches of 2 on 8."""
    plan = small_plan(
        LLAMA,
        "tp=2,dp=8,param_shard=4,grad_shard=4,optim_shard=4,sequence_parallel=false,micro_batch_size=2,"
        "recompute=full,recompute_layers=10",
        cluster="2x8xH100-SXM",
    )
    files = transformers_files(plan)
    values = values_of(files[CONFIG])
    model = values.pop("model_config")
    assert model == {**model, **LLAMA}
    assert values == {
        "distributed_config": {
            "tp_size": 2, "fsdp_size": 4, "dp_replicate_size": 2, "fsdp_mixed_precision": True,
        },
        "attn_implementation": "sdpa",
        "sequence_length": 1024,
    }  # fmt: skip
    arguments = json.loads(files[ARGUMENTS])
    assert arguments.pop("run_name").startswith(f"{WRITTEN_BY}, plan {plan_hash(plan)}; predicted step time ")
    assert arguments == {
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "accelerator_config": {"gradient_accumulation_kwargs": {"sync_each_batch": True}},
        "bf16": True,
        "optim": "adamw_torch",
        "activation_checkpointing": True,
    }
    assert files[CONFIG].startswith(f"# {WRITTEN_BY} for the target transformers-5")
    assert f"# Plan: {plan_hash(plan)}" in files[CONFIG]
    assert (
        'torchrun --nnodes 2 --nproc-per-node 8 --master-port 29500 --node-rank "$NODE_RANK"' in files[CONFIG]
    )


def test_experts_and_one_micro_batch() -> None:
    files = transformers_files(small_plan(MIXTRAL, "dp=8,ep=4,zero_stage=3,micro_batch_size=4", dtype="fp32"))
    sizes = values_of(files[CONFIG])["distributed_config"]
    assert sizes == {
        "tp_size": 1, "fsdp_size": 8, "dp_replicate_size": 1, "ep_size": 4, "ep_implementation": "all_to_all",
        "fsdp_mixed_precision": False,
    }  # fmt: skip
    assert "accelerator_config" not in files[ARGUMENTS] and '"bf16": false' in files[ARGUMENTS]


EXPERTS_4 = MIXTRAL | {"num_local_experts": 4}

REFUSED: dict[str, dict[str, Any]] = {
    "best.strategy.cp": {"cp": 2, "dp": 4},
    "best.strategy.pp": {"pp": 2, "dp": 4},
    "best.strategy.sequence_parallel": {"sequence_parallel": True},
    "best.strategy.recompute": {"recompute": "selective"},
    "best.strategy.recompute_layers": {"recompute": "full", "recompute_layers": 9},
    "best.strategy.offload": {"offload": "optimizer"},
    "best.strategy.param_shard": {"param_shard": 4},
    "best.strategy.micro_batch_size": {"micro_batch_size": 3},
    "cluster": {"dp": 4, "param_shard": 4, "grad_shard": 4, "optim_shard": 4},
}
"""Changes of a legal plan of 8 data-parallel ranks, by the key that the error has."""


@pytest.mark.parametrize("key", REFUSED)
def test_a_field_that_the_files_cannot_have_is_refused_by_its_name(key: str) -> None:
    plan = small_plan(LLAMA, "tp=1,dp=8,zero_stage=3")
    with pytest.raises(ConfigError) as refused:
        transformers_files(with_fields(plan, **REFUSED[key]))
    assert refused.value.key == key


@pytest.mark.parametrize(
    ("config", "strategy", "key"),
    [
        (GPT2, "dp=8,zero_stage=3", "model.config.model_type"),  # its FSDP plan names no module of GPT-2
        (PLAIN, "dp=8,zero_stage=3", "model.config.model_type"),
        (LLAMA, "tp=8,dp=1,sequence_parallel=false", "best.strategy.tp"),  # 4 key-value heads
        (MIXTRAL, "tp=2,dp=4,ep=1,etp=1,zero_stage=3,sequence_parallel=false", "best.strategy.etp"),
        (EXPERTS_4, "dp=8,ep=1,etp=1,zero_stage=3", "best.strategy.dp"),  # 4 experts are not 8 shards
        (EXPERTS_4, "dp=8,ep=2,etp=1,zero_stage=3", "best.strategy.dp"),  # nor 2 x 4
        (MIXTRAL, "dp=8,ep=2,param_shard=4,grad_shard=4,optim_shard=4", "best.strategy.optim_shard"),
    ],
    ids=["gpt2", "plain", "key-value heads", "etp", "experts", "experts of ep", "HSDP of experts"],
)
def test_a_plan_that_the_software_cannot_run_is_refused(
    config: dict[str, Any], strategy: str, key: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        transformers_files(small_plan(config, strategy))
    assert refused.value.key == key


def test_gradients_that_are_reduced_in_16_bits_are_refused() -> None:
    plan = small_plan(LLAMA, "tp=1,dp=8,zero_stage=3")
    job = replace(plan.job, profile=replace(plan.job.profile, reduce_in_fp32=False))
    with pytest.raises(ConfigError) as refused:
        transformers_files(replace(plan, job=job))
    assert refused.value.key == "job.profile.reduce_in_fp32"


def experts_plan() -> Plan:
    return small_plan(MIXTRAL, "dp=8,ep=4,zero_stage=3,recompute=full,recompute_layers=8")


def answer() -> dict[str, Any]:
    """What Transformers 5.23.0 reads in the files of `experts_plan()`: 8 layers, all with experts."""
    return {
        "sizes": {
            "tp_size": 1, "fsdp_size": 8, "dp_replicate_size": 1, "pp_size": 1, "ep_size": 4,
            "ep_implementation": "all_to_all", "fsdp_cpu_offload": False, "fsdp_mixed_precision": True,
        },
        "arguments": {
            "per_device_train_batch_size": 1, "gradient_accumulation_steps": 4, "bf16": True, "fp16": False,
            "optim": "ADAMW_TORCH", "activation_checkpointing": True,
        },
        "sequence_length": 1024,
        "attention": "sdpa",
        "supports_attention": True,
        "parameters": parameters(experts_plan().model),
        "sharded_layers": 8,
        "tensor_parallel_layers": 0,
        "expert_parallel_layers": 8,
        "synchronizes_each_micro_batch": True,
    }  # fmt: skip


def test_an_equal_reading_has_no_difference() -> None:
    found = read_back(experts_plan(), answer())
    assert found.differences == () and found.values == 23


@pytest.mark.parametrize(
    ("section", "changed", "field"),
    [
        ("sizes", {"tp_size": 2}, "strategy.tp"),
        ("sizes", {"pp_size": 2}, "strategy.pp"),
        ("sizes", {"pp_size": 2}, "devices"),
        ("sizes", {"ep_size": 2}, "strategy.ep"),
        ("sizes", {"fsdp_size": 4}, "strategy.param_shard"),
        ("sizes", {"dp_replicate_size": 2}, "strategy.dp"),
        ("sizes", {"dp_replicate_size": 2}, "job.global_batch_size"),
        ("sizes", {"ep_implementation": "auto"}, "exchange of tokens"),
        ("sizes", {"fsdp_cpu_offload": True}, "strategy.offload"),
        ("sizes", {"fsdp_mixed_precision": False}, "dtype of gathered parameters"),
        ("arguments", {"per_device_train_batch_size": 2}, "strategy.micro_batch_size"),
        ("arguments", {"gradient_accumulation_steps": 8}, "job.global_batch_size"),
        ("arguments", {"bf16": False}, "job.dtype"),
        ("arguments", {"optim": "ADAFACTOR"}, "job.optimizer"),
        ("arguments", {"activation_checkpointing": False}, "strategy.recompute"),
        ("arguments", {"activation_checkpointing": False}, "strategy.recompute_layers"),
        (None, {"sequence_length": 2048}, "job.seq_len"),
        (None, {"parameters": 1}, "parameters"),
        (None, {"attention": "eager"}, "attention"),
        (None, {"supports_attention": False}, "the model has this attention"),
        (None, {"sharded_layers": 0}, "sharded layers"),
        (None, {"tensor_parallel_layers": 8}, "tensor-parallel layers"),
        (None, {"expert_parallel_layers": 0}, "expert-parallel layers"),
        (None, {"synchronizes_each_micro_batch": False}, "gradients stay sharded"),
        (None, {"error": "ValueError: no"}, "files"),
    ],
)
def test_a_wrong_reading_is_found(section: str | None, changed: dict[str, Any], field: str) -> None:
    wrong = copy.deepcopy(answer())
    (wrong if section is None else wrong[section]).update(changed)
    found = read_back(experts_plan(), wrong)
    assert field in {each.field for each in found.differences}
