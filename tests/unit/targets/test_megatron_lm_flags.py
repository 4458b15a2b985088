"""Flags of Megatron-LM by hand, and the fields without a flag."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from tests.unit.targets.small_plans import GPT2, LLAMA, MIXTRAL, PLAIN, small_plan, with_fields

from shardwise.cluster import load_cluster
from shardwise.errors import ConfigError
from shardwise.model import catalogue_entry, catalogue_names, model_from_config
from shardwise.plans import Plan
from shardwise.strategy import PROFILES, target_of
from shardwise.targets.megatron_lm import megatron_lm_flags
from shardwise.targets.megatron_lm_model import FAMILIES, check_model


def flags(plan: Plan) -> dict[str, str]:
    """The values of each flag, joined; empty for a flag without values."""
    written = megatron_lm_flags(plan)
    assert len({flag[0] for flag in written}) == len(written), "a flag is written twice"
    return {flag[0]: " ".join(flag[1:]) for flag in written}


def test_a_dense_plan() -> None:
    """8 devices: tp 2 x cp 1 x pp 4 leaves dp 1. 10 layers on 4 stages, ends of 2: 2 + 3 + 3 + 2."""
    written = flags(small_plan(LLAMA, "tp=2,pp=4,first_stage_layers=2,last_stage_layers=2"))
    assert written == {
        "--num-layers": "10",
        "--hidden-size": "512",
        "--ffn-hidden-size": "1408",
        "--num-attention-heads": "8",
        "--group-query-attention": "",
        "--num-query-groups": "4",
        "--kv-channels": "64",  # 512 / 8
        "--max-position-embeddings": "4096",
        "--position-embedding-type": "rope",
        "--rotary-base": "500000",
        "--rotary-percent": "1",
        "--normalization": "RMSNorm",
        "--norm-epsilon": "1e-05",
        "--swiglu": "",
        "--disable-bias-linear": "",
        "--untie-embeddings-and-output-weights": "",
        "--attention-dropout": "0",  # Megatron-LM's own default is 0.1
        "--hidden-dropout": "0",
        "--init-method-std": "0.02",
        "--vocab-size": "4096",
        "--padded-vocab-size": "4096",
        "--tokenizer-type": "NullTokenizer",
        "--seq-length": "1024",
        "--micro-batch-size": "1",
        "--global-batch-size": "32",
        "--bf16": "",
        "--accumulate-allreduce-grads-in-fp32": "",
        "--optimizer": "adam",
        "--tensor-model-parallel-size": "2",
        "--sequence-parallel": "",
        "--context-parallel-size": "1",
        "--cp-comm-type": "p2p",
        "--pipeline-model-parallel-size": "4",
        "--pipeline-model-parallel-layout": "Ett|(ttt|)*2ttL",
        "--overlap-grad-reduce": "",
    }


def test_a_pipeline_with_empty_ends() -> None:
    """4 x 3 stages for 10 layers: the first has only the embedding, the last only the loss."""
    written = flags(small_plan(LLAMA, "tp=1,pp=4,vpp=3,dp=2"))
    assert written["--pipeline-model-parallel-layout"] == "E|(t|)*10L"


def test_a_plan_of_experts() -> None:
    """8 devices: pp 2 leaves dp 4, whose states are sharded over all 4; 8 layers in 2 x 2 chunks of 2, one of
    each recomputed."""
    text = "pp=2,vpp=2,ep=4,optim_shard=4,recompute=full,recompute_layers=1"
    written = flags(small_plan(MIXTRAL, text))
    expected = {
        "--num-experts": "8",
        "--moe-router-topk": "2",
        "--moe-ffn-hidden-size": "512",
        "--moe-router-load-balancing-type": "aux_loss",
        "--moe-router-dtype": "fp32",
        "--moe-token-dispatcher-type": "alltoall",
        "--moe-grouped-gemm": "",
        "--pipeline-model-parallel-size": "2",
        "--num-virtual-stages-per-pipeline-rank": "2",
        "--expert-model-parallel-size": "4",
        "--expert-tensor-parallel-size": "1",
        "--use-distributed-optimizer": "",
        "--overlap-grad-reduce": "",
        "--overlap-param-gather": "",
        "--recompute-granularity": "full",
        "--recompute-method": "block",
        "--recompute-num-layers": "1",
    }
    assert {name: written.get(name) for name in expected} == expected
    assert not set(written) & {
        "--pipeline-model-parallel-layout", "--untie-embeddings-and-output-weights", "--moe-layer-freq",
        "--sequence-parallel", "--moe-router-pre-softmax", "--num-distributed-optimizer-instances",
    }  # fmt: skip


def test_states_sharded_over_a_part_of_the_replicas() -> None:
    """dp 8, states over 2 of them: 8 / 2 = 4 instances."""
    written = flags(small_plan(LLAMA, "optim_shard=2"))
    assert written["--num-distributed-optimizer-instances"] == "4"
    assert "--use-distributed-optimizer" in written


def test_optimizer_states_in_host_memory() -> None:
    written = flags(small_plan(LLAMA, "optim_shard=8,offload=optimizer"))
    assert {"--optimizer-cpu-offload", "--use-precision-aware-optimizer"} <= set(written)
    assert "--optimizer-cpu-offload" not in flags(small_plan(LLAMA, "optim_shard=8"))


@pytest.mark.parametrize(
    ("config", "modules", "words"),
    [
        (LLAMA, "mlp+core_attn", "core_attn mlp"),
        (LLAMA, "layernorm", "layernorm"),
        (MIXTRAL, "moe_act+layernorm", "layernorm moe_act"),
    ],
)
def test_named_modules_are_recomputed(config: dict[str, Any], modules: str, words: str) -> None:
    written = flags(small_plan(config, f"recompute_modules={modules}"))
    assert (written["--recompute-granularity"], written["--recompute-modules"]) == ("selective", words)
    assert not {"--recompute-method", "--recompute-num-layers"} & set(written)


def test_the_order_of_ranks() -> None:
    mapped = small_plan(LLAMA, "pp=2,dp=4,axis_order=tp-cp-pp-dp")
    assert "--use-tp-pp-dp-mapping" in flags(mapped)
    assert "--use-tp-pp-dp-mapping" not in flags(with_fields(mapped, axis_order="tp-cp-dp-pp"))
    # Without pipelines all ranks are at their default places.
    assert "--use-tp-pp-dp-mapping" not in flags(small_plan(LLAMA, "dp=8,axis_order=tp-cp-pp-dp"))


def test_sequences_split_by_all_to_all() -> None:
    written = flags(small_plan(LLAMA, "cp=2,cp_kind=all_to_all"))
    assert (written["--context-parallel-size"], written["--cp-comm-type"]) == ("2", "a2a")


def test_gradients_in_the_dtype_of_the_weights() -> None:
    plan = small_plan(LLAMA, "dp=8", profile=replace(PROFILES["megatron-2024"], reduce_in_fp32=False))
    written = flags(plan)
    assert "--grad-reduce-in-bf16" in written and "--accumulate-allreduce-grads-in-fp32" not in written


def test_software_without_overlap_and_fused_attention() -> None:
    written = flags(small_plan(LLAMA, "optim_shard=8", profile=PROFILES["megatron-2021"]))
    assert written["--attention-backend"] == "unfused"
    assert not {"--overlap-grad-reduce", "--overlap-param-gather"} & set(written)


@pytest.mark.parametrize(
    ("config", "expected", "absent"),
    [
        (GPT2, {"--normalization": "LayerNorm", "--attention-dropout": "0.1", "--hidden-dropout": "0.1",
                "--position-embedding-type": "learned_absolute", "--max-position-embeddings": "1024",
                "--ffn-hidden-size": "1024"},  # 4 x 256
         {"--swiglu", "--disable-bias-linear", "--rotary-base", "--group-query-attention",
          "--untie-embeddings-and-output-weights", "--no-bias-gelu-fusion"}),
        (GPT2 | {"activation_function": "gelu"}, {"--no-bias-gelu-fusion": ""}, {"--swiglu"}),
        (PLAIN | {"bias": False, "gated": True, "norm": "rmsnorm", "positions": "rope", "dropout": 0},
         {"--swiglu": "", "--disable-bias-linear": "", "--normalization": "RMSNorm", "--rotary-base": "10000",
          "--hidden-dropout": "0"}, {"--add-qkv-bias"}),
        (PLAIN | {"bias": False, "positions": "none", "experts": 4, "top_k": 1, "dense_layers": 1,
                  "shared_ffn": 128},
         {"--moe-layer-freq": "[0]*1+[1]*3", "--moe-shared-expert-intermediate-size": "128",
          "--moe-router-pre-softmax": "", "--position-embedding-type": "none"}, {"--rotary-base"}),
        (LLAMA | {"model_type": "qwen2"}, {"--add-qkv-bias": "", "--disable-bias-linear": ""},
         {"--qk-layernorm"}),
        (LLAMA | {"model_type": "qwen3", "head_dim": 128}, {"--qk-layernorm": "", "--kv-channels": "128"},
         {"--add-qkv-bias"}),
        # 256 keys: the query's own and 255 before it.
        (LLAMA | {"model_type": "mistral", "sliding_window": 256}, {"--window-size": "255,0"},
         {"--window-attn-skip-freq"}),
        (LLAMA | {"model_type": "mistral", "sliding_window": 1024}, {}, {"--window-size"}),  # all tokens
        (LLAMA | {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 256,
                  "max_window_layers": 4},
         {"--window-size": "255,0", "--window-attn-skip-freq": "[0]*4+[1]*6"}, set()),
        (LLAMA | {"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
                                   "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}},
         {"--use-rope-scaling": "", "--rope-scaling-factor": "8"}, set()),
    ],
)  # fmt: skip
def test_models(config: dict[str, Any], expected: dict[str, str], absent: set[str]) -> None:
    written = flags(small_plan(config, "dp=8"))
    assert {name: written.get(name) for name in expected} == expected
    assert not absent & set(written)


@pytest.mark.parametrize(
    ("fields", "key"),
    [
        ({"schedule": "gpipe"}, "schedule"),
        ({"schedule": "zb_h1"}, "schedule"),
        ({"schedule": "interleaved_1f1b"}, "schedule"),  # one chunk per rank
        ({"vpp": 2}, "vpp"),
        ({"recompute": "selective"}, "recompute"),
        ({"recompute": "full"}, "recompute_layers"),
        ({"recompute": "selective", "recompute_modules": "moe"}, "recompute_modules"),  # no experts
        ({"recompute": "selective", "recompute_modules": "core_attn+mla_up_proj"}, "recompute_modules"),
        ({"recompute_modules": "mlp"}, "recompute_modules"),  # without selective recomputation
        ({"axis_order": "pp-tp-cp-dp"}, "axis_order"),
        ({"param_shard": 2, "grad_shard": 2, "optim_shard": 2}, "param_shard"),
        ({"grad_shard": 2, "optim_shard": 2}, "grad_shard"),
        ({"optim_shard": 3}, "optim_shard"),  # dp x cp is 2: Megatron-LM would accept 2 / 3 of an instance
        ({"offload": "activations"}, "offload"),
        ({"offload": "both"}, "offload"),
        ({"offload": "optimizer"}, "offload"),  # states that are not sharded
        ({"ep": 2}, "ep"),  # a model without experts
        ({"tp": 3}, "tp"),  # 4,096 / 3
        ({"micro_batch_size": 3}, "micro_batch_size"),  # 32 / (2 x 3)
        ({"tp": 1, "pp": 4}, "sequence_parallel"),
    ],
)
def test_fields_without_a_flag_are_refused_by_name(fields: dict[str, Any], key: str) -> None:
    plan = small_plan(LLAMA, "tp=2,pp=2,dp=2")
    flags(plan)
    with pytest.raises(ConfigError) as caught:
        megatron_lm_flags(with_fields(plan, **fields))
    assert caught.value.key == f"best.strategy.{key}"


@pytest.mark.parametrize(
    ("config", "text", "fields", "key"),
    [
        # etp 8 x ep 4 = 32 of the 4 ranks of a stage.
        (MIXTRAL, "pp=2,ep=4", {"etp": 8}, "ep"),
        (MIXTRAL, "tp=2,ep=4,etp=1", {"sequence_parallel": False}, "sequence_parallel"),
        (MIXTRAL, "ep=4", {"optim_shard": 4}, "optim_shard"),  # of dp 8
        (MIXTRAL, "pp=2,ep=4", {"axis_order": "tp-cp-pp-dp"}, "axis_order"),  # 4 is not tp x cp = 1
        (LLAMA, "cp=2,pp=2,dp=2", {"axis_order": "tp-cp-pp-dp"}, "axis_order"),
        # 32 / (2 x 8) = 2 micro-batches for each of 2 replicas: no multiple of pp 4.
        (LLAMA, "pp=4,vpp=2,dp=2", {"micro_batch_size": 8}, "vpp"),
        (LLAMA | {"model_type": "mistral", "sliding_window": 256}, "dp=8",
         {"cp": 2, "dp": 4}, "cp"),  # a ring does not support windows
    ],
)  # fmt: skip
def test_wrong_flags_that_megatron_lm_accepts_are_refused(
    config: dict[str, Any], text: str, fields: dict[str, Any], key: str
) -> None:
    plan = small_plan(config, text)
    flags(plan)
    with pytest.raises(ConfigError) as caught:
        megatron_lm_flags(with_fields(plan, **fields))
    assert caught.value.key == f"best.strategy.{key}"


@pytest.mark.parametrize(
    ("job", "key"),
    [({"dtype": "fp8"}, "job.dtype"), ({"optimizer": "muon"}, "job.optimizer"),
     ({"optimizer": "adafactor"}, "job.optimizer")],
)  # fmt: skip
def test_jobs_without_a_flag_are_refused_by_name(job: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        megatron_lm_flags(small_plan(LLAMA, "optim_shard=8", **job))
    assert caught.value.key == key


def test_unfused_attention_has_no_context_parallelism() -> None:
    """Transformer Engine's unfused attention does not split sequences."""
    profile = PROFILES["megatron-2021"]
    flags(small_plan(LLAMA, "dp=8", profile=profile))
    with pytest.raises(ConfigError) as caught:
        megatron_lm_flags(small_plan(LLAMA, "cp=2", profile=profile))
    assert caught.value.key == "best.strategy.cp"


