"""Import of Accelerate's YAML: the inverse of `fsdp2.fsdp2_files`. Files with FSDP of version 1, with DDP and
with DeepSpeed are read too.

The script, not the file, has the model, the batch and the sequence length.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from math import prod
from typing import Any

from shardwise.errors import ConfigError
from shardwise.inputs import parse_mapping, unknown
from shardwise.targets.fsdp2 import PRECISIONS, TARGET
from shardwise.targets.imports.deepspeed_import import read_deepspeed
from shardwise.targets.imports.imported import (
    FileSection,
    ImportedRun,
    ReviewFinding,
    Supplied,
    assumed,
    chosen,
    ignored,
    model_of_file,
    require_devices,
)

NAMES = {
    "dp": "num_processes",
    "tp": "parallelism_config.parallelism_config_tp_size",
    "cp": "parallelism_config.parallelism_config_cp_size",
    "optim_shard": "fsdp_config.fsdp_version",
    "param_shard": "fsdp_config.fsdp_reshard_after_forward",
    "micro_batch_size": "micro-batch size in the script",
    "recompute": "fsdp_config.fsdp_activation_checkpointing",
    "offload": "fsdp_config.fsdp_offload_params",
    "global_batch_size": "--global-batch-size",
    "seq_len": "--seq-len",
}
"""Fields of a strategy or a job, and the key of each."""

SIZES = {
    "parallelism_config_dp_replicate_size", "parallelism_config_dp_shard_size", "parallelism_config_tp_size",
    "parallelism_config_cp_size", "parallelism_config_sp_size", "parallelism_config_cp_comm_strategy",
    "parallelism_config_cp_backend", "parallelism_config_sp_backend", "parallelism_config_sp_seq_length",
    "parallelism_config_sp_seq_length_is_variable", "parallelism_config_sp_attn_implementation",
}  # fmt: skip
"""Keys of `parallelism_config` that Accelerate reads; it ignores others, such as a size of pipelines."""

KINDS = ("FSDP", "MULTI_GPU", "NO")

DEEPSPEED_KEYS = {
    "deepspeed_config_file", "deepspeed_hostfile", "deepspeed_multinode_launcher",
    "deepspeed_exclusion_filter", "deepspeed_inclusion_filter", "deepspeed_moe_layer_cls_names",
    "gradient_accumulation_steps",
    "gradient_clipping", "offload_optimizer_device", "offload_optimizer_nvme_path", "offload_param_device",
    "offload_param_nvme_path", "zero3_init_flag", "zero3_save_16bit_model", "zero_stage",
}  # fmt: skip
"""Keys of `deepspeed_config` that Accelerate reads."""

POLICY = "reduce_dtype=torch.float32"
"""What a comment of the YAML has where the script passes a policy that reduces gradients in fp32."""

STRATEGIES = {"FULL_SHARD": 3, "SHARD_GRAD_OP": 2, "NO_SHARD": 0, "HYBRID_SHARD": 3, "HYBRID_SHARD_ZERO2": 2}
"""`fsdp_sharding_strategy` of version 1, and the ZeRO stage of each."""


def is_accelerate(text: str) -> bool:
    """Whether the text is a YAML of Accelerate."""
    return not text.lstrip().startswith("{") and any(
        f"{name}:" in text for name in ("distributed_type", "compute_environment", "fsdp_config")
    )


def read_accelerate(text: str, *, devices: int, supplied: Supplied) -> ImportedRun:
    """The run that a YAML of Accelerate describes, on `devices`. Raises ConfigError, with the key, for a
    value that cannot be used."""
    read = FileSection(parse_mapping(text))
    kind = read.text("distributed_type", "NO")
    require_devices("num_processes", read.integer("num_processes"), devices)
    if kind == "DEEPSPEED":
        return _read_with_deepspeed(read, devices=devices, supplied=supplied)
    if kind not in KINDS:
        allowed = ", ".join((*KINDS[:2], "DEEPSPEED"))
        raise ConfigError("is not read", key="distributed_type", found=kind, allowed=allowed)
    model = model_of_file(supplied.model, "a YAML of Accelerate")
    sizes, fsdp = read.section("parallelism_config"), read.section("fsdp_config")
    fields = _degrees(sizes, devices)
    fields |= _states(fsdp, sizes, fields, is_fsdp=kind == "FSDP", devices_per_node=_per_node(read, devices))
    is_recomputed = fsdp.is_on("fsdp_activation_checkpointing")
    fields |= {"recompute": "full" if is_recomputed else "none", "sequence_parallel": False}
    if fsdp.is_on("fsdp_offload_params"):
        fields["offload"] = "optimizer"
    given = dict(supplied.fields)
    if is_recomputed or given.get("recompute") in ("none", fields["recompute"]):
        given.pop("recompute", None)
    return ImportedRun(
        target=TARGET,
        model=model,
        fields={"micro_batch_size": 1, **fields, **given},
        seq_len=chosen("seq_len", None, supplied.seq_len, "--seq-len"),
        global_batch_size=supplied.batch(fields["dp"]),
        dtype=_dtype(read),
        optimizer="adamw",
        profile={},
        names=NAMES,
        findings=(*_findings(read, sizes, fsdp, supplied, text), *read.misspelt()),
        options={"grad_reduce_dtype": "bf16"} if _reduces_in_bf16(read, text) else {},
    )


def _reduces_in_bf16(read: FileSection, text: str) -> bool:
    """Whether FSDP reduces gradients in bf16, as Accelerate does without a policy of the script."""
    return read.text("distributed_type") == "FSDP" and _dtype(read) == "bf16" and POLICY not in text


def _read_with_deepspeed(read: FileSection, *, devices: int, supplied: Supplied) -> ImportedRun:
    """The run of a YAML that starts DeepSpeed: its `deepspeed_config` as DeepSpeed's own JSON."""
    given = read.section("deepspeed_config")
    if (path := given.text("deepspeed_config_file", "none")) != "none":
        raise ConfigError(
            "names another file", key=given.key("deepspeed_config_file"), found=path,
            allowed="shardwise review of that file",
        )  # fmt: skip
    zero: dict[str, Any] = {"stage": given.count("zero_stage", 2, low=0)}
    for name in ("offload_optimizer", "offload_param"):
        zero[name] = {"device": given.text(f"{name}_device", "none")}
    config: dict[str, Any] = {"zero_optimization": zero}
    if (steps := given.integer("gradient_accumulation_steps")) is not None:
        config["gradient_accumulation_steps"] = steps
    dtype = _dtype(read)
    if dtype in ("bf16", "fp16"):
        config[dtype] = {"enabled": True}
    run = read_deepspeed(json.dumps(config), devices=devices, supplied=supplied)
    stage, ours = given.key("zero_stage"), ("dp", "micro_batch_size", "global_batch_size")
    names = {**{name: NAMES[name] for name in ours}, "optim_shard": stage, "param_shard": stage,
             "offload": given.key("offload_optimizer_device")}  # fmt: skip
    unknown = [name for name in given.values if name not in DEEPSPEED_KEYS]
    findings = (ignored(given.key(name), "Accelerate ignores this key") for name in unknown)
    return replace(run, names={**run.names, **names}, findings=(*run.findings, *findings))


