"""Applies measured curves to devices and writes calibration files (docs/reference/formats.md).

`with_kernels` and `with_links` set the curves of a CPU, `with_accelerated_kernels` and `with_link_fractions`
set the fractions that an accelerator of known peaks reaches. `calibration_document` is the file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from shardwise.accuracy.calibration.curves import KernelCurves, LinkCurve, Tiles
from shardwise.cluster import AttentionCurve, CollectiveCurve, Device, Tier, find_device
from shardwise.strategy import (
    CALIBRATED_FIELDS,
    CALIBRATION_SCHEMA,
    CALIBRATION_VERSION,
    OWN_PROFILE,
    PROFILES,
    Profile,
    WorkloadFactor,
)

KERNEL = "flash-2"
"""Generation of the fused attention kernels that PyTorch ships for CPUs and CUDA devices."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TierCurve:
    """The measured curve of the links of a tier, which joins `groups` groups of the tier below."""

    tier: Tier
    curve: LinkCurve
    groups: int = 1


def with_kernels(
    device: Device, curves: KernelCurves, attention: AttentionCurve, *, bf16_ratio: float
) -> Device:
    """`device`, a CPU, with measured kernels. Its peak is the rate of large matmuls, so fractions are 1.

    Tiles and waves do not matter on CPUs. Computation and communication do not overlap there, so neither
    slows the other.
    """
    efficiency = device.efficiency
    matmul = replace(
        efficiency.matmul, peak_fraction=1.0, tile_m=1, tile_n=1, units=1, k_half=curves.k_half,
        small_tile_fraction=1.0,
    )  # fmt: skip
    return replace(
        device,
        peak_flop_per_s={"fp32": curves.flop_per_s, "bf16": curves.flop_per_s * bf16_ratio},
        memory_bytes_per_s=curves.memory_bytes_per_s,
        efficiency=replace(
            efficiency,
            matmul=matmul,
            memory=replace(efficiency.memory, fraction=1.0, half_bytes=0.0),
            attention={**efficiency.attention, KERNEL: _bounded(attention)},
            launch_s=curves.launch_s,
            overlap_slowdown=1.0,
            is_calibrated=True,
        ),
    )


def with_accelerated_kernels(
    device: Device, curves: KernelCurves, attention: AttentionCurve, *, dtype: str
) -> Device:
    """`device`, an accelerator of known peaks, with the fractions of them that kernels of `dtype` reach.

    `attention` has fractions of the peak. Kernel fractions are clipped to 1, the memory fraction to 2. Other
    dtypes get the same fractions. The slowdown of computation by overlapped collectives is not measured and
    stays unchanged.
    """
    efficiency, peak = device.efficiency, device.peak_flop_per_s[dtype]
    matmul = replace(
        efficiency.matmul, peak_fraction=min(curves.flop_per_s / peak, 1.0), k_half=curves.k_half
    )
    memory = replace(
        efficiency.memory,
        fraction=min(curves.memory_bytes_per_s / device.memory_bytes_per_s, 2.0),
        half_bytes=0.0,
    )
    return replace(
        device,
        efficiency=replace(
            efficiency,
            matmul=matmul,
            memory=memory,
            attention={**efficiency.attention, KERNEL: _bounded(attention)},
            launch_s=curves.launch_s,
            is_calibrated=True,
        ),
    )


def _bounded(attention: AttentionCurve) -> AttentionCurve:
    """`attention` with fractions clipped to 1: larger ones are timing errors."""
    return replace(
        attention,
        forward_fraction=min(attention.forward_fraction, 1.0),
        backward_fraction=min(attention.backward_fraction, 1.0),
    )


def tiles_of(device: Device) -> Tiles:
    """The output tiles of a device's matmuls, from its efficiency tables."""
    matmul = device.efficiency.matmul
    return Tiles(
        tile_m=matmul.tile_m,
        tile_n=matmul.tile_n,
        units=matmul.units,
        small_fraction=matmul.small_tile_fraction,
    )


def with_links(device: Device, measured: Sequence[TierCurve]) -> Device:
    """`device` with the measured curves of its links.

    Inside a node the latency and the bandwidth become those of the device. On the network the bandwidth
    becomes a fraction of the cluster's bandwidth."""
    for each in measured:
        curve = each.curve
        fraction = min(curve.bytes_per_s / each.tier.bytes_per_s, 2.0) if each.tier.is_network else 1.0
        reached = replace(
            _link_of(device, each), fraction=fraction, startup_s=curve.startup_s, partial_fraction=1.0,
            crowding=0.0, exchange_fraction=curve.exchange_fraction, lockstep_s=curve.lockstep_s,
        )  # fmt: skip
        device = _with_link(device, each, reached)
        if not each.tier.is_network:
            device = replace(device, scale_up_bytes_per_s=curve.bytes_per_s)
    return device


