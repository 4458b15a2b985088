"""Megatron-LM's own view of a plan compared with the plan: each wrong value is found by its field."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest
from tests.unit.targets.small_plans import MIXTRAL, small_plan, with_fields

from shardwise.plans import Plan
from shardwise.strategy import FIELDS
from shardwise.targets.megatron_lm_model import MegatronExperts, MegatronModel
from shardwise.targets.megatron_lm_read_back import Reading, differences, read_back

ARGUMENTS: dict[str, Any] = {
    "accumulate_allreduce_grads_in_fp32": True, "attention_backend": "auto", "context_parallel_size": 1,
    "cpu_offloading_num_layers": 0, "data_parallel_sharding_strategy": "optim_grads_params",
    "exp_avg_dtype": "torch.float32", "exp_avg_sq_dtype": "torch.float32", "tp_comm_overlap": False,
    "overlap_moe_expert_parallel_comm": False,
    "data_parallel_size": 4, "outer_dp_sharding_strategy": "no_shard", "expert_model_parallel_size": 4,
    "expert_tensor_parallel_size": 1, "fine_grained_activation_offloading": False, "fp4": None, "fp8": None,
    "global_batch_size": 32, "max_position_embeddings": 2048, "micro_batch_size": 1,
    "num_distributed_optimizer_instances": 1, "num_experts": 8, "num_layers": 8, "optimizer": "adam",
    "optimizer_cpu_offload": False, "optimizer_offload_fraction": 1.0, "overlap_grad_reduce": True,
    "overlap_param_gather": True, "params_dtype": "torch.bfloat16", "pipeline_model_parallel_size": 2,
    "position_embedding_type": "rope", "recompute_granularity": "full", "recompute_method": "block",
    "recompute_num_layers": 1, "rope_scaling_factor": 8.0, "rotary_base": 1000000, "rotary_percent": 1.0,
    "seq_length": 1024, "sequence_parallel": False, "tensor_model_parallel_size": 1,
    "untie_embeddings_and_output_weights": False, "use_distributed_optimizer": True,
    "use_megatron_fsdp": False, "use_rope_scaling": False, "use_torch_fsdp2": False,
    "use_tp_pp_dp_mapping": False, "virtual_pipeline_model_parallel_size": 2, "world_size": 8,
}  # fmt: skip
"""Arguments of Megatron-LM 0.19.2 after `validate_args`, for the flags of `requested_plan()`."""

CONFIG: dict[str, Any] = {
    "activation_func": "silu", "add_bias_linear": False, "add_qkv_bias": False, "attention_dropout": 0.0,
    "bias_activation_fusion": True, "cp_comm_type": "p2p", "ffn_hidden_size": 512, "gated_linear_unit": True,
    "hidden_dropout": 0.0, "hidden_size": 256, "init_method_std": 0.02, "kv_channels": 32,
    "offload_modules": ["core_attn"],
    "layernorm_epsilon": 1e-05, "moe_ffn_hidden_size": 512, "moe_layer_freq": 1,
    "moe_router_pre_softmax": False, "moe_router_topk": 2, "moe_shared_expert_intermediate_size": None,
    "moe_token_dispatcher_type": "alltoall", "normalization": "RMSNorm", "num_attention_heads": 8,
    "num_moe_experts": 8, "num_query_groups": 2, "qk_layernorm": False, "recompute_modules": ["core_attn"],
    "window_attn_skip_freq": None, "window_size": None,
}  # fmt: skip
"""Its TransformerConfig."""

READING = Reading(arguments=ARGUMENTS, config=CONFIG, layers=((2, 2), (2, 2)), padded_vocab_size=1024)


def requested_plan() -> Plan:
    """8 layers of 8 experts on 8 devices: pp 2 x vpp 2 chunks of 2 layers, dp 4."""
    return small_plan(MIXTRAL, "pp=2,vpp=2,ep=4,optim_shard=4,recompute=full,recompute_layers=1")


def test_equal_values_are_counted() -> None:
    """A model's values (its experts' instead of `experts`), 21 fields, and 14 more: sequence, batch, dtype,
    optimizer, dtypes of gradients and of moments, attention, four overlaps, modules on the host,
    devices, layers of stages.
    """
    found = read_back(requested_plan(), READING)
    assert found.differences == ()
    sizes = len(fields(MegatronModel)) - 1 + len(fields(MegatronExperts))
    assert found.values == sizes + len(FIELDS) + 15


@pytest.mark.parametrize(
    ("modules", "found"),
    [(["mlp"], "mlp"), (["core_attn", "mlp", "gdn_norm_out"], "core_attn+mlp+gdn_norm_out")],
)
def test_other_modules_are_found(modules: list[str], found: str) -> None:
    """Megatron-LM lists modules in any order; one that we do not know is shown with its name."""
    plan = with_fields(
        requested_plan(), recompute="selective", recompute_layers=0, recompute_modules="layernorm+moe_act"
    )
    reading = replace(
        READING,
        arguments=ARGUMENTS | {"recompute_granularity": "selective", "recompute_num_layers": None},
        config=CONFIG | {"recompute_modules": ["moe_act", "layernorm"]},
    )
    assert differences(plan, reading) == ()
    other = replace(reading, config=CONFIG | {"recompute_modules": modules})
    (difference,) = differences(plan, other)
    assert (difference.field, difference.read) == ("strategy.recompute_modules", found)


@pytest.mark.parametrize(
    ("changed", "field"),
    [
        ({"tensor_model_parallel_size": 2}, "strategy.tp"),
        ({"pipeline_model_parallel_size": 4}, "strategy.pp"),
        ({"virtual_pipeline_model_parallel_size": None}, "strategy.vpp"),
        ({"virtual_pipeline_model_parallel_size": None}, "strategy.schedule"),
        ({"context_parallel_size": 2}, "strategy.cp"),
        ({"expert_model_parallel_size": 8}, "strategy.ep"),
        ({"expert_tensor_parallel_size": 2}, "strategy.etp"),
        ({"data_parallel_size": 2}, "strategy.dp"),
        ({"use_torch_fsdp2": True}, "strategy.param_shard"),
        ({"use_megatron_fsdp": True}, "strategy.grad_shard"),
        ({"num_distributed_optimizer_instances": 2}, "strategy.optim_shard"),
        ({"num_distributed_optimizer_instances": 3}, "strategy.optim_shard"),
        ({"use_distributed_optimizer": False}, "strategy.optim_shard"),
        ({"micro_batch_size": 2}, "strategy.micro_batch_size"),
        ({"sequence_parallel": True}, "strategy.sequence_parallel"),
        ({"recompute_granularity": None}, "strategy.recompute"),
        ({"recompute_granularity": "selective"}, "strategy.recompute"),
        ({"recompute_method": "uniform"}, "strategy.recompute_layers"),
        ({"recompute_num_layers": 2}, "strategy.recompute_layers"),
        ({"optimizer_cpu_offload": True}, "strategy.offload"),
        ({"cpu_offloading_num_layers": 1}, "strategy.offload"),
        (
            {
                "fine_grained_activation_offloading": True,
                "min_offloaded_tensor_size": 1 << 20,
                "activation_offload_fraction": 1.0,
            },
            "modules on the host",
        ),
        ({"use_tp_pp_dp_mapping": True}, "strategy.axis_order"),
        ({"seq_length": 512}, "job.seq_len"),
        ({"global_batch_size": 64}, "job.global_batch_size"),
        ({"params_dtype": "torch.float16"}, "job.dtype"),
        ({"fp8": "hybrid"}, "job.dtype"),
        ({"optimizer": "sgd"}, "job.optimizer"),
        ({"accumulate_allreduce_grads_in_fp32": False}, "job.profile.reduce_in_fp32"),
        ({"exp_avg_dtype": "torch.bfloat16"}, "dtypes of moments"),
        ({"exp_avg_sq_dtype": "torch.bfloat16"}, "dtypes of moments"),
        ({"tp_comm_overlap": True}, "communication of tensor parallelism overlaps"),
        ({"overlap_moe_expert_parallel_comm": True}, "communication of expert parallelism overlaps"),
        ({"cuda_graph_impl": "full_iteration", "cuda_graph_modules": []}, "CUDA graphs"),
        ({"attention_backend": "unfused"}, "fused attention"),
        ({"overlap_grad_reduce": False}, "gradients reduced during computation"),
        ({"overlap_param_gather": False}, "parameters gathered during computation"),
        ({"world_size": 16}, "devices"),
        ({"num_layers": 9}, "model.num_layers"),
        ({"rotary_base": 10000}, "model.rotary_base"),
        ({"use_rope_scaling": True}, "model.rope_scaling_factor"),
        ({"untie_embeddings_and_output_weights": True}, "model.untie_embeddings_and_output_weights"),
    ],
)
def test_a_wrong_argument_is_found(changed: dict[str, Any], field: str) -> None:
    found = differences(requested_plan(), replace(READING, arguments=ARGUMENTS | changed))
    assert field in [each.field for each in found]


@pytest.mark.parametrize(
    ("changed", "field"),
    [
        ({"cp_comm_type": "bogus"}, "strategy.cp_kind"),  # Megatron-LM accepts it
        ({"cp_comm_type": "a2a"}, "strategy.cp_kind"),
        ({"attention_dropout": 0.1}, "model.attention_dropout"),
        ({"hidden_dropout": 0.1}, "model.hidden_dropout"),
        ({"num_query_groups": 8}, "model.num_query_groups"),
        ({"gated_linear_unit": False}, "model.swiglu"),
        ({"activation_func": "gelu"}, "model.swiglu"),
        ({"add_bias_linear": True}, "model.add_bias_linear"),
        ({"normalization": "LayerNorm"}, "model.normalization"),
        ({"window_size": [255, 0]}, "model.window"),
        ({"num_moe_experts": 4}, "model.num_experts"),
        ({"num_moe_experts": None}, "model.num_experts"),
        ({"moe_router_topk": 1}, "model.moe_router_topk"),
        ({"moe_layer_freq": 2}, "model.pattern"),
        ({"moe_router_pre_softmax": True}, "model.moe_router_pre_softmax"),
        ({"moe_token_dispatcher_type": "allgather"}, "model.moe_token_dispatcher_type"),
    ],
)
def test_a_wrong_value_of_the_configuration_is_found(changed: dict[str, Any], field: str) -> None:
    found = differences(requested_plan(), replace(READING, config=CONFIG | changed))
    assert field in [each.field for each in found]


@pytest.mark.parametrize(
    ("layers", "field"),
    [
        (((1, 2), (3, 2)), "strategy.first_stage_layers"),
        (((2, 2), (3, 1)), "strategy.last_stage_layers"),
        (((2, 1), (3, 2)), "layers of stages"),  # the ends are equal
    ],
)
def test_wrong_stages_are_found(layers: tuple[tuple[int, ...], ...], field: str) -> None:
    found = differences(requested_plan(), replace(READING, layers=layers))
    assert field in [each.field for each in found]


def test_a_padded_vocabulary_is_found() -> None:
    (found,) = differences(requested_plan(), replace(READING, padded_vocab_size=1152))
    assert (found.field, found.plan, found.read) == ("model.padded_vocab_size", "1024", "1152")


def test_refused_flags_are_one_difference() -> None:
    (found,) = differences(requested_plan(), Reading(error="AssertionError: no"))
    assert (found.field, found.read) == ("files", "AssertionError: no")
