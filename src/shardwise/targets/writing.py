"""What all exports share: the head of a file, refusals, and the check against the capability file."""

from __future__ import annotations

import posixpath
import shlex
from collections.abc import Iterator

from shardwise.errors import ConfigError
from shardwise.inputs import printable, short_repr
from shardwise.plans import Plan, plan_hash
from shardwise.strategy import PACKED_SAMPLES, Target, target_of
from shardwise.units import format_bytes, format_seconds

WRITTEN_BY = "Written by shardwise export"
"""A text in every file that `export` writes; it never replaces files without it."""


def head_lines(plan: Plan, target: Target) -> Iterator[str]:
    """The first lines of a file: its target, the hash of the plan and the prediction."""
    yield f"{WRITTEN_BY} for the target {target.name} ({target.command})."
    yield f"Plan: {plan_hash(plan)}"
    yield step_time_line(plan)
    peak = plan.best.peak_memory
    yield f"Predicted peak memory: {format_bytes(peak.device)} of {format_bytes(peak.capacity)} per device."
    if plan.job.is_packed:
        yield f"Attention is predicted within packed samples of {plan.job.mean_sample_len} tokens:"
        yield _BOUNDARIES[target.name.startswith("megatron")]
    yield "Predictions only: this file was not run on hardware."


_BOUNDARIES = {
    True: "the data must give their boundaries (cu_seqlens), as --sft of Megatron-LM does.",
    False: "position_ids must restart with each sample (DataCollatorWithFlattening), with FlashAttention.",
}
"""How the software learns where packed samples end: Megatron-LM, and modules of Transformers."""


def step_time_line(plan: Plan) -> str:
    """The line with the predicted step time, and the software profile that it is the prediction of."""
    best = plan.best
    band = " to ".join(map(format_seconds, best.band_s))
    return f"Predicted step time: {best.step_time_s:.6g} s (band {band}; profile {plan.job.profile.name})."


def refusal(target: Target, key: str, found: object, allowed: str) -> ConfigError:
    """The error for a value that cannot be exported, with its key in the plan file."""
    return ConfigError(
        f"cannot be exported to {target.command}", key=key, found=short_repr(found), allowed=allowed
    )


def check_plan(plan: Plan, name: str) -> Target:
    """The target for the model and the job of a uniform plan. ConfigError for the first value of the plan
    that the capability file excludes."""
    strategy, job = plan.best.strategy, plan.job
    target = target_of(name).for_job(plan.model, job)
    for key, found, known in (
        ("job.dtype", job.dtype, target.dtypes),
        ("job.optimizer", job.optimizer, target.optimizers),
        ("model.config.model_type", plan.model.family, target.families),
    ):
        if found not in known:
            raise refusal(target, key, found, ", ".join(known))
    if not target.runs_on(plan.cluster.vendors):
        raise refusal(target, "cluster", ", ".join(plan.cluster.classes), target.known_devices)
    if job.is_packed and PACKED_SAMPLES in target.lacks:
        allowed = f"{job.seq_len}, the sequence length"
        raise refusal(target, "job.mean_sample_len", job.mean_sample_len, allowed)
    for part in plan.model.special_parts:
        if part in target.lacks:
            raise refusal(target, "model.config", part, "models without it")
    for option, value in job.profile.options.items():
        values = target.options.get(option, {})
        if value not in values:
            key = f"job.profile.options.{option}"
            raise refusal(target, key, value, ", ".join(values) or "a plan without this option")
    for unsupported in target.refusals(strategy):
        raise refusal(
            target,
            f"best.strategy.{unsupported.key}",
            getattr(strategy, unsupported.key),
            unsupported.allowed,
        )
    devices = strategy.tp * strategy.cp * strategy.dp * strategy.pp
    if plan.cluster.devices != devices:
        raise refusal(
            target, "cluster", f"{plan.cluster.devices} devices", f"{devices}, as tp * cp * dp * pp"
        )
    return target


def path_in(folder: str, name: str) -> str:
    """The path of a file in `folder`, with a slash, so that no program looks for it elsewhere."""
    path = posixpath.join(folder, name)
    return path if path.startswith(("/", "./", "../")) else f"./{path}"


def on_python_path(folder: str) -> str:
    """The bash command by which Python finds modules in `folder`. ConfigError where it cannot."""
    if ":" in folder:
        raise ConfigError(
            "cannot be a folder of PYTHONPATH", key="--files", found=printable(folder),
            allowed="a folder without a colon",
        )  # fmt: skip
    return f"export PYTHONPATH={shlex.quote(folder)}${{PYTHONPATH:+:$PYTHONPATH}}"
