"""A plan for Megatron-LM as overrides of a recipe of Megatron-Bridge 0.6, in Hydra's syntax.

The overrides say all that the flags say, also what is off, so that they do not depend on the recipe.
`bridge_text` writes the file. Names are the fields of Megatron-Bridge's `ConfigContainer` and of the classes
of Megatron-Core under it (`DistributedDataParallelConfig`, `OptimizerConfig`, `TransformerConfig`).
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator, Sequence

from shardwise.plans import Plan
from shardwise.strategy import Job
from shardwise.targets.megatron_lm_model import MegatronModel, megatron_model, model_flags

FILE = "megatron-bridge.txt"
"""The file with one override a line, each quoted for a shell."""


class PythonName(str):
    """The full name of an object of Python, which Megatron-Bridge looks up."""

    __slots__ = ()


Value = bool | int | float | str | None | list[int] | list[str]
"""A value of an override. None is `null`."""

_FIELDS: dict[str, tuple[tuple[str, ...], Value]] = {
    "--seq-length": (("model.seq_length", "dataset.seq_length"), None),
    "--micro-batch-size": (("train.micro_batch_size",), None),
    "--global-batch-size": (("train.global_batch_size",), None),
    "--optimizer": (("optimizer.optimizer",), None),
    "--tensor-model-parallel-size": (("model.tensor_model_parallel_size",), 1),
    "--sequence-parallel": (("model.sequence_parallel",), False),
    "--context-parallel-size": (("model.context_parallel_size",), 1),
    "--cp-comm-type": (("model.cp_comm_type",), "p2p"),
    "--pipeline-model-parallel-size": (("model.pipeline_model_parallel_size",), 1),
    "--pipeline-model-parallel-layout": (("model.pipeline_model_parallel_layout",), None),
    "--expert-model-parallel-size": (("model.expert_model_parallel_size",), 1),
    "--expert-tensor-parallel-size": (("model.expert_tensor_parallel_size",), None),
    "--use-tp-pp-dp-mapping": (("dist.use_tp_pp_dp_mapping",), False),
    "--use-distributed-optimizer": (
        ("ddp.use_distributed_optimizer", "optimizer.use_distributed_optimizer"),
        False,
    ),
    "--num-distributed-optimizer-instances": (("ddp.num_distributed_optimizer_instances",), 1),
    "--optimizer-cpu-offload": (("optimizer.optimizer_cpu_offload",), False),
    "--use-precision-aware-optimizer": (("optimizer.use_precision_aware_optimizer",), False),
    "--exp-avg-dtype": (("optimizer.exp_avg_dtype",), "fp32"),
    "--exp-avg-sq-dtype": (("optimizer.exp_avg_sq_dtype",), "fp32"),
    "--overlap-grad-reduce": (("ddp.overlap_grad_reduce",), False),
    "--overlap-param-gather": (("ddp.overlap_param_gather", "optimizer.overlap_param_gather"), False),
    "--tp-comm-overlap": (("model.tp_comm_overlap",), False),
    "--overlap-moe-expert-parallel-comm": (("model.overlap_moe_expert_parallel_comm",), False),
    "--delay-wgrad-compute": (("model.delay_wgrad_compute", "ddp.delay_wgrad_compute"), False),
    "--recompute-granularity": (("model.recompute_granularity",), None),
    "--recompute-method": (("model.recompute_method",), None),
    "--recompute-num-layers": (("model.recompute_num_layers",), None),
    "--recompute-modules": (("model.recompute_modules",), None),
    "--fine-grained-activation-offloading": (("model.fine_grained_activation_offloading",), False),
    "--offload-modules": (("model.offload_modules",), None),
    "--use-megatron-fsdp": (("ddp.use_megatron_fsdp", "dist.use_megatron_fsdp"), False),
}
"""The fields of each flag, and their value without it."""

_FSDP_FIELDS: dict[str, tuple[tuple[str, ...], Value]] = {
    "--data-parallel-sharding-strategy": (("ddp.data_parallel_sharding_strategy",), "no_shard"),
    "--outer-dp-sharding-strategy": (("ddp.outer_dp_sharding_strategy",), "no_shard"),
}
"""The same with Megatron-FSDP; without it, they mean nothing."""

_DTYPE_FIELDS = {
    "--megatron-fsdp-main-grads-dtype": "ddp.megatron_fsdp_main_grads_dtype",
    "--megatron-fsdp-grad-comm-dtype": "ddp.megatron_fsdp_grad_comm_dtype",
}
"""Fields of a dtype without a default, to which Megatron-Bridge does not convert text."""

LISTS = ("--recompute-modules", "--offload-modules", "--cuda-graph-modules")
"""Flags with a list of words."""

_FROM_PLAN = (
    "--bf16", "--fp16", "--accumulate-allreduce-grads-in-fp32", "--grad-reduce-in-bf16",
    "--num-virtual-stages-per-pipeline-rank", "--attention-backend", "--ckpt-format", "--cuda-graph-impl",
    "--cuda-graph-modules", "--no-check-for-nan-in-loss-and-grad",
)  # fmt: skip
"""Flags whose fields are written from the plan."""

_OTHER_LAYOUTS = {
    "num_layers_in_first_pipeline_stage": None,
    "num_layers_in_last_pipeline_stage": None,
    "account_for_embedding_in_pipeline_split": False,
    "account_for_loss_in_pipeline_split": False,
}
"""Other ways to divide the layers, which a recipe may have."""

_TORCH_DTYPES = {"fp32": "torch.float32", "bf16": "torch.bfloat16", "fp16": "torch.float16"}

_MIXED = {"bf16": True, "fp16": False}
"""Recipes of mixed precision, `NAME_mixed`, and whether each reduces gradients in fp32."""


def bridge_overrides(plan: Plan, flags: Sequence[tuple[str, ...]]) -> dict[str, Value]:
    """The value of each overridden field, for the plan whose flags of Megatron-LM these are."""
    strategy = plan.best.strategy
    given = {flag: values for flag, *values in flags}
    chunks = strategy.vpp if strategy.pp > 1 and strategy.vpp > 1 else None
    found: dict[str, Value] = {
        f"model.{name}": value
        for name, value in _model_fields(megatron_model(plan.model, seq_len=plan.job.seq_len)).items()
    }
    found["tokenizer.use_tokenizer_vocab_size"] = False
    found |= _precision(plan.job)
    found["comm_overlap"] = None
    for flag, (paths, absent) in (_FIELDS | (_FSDP_FIELDS if "--use-megatron-fsdp" in given else {})).items():
        value = _value(flag, given[flag]) if flag in given else absent
        found |= dict.fromkeys(paths, value)
    found |= {path: _dtype(given[flag][0]) for flag, path in _DTYPE_FIELDS.items() if flag in given}
    if "--attention-backend" in given:
        backend = given["--attention-backend"][0]
        found["model.attention_backend"] = PythonName(
            f"megatron.core.transformer.enums.AttnBackend.{backend}"
        )
    if "--cuda-graph-impl" in given:
        found["model.cuda_graph_impl"] = given["--cuda-graph-impl"][0]
        found["model.cuda_graph_modules"] = list(given.get("--cuda-graph-modules", ()))
    if "--no-check-for-nan-in-loss-and-grad" in given:
        found |= dict.fromkeys(
            ("rerun_state_machine.check_for_nan_in_loss", "ddp.check_for_nan_in_grad"), False
        )
    if "--ckpt-format" in given:
        found["checkpoint.ckpt_format"] = given["--ckpt-format"][0]
    found["model.virtual_pipeline_model_parallel_size"] = chunks
    found |= {f"model.{name}": value for name, value in _OTHER_LAYOUTS.items()}
    found["model.overlap_p2p_comm"] = chunks is not None
    found["model.batch_p2p_comm"] = chunks is None
    found["optimizer.optimizer_offload_fraction"] = float("--optimizer-cpu-offload" in given)
    return found


def unsaid(plan: Plan, flags: Sequence[tuple[str, ...]]) -> Iterator[str]:
    """What a recipe cannot say of the plan, each as a sentence."""
    model = megatron_model(plan.model, seq_len=plan.job.seq_len)
    if model.position_embedding_type == "none":
        yield "A model without positions has no value of model.position_embedding_type."
    positions = model.max_position_embeddings
    if model.position_embedding_type == "learned_absolute" and positions != plan.job.seq_len:
        yield f"The model has {positions} learned positions; a recipe builds as many as model.seq_length."
    of_model = {flag for flag, *_ in model_flags(model)}
    for flag, *_ in flags:
        if flag not in (*of_model, *_FIELDS, *_FSDP_FIELDS, *_DTYPE_FIELDS, *_FROM_PLAN):
            yield f"No override is known for {flag}."


def bridge_text(plan: Plan, head: Sequence[str], flags: Sequence[tuple[str, ...]]) -> str:
    """The text of the file, after the lines of `head`."""
    reasons = list(unsaid(plan, flags))
    if reasons:
        return "\n".join((*head, "#", "# There are no overrides for this plan:", *_notes(reasons))) + "\n"
    lines = [shlex.quote(override_text(*item)) for item in bridge_overrides(plan, flags).items()]
    return "\n".join((*head, "#", *_notes(_USE), "", *lines)) + "\n"


_USE = (
    "Overrides of a recipe of Megatron-Bridge 0.6 that pretrains this model, each quoted for a shell:",
    f"grep -v '^#' {FILE} | xargs torchrun ... run_recipe.py --recipe NAME",
    "Learning rate, iterations, data and the tokenizer are those of the recipe. Megatron-Bridge did not run.",
)


def _notes(lines: Sequence[str]) -> list[str]:
    return [f"# {line}" for line in lines]


def override_text(path: str, value: Value) -> str:
    """An override in Hydra's syntax."""
    return f"{path}={_hydra(value)}"


