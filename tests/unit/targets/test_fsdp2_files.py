"""The export to FSDP2 by Accelerate: the file, the refused fields, and the comparison with a reading."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import yaml
from tests.unit.targets.small_plans import GPT2, LLAMA, MIXTRAL, PLAIN, small_plan, with_fields

from shardwise.cluster import load_cluster
from shardwise.errors import ConfigError
from shardwise.model import load_model
from shardwise.plans import Plan, plan_hash
from shardwise.targets import WRITTEN_BY
from shardwise.targets.fsdp2 import FILE, fsdp2_files, read_back

EXPERTS_4 = MIXTRAL | {"num_local_experts": 4}

HYBRID = "dp=8,param_shard=4,grad_shard=4,optim_shard=4,recompute=full,recompute_layers=10"


def settings(plan: Plan) -> Any:
    return yaml.safe_load(fsdp2_files(plan)[FILE])


def test_the_values_of_a_plan() -> None:
    """16 devices: tp 2 x dp 8, of which 2 replicas of 4 shards."""
    found = settings(small_plan(LLAMA, f"tp=2,sequence_parallel=false,{HYBRID}", cluster="2x8xH100-SXM"))
    assert found == {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "FSDP",
        "mixed_precision": "bf16",
        "num_machines": 2,
        "num_processes": 16,
        "fsdp_config": {
            "fsdp_version": 2,
            "fsdp_reshard_after_forward": True,
            "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "fsdp_transformer_layer_cls_to_wrap": "LlamaDecoderLayer",
            "fsdp_activation_checkpointing": True,
            "fsdp_offload_params": False,
        },
        "parallelism_config": {
            "parallelism_config_dp_replicate_size": 2,
            "parallelism_config_dp_shard_size": 4,
            "parallelism_config_tp_size": 2,
            "parallelism_config_cp_size": 1,
        },
    }
    assert settings(small_plan(GPT2, "zero_stage=3", dtype="fp32"))["mixed_precision"] == "no"


def test_the_rest_of_the_plan_is_a_comment() -> None:
    """32 sequences, 8 ranks with micro-batches of 2: 2 micro-batches."""
    plan = small_plan(LLAMA, "tp=1,dp=8,micro_batch_size=2,zero_stage=3")
    text = fsdp2_files(plan)[FILE]
    comments = [line for line in text.splitlines() if line.startswith("#")]
    assert comments[0].startswith(f"# {WRITTEN_BY} for the target fsdp2")
    assert f"# Plan: {plan_hash(plan)}" in comments
    assert "# - micro-batch: 2 sequences on each of 8 data-parallel ranks" in comments
    assert "# - gradient accumulation: 2 micro-batches (32 sequences)" in comments
    assert "# - optimizer: torch.optim.AdamW" in comments
    assert "# - sequence length: 1024 tokens" in comments
    assert "sync_each_batch=True" in text and "reduce_dtype=torch.float32" in text
    assert "--machine_rank" not in text and "tp_plan" not in text
    one = fsdp2_files(small_plan(LLAMA, "tp=1,dp=8,micro_batch_size=4,zero_stage=3", dtype="fp32"))[FILE]
    assert "sync_each_batch" not in one and "reduce_dtype" not in one
    several = small_plan(
        LLAMA, "tp=2,dp=8,zero_stage=3,sequence_parallel=false", cluster="2x8xH100-SXM", optimizer="sgd"
    )
    text = fsdp2_files(several)[FILE]
    assert "--machine_rank" in text and 'tp_plan="auto"' in text and "torch.optim.SGD" in text


@pytest.mark.parametrize(
    ("model", "cluster", "kernel"),
    [
        ("gemma-2-9b", "1x8xH100-SXM", "flash_attention_2"),  # soft caps
        ("gpt-oss-20b", "1x8xH100-SXM", "kernels-community/vllm-flash-attn3"),  # sinks
        ("gpt2", "1x8xH100-SXM", "sdpa"),
        ("gpt2", "1x8xV100-32G", "eager"),  # the profile has no fused kernel for it
    ],
)
def test_attention_is_fused_where_the_prediction_assumes_it(model: str, cluster: str, kernel: str) -> None:
    plan = small_plan(
        dict(load_model(model).config), "tp=1,ep=1,zero_stage=3,recompute=full", cluster=cluster, dtype="fp32"
    )
    assert f'attn_implementation="{kernel}"' in fsdp2_files(plan)[FILE]


REFUSED: dict[str, dict[str, Any]] = {
    "best.strategy.cp_kind": {"cp": 2, "dp": 4, "cp_kind": "all_to_all"},
    "best.strategy.pp": {"pp": 2, "dp": 4},
    "best.strategy.sequence_parallel": {"sequence_parallel": True},
    "best.strategy.recompute": {"recompute": "selective"},
    "best.strategy.recompute_layers": {"recompute": "full", "recompute_layers": 9},
    "best.strategy.offload": {"offload": "optimizer"},
    "best.strategy.param_shard": {"param_shard": 1},
    "best.strategy.micro_batch_size": {"micro_batch_size": 3},
    "best.strategy.ep": {"etp": 2},
    "best.strategy.optim_shard": {"cp": 8, "dp": 1, "param_shard": 4, "grad_shard": 4, "optim_shard": 4},
    "cluster": {"dp": 4, "param_shard": 4, "grad_shard": 4, "optim_shard": 4},
}
"""Changes of a legal plan of 8 data-parallel ranks, by the key that the error has."""


@pytest.mark.parametrize("key", REFUSED)
def test_a_field_that_the_file_cannot_have_is_refused_by_its_name(key: str) -> None:
    plan = small_plan(LLAMA, "tp=1,dp=8,zero_stage=3")
    with pytest.raises(ConfigError) as refused:
        fsdp2_files(with_fields(plan, **REFUSED[key]))
    assert refused.value.key == key


@pytest.mark.parametrize(
    ("config", "strategy", "key"),
    [
        (
            GPT2,
            "tp=2,dp=4,zero_stage=3,sequence_parallel=false",
            "best.strategy.tp",
        ),  # no plan in Transformers
        (LLAMA, "tp=8,dp=1,sequence_parallel=false", "best.strategy.tp"),  # 4 key-value heads
        (GPT2, "cp=2,dp=4,zero_stage=3", "best.strategy.cp"),
        # Four replicas, whose states only the two context-parallel ranks of each would shard.
        (LLAMA, "cp=2,dp=4,param_shard=2,grad_shard=2,optim_shard=2", "best.strategy.optim_shard"),
        (LLAMA, "tp=4,dp=2,zero_stage=1,sequence_parallel=false", "best.strategy.param_shard"),
        (MIXTRAL, "dp=8,ep=4,zero_stage=3", "best.strategy.ep"),
        (MIXTRAL, "tp=2,dp=4,ep=1,etp=1,zero_stage=3,sequence_parallel=false", "best.strategy.etp"),
        (EXPERTS_4, "dp=8,zero_stage=3", "best.strategy.param_shard"),  # 4 experts are not 8 shards
        (PLAIN, "dp=8,zero_stage=3", "model.config.model_type"),
    ],
    ids=["no plan", "key-value heads", "cp of gpt2", "replicas", "ZeRO-1", "ep", "etp", "experts", "family"],
)
def test_a_plan_that_the_software_cannot_run_is_refused(
    config: dict[str, Any], strategy: str, key: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        fsdp2_files(small_plan(config, strategy))
    assert refused.value.key == key


def test_context_parallel_ranks_shard_too() -> None:
    """2 replicas of 2 x 2 ranks: states over 4 ranks are 2 of data parallelism times 2 of the sequence."""
    plan = small_plan(LLAMA, "tp=1,cp=2,dp=4,param_shard=4,grad_shard=4,optim_shard=4")
    text = fsdp2_files(plan)[FILE]
    assert yaml.safe_load(text)["parallelism_config"] == {
        "parallelism_config_dp_replicate_size": 2,
        "parallelism_config_dp_shard_size": 2,
        "parallelism_config_tp_size": 1,
        "parallelism_config_cp_size": 2,
        "parallelism_config_cp_comm_strategy": "alltoall",
    }
    assert "accelerator.maybe_context_parallel(" in text


def test_a_name_with_line_breaks_adds_no_keys() -> None:
    plan = small_plan(LLAMA, "tp=1,dp=8,zero_stage=3")
    text = fsdp2_files(replace(plan, network=replace(plan.model, name="a\nnum_processes: 7\n#")))[FILE]
    assert yaml.safe_load(text)["num_processes"] == 8


def test_nodes_of_unlike_sizes_are_refused() -> None:
    plan = small_plan(LLAMA, "dp=8,zero_stage=3")
    uneven = replace(plan, cluster=load_cluster("1x6xH100-SXM+1x2xH100-SXM"))
    with pytest.raises(ConfigError, match="nodes of 6, 2 devices") as refused:
        fsdp2_files(uneven)
    assert refused.value.key == "cluster"


ANSWER: dict[str, Any] = {
    "arguments": {"mixed_precision": "bf16", "num_processes": 8, "num_machines": 1, "use_fsdp": True},
    "sizes": {
        "dp_replicate_size": 2, "dp_shard_size": 4, "tp_size": 1, "cp_size": 1, "sp_size": 1, "total_size": 8,
    },
    "fsdp": {
        "fsdp_version": 2, "reshard_after_forward": True, "activation_checkpointing": True,
        "activation_checkpointing_offload": False, "transformer_cls_names_to_wrap": ["LlamaDecoderLayer"],
    },
    "offloads": False,
    "ring": None,
    "ignored": [],
}  # fmt: skip
"""What Accelerate 1.15.0 reads in the file of `small_plan(LLAMA, HYBRID)`."""


def test_an_equal_reading_has_no_difference() -> None:
    found = read_back(small_plan(LLAMA, HYBRID), ANSWER)
    assert found.differences == () and found.values == 18


@pytest.mark.parametrize(
    ("section", "changed", "field"),
    [
        ("arguments", {"mixed_precision": "fp16"}, "job.dtype"),
        ("arguments", {"num_processes": 16}, "devices"),
        ("arguments", {"num_machines": 2}, "nodes"),
        ("arguments", {"use_fsdp": False}, "FSDP version"),
        ("sizes", {"tp_size": 2}, "strategy.tp"),
        ("sizes", {"cp_size": 2}, "strategy.cp"),
        ("sizes", {"total_size": 4}, "strategy.pp"),
        ("sizes", {"dp_replicate_size": 1}, "strategy.dp"),
        ("sizes", {"dp_shard_size": 2}, "strategy.param_shard"),
        ("sizes", {"dp_shard_size": 2}, "strategy.grad_shard"),
        ("sizes", {"dp_shard_size": 2}, "strategy.optim_shard"),
        ("sizes", {"sp_size": 2}, "Ulysses ranks"),
        ("fsdp", {"fsdp_version": 1}, "FSDP version"),
        ("fsdp", {"reshard_after_forward": False}, "strategy.param_shard"),
        ("fsdp", {"activation_checkpointing": False}, "strategy.recompute"),
        ("fsdp", {"activation_checkpointing": False}, "strategy.recompute_layers"),
        ("fsdp", {"activation_checkpointing_offload": True}, "strategy.offload"),
        ("fsdp", {"transformer_cls_names_to_wrap": None}, "layer class"),
        (None, {"offloads": True}, "strategy.offload"),
        (None, {"ring": "allgather"}, "context parallelism"),
        (None, {"ignored": ["parallelism_config_pp_size"]}, "keys that Accelerate ignores"),
        (None, {"error": "ValueError: no"}, "files"),
    ],
)
def test_a_wrong_reading_is_found(section: str | None, changed: dict[str, Any], field: str) -> None:
    answer = copy.deepcopy(ANSWER)
    (answer if section is None else answer[section]).update(changed)
    found = read_back(small_plan(LLAMA, HYBRID), answer)
    assert field in {each.field for each in found.differences}
