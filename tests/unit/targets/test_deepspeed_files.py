"""The export to DeepSpeed: the file, the refused fields, and the comparison with a reading."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from typing import Any

import pytest
from tests.unit.targets.small_plans import LLAMA, MIXTRAL, PLAIN, small_plan, with_fields

from shardwise.errors import ConfigError
from shardwise.plans import Plan, plan_hash
from shardwise.targets import WRITTEN_BY
from shardwise.targets.deepspeed import FILE, deepspeed_files, read_back
from shardwise.targets.hugging_face import NOTES


def settings(plan: Plan) -> Any:
    found = json.loads(deepspeed_files(plan)[FILE])
    del found[NOTES]
    return found


def test_the_values_of_a_plan() -> None:
    """32 sequences on 8 ranks with micro-batches of 2: 2 micro-batches."""
    plan = small_plan(LLAMA, "tp=1,dp=8,micro_batch_size=2,zero_stage=2,offload=optimizer")
    assert settings(plan) == {
        "train_batch_size": 32,
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "bf16": {"enabled": True},
        "fp16": {"enabled": False},
        "data_types": {"grad_accum_dtype": "fp32"},
        "communication_data_type": "fp32",
        "zero_optimization": {
            "stage": 2,
            "overlap_comm": True,
            "offload_optimizer": {"device": "cpu", "pin_memory": True},
        },
        "optimizer": {"type": "AdamW"},
        "zero_allow_untested_optimizer": False,
    }


@pytest.mark.parametrize(
    ("strategy", "stage"),
    [("dp=8,zero_stage=1", 1), ("dp=8,zero_stage=2", 2), ("dp=8,zero_stage=3", 3)],
)
def test_sharded_states_are_the_stage(strategy: str, stage: int) -> None:
    assert settings(small_plan(LLAMA, f"tp=1,{strategy}"))["zero_optimization"]["stage"] == stage


def test_one_device_has_stage_1() -> None:
    assert settings(small_plan(LLAMA, "", cluster="1xH100-SXM"))["zero_optimization"]["stage"] == 1


def test_the_profile_decides_the_dtype_of_gradients_and_the_overlap() -> None:
    plan = small_plan(LLAMA, "tp=1,dp=8,zero_stage=3", dtype="fp16", optimizer="sgd")
    profile = replace(plan.job.profile.without_overlap(), reduce_in_fp32=False)
    found = settings(replace(plan, job=replace(plan.job, profile=profile)))
    assert found["communication_data_type"] == found["data_types"]["grad_accum_dtype"] == "fp16"
    assert found["zero_optimization"] == {"stage": 3, "overlap_comm": False}
    assert found["fp16"] == {"enabled": True} and found["bf16"] == {"enabled": False}
    assert found["optimizer"] == {"type": "SGD"} and found["zero_allow_untested_optimizer"] is True


def test_the_rest_of_the_plan_is_a_text() -> None:
    plan = small_plan(LLAMA, "tp=1,dp=8,zero_stage=3,recompute=full,recompute_layers=10")
    text = deepspeed_files(plan)[FILE]
    lines = json.loads(text)[NOTES]
    assert text.index(WRITTEN_BY) < 100 and lines[0].startswith(WRITTEN_BY)
    assert f"Plan: {plan_hash(plan)}" in lines
    assert "- sequence length: 1024 tokens" in lines
    assert any("gradient_checkpointing_enable" in line for line in lines)
    program = "-- train.py --deepspeed --deepspeed_config ./deepspeed.json"
    assert lines[-1] == f"torchrun --standalone --nproc-per-node 8 {program}"
    two = deepspeed_files(small_plan(LLAMA, "tp=1,dp=16,zero_stage=3", cluster="2x8xH100-SXM"))[FILE]
    assert json.loads(two)[NOTES][-1] == (
        'torchrun --nnodes 2 --nproc-per-node 8 --master-port 29500 --node-rank "$NODE_RANK"'
        f' --master-addr "$MASTER_ADDR" {program}'
    )
    assert "gradient_checkpointing_enable" not in two


REFUSED: dict[str, dict[str, Any]] = {
    "best.strategy.tp": {"tp": 2, "dp": 4},
    "best.strategy.cp": {"cp": 2, "dp": 4},
    "best.strategy.pp": {"pp": 2, "dp": 4},
    "best.strategy.recompute": {"recompute": "selective"},
    "best.strategy.recompute_layers": {"recompute": "full", "recompute_layers": 9},
    "best.strategy.offload": {"offload": "activations"},
    "best.strategy.optim_shard": {"param_shard": 1, "grad_shard": 1, "optim_shard": 4},
    "best.strategy.grad_shard": {"param_shard": 1, "grad_shard": 4},
    "best.strategy.param_shard": {"param_shard": 4},
    "best.strategy.micro_batch_size": {"micro_batch_size": 3},
    "cluster": {"dp": 4, "param_shard": 4, "grad_shard": 4, "optim_shard": 4},
}
"""Changes of a legal plan of 8 data-parallel ranks, by the key that the error has."""


@pytest.mark.parametrize("key", REFUSED)
def test_a_field_that_the_file_cannot_have_is_refused_by_its_name(key: str) -> None:
    plan = small_plan(LLAMA, "tp=1,dp=8,zero_stage=3")
    with pytest.raises(ConfigError) as refused:
        deepspeed_files(with_fields(plan, **REFUSED[key]))
    assert refused.value.key == key


@pytest.mark.parametrize(
    ("plan", "key"),
    [
        (lambda: small_plan(MIXTRAL, "dp=8,ep=4,zero_stage=3"), "best.strategy.ep"),
        (lambda: small_plan(PLAIN, "dp=8,zero_stage=3"), "model.config.model_type"),
        (
            lambda: small_plan(LLAMA, "tp=1,dp=8,zero_stage=1,offload=optimizer", optimizer="sgd"),
            "best.strategy.offload",
        ),
        (lambda: small_plan(LLAMA, "dp=8,zero_stage=1", optimizer="muon"), "job.optimizer"),
    ],
)
def test_a_plan_that_the_software_cannot_run_is_refused(plan: Any, key: str) -> None:
    with pytest.raises(ConfigError) as refused:
        deepspeed_files(plan())
    assert refused.value.key == key


ANSWER: dict[str, Any] = {
    "config": {
        "world_size": 8, "train_batch_size": 32, "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 4, "optimizer_name": "adamw", "grad_accum_dtype": "fp32",
        "communication_data_type": "torch.float32", "zero_allow_untested_optimizer": False,
    },
    "zero": {
        "stage": 3, "overlap_comm": True, "offload_optimizer": {"device": "cpu"}, "offload_param": None,
        "zero_hpz_partition_size": 1,
    },
    "bf16": True,
    "fp16": False,
    "tensor_parallel": 0,
    "ignored": ["shardwise"],
}  # fmt: skip
"""What DeepSpeed 0.19.8 reads in the file of `offloaded()`."""


def offloaded() -> Plan:
    return small_plan(LLAMA, "tp=1,dp=8,zero_stage=3,offload=optimizer")


def test_an_equal_reading_has_no_difference() -> None:
    found = read_back(offloaded(), ANSWER)
    assert found.differences == () and found.values == 17


@pytest.mark.parametrize(
    ("section", "changed", "field"),
    [
        ("config", {"world_size": 1}, "strategy.dp"),
        ("config", {"train_batch_size": 64}, "job.global_batch_size"),
        ("config", {"train_micro_batch_size_per_gpu": 2}, "strategy.micro_batch_size"),
        ("config", {"gradient_accumulation_steps": 2}, "micro-batches"),
        ("config", {"optimizer_name": "SGD"}, "job.optimizer"),
        ("config", {"optimizer_name": None}, "job.optimizer"),
        ("config", {"grad_accum_dtype": None}, "dtype of accumulated gradients"),
        ("config", {"communication_data_type": None}, "dtype of reduced gradients"),
        ("config", {"zero_allow_untested_optimizer": True}, "untested optimizers"),
        ("zero", {"stage": 2}, "strategy.param_shard"),
        ("zero", {"stage": 1}, "strategy.grad_shard"),
        ("zero", {"stage": 0}, "strategy.optim_shard"),
        ("zero", {"zero_hpz_partition_size": 4}, "strategy.param_shard"),
        ("zero", {"overlap_comm": False}, "communication during computation"),
        ("zero", {"offload_optimizer": None}, "strategy.offload"),
        ("zero", {"offload_optimizer": {"device": "nvme"}}, "strategy.offload"),
        ("zero", {"offload_param": {"device": "cpu"}}, "strategy.offload"),
        (None, {"bf16": False}, "job.dtype"),
        (None, {"bf16": False, "fp16": True}, "job.dtype"),
        (None, {"tensor_parallel": 2}, "strategy.tp"),
        (None, {"ignored": ["shardwise", "zero_optimisation"]}, "keys that DeepSpeed ignores"),
        (None, {"error": "AssertionError: no"}, "files"),
    ],
)
def test_a_wrong_reading_is_found(section: str | None, changed: dict[str, Any], field: str) -> None:
    answer = copy.deepcopy(ANSWER)
    (answer if section is None else answer[section]).update(changed)
    found = read_back(offloaded(), answer)
    assert field in {each.field for each in found.differences}


def test_sizes_of_buckets_are_those_of_the_predicted_memory() -> None:
    plan = small_plan(LLAMA, "tp=1,dp=8,zero_stage=3")
    sizes = {"reduce_bucket_size": 500, "stage3_max_live_parameters": 2000, "sub_group_size": 1000}
    profile = replace(
        plan.job.profile, bucket_elements=500.0, gathered_elements=2000.0, update_elements=1000.0
    )
    changed = replace(plan, job=replace(plan.job, profile=profile))
    zero = settings(changed)["zero_optimization"]
    assert {name: zero[name] for name in sizes} == sizes
    assert not sizes.keys() & settings(plan)["zero_optimization"].keys()
