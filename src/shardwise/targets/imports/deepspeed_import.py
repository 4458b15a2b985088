"""Import of DeepSpeed's JSON: the inverse of `deepspeed.deepspeed_files`.

The script, not the file, has the model, the sequence length and recomputation.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from shardwise.errors import ConfigError
from shardwise.inputs import parse_mapping, short_repr
from shardwise.targets.deepspeed import OPTIMIZERS, TARGET
from shardwise.targets.hugging_face import NOTES
from shardwise.targets.imports.imported import (
    FileSection,
    ImportedRun,
    ReviewFinding,
    Supplied,
    assumed,
    chosen,
    ignored,
    model_of_file,
)

NAMES = {
    "dp": "train_batch_size",
    "tp": "tensor_parallel.autotp_size",
    "optim_shard": "zero_optimization.stage",
    "param_shard": "zero_optimization.stage",
    "micro_batch_size": "train_micro_batch_size_per_gpu",
    "recompute": "gradient checkpointing in the script",
    "offload": "zero_optimization.offload_optimizer",
    "global_batch_size": "train_batch_size",
    "seq_len": "--seq-len",
}
"""Fields of a strategy or a job, and the key of each."""

KNOWN = frozenset((
    NOTES, "activation_checkpointing", "aio", "amp", "autotuning", "bf16", "bfloat16", "checkpoint", "comet",
    "comms_logger", "communication_data_type", "compile", "compression_training", "csv_monitor",
    "curriculum_learning", "data_efficiency", "data_types", "dataloader_drop_last", "disable_allgather",
    "dump_state", "eigenvalue", "elasticity", "expert_parallel", "flops_profiler", "fp16",
    "gradient_accumulation_steps", "gradient_clipping", "gradient_predivide_factor", "graph_harvesting",
    "hybrid_engine", "load_universal_checkpoint", "memory_breakdown", "nebula", "optimizer", "pipeline",
    "prescale_gradients", "progressive_layer_drop", "scheduler", "seq_parallel_communication_data_type",
    "sequence_parallel_size", "sparse_attention", "sparse_gradients", "steps_per_print", "tensor_parallel",
    "tensorboard", "timers", "torch_autocast", "train_batch_size", "train_micro_batch_size_per_gpu",
    "use_data_before_expert_parallelism", "use_node_local_storage", "wall_clock_breakdown", "wandb",
    "weight_quantization", "zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer",
    "zero_optimization",
))  # fmt: skip
"""Keys at the top that DeepSpeed looks up; it accepts others and ignores them."""

WIDE = {"fp32", "float32", "float"}
"""Names of fp32."""

REMOVED = {"mics_shard_size": "MiCS was removed", "mics_hierarchical_params_gather": "MiCS was removed"}
"""Keys of `zero_optimization` that this version refuses."""


def is_deepspeed(text: str) -> bool:
    """Whether the text is a JSON of DeepSpeed."""
    return text.lstrip().startswith("{") and any(
        f'"{name}"' in text
        for name in ("zero_optimization", "train_micro_batch_size_per_gpu", "train_batch_size")
    )


def read_deepspeed(text: str, *, devices: int, supplied: Supplied) -> ImportedRun:
    """The run that a JSON of DeepSpeed describes, on `devices`. Raises ConfigError, with the key, for a value
    that cannot be used."""
    read = FileSection(parse_mapping(text))
    zero = read.section("zero_optimization")
    model = model_of_file(supplied.model, "a JSON of DeepSpeed")
    tp = max(read.section("tensor_parallel").count("autotp_size", 0, low=0), 1)
    if devices % tp:
        raise ConfigError(
            "does not divide the cluster's devices",
            key=NAMES["tp"],
            found=str(tp),
            allowed=f"divisors of {devices}",
        )
    dp = devices // tp
    batch, micro, findings = _batch(read, dp, supplied)
    fields: dict[str, Any] = {"tp": tp, "dp": dp, "micro_batch_size": micro, "sequence_parallel": False}
    fields |= _states(zero)
    given = dict(supplied.fields)
    if not {"recompute", "recompute_layers"} & set(given):
        findings.append(assumed(NAMES["recompute"], "none: --fix recompute=full where the script has it"))
    return ImportedRun(
        target=TARGET,
        model=model,
        fields={**given, **fields},
        seq_len=_seq_len(supplied, model.max_seq_len),
        global_batch_size=batch,
        dtype=_dtype(read),
        optimizer=_optimizer(read, findings),
        profile={**_accumulated(read), **_unoverlapped(zero)},
        names=NAMES,
        findings=(*findings, *_key_findings(read, zero)),
        options=_options(read),
    )


def _unoverlapped(zero: FileSection) -> dict[str, Any]:
    return {} if zero.is_on("overlap_comm", True) else {"state_overlap": 0.0, "shard_overlap": 0.0}


def _accumulated(read: FileSection) -> dict[str, Any]:
    """Gradients that are accumulated in fp32, and reduced in bf16."""
    accumulated = read.section("data_types").text("grad_accum_dtype", "")
    is_wide = _dtype(read) == "bf16" and accumulated in WIDE and not _options(read)
    return {"accumulates_in_fp32": True} if is_wide else {}


def _options(read: FileSection) -> dict[str, str]:
    """Gradients in fp32, where they are both accumulated and reduced in it."""
    reduced = read.text("communication_data_type", "")
    accumulated = read.section("data_types").text("grad_accum_dtype", "")
    is_wide = _dtype(read) == "bf16" and {reduced, accumulated} <= WIDE
    return {"grad_reduce_dtype": "fp32"} if is_wide else {}


def _seq_len(supplied: Supplied, longest: int | None) -> int:
    if supplied.seq_len is None and longest is not None and longest > 8192:
        raise ConfigError("is missing: the file has none", key="--seq-len", allowed="--seq-len N")
    return chosen("seq_len", None, supplied.seq_len or longest, "--seq-len")


def _batch(read: FileSection, dp: int, supplied: Supplied) -> tuple[int, int, list[ReviewFinding]]:
    """Sequences of a step and of a micro-batch. DeepSpeed needs two of batch, micro-batch and gradient
    accumulation, and refuses three that do not agree."""
    whole = read.integer("train_batch_size")
    micro = read.integer("train_micro_batch_size_per_gpu", supplied.fields.get("micro_batch_size"))
    steps = read.integer("gradient_accumulation_steps", supplied.micro_batches)
    if whole is None and micro is not None and steps is not None:
        whole = micro * steps * dp
    batch = chosen("train_batch_size", whole, supplied.global_batch_size, "--global-batch-size")
    if micro is None:
        micro = max(batch // (dp * (steps or 1)), 1)
    if steps is not None and micro * steps * dp != batch and batch % (micro * dp) == 0:
        return batch, micro, [
            ReviewFinding(
                code="batch_does_not_divide", severity="error", field="train_batch_size",
                text=f"{batch} is not {micro} x {steps} accumulated x {dp} ranks; DeepSpeed refuses it",
            )
        ]  # fmt: skip
    return batch, micro, []


def _states(zero: FileSection) -> dict[str, Any]:
    stage = zero.count("stage", 0, low=0)
    if stage > 3:
        raise ConfigError("is no stage", key=NAMES["optim_shard"], found=str(stage), allowed="0 to 3")
    states = zero.section("offload_optimizer").text("device", "none")
    parameters = zero.section("offload_param").text("device", "none")
    if zero.is_on("cpu_offload"):
        states = "cpu"
    is_offloaded = states != "none" or parameters != "none"
    return {"zero_stage": stage, "offload": "optimizer" if is_offloaded else "none"}


def _dtype(read: FileSection) -> str:
    for key, ours in (("bf16", "bf16"), ("bfloat16", "bf16"), ("fp16", "fp16")):
        if read.section(key).values.get("enabled") in (True, "auto", "true"):
            return ours
    return "fp32"


def _optimizer(read: FileSection, findings: list[ReviewFinding]) -> str:
    name = read.section("optimizer").text("type", "AdamW")
    ours = {theirs.lower(): own for own, theirs in OPTIMIZERS.items()} | {"adam": "adamw", "auto": "adamw"}
    if name.lower() not in ours:
        findings.append(
            ReviewFinding(
                code="approximated", severity="info", field="optimizer.type",
                text=f"{short_repr(name)} is predicted as AdamW",
            )
        )  # fmt: skip
    return ours.get(name.lower(), "adamw")


def _key_findings(read: FileSection, zero: FileSection) -> Iterator[ReviewFinding]:
    for name in read.values:
        if name not in KNOWN:
            yield ignored(name, "DeepSpeed does not look this key up")
    yield from (one for one in read.misspelt() if "." in one.field)
    for name, why in REMOVED.items():
        if name in zero.values:
            yield ReviewFinding(
                code="removed_key", severity="error", field=zero.key(name),
                text=f"{why}: DeepSpeed 0.19 refuses the file",
            )  # fmt: skip
    if read.section("pipeline").values.get("stages") not in (None, "auto", 1):
        yield ignored("pipeline.stages", "only a PipelineModule of the script has stages")
    if zero.integer("zero_hpz_partition_size", 1) != 1:
        yield ReviewFinding(
            code="approximated", severity="info", field=zero.key("zero_hpz_partition_size"),
            text="secondary partitions of ZeRO++ are not predicted",
        )  # fmt: skip
    if zero.section("offload_param").text("device", "none") != "none":
        yield ReviewFinding(
            code="approximated", severity="info", field=zero.key("offload_param"),
            text="parameters on the host are not predicted, only optimizer states there: host memory grows "
            "by 2 bytes a weight (4 in fp32), and each gather takes the host link",
        )  # fmt: skip