def _hydra(value: Value) -> str:
    """A value in Hydra's syntax: text is quoted unless it is a plain word."""
    if isinstance(value, list):
        return "[" + ",".join(map(_hydra, value)) + "]"
    if isinstance(value, PythonName):
        return "{_target_:" + value + ",_call_:false}"
    if isinstance(value, str):
        return value if re.fullmatch(r"[A-Za-z_]\w*", value) else json.dumps(value)
    return json.dumps(value)


def _value(flag: str, words: Sequence[str]) -> Value:
    """The value of a flag: true for a switch, the words of a list, a number, or text."""
    if not words:
        return True
    if flag in LISTS:
        return list(words)
    return int(words[0]) if words[0].isdecimal() else words[0]


def _dtype(name: str) -> PythonName:
    return PythonName(_TORCH_DTYPES[name])


def _precision(job: Job) -> dict[str, Value]:
    """Fields of precision: the recipe of mixed precision of this name, where it reduces gradients as the plan
    does; else each field."""
    reduces = job.dtype == "fp32" or job.profile.reduce_in_fp32
    found: dict[str, Value] = {"ddp.grad_reduce_in_fp32": reduces}
    if _MIXED.get(job.dtype) == reduces:
        return {"mixed_precision": f"{job.dtype}_mixed", **found}
    is_half = {name: job.dtype == name for name in ("bf16", "fp16")}
    switches = {f"{part}.{name}": on for part in ("model", "optimizer") for name, on in is_half.items()}
    dtyped = ("model.params_dtype", "model.pipeline_dtype", "optimizer.params_dtype")
    dtypes = dict.fromkeys(dtyped, job.dtype)
    return {"mixed_precision": None, **switches, **dtypes, "model.autocast_dtype": None, **found}