def test_devices_that_megatron_lm_does_not_run_on() -> None:
    plan = small_plan(LLAMA, "dp=8")
    with pytest.raises(ConfigError) as caught:
        megatron_lm_flags(replace(plan, cluster=load_cluster("8xcpu")))
    assert (caught.value.key, caught.value.found) == ("cluster", "'cpu'")


def test_sgd_states_are_not_offloaded() -> None:
    plan = small_plan(LLAMA, "optim_shard=8", optimizer="sgd")
    assert flags(plan)["--optimizer"] == "sgd"
    with pytest.raises(ConfigError) as caught:
        megatron_lm_flags(with_fields(plan, offload="optimizer"))
    assert caught.value.key == "best.strategy.offload"


@pytest.mark.parametrize(
    ("config", "key"),
    [
        ({"model_type": "opt", "hidden_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4,
          "ffn_dim": 512, "vocab_size": 512, "max_position_embeddings": 512}, "model.config.model_type"),
        (LLAMA | {"hidden_act": "gelu"}, "model.config.hidden_act"),
        (LLAMA | {"attention_bias": True}, "model.config"),  # MLPs have none
        (LLAMA | {"rope_theta": 10000.5}, "model.config.rope_theta"),
        (LLAMA | {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "model.config.rope_scaling"),
        (LLAMA | {"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
                                   "high_freq_factor": 2.0, "original_max_position_embeddings": 8192}},
         "model.config.rope_scaling.high_freq_factor"),
        (GPT2 | {"activation_function": "relu"}, "model.config.activation_function"),
        (GPT2 | {"embd_pdrop": 0.0}, "model.config.embd_pdrop"),
        (GPT2 | {"scale_attn_by_inverse_layer_idx": True}, "model.config.scale_attn_by_inverse_layer_idx"),
        (MIXTRAL | {"num_experts_per_tok": 1}, "model.config.num_experts_per_tok"),
        (MIXTRAL | {"expert_capacity_factor": 1.5}, "model.config"),
        (PLAIN | {"experts": 4, "top_k": 2}, "model.config.bias"),  # the router would have one
        (PLAIN | {"qkv_bias": False}, "model.config"),
    ],
)  # fmt: skip
def test_models_without_flags_are_refused_by_name(config: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_model(model_from_config(config, name="small"), 1)
    assert caught.value.key == key


def test_the_target_lists_the_exported_fields() -> None:
    target = target_of("megatron-lm-0.19")
    assert target.families == FAMILIES
    assert set(target.dtypes) == {"fp32", "bf16", "fp16"} and set(target.optimizers) == {"adamw", "sgd"}
    for dtype in target.dtypes:
        for optimizer in target.optimizers:
            written = flags(small_plan(LLAMA, "dp=8", dtype=dtype, optimizer=optimizer))
            assert ("--bf16" in written, "--fp16" in written) == (dtype == "bf16", dtype == "fp16")
            assert written["--optimizer"] == {"adamw": "adam", "sgd": "sgd"}[optimizer]


def test_learned_positions_end_before_the_sequence() -> None:
    with pytest.raises(ConfigError) as caught:
        megatron_lm_flags(small_plan(GPT2, "dp=8", seq_len=2048))
    assert caught.value.key == "job.seq_len"


def test_models_of_the_catalogue() -> None:
    """The families that flags can express; no other."""
    for name in catalogue_names():
        model = model_from_config(catalogue_entry(name).config, name=name)
        if model.family in FAMILIES:
            check_model(model, 1)
            continue
        with pytest.raises(ConfigError) as caught:
            check_model(model, 1)
        assert caught.value.key == "model.config.model_type"
