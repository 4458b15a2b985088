"""A device with measured curves, and the calibration file that says so (docs/formats.md)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from shardwise.accuracy.calibration.kernels import KernelCurves
from shardwise.accuracy.calibration.links import LinkCurve
from shardwise.cluster import AttentionCurve, Device, Tier
from shardwise.strategy import CALIBRATION_SCHEMA, CALIBRATION_VERSION, PROFILES, Profile

KERNEL = "flash-2"
"""The generation of fused attention kernels that PyTorch has on CPUs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TierCurve:
    """The curve of the links of a tier, measured on it."""

    tier: Tier
    curve: LinkCurve


def with_kernels(
    device: Device, curves: KernelCurves, attention: AttentionCurve, *, bf16_ratio: float
) -> Device:
    """`device` with measured kernels. Its peak is what large matmuls reach: curves need no share of another.

    Processors of general purpose have no tiles or waves that count. Computation and communication do not run
    beside each other, so neither slows the other.
    """
    efficiency = device.efficiency
    matmul = replace(
        efficiency.matmul, peak_fraction=1.0, tile_m=1, tile_n=1, units=1, k_half=curves.k_half,
        small_tile_fraction=1.0,
    )  # fmt: skip
    # A kernel cannot be faster than the peak; fractions beyond would be errors of the clock.
    bounded = replace(
        attention,
        forward_fraction=min(attention.forward_fraction, 1.0),
        backward_fraction=min(attention.backward_fraction, 1.0),
    )
    return replace(
        device,
        peak_flop_per_s={"fp32": curves.flop_per_s, "bf16": curves.flop_per_s * bf16_ratio},
        memory_bytes_per_s=curves.memory_bytes_per_s,
        efficiency=replace(
            efficiency,
            matmul=matmul,
            memory=replace(efficiency.memory, fraction=1.0, half_bytes=0.0),
            attention={**efficiency.attention, KERNEL: bounded},
            launch_s=curves.launch_s,
            overlap_slowdown=1.0,
            is_calibrated=True,
        ),
    )


def with_links(device: Device, measured: Sequence[TierCurve]) -> Device:
    """`device` with the measured curves of its links: inside a node, where latency and bandwidth are the
    device's own, and on the network, where the bandwidth is a share of what the cluster says."""
    for each in measured:
        efficiency, curve = device.efficiency, each.curve
        if each.tier.is_network:
            fraction = min(curve.bytes_per_s / each.tier.bytes_per_s, 2.0)
            reached = replace(
                efficiency.scale_out, fraction=fraction, startup_s=curve.startup_s,
                partial_fraction=1.0, crowding=0.0,
            )  # fmt: skip
            device = replace(
                device,
                scale_out_latency_s=curve.latency_s,
                efficiency=replace(efficiency, scale_out=reached),
            )
        else:
            inside = replace(
                efficiency.scale_up, fraction=1.0, startup_s=curve.startup_s,
                partial_fraction=1.0, crowding=0.0,
            )  # fmt: skip
            device = replace(
                device,
                scale_up_bytes_per_s=curve.bytes_per_s,
                scale_up_latency_s=curve.latency_s,
                efficiency=replace(efficiency, scale_up=inside),
            )
    return device


def eager_profile() -> Profile:
    """Our own runtime on processors of general purpose: operators one by one, collectives that are waited
    for, sends between stages beside the next action."""
    none: dict[str, Any] = {
        f"{kind}_overlap": 0.0 for kind in ("tensor", "tensor_backward", "context", "expert", "data", "shard")
    }
    return replace(
        PROFILES["fsdp2"], name="shardwise", attention=(KERNEL,), recompute_stops_early=False, **none
    )


def calibration_document(
    device: Device,
    profile: Profile | None,
    *,
    machine: str,
    measured: Mapping[str, object],
) -> dict[str, Any]:
    """The content of a calibration file: every measured figure of `device` and `profile`."""
    efficiency = asdict(device.efficiency)
    kept = ("matmul", "memory", "attention", "scale_up", "scale_out", "launch_s", "overlap_slowdown",
            "is_calibrated")  # fmt: skip
    document: dict[str, Any] = {
        "schema": CALIBRATION_SCHEMA,
        "version": CALIBRATION_VERSION,
        "machine": machine,
        "classes": {
            device.name: {
                "device": device.name,
                "peak": {name: f"{peak!r}FLOP/s" for name, peak in device.peak_flop_per_s.items()},
                "memory_bandwidth": f"{device.memory_bytes_per_s!r}B/s",
                "scale_up": {
                    "bandwidth": f"{device.scale_up_bytes_per_s!r}B/s",
                    "latency": f"{device.scale_up_latency_s!r}s",
                },
                "scale_out": {"latency": f"{device.scale_out_latency_s!r}s"},
                "efficiency": {name: efficiency[name] for name in kept},
            }
        },
    }
    if profile is not None:
        document["software"] = _software(profile)
    document["measured"] = dict(measured)
    return document


def _software(profile: Profile) -> dict[str, Any]:
    numbers = ("pointwise_passes", "dispatch_s", "expert_dispatch_s", "host_action_s", "host_step_s")
    overlaps = [name for name in asdict(profile) if name.endswith("_overlap")]
    return {
        "like": "fsdp2",
        "name": profile.name,
        "attention": list(profile.attention),
        "recompute_stops_early": profile.recompute_stops_early,
        **{name: getattr(profile, name) for name in (*numbers, *overlaps)},
    }
