"""Import of Accelerate's YAML: the inverse of `fsdp2.fsdp2_files`. Files with FSDP of version 1 and with DDP
are read too.

The script, not the file, has the model, the batch and the sequence length.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import Any

from shardwise.errors import ConfigError
from shardwise.inputs import parse_mapping
from shardwise.targets.fsdp2 import PRECISIONS, TARGET
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
    if kind not in KINDS:
        allowed = "FSDP, MULTI_GPU; with DEEPSPEED, review its JSON"
        raise ConfigError("is not read", key="distributed_type", found=kind, allowed=allowed)
    require_devices("num_processes", read.integer("num_processes"), devices)
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
    batch = chosen("global_batch_size", None, supplied.global_batch_size, "--global-batch-size")
    return ImportedRun(
        target=TARGET,
        model=model,
        fields={"micro_batch_size": 1, **fields, **given},
        seq_len=chosen("seq_len", None, supplied.seq_len, "--seq-len"),
        global_batch_size=batch,
        dtype=_dtype(read),
        optimizer="adamw",
        profile={},
        names=NAMES,
        findings=tuple(_findings(read, sizes, fsdp, supplied)),
    )


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
        raise ConfigError("is not predicted", key="mixed_precision", found=found, allowed=", ".join(ours))
    return ours[found]


def _findings(
    read: FileSection, sizes: FileSection, fsdp: FileSection, supplied: Supplied
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
            text="only the offload of optimizer states is predicted",
        )  # fmt: skip
    if "micro_batch_size" not in supplied.fields:
        yield assumed(NAMES["micro_batch_size"], "1 sequence: --fix micro_batch_size=N for another")
