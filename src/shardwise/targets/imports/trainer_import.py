"""Import of arguments of the Hugging Face Trainer in JSON or YAML, alone or with the other file of the run
(transformers 5.23.0: training_args.py, integrations/deepspeed.py).

The Trainer has batch, precision, optimizer and recomputation. How the run is sharded follows from `fsdp`,
from `deepspeed`, or from the other file: a `DistributedConfig`, a JSON of DeepSpeed, a YAML of Accelerate.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from shardwise.errors import ConfigError
from shardwise.inputs import parse_mapping, read_mapping, short_repr
from shardwise.model import parameters
from shardwise.strategy import PROFILES
from shardwise.targets.imports.accelerate_import import STRATEGIES, read_accelerate
from shardwise.targets.imports.deepspeed_import import is_deepspeed, read_deepspeed
from shardwise.targets.imports.imported import (
    FileSection,
    ImportedRun,
    ReviewFinding,
    Supplied,
    assumed,
    ignored,
)
from shardwise.targets.imports.transformers_import import is_transformers
from shardwise.units import format_bytes

BATCH, STEPS = "per_device_train_batch_size", "gradient_accumulation_steps"

DEFAULT_BATCH = 8
"""Sequences of a micro-batch where the arguments name none; the Trainer's default."""

SGD = ("sgd",)

ADAMW = ("adamw_torch", "adamw_torch_fused", "adamw_torch_xla", "adamw_anyprecision", "adamw_hf")
"""Values of `optim` with fp32 moments of AdamW."""

COMPILED = "torchtitan-0.3"
"""The software profile of layers that are compiled."""

REMOVED = (
    "adafactor", "fp16_backend", "fp16_opt_level", "fsdp_min_num_params",
    "fsdp_transformer_layer_cls_to_wrap", "half_precision_backend", "no_cuda", "per_gpu_train_batch_size",
    "sharded_ddp", "tpu_num_cores",
)  # fmt: skip
"""Arguments of version 4 that version 5 does not have."""

FSDP_KEYS = {
    "activation_checkpointing", "auto_wrap_policy", "cpu_offload", "cpu_ram_efficient_loading",
    "min_num_params", "reshard_after_forward", "state_dict_type", "transformer_layer_cls_to_wrap", "version",
    "xla", "xla_fsdp_grad_ckpt", "xla_fsdp_settings", "xla_fsdp_v2",
}  # fmt: skip
"""Keys of `fsdp_config` that `_process_fsdp_args` reads, without their prefix `fsdp_`."""

FSDP_1_KEYS = {
    "backward_prefetch", "forward_prefetch", "limit_all_gathers", "sync_module_states", "use_orig_params"
}  # fmt: skip
"""Further keys that it reads for FSDP of version 1."""

NAMES = {
    "micro_batch_size": BATCH,
    "global_batch_size": STEPS,
    "recompute": "activation_checkpointing",
    "dp": "number of processes",
    "optim_shard": "fsdp",
    "tp": "parallelism_config.tp_size",
    "cp": "parallelism_config.cp_size",
}
"""Fields of a strategy or a job, and the argument of each."""

_LACKED = ("micro_batch_size", "global_batch_size")

