"""Read-back: Megatron-LM parses exported flags in a child process (`megatron_lm_reader`), and its values are
compared with those of the plan.

The values come from Megatron-LM's own arguments and configuration, never from the exported flags. Entry
points: `read_by_megatron_lm`, `read_back`.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from shardwise.cost import has_fused_attention
from shardwise.model import MODULES, NO_MODULES, OFFLOADED, set_text
from shardwise.plans import Plan
from shardwise.strategy import Strategy, acting_options
from shardwise.targets.child_process import Reader
from shardwise.targets.megatron_lm import (
    ARGS,
    CP_COMM_TYPES,
    MAPPED_ORDER,
    OPTIMIZERS,
    OWN_ORDER,
    effective_order,
    overlaps,
    stage_layers,
)
from shardwise.targets.megatron_lm_model import TARGET, MegatronExperts, MegatronModel, megatron_model
from shardwise.targets.read_back import ReadBack, ReadBackDifference, compared, rejected

READER = Reader(
    module="shardwise.targets.megatron_lm_reader",
    software="Megatron-LM",
    install="pip install megatron-core==0.19.* numpy packaging einops, on Python 3.12 with PyTorch for a GPU",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReaderRequest:
    """Flags that Megatron-LM reads as those of a run on `world_size` devices."""

    flags: tuple[str, ...]
    world_size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """Megatron-LM's result: its arguments after validation; the fields of its TransformerConfig; the names
    of layers by pipeline rank and chunk, where a layout was given; decoder layers by pipeline rank and
    chunk; and the padded vocabulary. Where it rejected the flags, `error` is one line and all else is
    empty."""

    arguments: Mapping[str, Any] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)
    layout: tuple[tuple[tuple[str, ...], ...], ...] | None = None
    layers: tuple[tuple[int, ...], ...] = ()
    padded_vocab_size: int | None = None
    error: str | None = None


def read_by_megatron_lm(
    requests: Sequence[ReaderRequest], *, environment: Mapping[str, str] | None = None
) -> list[Reading]:
    """Megatron-LM's reading of each request, in one child process with this `environment` (None: that of this
    process). Raises as `Reader.answers`."""
    replies = READER.answers([asdict(request) for request in requests], environment=environment)
    return [_reading(reply) for reply in replies]


def _reading(reply: Mapping[str, Any]) -> Reading:
    if "error" in reply:
        return Reading(error=reply["error"])
    layout = reply["layout"]
    return Reading(
        arguments=reply["arguments"],
        config=reply["config"],
        layout=None if layout is None else tuple(tuple(map(tuple, rank)) for rank in layout),
        layers=tuple(map(tuple, reply["layers"])),
        padded_vocab_size=reply["padded_vocab_size"],
    )


_MOMENTS = {4.0: "fp32", 2.0: "bf16"}
"""Bytes of a moment and its dtype."""

_DTYPES = {"torch.float32": "fp32", "torch.bfloat16": "bf16", "torch.float16": "fp16"}


FOR_READING = ("--no-rope-fusion",)
"""Flags that are added only for reading back. The fused RoPE kernel needs Transformer Engine, which a
machine that only reads flags may lack."""


def reader_request(plan: Plan, flags: tuple[tuple[str, ...], ...]) -> ReaderRequest:
    """The request for Megatron-LM to read the flags of `plan`."""
    words = tuple(word for flag in flags for word in flag)
    return ReaderRequest(flags=words + FOR_READING, world_size=plan.cluster.devices)


def read_files_back(
    plan: Plan, files: Mapping[str, str], *, environment: Mapping[str, str] | None = None
) -> ReadBack:
    """Compare `plan` with what Megatron-LM reads in its file of flags. Raises as `Reader.answers`."""
    words = tuple(shlex.split(files[ARGS], comments=True))
    (reading,) = read_by_megatron_lm([reader_request(plan, (words,))], environment=environment)
    return read_back(plan, reading)


def read_back(plan: Plan, reading: Reading, *, overlapped: tuple[bool, bool] | None = None) -> ReadBack:
    """Compare every exported value of `plan` with the value that Megatron-LM read. `overlapped` is whether
    gradients are reduced, and parameters gathered, during computation (None: as without FSDP)."""
    if reading.error is not None:
        return rejected(reading.error)
    reduces, gathers = overlapped or overlaps(plan.best.strategy, plan.job)
    planned = {
        **_of_plan(plan),
        "gradients reduced during computation": reduces,
        "parameters gathered during computation": gathers,
    }
    return compared(planned, _of_reading(plan, reading))


def differences(plan: Plan, reading: Reading) -> tuple[ReadBackDifference, ...]:
    """The values of `plan` that Megatron-LM read differently."""
    return read_back(plan, reading).differences


def _of_plan(plan: Plan) -> dict[str, object]:
    job, strategy = plan.job, plan.best.strategy
    model = megatron_model(plan.model, seq_len=job.seq_len)
    options = acting_options(TARGET, job.profile, strategy)
    return {
        **_values("model", model),
        "job.seq_len": job.seq_len,
        "job.global_batch_size": job.global_batch_size,
        "job.dtype": job.dtype,
        "job.optimizer": job.optimizer,
        "job.profile.reduce_in_fp32": job.dtype == "fp32" or job.profile.reduce_in_fp32,
        "dtypes of moments": [_MOMENTS[job.profile.moment_bytes]] * 2,
        "communication of tensor parallelism overlaps": options.get("tp_comm_overlap") == "on",
        "communication of expert parallelism overlaps": options.get("ep_overlap") == "on",
        "CUDA graphs": _GRAPHS[options.get("cuda_graph", "none")],
        "modules on the host": options.get("offload_modules", "none"),
        "fused attention": has_fused_attention(plan.cluster, plan.job.profile),
        "devices": plan.cluster.devices,
        **{f"strategy.{name}": value for name, value in asdict(strategy).items()},
        "layers of stages": stage_layers(strategy, plan.model.layers),
    }


def _of_reading(plan: Plan, reading: Reading) -> dict[str, object]:
    read = reading.arguments
    # Ranks have chunks; stages are in model order, chunk by chunk over the ranks.
    stages = tuple(rank[chunk] for chunk in range(len(reading.layers[0])) for rank in reading.layers)
    strategy = _strategy(plan.best.strategy, reading)
    optimizers = {name: ours for ours, name in OPTIMIZERS.items()}
    dtype = _DTYPES.get(read["params_dtype"], read["params_dtype"])
    low_precision = read["fp8"] or read["fp4"]
    return {
        **_values("model", _model(reading, plan.job.seq_len)),
        "job.seq_len": read["seq_length"],
        "job.global_batch_size": read["global_batch_size"],
        "job.dtype": f"{dtype} with {low_precision}" if low_precision else dtype,
        "job.optimizer": optimizers.get(read["optimizer"], read["optimizer"]),
        "job.profile.reduce_in_fp32": dtype == "fp32" or bool(read["accumulate_allreduce_grads_in_fp32"]),
        "dtypes of moments": [_DTYPES.get(read[f"exp_avg{kind}_dtype"]) for kind in ("", "_sq")],
        "communication of tensor parallelism overlaps": read["tp_comm_overlap"],
        "communication of expert parallelism overlaps": read["overlap_moe_expert_parallel_comm"],
        "CUDA graphs": (read.get("cuda_graph_impl", "none"), _graphed_modules(read)),
        "modules on the host": _moved(reading),
        "fused attention": read["attention_backend"] in ("auto", "flash", "fused"),
        "gradients reduced during computation": read["overlap_grad_reduce"],
        "parameters gathered during computation": read["overlap_param_gather"],
        "devices": read["world_size"],
        **{f"strategy.{name}": value for name, value in strategy.items()},
        "layers of stages": stages,
    }


_GRAPHS: dict[str, tuple[str, tuple[str, ...]]] = {
    "none": ("none", ()),
    "modules": ("transformer_engine", ("attn", "moe_preprocess", "moe_router")),
    "full_iteration": ("full_iteration", ()),
}
"""The implementation and the modules of the graphs of each value of `cuda_graph`."""


def _graphed_modules(read: Mapping[str, Any]) -> tuple[str, ...]:
    """The modules of the graphs, which a run without graphs may have too; none where graphs are whole."""
    if read.get("cuda_graph_impl", "none") == "none":
        return ()
    given = read.get("cuda_graph_modules") or ()
    names = [given] if isinstance(given, str) else given
    return tuple(sorted({str(name).rpartition(".")[2] for name in names} - {"full"}))


def _values(prefix: str, model: MegatronModel) -> dict[str, object]:
    """The fields of a model, including those of its experts."""
    own = {f"{prefix}.{field.name}": getattr(model, field.name) for field in fields(MegatronModel)}
    experts = own.pop(f"{prefix}.experts")
    for size in fields(MegatronExperts):
        own[f"{prefix}.{size.name}"] = None if experts is None else getattr(experts, size.name)
    return own


def _strategy(planned: Strategy, reading: Reading) -> dict[str, object]:
    """The fields of a Strategy. An order of ranks that gives every rank the same place as the plan's is
    shown as the plan's."""
    read = reading.arguments
    vpp = read["virtual_pipeline_model_parallel_size"] or 1
    copies = read["data_parallel_size"] * read["context_parallel_size"]
    shards = _shards(read, copies)
    granularity = read["recompute_granularity"]
    has_experts = read["num_experts"] is not None
    order = MAPPED_ORDER if read["use_tp_pp_dp_mapping"] else OWN_ORDER
    is_same_order = effective_order(planned, order) == effective_order(planned, planned.axis_order)
    kinds = {name: kind for kind, name in CP_COMM_TYPES.items()}
    comm_type = reading.config["cp_comm_type"]
    return {
        "tp": read["tensor_model_parallel_size"],
        "pp": read["pipeline_model_parallel_size"],
        "vpp": vpp,
        "cp": read["context_parallel_size"],
        "cp_kind": kinds.get(str(comm_type), comm_type),
        "ep": read["expert_model_parallel_size"],
        "etp": read["expert_tensor_parallel_size"] if has_experts else 1,
        "dp": read["data_parallel_size"],
        **shards,
        "micro_batch_size": read["micro_batch_size"],
        "schedule": "interleaved_1f1b" if vpp > 1 else "1f1b",
        "sequence_parallel": read["sequence_parallel"],
        "recompute": granularity or "none",
        "recompute_modules": _modules(reading),
        "recompute_layers": _recomputed(read),
        "offload": _offload(read),
        "axis_order": planned.axis_order if is_same_order else order,
        "first_stage_layers": reading.layers[0][0],
        "last_stage_layers": reading.layers[-1][-1],
    }


