"""Fits software costs to measured steps.

`calibration_plans` and `accelerator_plans` are small plans of one device for these measurements.
`software_costs` and `queued_costs` fit the time of a step beyond its kernels, and `with_dispatch` the host's
time per kernel. `logged_times` reads step times from the log of
`train --log`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import log
from statistics import fmean, median

from shardwise import search
from shardwise.accuracy.calibration.curves import coefficients
from shardwise.cluster import Cluster, Device
from shardwise.errors import ConfigError
from shardwise.inputs import Fields, parse_mapping, printable, short_repr
from shardwise.model import model_from_config
from shardwise.plans import Plan
from shardwise.strategy import Job, Profile, complete, parse_fields

# Software costs
_MICROSECOND = 1e-6
_MILLISECOND = 1e-3

Variant = Callable[[Device, Profile], tuple[Device, Profile]]


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredStep:
    """A plan that ran, and the seconds of a typical step of its run."""

    plan: Plan
    seconds: float


def _launches(device: Device, profile: Profile, seconds: float) -> tuple[Device, Profile]:
    return replace(device, efficiency=replace(device.efficiency, launch_s=seconds)), profile


def _without_costs(profile: Profile) -> Profile:
    """`profile` without costs: no memory-bound work and no host time."""
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
"""Changes that set one unit of each fitted number: one memory pass, 1 ms per action, 1 ms per step."""


def software_costs(steps: Sequence[MeasuredStep], device: Device, profile: Profile) -> tuple[Device, Profile]:
    """`device` and `profile` with software costs fitted to `steps`.

    Fitted are the launch per kernel, the passes of memory-bound operators, and the host's seconds per action
    and per step. A step's time is linear in them where nothing overlaps, as on one device. `dispatch_s` is 0:
    the launch contains the host's dispatch, since such software waits for its kernels.
    """
    nothing, base = _launches(device, _without_costs(profile), 0.0)
    launch, *software = _units(steps, nothing, base, (_OF_LAUNCHES, *_OF_SOFTWARE))
    return _launches(device, _with_units(base, software), launch * _MICROSECOND)


def queued_costs(steps: Sequence[MeasuredStep], device: Device, profile: Profile) -> Profile:
    """`profile` with software costs fitted to `steps`, for a device with a kernel queue.

    The launch per kernel stays that of the device, which measured kernels determine. The kernels of `steps`
    take longer than the host needs to queue them."""
    base = _without_costs(profile)
    return _with_units(base, _units(steps, device, base, _OF_SOFTWARE))


def _units(
    steps: Sequence[MeasuredStep], device: Device, profile: Profile, variants: Sequence[Variant]
) -> tuple[float, ...]:
    """The units of each of the `variants` of `device` and `profile` that fit `steps` best.

    Raises ConfigError for too few steps."""
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
    """`profile` with this number of units of each variant of `_OF_SOFTWARE`."""
    passes, action, step = units
    return replace(
        profile,
        pointwise_passes=passes,
        host_action_s=action * _MILLISECOND,
        host_step_s=step * _MILLISECOND,
    )


LONGEST_DISPATCH_S = 1e-2
"""Upper bound of the host's seconds per kernel."""


def with_dispatch(steps: Sequence[MeasuredStep], device: Device, profile: Profile) -> Profile:
    """`profile` with the host's seconds per kernel (`dispatch_s`) fitted to `steps`.

    The kernels of `steps` are shorter than the time in which the host queues them. The geometric mean of
    predicted over measured time becomes 1. `profile` stays unchanged where kernels alone take at least the
    measured time."""

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


_HALVINGS = 40
"""Bisection steps of `with_dispatch`."""


def predicted_step_s(plan: Plan, device: Device, profile: Profile) -> float:
    """The predicted step time of a plan on `device` with the software `profile`."""
    cluster = _with_device(plan.cluster, device)
    job = replace(plan.job, profile=profile)
    return search.evaluate(plan.model, cluster, job, plan.best.strategy).step_time_s


def step_errors(steps: Sequence[MeasuredStep], device: Device, profile: Profile) -> Mapping[str, float]:
    """The number of `steps`, their seconds, and the mean and worst relative error of the predicted ones."""
    errors = [abs(predicted_step_s(step.plan, device, profile) / step.seconds - 1.0) for step in steps]
    return {
        "times": len(steps),
        "mean_error": fmean(errors),
        "worst_error": max(errors),
        "seconds": sum(step.seconds for step in steps),
    }


def _with_device(cluster: Cluster, device: Device) -> Cluster:
    return replace(cluster, classes={name: device for name in cluster.classes})


# Plans for calibration
@dataclass(frozen=True, slots=True)
class _Case:
    """A small plan for one device: a GPT, or a Llama where it `is_gated`, with its batch."""

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
"""Cases for CPUs: few and many micro-batches, narrow and wide layers, few and many parameters.

A step takes a fraction of a second. The last case has many short actions; it separates the cost of an action
from that of a step and of its kernels."""

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
"""Cases for accelerators: their kernels take longer than the host needs to queue them."""

MEMORY_SHARE = 0.9
"""Share of an accelerator's memory that plans may use, since other programs may use the memory too."""

_HOST_CASES = (
    _Case(4, 256, 128, 512, 4, 4),
    _Case(8, 128, 64, 512, 2, 8),
    _Case(12, 256, 64, 512, 2, 4),
)
"""Cases whose steps are host-bound: an accelerator finishes each kernel before the host queues the next."""


def calibration_plans(cluster: Cluster, profile: Profile) -> list[Plan]:
    """Plans for one CPU of `cluster` in fp32, without parallelism and recomputation."""
    return [case.plan(cluster, profile, "fp32", head_dim=64, dropout=0.1) for case in _CPU_CASES]


@dataclass(frozen=True, slots=True, kw_only=True)
class AcceleratorPlans:
    """Plans for one accelerator: the steps of `large` plans are bound by kernels, those of `small` plans by
    the host."""

    large: Sequence[Plan]
    small: Sequence[Plan]


def accelerator_plans(cluster: Cluster, profile: Profile, dtype: str) -> AcceleratorPlans:
    """The plans for an accelerator of `cluster` that fit in its memory.

    They have no dropout, since our runtime does not apply it."""

    def fitting(cases: Sequence[_Case]) -> list[Plan]:
        plans = [case.plan(cluster, profile, dtype, head_dim=128, dropout=0.0) for case in cases]
        peaks = [plan.best.peak_memory for plan in plans]
        return [
            plan
            for plan, peak in zip(plans, peaks, strict=True)
            if peak.device < MEMORY_SHARE * peak.capacity
        ]

    return AcceleratorPlans(large=fitting(_ACCELERATOR_CASES), small=fitting(_HOST_CASES))


# Logs of training
_SECONDS = {"low": 1e-9, "high": 1e9}


def logged_times(text: str, *, file: str) -> Mapping[float, float]:
    """The median measured step time for each predicted step time in `text`, the content of `file`; seconds.

    The first quarter of the steps is warm-up and does not count. A last line that an interrupted run left
    incomplete is skipped. ConfigError names the first wrong line.
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
            found=short_repr(line.strip()[:60]), allowed="one step per line",
        ) from None  # fmt: skip
    fields = Fields(mapping, file=file, key=f"line {number}")
    fields.integer("step", low=1)
    return fields.number("predicted_s", **_SECONDS), fields.number("step_time_s", **_SECONDS)
