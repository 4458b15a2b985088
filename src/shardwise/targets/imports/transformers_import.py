"""Import of a `DistributedConfig` of Transformers in Python text: the inverse of
`transformers.transformers_files`. The text is parsed, never run.

Trainer arguments, not this file, have the batch, recomputation and the optimizer (`trainer_import`).
"""

from __future__ import annotations

import ast
import warnings
from collections.abc import Mapping
from typing import Any

from shardwise.errors import ConfigError
from shardwise.model import Model, model_from_config
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
from shardwise.targets.transformers import TARGET

CALL = "DistributedConfig"

NAMES = {
    "tp": "tp_size",
    "ep": "ep_size",
    "dp": "dp_replicate_size",
    "param_shard": "fsdp_size",
    "optim_shard": "fsdp_size",
    "micro_batch_size": "per_device_train_batch_size of the Trainer",
    "recompute": "activation_checkpointing of the Trainer",
    "offload": "fsdp_cpu_offload",
    "global_batch_size": "--global-batch-size",
    "seq_len": "sequence_length",
}
"""Fields of a strategy or a job, and the argument of each."""

ARGUMENTS = {
    "tp_size", "fsdp_size", "dp_replicate_size", "pp_size", "ep_size", "ep_implementation",
    "fsdp_mixed_precision", "fsdp_cpu_offload",
}  # fmt: skip
"""Arguments of `DistributedConfig` that a prediction follows."""


def is_transformers(text: str) -> bool:
    """Whether the text is Python with a `DistributedConfig`."""
    return f"{CALL}(" in text


def read_transformers(text: str, *, devices: int, supplied: Supplied) -> ImportedRun:
    """The run that the `DistributedConfig` describes, on `devices`. Raises ConfigError, with the argument,
    for a value that cannot be used."""
    read, names = _call(text), _constants(text)
    tp, pp = read.count("tp_size"), read.count("pp_size")
    shards, replicas = read.count("fsdp_size"), read.count("dp_replicate_size")
    if pp > 1:
        raise ConfigError("is not predicted", key="pp_size", found=str(pp), allowed="1")
    require_devices("tp_size * fsdp_size * dp_replicate_size", tp * shards * replicas, devices)
    model = _model(names, supplied)
    dp = shards * replicas
    fields: dict[str, Any] = {
        "tp": tp, "dp": dp, "ep": read.count("ep_size"), "sequence_parallel": False,
        "param_shard": shards, "grad_shard": shards, "optim_shard": shards,
        "offload": "optimizer" if read.is_on("fsdp_cpu_offload") else "none",
    }  # fmt: skip
    findings = [
        ignored(name, "no prediction follows this argument") for name in read.values if name not in ARGUMENTS
    ]
    if read.is_on("fsdp_cpu_offload"):
        findings.append(
            ReviewFinding(
                code="approximated", severity="info", field="fsdp_cpu_offload",
                text="only the offload of optimizer states is predicted",
            )
        )  # fmt: skip
    if "micro_batch_size" not in supplied.fields:
        findings.append(
            assumed(NAMES["micro_batch_size"], "1 sequence: --fix micro_batch_size=N for another")
        )
    length = names.get("sequence_length")
    return ImportedRun(
        target=TARGET,
        model=model,
        fields={"micro_batch_size": 1, **supplied.fields, **fields},
        seq_len=chosen(
            "sequence_length", length if isinstance(length, int) else None, supplied.seq_len, "--seq-len"
        ),
        global_batch_size=supplied.batch(dp),
        dtype="bf16" if read.is_on("fsdp_mixed_precision") else "fp32",
        optimizer="adamw",
        profile={},
        names=NAMES,
        findings=tuple(findings),
    )


def _call(text: str) -> FileSection:
    """The arguments of the first `DistributedConfig`."""
    for node in ast.walk(_parsed(text)):
        if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] == CALL:
            if node.args or any(word.arg is None for word in node.keywords):
                raise ConfigError("has arguments without names", key=CALL, allowed="NAME=VALUE arguments")
            return FileSection({str(word.arg): _value(str(word.arg), word.value) for word in node.keywords})
    raise ConfigError("has no call", key=CALL, allowed=f"{CALL}(tp_size=..., ...)")


def _constants(text: str) -> dict[str, Any]:
    """Names at the top of the text that are assigned literals."""
    found: dict[str, Any] = {}
    for node in _parsed(text).body:
        if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
            try:
                found[node.targets[0].id] = ast.literal_eval(node.value)
            except ValueError:  # not a literal
                continue
    return found


def _parsed(text: str) -> ast.Module:
    try:
        with warnings.catch_warnings(action="ignore", category=SyntaxWarning):
            return ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise ConfigError("is not Python", key=CALL, allowed="a Python file") from None


def _value(name: str, node: ast.expr) -> object:
    try:
        return ast.literal_eval(node)
    except ValueError:
        raise ConfigError(
            "is no literal", key=name, found=ast.unparse(node)[:40], allowed="a number, true or false"
        ) from None


def _model(names: Mapping[str, Any], supplied: Supplied) -> Model:
    config = names.get("model_config")
    if supplied.model is None and isinstance(config, dict):
        return model_from_config(config, name=str(config.get("_name_or_path", "model_config")))
    return model_of_file(supplied.model, f"a {CALL}")
