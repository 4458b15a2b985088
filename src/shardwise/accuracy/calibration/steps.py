"""Costs of software from whole steps on one device: what a step takes beyond its kernels.

Small plans of one device whose steps tell what software costs.

The log of `train --log` read back: what steps took, by the step time that their plan predicted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import exp, log, sqrt
from statistics import fmean, median

from shardwise import search
from shardwise.accuracy.calibration.curves import coefficients
from shardwise.accuracy.calibration.device import max_speed_factor, with_speed
from shardwise.cluster import Cluster, Device
from shardwise.errors import ConfigError
from shardwise.inputs import Fields, parse_mapping, printable, short_repr
from shardwise.model import model_from_config
from shardwise.plans import Plan
from shardwise.strategy import Job, Profile, complete, parse_fields

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


@dataclass(frozen=True, slots=True)
class _Case:
    """A small transformer, a strategy of one device, and a batch: one step that tells what software costs.
    It is a GPT, or, where it `is_gated`, a Llama."""

    layers: int
    hidden: int
    seq_len: int
    vocab: int
    micro_batch_size: int
    global_batch_size: int
    is_gated: bool = False

    def plan(self, cluster: Cluster, profile: Profile, dtype: str, *, head_dim: int, dropout: float) -> Plan:
        dims: dict[str, object] = {
            "layers": self.layers, "hidden": self.hidden, "ffn": 4 * self.hidden, "vocab": self.vocab,
            "heads": max(self.hidden // head_dim, 1), "seq_len": self.seq_len, "dropout": dropout,
        }  # fmt: skip
        if self.is_gated:
            dims |= {"gated": True, "norm": "rmsnorm", "positions": "rope", "bias": False}
        model = model_from_config(dims, name=f"{self.layers}x{self.hidden}")
        batch = self.global_batch_size
        job = Job(seq_len=self.seq_len, global_batch_size=batch, dtype=dtype, profile=profile)
        strategy = complete(
            parse_fields(f"micro_batch_size={self.micro_batch_size}"), devices=1, layers=self.layers,
            experts=None, global_batch_size=batch,
        )  # fmt: skip
        return search.plan_of_strategy(model, cluster, job, strategy)


_CPU_CASES = (
    _Case(4, 256, 128, 512, 4, 4),
    _Case(4, 256, 128, 512, 1, 4),
    _Case(2, 512, 256, 512, 1, 2),
    _Case(2, 128, 64, 512, 8, 8),
    _Case(8, 128, 64, 512, 2, 8),
    _Case(1, 768, 128, 2048, 2, 4),
    _Case(1, 128, 64, 512, 1, 32),
)
"""Few and many microbatches, narrow and wide layers, few and many parameters: a fraction of a second each.
The last has many actions and little in each: without it what an action takes is hardly told from what a step
and its kernels do."""

_ACCELERATOR_CASES = (
    _Case(2, 4096, 2048, 8192, 8, 8),
    _Case(2, 4096, 2048, 8192, 2, 8),
    _Case(4, 2048, 2048, 32768, 4, 8),
    _Case(8, 1024, 1024, 8192, 32, 32),
    _Case(2, 2048, 4096, 49152, 4, 8),
    _Case(1, 6144, 2048, 4096, 4, 8),
    _Case(6, 1536, 1024, 4096, 16, 64),
    _Case(4, 2048, 2048, 8192, 4, 8, is_gated=True),
    _Case(2, 4096, 4096, 16384, 2, 4, is_gated=True),
    _Case(8, 1024, 2048, 32768, 8, 16, is_gated=True),
    _Case(4, 2048, 2048, 32768, 8, 16, is_gated=True),
    _Case(1, 5120, 2048, 32768, 4, 8, is_gated=True),
)
"""The same at the sizes of accelerators: kernels that take longer than the host needs to hand them over."""

MEMORY_SHARE = 0.9
"""Of an accelerator's memory, which others may use too."""

_HOST_CASES = (
    _Case(4, 256, 128, 512, 4, 4),
    _Case(8, 128, 64, 512, 2, 8),
    _Case(12, 256, 64, 512, 2, 4),
)
"""Kernels that an accelerator is done with long before it gets the next."""


def calibration_plans(cluster: Cluster, profile: Profile) -> list[Plan]:
    """Plans for one processor of `cluster`, in fp32, without anything that is divided or recomputed."""
    return [case.plan(cluster, profile, "fp32", head_dim=64, dropout=0.1) for case in _CPU_CASES]


@dataclass(frozen=True, slots=True, kw_only=True)
class AcceleratorPlans:
    """Plans for one accelerator: `large` ones, whose steps take what their kernels take, and `small` ones,
    whose steps take what the host does."""

    large: Sequence[Plan]
    small: Sequence[Plan]


def accelerator_plans(cluster: Cluster, profile: Profile, dtype: str) -> AcceleratorPlans:
    """Such plans for an accelerator of `cluster`, those that fit into its memory. Nothing is dropped out, as
    our runtime never does."""

    def fitting(cases: Sequence[_Case]) -> list[Plan]:
        plans = [case.plan(cluster, profile, dtype, head_dim=128, dropout=0.0) for case in cases]
        peaks = [plan.best.peak_memory for plan in plans]
        return [
            plan
            for plan, peak in zip(plans, peaks, strict=True)
            if peak.device < MEMORY_SHARE * peak.capacity
        ]

    return AcceleratorPlans(large=fitting(_ACCELERATOR_CASES), small=fitting(_HOST_CASES))


_SECONDS = {"low": 1e-9, "high": 1e9}


def logged_times(text: str, *, file: str) -> Mapping[float, float]:
    """The median of the measured seconds of a step for each predicted time in `text`, the content of `file`;
    the first quarter of the steps, which warms up, does not count.

    A last line that a run was ended in is left out. ConfigError names the first line that is wrong.
    """
    lines = text.split("\n")
    whole, torn = lines[:-1], lines[-1]
    numbered = [(number, line) for number, line in enumerate(whole, start=1) if line.strip()]
    if torn.strip().endswith("}"):
        numbered.append((len(lines), torn))
    records = [_record(line, number, file) for number, line in numbered]
    if not records:
        raise ConfigError("has no steps", file=printable(file), allowed="a log that train --log wrote")
    found: dict[float, list[float]] = {}
    for predicted_s, seconds in records[len(records) // 4 :]:
        found.setdefault(predicted_s, []).append(seconds)
    return {predicted_s: median(times) for predicted_s, times in found.items()}


def _record(line: str, number: int, file: str) -> tuple[float, float]:
    """Predicted and measured seconds of one line."""
    try:
        mapping = parse_mapping(line if line.lstrip().startswith("{") else "", file="line.json")
    except ConfigError as error:
        raise ConfigError(
            f"is not a JSON object: {error.message}", file=printable(file), key=f"line {number}",
            found=short_repr(line.strip()[:60]), allowed="a step a line",
        ) from None  # fmt: skip
    fields = Fields(mapping, file=file, key=f"line {number}")
    fields.integer("step", low=1)
    return fields.number("predicted_s", **_SECONDS), fields.number("step_time_s", **_SECONDS)