def _shards(read: Mapping[str, Any], copies: int) -> dict[str, object]:
    """Sharding degrees of parameters, gradients and optimizer states."""
    if read["use_torch_fsdp2"]:
        return dict.fromkeys(("param_shard", "grad_shard", "optim_shard"), copies)
    instances = read["num_distributed_optimizer_instances"]
    shard: object = copies // instances if copies % instances == 0 else f"{copies} / {instances}"
    if not read["use_megatron_fsdp"]:
        return {
            "param_shard": 1,
            "grad_shard": 1,
            "optim_shard": shard if read["use_distributed_optimizer"] else 1,
        }
    strategy = read["data_parallel_sharding_strategy"]
    is_outer = instances > 1 and read["outer_dp_sharding_strategy"] == "optim"
    return {
        "param_shard": shard if strategy == "optim_grads_params" else 1,
        "grad_shard": shard if strategy in ("optim_grads", "optim_grads_params") else 1,
        "optim_shard": copies if is_outer else 1 if strategy == "no_shard" else shard,
    }


def _recomputed(read: Mapping[str, Any]) -> object:
    """Layers of a chunk with full recomputation."""
    if read["recompute_granularity"] != "full":
        return 0
    layers = read["recompute_num_layers"]
    return layers if read["recompute_method"] == "block" else f"{read['recompute_method']} {layers}"