def with_link_fractions(device: Device, measured: Sequence[TierCurve]) -> Device:
    """`device` with measured latencies, startups and fractions of the known bandwidth of its links.

    A fraction is clipped to 1. The loss by many senders (`crowding`) stays unchanged; the fraction is
    corrected for the number of groups that were measured.
    """
    for each in measured:
        curve, known = each.curve, _link_of(device, each)
        fraction = min(curve.bytes_per_s / each.tier.bytes_per_s * each.groups**known.crowding, 1.0)
        reached = replace(known, fraction=fraction, startup_s=curve.startup_s)
        device = _with_link(device, each, reached)
    return device


def _link_of(device: Device, measured: TierCurve) -> CollectiveCurve:
    """The efficiency of the device's link that the tier consists of."""
    return device.efficiency.scale_out if measured.tier.is_network else device.efficiency.scale_up


def _with_link(device: Device, measured: TierCurve, link: CollectiveCurve) -> Device:
    """`device` with this efficiency of the link, and its measured latency."""
    efficiency, latency_s = device.efficiency, measured.curve.latency_s
    if measured.tier.is_network:
        efficiency = replace(efficiency, scale_out=link)
        return replace(device, scale_out_latency_s=latency_s, efficiency=efficiency)
    return replace(device, scale_up_latency_s=latency_s, efficiency=replace(efficiency, scale_up=link))


EAGER_LIKE = "fsdp2"
"""The known software that our own runtime is like."""


def eager_profile() -> Profile:
    """The profile of our own runtime (OWN_PROFILE).

    It runs operators one by one, waits for collectives, and overlaps sends between stages with the next
    action. Its capability file describes its further limits."""
    waiting = PROFILES[EAGER_LIKE].without_overlap()
    return replace(
        waiting, name=OWN_PROFILE, attention=(KERNEL,), pipeline_overlap=1.0, applies_dropout=False
    )


def calibration_document(
    device: Device,
    profile: Profile | None,
    *,
    machine: str,
    measured: Mapping[str, object],
    workloads: Sequence[WorkloadFactor] = (),
) -> dict[str, Any]:
    """The content of a calibration file: every value of `device` that differs from the known device of its
    name, every one of `profile` that differs from the known software that it is like, and factors of
    `workloads`."""
    known = find_device(device.name)
    entry: dict[str, Any] = {"device": device.name}
    if device.peak_flop_per_s != known.peak_flop_per_s:
        entry["peak"] = {name: f"{peak!r}FLOP/s" for name, peak in device.peak_flop_per_s.items()}
    if device.memory_bytes_per_s != known.memory_bytes_per_s:
        entry["memory_bandwidth"] = f"{device.memory_bytes_per_s!r}B/s"
    scale_up: dict[str, Any] = {}
    if device.scale_up_bytes_per_s != known.scale_up_bytes_per_s:
        scale_up["bandwidth"] = f"{device.scale_up_bytes_per_s!r}B/s"
    if device.scale_up_latency_s != known.scale_up_latency_s:
        scale_up["latency"] = f"{device.scale_up_latency_s!r}s"
    if device.scale_out_latency_s != known.scale_out_latency_s:
        entry["scale_out"] = {"latency": f"{device.scale_out_latency_s!r}s"}
    efficiency = _changed(asdict(device.efficiency), asdict(known.efficiency))
    efficiency.pop("provenance", None)
    entry |= {name: part for name, part in (("scale_up", scale_up), ("efficiency", efficiency)) if part}
    document: dict[str, Any] = {
        "schema": CALIBRATION_SCHEMA,
        "version": CALIBRATION_VERSION,
        "machine": machine,
        "classes": {device.name: entry},
    }
    if profile is not None:
        document["software"] = _software(profile)
    if workloads:
        document["workloads"] = [asdict(each) for each in workloads]
    document["measured"] = dict(measured)
    return document


def _changed(record: Mapping[str, Any], known: Mapping[str, Any]) -> dict[str, Any]:
    """The entries of `record` that differ from `known`, recursively."""
    changed: dict[str, Any] = {}
    for name, value in record.items():
        before = known.get(name)
        if isinstance(value, Mapping) and isinstance(before, Mapping):
            if part := _changed(value, before):
                changed[name] = part
        elif value != before:
            changed[name] = value
    return changed


def _software(profile: Profile) -> dict[str, Any]:
    """The software of a calibration file, like the known software of its name; our own runtime is like the
    software that `eager_profile` starts from."""
    like = profile.name if profile.name in PROFILES else EAGER_LIKE
    found: dict[str, Any] = {"like": like, "name": profile.name}
    for name in CALIBRATED_FIELDS:
        value = getattr(profile, name)
        if profile.name == OWN_PROFILE or value != getattr(PROFILES[like], name):
            found[name] = list(value) if isinstance(value, tuple) else value
    return found
