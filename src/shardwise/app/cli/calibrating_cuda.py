"""What `calibrate --devices cuda` does: measures the kernels of this machine's CUDA device, and what training
with our runtime takes beyond them."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from statistics import fmean, median

from shardwise import accuracy
from shardwise.accuracy import AcceleratorPlans, MeasuredStep
from shardwise.app.cli.calibrating_from import CalibrationResult, only_class
from shardwise.app.cli.request import OWN_TARGET
from shardwise.cluster import Device, load_cluster
from shardwise.errors import ConfigError
from shardwise.plan import Plan
from shardwise.strategy import Profile, target_of

STEPS = 8
"""Of a plan."""

WARMING_UP = 4
"""Steps before them."""

MIN_PLANS = 6
"""Large ones that fit into the memory, by which software is told."""


def calibrate_accelerator(cluster: str | None) -> CalibrationResult:
    """What kernels reach of the peaks of the known device that the driver names, and what our runtime takes
    on it; `cluster` says which device it is where that name tells nothing.

    The software of other trainers has profiles of its own; links are measured by nccl-tests.
    """
    from shardwise.measure import accelerator_name, accelerator_times, torch_version

    name = accelerator_name()
    device = _device(name, cluster)
    dtype = "bf16" if "bf16" in device.peak_flop_per_s else "fp16"
    times = accelerator_times(dtype)
    curves = accuracy.kernel_curves(
        times.matmuls, times.passes, number_bytes=2.0, tiles=accuracy.tiles_of(device)
    )
    attention = accuracy.attention_curve(
        times.attentions, launch_s=curves.launch_s, flop_per_s=device.peak_flop_per_s[dtype]
    )
    device = accuracy.with_accelerated_kernels(device, curves, attention, dtype=dtype)
    measured: dict[str, object] = {
        "matmuls": {
            "times": len(times.matmuls),
            "mean_error": accuracy.mean_error(curves.matmul_s, times.matmuls),
        }
    }
    profile = None
    plans = accuracy.accelerator_plans(load_cluster(f"1x1x{device.name}"), _unmeasured(), dtype)
    if dtype == "bf16" and len(plans.large) >= MIN_PLANS:  # what our runtime computes in, and has room for
        profile, measured["steps"] = _software(device, plans)
    return CalibrationResult(
        device=device,
        profile=profile,
        machine=f"{name}, {dtype}, PyTorch {torch_version()}, {datetime.now(UTC):%Y-%m-%d}",
        measured=measured,
    )


def _unmeasured() -> Profile:
    """Our runtime, before its numbers are found."""
    return target_of(OWN_TARGET).run_by(accuracy.eager_profile())


def _software(device: Device, plans: AcceleratorPlans) -> tuple[Profile, object]:
    """What steps of our runtime take beyond kernels, and how close the steps are that tell it."""
    large, small = _taken([*plans.large, *plans.small], len(plans.large))
    profile = accuracy.with_dispatch(small, device, accuracy.queued_costs(large, device, _unmeasured()))
    errors = [
        abs(accuracy.predicted_step_s(step.plan, device, profile) / step.seconds - 1.0) for step in large
    ]
    return profile, {
        "times": len(large),
        "mean_error": fmean(errors),
        "worst_error": max(errors),
        "seconds": sum(step.seconds for step in large),
    }


def _taken(plans: Sequence[Plan], large: int) -> tuple[list[MeasuredStep], list[MeasuredStep]]:
    """The typical steps of the first `large` plans, and of the others."""
    from shardwise.runtime import WorkerPool

    with WorkerPool(1) as team:
        seconds = [median(team.run(1, _steps_s, plan)[0]) for plan in plans]
    steps = [MeasuredStep(plan=plan, seconds=each) for plan, each in zip(plans, seconds, strict=True)]
    return steps[:large], steps[large:]


def _steps_s(report: object, plan: Plan) -> list[float]:
    from shardwise.runtime import timed_steps

    return list(timed_steps(plan, steps=STEPS, warming_up=WARMING_UP).seconds)


def _device(name: str, cluster: str | None) -> Device:
    if cluster is not None:
        return only_class(load_cluster(cluster))
    try:
        return accuracy.device_named(name)[0]
    except ConfigError:
        raise ConfigError(
            "is not known by its name", key="--devices", found=name, allowed="--cluster 1x1xDEVICE"
        ) from None