def _modules(reading: Reading) -> str:
    """The set of named modules that are recomputed; names that we do not know come last."""
    if reading.arguments["recompute_granularity"] != "selective":
        return NO_MODULES
    names = [str(name) for name in reading.config["recompute_modules"]]
    known = set_text(names)
    return "+".join(filter(None, (known, *(name for name in names if name not in MODULES))))


def _moved(reading: Reading) -> str:
    """The modules whose saved tensors go to the host, all of them in every pipeline stage."""
    read = reading.arguments
    if not read["fine_grained_activation_offloading"]:
        return "none"
    names = [str(name) for name in reading.config["offload_modules"] or ()]
    sizes = read["min_offloaded_tensor_size"], read["activation_offload_fraction"]
    others = (f"with {value}" for value in sizes if value not in (2**20, 1.0))
    known = [name for name in OFFLOADED if name in names]
    return "+".join((*known, *(name for name in names if name not in OFFLOADED), *others))


def _offload(read: Mapping[str, Any]) -> str:
    states = read["optimizer_cpu_offload"] and read["optimizer_offload_fraction"] == 1
    activations = read["cpu_offloading_num_layers"]
    if states and activations:
        return "both"
    return "optimizer" if states else "activations" if activations else "none"


def _model(reading: Reading, seq_len: int) -> MegatronModel:
    read, config = reading.arguments, reading.config
    is_rotary = read["position_embedding_type"] == "rope"
    layers = read["num_layers"]
    window, pattern = _window(config, layers, seq_len)
    return MegatronModel(
        num_layers=layers,
        hidden_size=config["hidden_size"],
        ffn_hidden_size=config["ffn_hidden_size"],
        num_attention_heads=config["num_attention_heads"],
        num_query_groups=config["num_query_groups"],
        kv_channels=config["kv_channels"],
        padded_vocab_size=reading.padded_vocab_size or 0,
        untie_embeddings_and_output_weights=read["untie_embeddings_and_output_weights"],
        max_position_embeddings=read["max_position_embeddings"],
        position_embedding_type=read["position_embedding_type"],
        rotary_base=read["rotary_base"] if is_rotary else None,
        rotary_percent=read["rotary_percent"] if is_rotary else None,
        rope_scaling_factor=read["rope_scaling_factor"] if is_rotary and read["use_rope_scaling"] else None,
        normalization=config["normalization"],
        norm_epsilon=config["layernorm_epsilon"],
        qk_layernorm=config["qk_layernorm"],
        swiglu=config["gated_linear_unit"] and config["activation_func"] == "silu",
        exact_gelu=not config["gated_linear_unit"] and not config["bias_activation_fusion"],
        add_bias_linear=config["add_bias_linear"],
        add_qkv_bias=config["add_qkv_bias"],
        attention_dropout=config["attention_dropout"],
        hidden_dropout=config["hidden_dropout"],
        init_method_std=config["init_method_std"],
        window=window,
        window_pattern=pattern,
        experts=_experts(config, layers),
    )


