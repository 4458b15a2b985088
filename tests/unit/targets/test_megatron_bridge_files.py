"""Overrides of a Megatron-Bridge recipe and the YAML of names, against values written by hand."""

from __future__ import annotations

import shlex
from dataclasses import replace

import pytest
import yaml
from tests.unit.targets.small_plans import GPT2, LLAMA, MIXTRAL, PLAIN, small_plan

from shardwise.plans import Plan
from shardwise.targets import EXPORTERS
from shardwise.targets.megatron_bridge import PythonName, override_text, unsaid
from shardwise.targets.megatron_lm import megatron_lm_flags

TARGET = "megatron-lm-0.19"


def overrides_of(plan: Plan, target: str = TARGET) -> dict[str, str]:
    """The texts of the overrides, by path, as a shell passes them."""
    words = shlex.split(EXPORTERS[target].files(plan)["megatron-bridge.txt"], comments=True)
    return dict(word.split("=", 1) for word in words)


def test_degrees_batch_and_layout() -> None:
    """10 layers over 2 x 2 stages with 2 at both ends: Ett, ttt, ttt, ttL."""
    plan = small_plan(LLAMA, "tp=2,pp=2,vpp=2,dp=2,zero_stage=1,first_stage_layers=2,last_stage_layers=2")
    found = overrides_of(plan)
    expected = {
        "model.tensor_model_parallel_size": "2",
        "model.pipeline_model_parallel_size": "2",
        "model.virtual_pipeline_model_parallel_size": "2",
        "model.pipeline_model_parallel_layout": '"Ett|(ttt|)*2ttL"',
        "model.context_parallel_size": "1",
        "model.sequence_parallel": "true",
        "model.seq_length": "1024",
        "dataset.seq_length": "1024",
        "train.micro_batch_size": "1",
        "train.global_batch_size": "32",
        "ddp.use_distributed_optimizer": "true",
        "optimizer.use_distributed_optimizer": "true",
        "ddp.num_distributed_optimizer_instances": "1",
        "mixed_precision": "bf16_mixed",
        "comm_overlap": "null",
        "model.overlap_p2p_comm": "true",
        "model.batch_p2p_comm": "false",
        "model.num_layers": "10",
        "model.layernorm_epsilon": "1e-05",
        "model.activation_func": "silu",
        "model.share_embeddings_and_output_weights": "false",
    }
    assert {path: found[path] for path in expected} == expected


def test_what_is_off_replaces_what_a_recipe_has_on() -> None:
    found = overrides_of(small_plan(LLAMA, "dp=8,recompute=none"))
    for path, value in (
        ("model.sequence_parallel", "false"),
        ("model.recompute_granularity", "null"),
        ("model.recompute_num_layers", "null"),
        ("model.virtual_pipeline_model_parallel_size", "null"),
        ("model.pipeline_model_parallel_layout", "null"),
        ("model.num_layers_in_first_pipeline_stage", "null"),
        ("model.account_for_loss_in_pipeline_split", "false"),
        ("model.tp_comm_overlap", "false"),
        ("optimizer.optimizer_cpu_offload", "false"),
        ("ddp.use_distributed_optimizer", "false"),
        ("ddp.use_megatron_fsdp", "false"),
        ("model.num_moe_experts", "null"),
        ("model.window_size", "null"),
    ):
        assert found[path] == value, path


def test_experts_and_windows() -> None:
    found = overrides_of(small_plan(MIXTRAL, "ep=4,etp=1"))
    assert found["model.num_moe_experts"] == "8" and found["model.moe_router_topk"] == "2"
    assert found["model.expert_model_parallel_size"] == "4" and found["model.moe_layer_freq"] == "1"
    routed = {"bias": False, "experts": 4, "top_k": 2, "dense_layers": 1, "positions": "rope"}
    dense_first = small_plan(PLAIN | routed, "ep=4")
    assert overrides_of(dense_first)["model.moe_layer_freq"] == "[0,1,1,1]"
    # A window of 256 keys is 255 keys before a token and none after it.
    windowed = small_plan(LLAMA | {"model_type": "mistral", "sliding_window": 256}, "dp=8")
    assert overrides_of(windowed)["model.window_size"] == "[255,0]"