def _model_fields(model: MegatronModel) -> dict[str, Value]:
    """The fields of `GPTModelProvider` that describe the model."""
    found: dict[str, Value] = {
        "num_layers": model.num_layers,
        "hidden_size": model.hidden_size,
        "ffn_hidden_size": model.ffn_hidden_size,
        "num_attention_heads": model.num_attention_heads,
        "num_query_groups": model.num_query_groups,
        "kv_channels": model.kv_channels,
        "vocab_size": model.padded_vocab_size,
        "should_pad_vocab": False,
        "share_embeddings_and_output_weights": not model.untie_embeddings_and_output_weights,
        "position_embedding_type": model.position_embedding_type,
        "rope_scaling": model.rope_scaling_factor is not None,
        "normalization": model.normalization,
        "layernorm_epsilon": model.norm_epsilon,
        "qk_layernorm": model.qk_layernorm,
        "gated_linear_unit": model.swiglu,
        "activation_func": "silu" if model.swiglu else "gelu",
        "bias_activation_fusion": not model.exact_gelu,
        "add_bias_linear": model.add_bias_linear,
        "add_qkv_bias": model.add_qkv_bias,
        "attention_dropout": model.attention_dropout,
        "hidden_dropout": model.hidden_dropout,
        "init_method_std": model.init_method_std,
        "window_size": None if model.window is None else [model.window - 1, 0],
        "window_attn_skip_freq": _pattern(model.window_pattern),
        "num_moe_experts": None,
    }
    for name, value in (
        ("rotary_base", model.rotary_base),
        ("rotary_percent", model.rotary_percent),
        ("rope_scaling_factor", model.rope_scaling_factor),
    ):
        found |= {} if value is None else {name: value}
    if (experts := model.experts) is not None:
        found |= {
            "num_moe_experts": experts.num_experts,
            "moe_router_topk": experts.moe_router_topk,
            "moe_ffn_hidden_size": experts.moe_ffn_hidden_size,
            "moe_layer_freq": _pattern(experts.pattern) or 1,
            "moe_shared_expert_intermediate_size": experts.moe_shared_expert_intermediate_size,
            "moe_router_pre_softmax": experts.moe_router_pre_softmax,
            "moe_router_load_balancing_type": "aux_loss",
            "moe_router_dtype": "fp32",
            "moe_token_dispatcher_type": experts.moe_token_dispatcher_type,
            "moe_grouped_gemm": True,
        }
    return found


def _pattern(pattern: tuple[int, ...] | None) -> list[int] | None:
    """1 and 0 for each layer; None where it is 1 for all."""
    return None if pattern is None or all(pattern) else list(pattern)
