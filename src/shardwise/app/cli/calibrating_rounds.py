"""Kernels and steps of small plans, piece by piece on every rank at a time, and what all pieces tell."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import TYPE_CHECKING

from shardwise import accuracy
from shardwise.accuracy import MeasuredStep
from shardwise.app.cli.calibrating_ranks import Ranks
from shardwise.app.cli.calibrating_steps import StepMeasurement
from shardwise.cluster import Device, load_cluster
from shardwise.strategy import Profile

if TYPE_CHECKING:
    from shardwise.measure import KernelTimes

ONE_DEVICE = "1x1xcpu"
"""What the small plans are for: each rank's own device."""


@dataclass(frozen=True, slots=True)
class MeasuredMachine:
    """A measured `device` and its software. `measured` says how much was, and how well curves explain it;
    `steps_s` are the seconds of a step of each small plan."""

    device: Device
    profile: Profile
    measured: Mapping[str, object]
    steps_s: tuple[float, ...]


class KernelMeasurement:
    """What ranks take for kernels and for steps of small plans, measured on all of them at a time, as they
    share caches and cores when they train.

    A round is each of `measurements` once: a machine that others use too is faster and slower from second to
    second and from minute to minute, so rounds are many and pieces short, and may have other work between
    them."""

    def __init__(self, ranks: Ranks, *, threads: int) -> None:
        profile = accuracy.eager_profile()
        plans = accuracy.calibration_plans(load_cluster(ONE_DEVICE), profile)
        self.steps = StepMeasurement(ranks, plans, threads=threads)
        self._ranks, self._threads, self._profile = ranks, threads, profile
        self._kernels: list[list[KernelTimes]] = []

    @property
    def measurements(self) -> int:
        """A piece for each small plan, and one for all kernels."""
        return len(self.steps.plans) + 1

    def measure(self, measurement: int) -> None:
        """Measure the piece of this number; every rank calls this."""
        if measurement < len(self.steps.plans):
            self.steps.measure(measurement)
            return
        from shardwise.measure import KernelTimes

        found = self._ranks.run_in_group(_kernel_times, self._threads)
        self._kernels.append([KernelTimes.of_values(each) for each in found])

    def found(self, device: Device) -> MeasuredMachine:
        """`device` with what all rounds so far tell of it, by those ranks whose device has speed 1: medians
        of kernels of the one in the middle, and of steps of the slowest each time."""
        from shardwise.measure import KernelTimes

        median_rank = self.steps.median_rank()
        times = KernelTimes.typical([of[median_rank] for of in self._kernels])
        seconds = self.steps.slowest()
        curves = accuracy.kernel_curves(times.matmuls, times.passes)
        attention = accuracy.attention_curve(
            times.attentions, launch_s=curves.launch_s, flop_per_s=curves.flop_per_s
        )
        device = accuracy.with_kernels(device, curves, attention, bf16_ratio=times.bf16_ratio)
        taken = [
            MeasuredStep(plan=plan, seconds=each)
            for plan, each in zip(self.steps.plans, seconds, strict=True)
        ]
        device, profile = accuracy.software_costs(taken, device, self._profile)
        errors = [
            abs(accuracy.predicted_step_s(step.plan, device, profile) / step.seconds - 1.0) for step in taken
        ]
        measured = {
            "matmuls": {
                "times": len(times.matmuls),
                "mean_error": accuracy.mean_error(curves.matmul_s, times.matmuls),
            },
            "steps": {
                "times": len(taken),
                "mean_error": fmean(errors),
                "worst_error": max(errors),
                "seconds": sum(seconds),
            },
        }
        return MeasuredMachine(device, profile, measured, tuple(seconds))


def _kernel_times(report: object, threads: int) -> dict[str, object]:
    from shardwise.measure import group_timer, kernel_times, use_threads

    use_threads(threads)
    return asdict(kernel_times(group_timer(batches=2)))