def _window(
    config: Mapping[str, Any], layers: int, seq_len: int
) -> tuple[int | None, tuple[int, ...] | None]:
    """Keys of a query where they are below the sequence length, and which layers are windowed."""
    if config["window_size"] is None:
        return None, None
    before, after = config["window_size"]
    if after != 0 or not 0 <= before < seq_len - 1:
        return None, None
    freq = config["window_attn_skip_freq"]
    if freq is None:
        return before + 1, (1,) * layers
    if isinstance(freq, int):
        return before + 1, tuple(int(layer % freq != 0) for layer in range(1, layers + 1))
    return before + 1, tuple(freq)


def _experts(config: Mapping[str, Any], layers: int) -> MegatronExperts | None:
    if config["num_moe_experts"] is None:
        return None
    freq = config["moe_layer_freq"]
    return MegatronExperts(
        num_experts=config["num_moe_experts"],
        moe_router_topk=config["moe_router_topk"],
        moe_ffn_hidden_size=config["moe_ffn_hidden_size"],
        pattern=(
            tuple(int(layer % freq == 0) for layer in range(layers)) if isinstance(freq, int) else tuple(freq)
        ),
        moe_shared_expert_intermediate_size=config["moe_shared_expert_intermediate_size"],
        moe_router_pre_softmax=config["moe_router_pre_softmax"],
        moe_token_dispatcher_type=config["moe_token_dispatcher_type"],
    )