RENAMED = {
    "micro-batch size in the script": BATCH,
    "gradient accumulation in the script": STEPS,
    "train_micro_batch_size_per_gpu": BATCH,
    "gradient checkpointing in the script": "activation_checkpointing",
    "per_device_train_batch_size of the Trainer": BATCH,
    "activation_checkpointing of the Trainer": "activation_checkpointing",
}
"""Keys of other files that stand for arguments of the Trainer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerArguments:
    """Arguments of the Trainer, without the values that shard the run. `steps` are micro-batches of a step,
    `dtype` is None where neither bf16 nor fp16 is on, `recompute` has fields of the strategy."""

    read: FileSection
    micro_batch_size: int
    steps: int
    dtype: str | None
    optimizer: str
    seq_len: int | None
    is_compiled: bool
    recompute: Mapping[str, Any]
    findings: tuple[ReviewFinding, ...]

    @property
    def is_recomputed(self) -> bool:
        return bool(self.recompute["recompute"] == "full")

    def supplied(self, given: Supplied) -> Supplied:
        """What the arguments and the user supply to the reader of the other file."""
        fields = {**given.fields, "micro_batch_size": self.micro_batch_size, **self.recompute}
        seq_len = self.seq_len if given.seq_len is None else given.seq_len
        return replace(given, seq_len=seq_len, fields=fields, micro_batches=self.steps)


def is_trainer(text: str) -> bool:
    """Whether the text is JSON or YAML with arguments of the Trainer."""
    return any(
        _is_key(text, name) for name in (BATCH, "activation_checkpointing", "gradient_checkpointing")
    ) and (not is_transformers(text))


def _is_key(text: str, name: str) -> bool:
    """Whether a line of YAML begins with the key, or JSON has it at all."""
    if text.lstrip().startswith("{"):
        return f'"{name}"' in text
    return any(line.startswith(f"{name}:") for line in text.splitlines())


def read_trainer(text: str, *, devices: int, supplied: Supplied) -> ImportedRun:
    """The run of the arguments alone, on `devices`: with DeepSpeed, with FSDP, else with whole states on all
    ranks. Raises ConfigError, with the argument, for a value that cannot be used."""
    found = trainer_arguments(text)
    own = found.supplied(supplied)
    deepspeed = found.read.values.get("deepspeed")
    if deepspeed:
        config = _mapping("deepspeed", deepspeed, supplied.folder)
        run = _with_deepspeed(found, config, devices=devices, supplied=own, prefix="deepspeed.")
        if found.read.values.get("fsdp"):
            run = _adding(run, ignored("fsdp", "Accelerate starts DeepSpeed where both are set"))
        return _adding(run, *found.findings, *found.read.misspelt())
    config, findings = _accelerate(found, supplied.folder)
    with _renamed_keys():
        run = read_accelerate(json.dumps(config), devices=devices, supplied=own)
    names = {
        **run.names, **NAMES, "offload": "fsdp_config.cpu_offload",
        "param_shard": "fsdp_config.reshard_after_forward",
    }  # fmt: skip
    if config["distributed_type"] != "FSDP":
        text = (
            "whole on each rank (DDP): a DistributedConfig, or a file of Accelerate or DeepSpeed, is reviewed"
        )
        findings += [assumed("fsdp", f"states are {text} with --trainer and these arguments")]
    theirs = [replace(one, field=_renamed(one.field)) for one in run.findings]
    run = replace(run, names=names, findings=(*theirs, *findings), renamed=_renamed)
    return _with_arguments(found, run)


def read_with_trainer(
    text: str, read: Callable[..., ImportedRun], *, arguments: str, devices: int, supplied: Supplied
) -> ImportedRun:
    """The run of another file, which `read` reads, with arguments of the Trainer. Raises ConfigError as both
    readers do."""
    found = trainer_arguments(arguments)
    own = found.supplied(supplied)
    sharding = [name for name in ("fsdp", "deepspeed", "parallelism_config") if found.read.values.get(name)]
    if is_deepspeed(text):
        sharding = [name for name in sharding if name != "deepspeed"]
        run = _with_deepspeed(found, parse_mapping(text), devices=devices, supplied=own, prefix="")
        run = _adding(run, *found.findings, *found.read.misspelt())
    else:
        run = read(text, devices=devices, supplied=own)
        run = replace(run, names={**run.names, **{name: NAMES[name] for name in _LACKED}}, renamed=_named)
        run = _with_arguments(found, run)
    if sharding:
        raise ConfigError(
            "shards the run too", key=sharding[0], found=short_repr(found.read.values[sharding[0]]),
            allowed="one file that shards the run: review the arguments alone",
        )  # fmt: skip
    return run


def trainer_arguments(text: str) -> TrainerArguments:
    """The arguments in JSON or YAML. Raises ConfigError, with the argument, for a value that cannot be
    used."""
    read = FileSection(parse_mapping(text))
    accelerator = read.section("accelerator_config")
    if accelerator.is_on("split_batches"):
        raise ConfigError(
            "is not predicted", key=accelerator.key("split_batches"), found="true", allowed="false"
        )
    kwargs = accelerator.section("gradient_accumulation_kwargs")
    optimizer = read.text("optim", ADAMW[0])
    recompute, findings = _recomputation(read)
    return TrainerArguments(
        read=read,
        micro_batch_size=read.count(BATCH, DEFAULT_BATCH),
        steps=kwargs.count("num_steps", read.count(STEPS)),
        dtype="fp16" if read.is_on("fp16") else "bf16" if read.is_on("bf16") else None,
        optimizer="sgd" if optimizer in SGD else "adamw",
        seq_len=read.integer("max_length", read.integer("max_seq_length")),
        is_compiled=read.is_on("torch_compile") or bool(read.text("torch_compile_backend")),
        recompute=recompute,
        findings=(*findings, *_findings(read, optimizer)),
    )


def _recomputation(read: FileSection) -> tuple[dict[str, Any], list[ReviewFinding]]:
    """Fields of recomputation, and what is wrong with its arguments; the old name counts where the new one is
    not set."""
    new, old = "activation_checkpointing", "gradient_checkpointing"
    name = new if read.values.get(new) is not None else old
    kwargs = f"{new}_kwargs" if read.values.get(f"{new}_kwargs") is not None else f"{old}_kwargs"
    findings = []
    if name == new and read.values.get(old) not in (None, read.values[new]):
        findings.append(ignored(old, f"{new} is set too, and counts"))
    if not read.is_on(name):
        if read.values.get(kwargs):
            findings.append(ignored(kwargs, f"{new} is off"))
        return {"recompute": "none"}, findings
    settings = read.section(kwargs)
    if settings.count("every_n_layers") > 1:
        findings.append(
            _approximated(settings.key("every_n_layers"), "every layer is predicted as recomputed")
        )
    offload = {"offload": "activations"} if settings.is_on("offload") else {}
    return {"recompute": "full", **offload}, findings


def _findings(read: FileSection, optimizer: str) -> Iterator[ReviewFinding]:
    if BATCH not in read.values:
        yield assumed(BATCH, f"{DEFAULT_BATCH} sequences, the Trainer's default")
    if read.is_on("bf16") and read.is_on("fp16"):
        yield _refused("bf16", "the Trainer refuses bf16 with fp16")
    steps = read.section("accelerator_config").section("gradient_accumulation_kwargs")
    if "num_steps" in steps.values and read.count(STEPS) > 1:
        yield _refused(steps.key("num_steps"), f"the Trainer refuses it with {STEPS}")
    if optimizer not in (*ADAMW, *SGD):
        yield _approximated("optim", f"{short_repr(optimizer)} is predicted as AdamW with moments in fp32")
    if read.is_on("auto_find_batch_size"):
        yield _approximated(
            "auto_find_batch_size", f"the Trainer may make {BATCH} smaller; it is predicted as given"
        )
    if {"max_length", "max_seq_length"} & set(read.values) and not read.is_on("packing"):
        yield assumed("packing", "all sequences have the largest length; without packing they are shorter")
    for name in REMOVED:
        if name in read.values:
            yield ReviewFinding(
                code="removed_key", severity="error", field=name,
                text="Transformers 5 has no such argument, and its parser refuses it",
            )  # fmt: skip


# With DeepSpeed


def _with_deepspeed(
    found: TrainerArguments, config: Mapping[str, Any], *, devices: int, supplied: Supplied, prefix: str
) -> ImportedRun:
    """The run of a DeepSpeed configuration whose `auto` values are those of the Trainer. The Trainer refuses
    values that differ from its own (`HfTrainerDeepSpeedConfig`)."""
    findings = []
    filled: dict[str, Any] = {}
    own = {
        "train_micro_batch_size_per_gpu": (BATCH, found.micro_batch_size),
        STEPS: (STEPS, found.steps),
        "train_batch_size": (
            f"{BATCH} * {STEPS} * processes",
            devices * found.micro_batch_size * found.steps,
        ),
    }
    for name, value in config.items():
        filled[name] = value
        if name in own:
            argument, ours = own[name]
            filled[name] = ours
            if value not in ("auto", None, ours):
                findings.append(
                    _refused(prefix + name, f"{value} is not {argument} = {ours}; the Trainer refuses it")
                )
    for dtype in ("bf16", "fp16"):
        enabled = FileSection(config.get(dtype) or {}, prefix + dtype).values.get("enabled")
        if enabled == "auto":
            filled[dtype] = {**config[dtype], "enabled": found.dtype == dtype}
        elif enabled is not None and enabled is not (found.dtype == dtype):
            findings.append(
                _refused(
                    f"{prefix}{dtype}.enabled", f"{enabled} is not {dtype} of the Trainer, which refuses it"
                )
            )
    if found.dtype is not None and not {"bf16", "fp16"} & set(config):
        filled[found.dtype] = {"enabled": True}
    filled["train_micro_batch_size_per_gpu"], filled[STEPS] = found.micro_batch_size, found.steps
    run = read_deepspeed(json.dumps(filled), devices=devices, supplied=supplied)
    theirs = {name: prefix + key for name, key in run.names.items()}
    named = ("micro_batch_size", "global_batch_size", "recompute")
    return replace(
        _compiled(found, run),
        optimizer=run.optimizer if "optimizer" in config else found.optimizer,
        names={**theirs, **{name: NAMES[name] for name in named}},
        findings=(*(replace(one, field=prefix + one.field) for one in run.findings), *findings),
        renamed=_named,
    )  # fmt: skip


# With FSDP


def _accelerate(found: TrainerArguments, folder: str) -> tuple[dict[str, Any], list[ReviewFinding]]:
    """The arguments of FSDP as a configuration of Accelerate, and what is wrong with them."""
    read, findings = found.read, list[ReviewFinding]()
    config: dict[str, Any] = {"distributed_type": "MULTI_GPU", "mixed_precision": found.dtype or "no"}
    given = read.values.get("fsdp_config")
    options = {} if not given else dict(_mapping("fsdp_config", given, folder))
    fsdp = {name.removeprefix("fsdp_"): value for name, value in options.items()}
    sizes = read.section("parallelism_config").values
    if sizes:
        config["parallelism_config"] = {
            name if name.startswith("parallelism_config_") else f"parallelism_config_{name}": value
            for name, value in sizes.items()
        }
        findings.append(
            assumed("parallelism_config", "the script makes it of these sizes; the Trainer takes no mapping")
        )
    items = read.values.get("fsdp")
    if not items or items == "false":
        if fsdp:
            findings.append(ignored("fsdp_config", "fsdp is off"))
        return config, findings
    version = FileSection(fsdp, "fsdp_config").count("version", 2)
    known = FSDP_KEYS if version >= 2 else FSDP_KEYS | FSDP_1_KEYS
    findings += [
        ignored(f"fsdp_config.{name}", f"the Trainer does not read this key for FSDP {version}")
        for name in fsdp
        if name not in known
    ]
    findings += _older(items, fsdp, version)
    if fsdp.get("activation_checkpointing") in (True, "true"):
        if found.is_recomputed:
            findings.append(
                _refused("activation_checkpointing", "the Trainer refuses it with that of fsdp_config")
            )
    elif found.is_recomputed:
        findings.append(
            ReviewFinding(
                code="repeated_gather", severity="warning", field="activation_checkpointing",
                text="FSDP gathers weights once more for it, not for fsdp_config.activation_checkpointing",
            )
        )  # fmt: skip
    names = {"cpu_offload": "offload_params"}
    config |= {
        "distributed_type": "FSDP",
        "fsdp_config": {
            "fsdp_version": version,
            **{f"fsdp_{names.get(name, name)}": value for name, value in fsdp.items()},
        },
    }
    return config, findings


def _older(items: object, fsdp: dict[str, Any], version: int) -> Iterator[ReviewFinding]:
    """What a text or a list of `fsdp` adds to `fsdp_config` where that has no value."""
    for item in items.split() if isinstance(items, str) else items if isinstance(items, list) else ():
        name = str(item).lower()
        if name == "offload":
            fsdp.setdefault("cpu_offload", True)
        elif name.upper() in STRATEGIES:
            if version < 2:
                fsdp.setdefault("reshard_after_forward", name.upper())
            elif name in ("full_shard", "shard_grad_op"):
                fsdp.setdefault("reshard_after_forward", name == "full_shard")
            else:
                yield _refused("fsdp", f"the Trainer has {name} for FSDP 1 alone")
        elif name not in ("auto_wrap", "true"):
            yield _refused("fsdp", f"the Trainer knows no {short_repr(item)}")


# With any of them


def _with_arguments(found: TrainerArguments, run: ImportedRun) -> ImportedRun:
    """A run of FSDP or of whole states, with what the Trainer adds to the other file: precision, optimizer,
    kernels, and gradients that stay whole between micro-batches."""
    run = replace(_compiled(found, run), optimizer=found.optimizer, dtype=found.dtype or run.dtype)
    findings = [*found.findings, *found.read.misspelt()]
    accumulation = found.read.section("accelerator_config").section("gradient_accumulation_kwargs")
    is_sharded = run.fields.get("zero_stage", 3) > 0 and run.fields.get("param_shard", 2) > 1
    if (
        found.steps > 1
        and is_sharded
        and not accumulation.is_on("sync_each_batch")
        and not _has_replicas(run)
    ):
        # PyTorch holds them in the dtype in which it reduces (_fsdp_param.py: to_accumulated_grad_if_needed).
        each = 2 if run.options.get("grad_reduce_dtype") == "bf16" else 4
        whole = parameters(run.model) // int(run.fields.get("tp", 1)) * each
        findings.append(
            ReviewFinding(
                code="whole_gradients", severity="warning", field=STEPS,
                text=f"gradients stay whole between micro-batches, {format_bytes(whole)} on each rank; they"
                " are predicted as sharded, as gradient_accumulation_kwargs.sync_each_batch has them",
            )
        )  # fmt: skip
    return _adding(run, *findings)


def _has_replicas(run: ImportedRun) -> bool:
    """Whether a model that Transformers shards has replicas: then gradients are sharded in each
    micro-batch."""
    return int(run.fields.get("param_shard", run.fields["dp"])) < int(run.fields["dp"])


def _compiled(found: TrainerArguments, run: ImportedRun) -> ImportedRun:
    """The run with what compiled modules and Liger's kernels change."""
    profile, findings = dict(run.profile), list[ReviewFinding]()
    if found.is_compiled:
        compiled = PROFILES[COMPILED]
        profile |= {
            "pointwise_passes": compiled.pointwise_passes,
            "eager_modules": False,
            "loss": compiled.loss,
        }
        findings.append(
            _approximated("torch_compile", "compiled modules are predicted as those of TorchTitan")
        )
    if found.read.is_on("use_liger_kernel"):
        profile["loss"] = "fused"
    return replace(run, profile=profile, findings=(*run.findings, *findings))