@pytest.mark.parametrize(
    ("dtype", "reduces", "expected"),
    [
        ("bf16", True, {"mixed_precision": "bf16_mixed"}),
        # bf16_mixed reduces in fp32, fp16_mixed does not: the other two are written field by field.
        ("bf16", False, {"mixed_precision": "null", "model.bf16": "true", "optimizer.params_dtype": "bf16"}),
        ("fp16", True, {"mixed_precision": "null", "optimizer.fp16": "true", "model.params_dtype": "fp16"}),
        ("fp16", False, {"mixed_precision": "fp16_mixed"}),
        ("fp32", False, {"mixed_precision": "null", "model.bf16": "false", "model.params_dtype": "fp32"}),
    ],
)
def test_precision(dtype: str, reduces: bool, expected: dict[str, str]) -> None:
    plan = small_plan(LLAMA, "dp=8", dtype=dtype)
    job = replace(plan.job, profile=replace(plan.job.profile, reduce_in_fp32=reduces))
    found = overrides_of(replace(plan, job=job))
    assert {path: found[path] for path in expected} == expected
    assert found["ddp.grad_reduce_in_fp32"] == str(reduces or dtype == "fp32").lower()


def test_megatron_fsdp_names_dtypes_by_their_objects() -> None:
    plan = small_plan(LLAMA, "dp=8,zero_stage=3")
    found = overrides_of(plan, "megatron-fsdp-0.19")
    assert found["ddp.data_parallel_sharding_strategy"] == "optim_grads_params"
    assert found["ddp.use_megatron_fsdp"] == found["dist.use_megatron_fsdp"] == "true"
    assert found["ddp.megatron_fsdp_main_grads_dtype"] == "{_target_:torch.float32,_call_:false}"
    assert found["checkpoint.ckpt_format"] == "fsdp_dtensor"


def test_what_a_recipe_cannot_say_is_in_the_file() -> None:
    """GPT-2 has 1,024 learned positions, and a recipe makes as many as the sequence is long."""
    same = small_plan(GPT2, "dp=8", seq_len=1024)
    shorter = small_plan(GPT2, "dp=8", seq_len=512)
    assert overrides_of(same)["model.seq_length"] == "1024"
    text = EXPORTERS[TARGET].files(shorter)["megatron-bridge.txt"]
    assert overrides_of(shorter) == {}
    assert "# The model has 1024 learned positions; a recipe builds as many as model.seq_length." in text
    flags = (*megatron_lm_flags(same), ("--no-such-flag", "1"))
    assert list(unsaid(same, flags)) == ["No override is known for --no-such-flag."]
    assert not list(unsaid(same, megatron_lm_flags(same)))


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (True, "x=true"), (None, "x=null"), (3, "x=3"), (0.5, "x=0.5"), ("p2p", "x=p2p"), ([0, 1], "x=[0,1]"),
        (["core_attn", "mlp"], "x=[core_attn,mlp]"), ("E|t", 'x="E|t"'), ("a b", 'x="a b"'),
        (PythonName("torch.float32"), "x={_target_:torch.float32,_call_:false}"),
    ],
)  # fmt: skip
def test_values_in_the_syntax_of_hydra(value: bool | int | float | str | list[int], text: str) -> None:
    assert override_text("x", value) == text


def test_yaml_has_the_values_by_the_names_of_arguments() -> None:
    plan = small_plan(LLAMA, "tp=2,dp=4,zero_stage=1")
    text = EXPORTERS[TARGET].files(plan)["megatron-lm.yaml"]
    found = yaml.safe_load(text)
    assert len(found) == len(megatron_lm_flags(plan))
    expected = {
        "tensor_model_parallel_size": 2,
        "sequence_parallel": True,
        "add_bias_linear": False,
        "layernorm_epsilon": 1e-5,
        "optimizer": "adam",
        "use_distributed_optimizer": True,
    }
    assert {name: found[name] for name in expected} == expected
    assert "--yaml-cfg of Megatron-LM 0.19.2 fails" in text