def _per_node(read: FileSection, devices: int) -> int:
    return max(devices // read.count("num_machines"), 1)


def _degrees(sizes: FileSection, devices: int) -> dict[str, Any]:
    """Degrees of parallelism; data parallelism has the processes that no other axis has."""
    tp, cp = sizes.count("parallelism_config_tp_size"), sizes.count("parallelism_config_cp_size")
    sp = sizes.count("parallelism_config_sp_size")
    if sp > 1:
        cp = sp
    if devices % (tp * cp):
        raise ConfigError(
            "tp * cp does not divide the processes", key=NAMES["tp"], found=f"{tp} * {cp}",
            allowed=f"a divisor of {devices}",
        )  # fmt: skip
    kind = {"cp_kind": "all_to_all"} if sp > 1 else {}
    return {"tp": tp, "cp": cp, "dp": devices // (tp * cp), **kind}


def _states(
    fsdp: FileSection, sizes: FileSection, fields: dict[str, Any], *, is_fsdp: bool, devices_per_node: int
) -> dict[str, Any]:
    """ZeRO stage and replicas of the sharded states."""
    if not is_fsdp:
        return {"zero_stage": 0}
    copies = fields["dp"] * fields["cp"]
    replicas = sizes.count("parallelism_config_dp_replicate_size")
    if fsdp.count("fsdp_version") >= 2:
        text = fsdp.text("fsdp_reshard_after_forward", "true").lower()
        stage = 2 if text in ("false", "shard_grad_op") else 3
    else:
        names = dict(zip(map(str, range(1, 6)), STRATEGIES, strict=True))
        found = fsdp.text("fsdp_sharding_strategy", fsdp.text("fsdp_reshard_after_forward", "FULL_SHARD"))
        name = names.get(found, found)
        stage = STRATEGIES.get(name, 3)
        if name.startswith("HYBRID"):
            replicas = max(copies // devices_per_node, 1)
    if stage == 0 or copies % replicas:
        return {"zero_stage": 0} if stage == 0 else _bad_replicas(replicas, copies)
    return {"zero_stage": stage, **({"dp_replicate": replicas} if replicas > 1 else {})}


def _bad_replicas(replicas: int, copies: int) -> dict[str, Any]:
    raise ConfigError(
        "does not divide the data-parallel ranks",
        key="parallelism_config.parallelism_config_dp_replicate_size",
        found=str(replicas), allowed=f"divisors of {copies}",
    )  # fmt: skip


def _dtype(read: FileSection) -> str:
    found = read.text("mixed_precision", "no")
    if found in ("False", "None"):
        found = "no"  # YAML of version 1.1 writes no as false
    ours = {theirs: name for name, theirs in PRECISIONS.items()} | {"fp16": "fp16", "fp8": "fp8"}
    if found not in ours:
        raise unknown("is not predicted", found, ours, key="mixed_precision")
    return ours[found]


def _findings(
    read: FileSection, sizes: FileSection, fsdp: FileSection, supplied: Supplied, text: str
) -> Iterator[ReviewFinding]:
    for name in sizes.values:
        if name not in SIZES:
            yield ignored(sizes.key(name), "Accelerate ignores this key; the ranks are data-parallel instead")
    axes = ("dp_replicate", "dp_shard", "tp", "cp", "sp")
    each = {axis: sizes.count(f"parallelism_config_{axis}_size") for axis in axes}
    if each["dp_replicate"] > 1 and each["dp_shard"] == 1 and max(each["tp"], each["cp"]) > 1:
        yield ReviewFinding(
            code="refused", severity="error", field=sizes.key("parallelism_config_dp_replicate_size"),
            text="Accelerate refuses replicas with tp or cp without parallelism_config_dp_shard_size above 1",
        )  # fmt: skip
    product = prod(each.values())
    devices = read.integer("num_processes")
    if sizes.values and devices is not None and product != devices:
        yield ReviewFinding(
            code="unused_processes", severity="error", field="parallelism_config",
            text=f"the sizes multiply to {product} of {devices} processes",
        )  # fmt: skip
    if read.text("distributed_type") == "FSDP" and fsdp.count("fsdp_version") < 2:
        yield ReviewFinding(
            code="old_version", severity="warning", field=fsdp.key("fsdp_version"),
            text="FSDP of version 1 is predicted as version 2, which PyTorch recommends",
        )  # fmt: skip
    if fsdp.is_on("fsdp_offload_params"):
        yield ReviewFinding(
            code="approximated", severity="info", field=fsdp.key("fsdp_offload_params"),
            text="parameters on the host are not predicted, only optimizer states there: each gather takes "
            "the host link, and no shard of a parameter or gradient stays on the device",
        )  # fmt: skip
    if "micro_batch_size" not in supplied.fields:
        yield assumed(NAMES["micro_batch_size"], "1 sequence: --fix micro_batch_size=N for another")
    # The Trainer passes no policy.
    if _reduces_in_bf16(read, text) and supplied.micro_batches is None:
        yield assumed(
            "mixed_precision", f"gradients are reduced in bf16; a comment with {POLICY} says otherwise"
        )
