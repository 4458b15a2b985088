"""Costs of software from whole steps on one device: what a step takes beyond its kernels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import exp, log, sqrt
from statistics import fmean

from shardwise import search
from shardwise.accuracy.calibration.record import max_speed_factor, with_speed
from shardwise.accuracy.calibration.solve import coefficients
from shardwise.cluster import Cluster, Device
from shardwise.errors import ConfigError
from shardwise.plan import Plan
from shardwise.strategy import Profile

_MICROSECOND = 1e-6
_MILLISECOND = 1e-3

Variant = Callable[[Device, Profile], tuple[Device, Profile]]


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredStep:
    """A plan that ran, and the seconds of its typical step."""

    plan: Plan
    seconds: float


def _launches(device: Device, profile: Profile, seconds: float) -> tuple[Device, Profile]:
    return replace(device, efficiency=replace(device.efficiency, launch_s=seconds)), profile


def _without_costs(profile: Profile) -> Profile:
    """Software that takes nothing: no memory-bound work, no time of the host."""
    return replace(
        profile,
        pointwise_passes=0.0,
        dispatch_s=0.0,
        expert_dispatch_s=0.0,
        host_action_s=0.0,
        host_step_s=0.0,
    )


_OF_LAUNCHES: Variant = lambda device, profile: _launches(device, profile, _MICROSECOND)  # noqa: E731

_OF_SOFTWARE: tuple[Variant, ...] = (
    lambda device, profile: (device, replace(profile, pointwise_passes=1.0)),
    lambda device, profile: (device, replace(profile, host_action_s=_MILLISECOND)),
    lambda device, profile: (device, replace(profile, host_step_s=_MILLISECOND)),
)
"""One unit of each number that is found, on top of nothing."""


def software_costs(steps: Sequence[MeasuredStep], device: Device, profile: Profile) -> tuple[Device, Profile]:
    """`device` and `profile` with the launch per kernel, the passes of memory-bound operators, and the host's
    seconds per action and per step with which the times of `steps` are closest to the measured ones.

    A step's time is linear in these while nothing is hidden beside anything, as on one device. The host hands
    kernels over within their launch here (`dispatch_s` is 0): such software waits for its kernels.
    """
    nothing, base = _launches(device, _without_costs(profile), 0.0)
    launch, *software = _units(steps, nothing, base, (_OF_LAUNCHES, *_OF_SOFTWARE))
    return _launches(device, _with_units(base, software), launch * _MICROSECOND)


def queued_costs(steps: Sequence[MeasuredStep], device: Device, profile: Profile) -> Profile:
    """The same of a device that the host queues kernels for: their launch is the device's own, as its kernels
    alone tell it, and `steps` are of kernels that take longer than the host needs to hand them over."""
    base = _without_costs(profile)
    return _with_units(base, _units(steps, device, base, _OF_SOFTWARE))


def _units(
    steps: Sequence[MeasuredStep], device: Device, profile: Profile, variants: Sequence[Variant]
) -> tuple[float, ...]:
    """How many units of each of the `variants` of `device` and `profile` explain `steps` best. ConfigError
    for too few."""
    if len({step.plan.best.strategy for step in steps}) < 2 or len(steps) <= len(variants):
        raise ConfigError("are too few", key="measured steps", allowed=f"more than {len(variants)}")
    known_s = [predicted_step_s(step.plan, device, profile) for step in steps]
    columns = [
        [
            predicted_step_s(step.plan, *variant(device, profile)) - known
            for step, known in zip(steps, known_s, strict=True)
        ]
        for variant in variants
    ]
    return coefficients(columns, [step.seconds for step in steps], known_s=known_s)


def _with_units(profile: Profile, units: Sequence[float]) -> Profile:
    """`profile` with so many of what `_OF_SOFTWARE` has one of each."""
    passes, action, step = units
    return replace(
        profile,
        pointwise_passes=passes,
        host_action_s=action * _MILLISECOND,
        host_step_s=step * _MILLISECOND,
    )


LONGEST_DISPATCH_S = 1e-2
"""Of a kernel."""


def with_dispatch(steps: Sequence[MeasuredStep], device: Device, profile: Profile) -> Profile:
    """`profile` with the host's seconds per kernel with which the predicted times of `steps`, whose kernels
    are done sooner than the host hands them over, are the measured ones in the geometric mean. 0 where
    kernels alone take as long as that."""

    def excess(seconds: float) -> float:
        slower = replace(profile, dispatch_s=seconds)
        return fmean(log(predicted_step_s(step.plan, device, slower) / step.seconds) for step in steps)

    if not steps or excess(0.0) >= 0.0:
        return profile
    low, high = 0.0, LONGEST_DISPATCH_S
    for _ in range(_HALVINGS):
        middle = (low + high) / 2.0
        low, high = (low, middle) if excess(middle) > 0.0 else (middle, high)
    return replace(profile, dispatch_s=low)


SLOWEST = 0.05
"""Of the known speed: a step that takes longer is not slow for its kernels."""

_HALVINGS = 40


def device_speed(steps: Sequence[MeasuredStep], device: Device) -> float:
    """How many times as fast as they are known the kernels of `device` are, where the predicted times of
    `steps` are the measured ones in the geometric mean; each with the software of its plan.

    One number tells only that: what a step takes for communication and the host stays as it is known. A
    faster device never takes longer, so that the number is found by halving. ConfigError where no device
    explains the times: at its peak it would take longer, or it would be slower than SLOWEST.
    """

    def excess(factor: float) -> float:
        """Mean log of predicted over measured seconds."""
        faster = with_speed(device, factor)
        return fmean(
            log(predicted_step_s(step.plan, faster, step.plan.job.profile) / step.seconds) for step in steps
        )

    low, high = SLOWEST, max_speed_factor(device)
    for bound, is_outside, why in (
        (high, excess(high) > 0.0, "are shorter than at the peak of the device"),
        (low, excess(low) < 0.0, "are longer than slow kernels explain"),
    ):
        if is_outside:
            measured_s = exp(fmean(log(step.seconds) for step in steps))
            raise ConfigError(
                why, key="measured steps", found=f"{measured_s:.3g} s",
                allowed=f"{measured_s * exp(excess(bound)):.3g} s",
            )  # fmt: skip
    for _ in range(_HALVINGS):
        middle = sqrt(low * high)
        low, high = (middle, high) if excess(middle) > 0.0 else (low, middle)
    return sqrt(low * high)


def predicted_step_s(plan: Plan, device: Device, profile: Profile) -> float:
    """The plan's step time where its devices were `device` and its software `profile`."""
    cluster = _with_device(plan.cluster, device)
    job = replace(plan.job, profile=profile)
    return search.evaluate(plan.model, cluster, job, plan.best.strategy).step_time_s


def _with_device(cluster: Cluster, device: Device) -> Cluster:
    return replace(cluster, classes={name: device for name in cluster.classes})