def _mapping(name: str, value: object, folder: str) -> Mapping[str, Any]:
    """A mapping, or that in the JSON file of this name: relative to the folder of the arguments, else to the
    working directory."""
    if isinstance(value, Mapping):
        return value
    if not isinstance(value, str):
        raise ConfigError(
            "is no mapping", key=name, found=short_repr(value), allowed="a mapping, or a JSON file"
        )
    near = os.path.join(folder, value)
    try:
        return read_mapping(near if os.path.exists(near) else value)
    except ConfigError as error:
        raise error.within(key=name) from None


def _named(key: str) -> str:
    """The argument of the Trainer for what no other file has; the key itself for others."""
    return RENAMED.get(key, key)


def _renamed(key: str) -> str:
    """The argument of the Trainer for a key of Accelerate's YAML."""
    key = _named(key).replace("fsdp_config.fsdp_offload_params", "fsdp_config.cpu_offload")
    return key.replace("fsdp_config.fsdp_", "fsdp_config.").replace(
        "parallelism_config.parallelism_config_", "parallelism_config."
    )


@contextmanager
def _renamed_keys() -> Iterator[None]:
    """Errors name arguments of the Trainer."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(
            error.message, key=None if error.key is None else _renamed(error.key), found=error.found,
            allowed=error.allowed,
        ) from None  # fmt: skip


def _adding(run: ImportedRun, *findings: ReviewFinding) -> ImportedRun:
    return replace(run, findings=(*run.findings, *findings))


def _refused(field: str, text: str) -> ReviewFinding:
    return ReviewFinding(code="refused", severity="error", field=field, text=text)


def _approximated(field: str, text: str) -> ReviewFinding:
    return ReviewFinding(code="approximated", severity="info", field=field, text=text)
