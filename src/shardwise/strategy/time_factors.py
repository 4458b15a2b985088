"""Factors on the parts of a step's time, which measured steps of a machine determine."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from shardwise.cluster import CollectiveCurve, Device
from shardwise.strategy.profile import Profile

MOST_OF_PEAK = 1.0
"""Largest fraction of a peak rate: a factor on kernels and links makes none faster than its data sheet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeFactors:
    """Factors on the seconds of kernels, of links in a node, of the network, and of the host; 1 changes
    nothing, 1.1 takes 10 % longer. Each is a number, or a column of numbers for problems with columns.

    The four parts are the whole of a step's time: the same factor on all of them is a factor on the step,
    except where a rate would exceed its peak."""

    kernels: Any = 1.0
    node_links: Any = 1.0
    network: Any = 1.0
    host: Any = 1.0

    def of_device(self, device: Device) -> Device:
        """`device` with these times. On CPUs, whose peaks are measured, the peaks change; on other devices
        the fractions that kernels reach of them."""
        efficiency = device.efficiency
        if device.name == "cpu":
            device = replace(
                device,
                peak_flop_per_s={name: peak / self.kernels for name, peak in device.peak_flop_per_s.items()},
                memory_bytes_per_s=device.memory_bytes_per_s / self.kernels,
            )
        else:
            efficiency = replace(
                efficiency,
                matmul=self._of_kernels(efficiency.matmul, "peak_fraction"),
                memory=self._of_kernels(efficiency.memory, "fraction"),
                attention={
                    name: self._of_kernels(curve, "forward_fraction", "backward_fraction")
                    for name, curve in efficiency.attention.items()
                },
            )
        efficiency = replace(
            efficiency,
            launch_s=efficiency.launch_s * self.kernels,
            scale_up=_of_links(efficiency.scale_up, self.node_links),
            scale_out=_of_links(efficiency.scale_out, self.network),
        )
        return replace(device, efficiency=efficiency)

    def _of_kernels(self, curve: Any, *names: str) -> Any:
        return replace(curve, **{name: _divided(getattr(curve, name), self.kernels) for name in names})

    def of_software(self, profile: Profile) -> Profile:
        """`profile` with these times of the host."""
        names = ("dispatch_s", "expert_dispatch_s", "host_action_s", "host_step_s")
        return replace(profile, **{name: getattr(profile, name) * self.host for name in names})


def _of_links(curve: CollectiveCurve, factor: Any) -> CollectiveCurve:
    return replace(
        curve,
        fraction=_divided(curve.fraction, factor),
        startup_s=curve.startup_s * factor,
        lockstep_s=curve.lockstep_s * factor,
    )


def _divided(fraction: float, factor: Any) -> Any:
    """The fraction of a peak, at most MOST_OF_PEAK, or as it was where it is more."""
    found = np.minimum(fraction / factor, max(fraction, MOST_OF_PEAK))
    return found if np.ndim(found) else float(found)
