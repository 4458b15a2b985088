"""The records of a device class: `Device`, its `Efficiency` and its communication `Backend`.

A `Device` has the figures of data sheet and driver. Its `Efficiency` has the numbers that say which part of
the peaks real kernels and collectives reach: `MatmulCurve`, `AttentionCurve`, `CollectiveCurve` and others.
They are parameters of the equations in `equations.compute` and `equations.comm`; calibration and fits change
the numbers, not the equations.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import NormalDist
from typing import Any

from shardwise.numbers import Number, most_specific, nested


# Communication library
@dataclass(frozen=True, slots=True, kw_only=True)
class Backend:
    """A communication library. `instead` maps each collective that it lacks to its substitute, which runs on
    the same whole tensor."""

    name: str
    instead: Mapping[str, str] = field(hash=False)

    def substitute(self, collective: str) -> str:
        """The collective that the backend runs where `collective` is requested."""
        return self.instead.get(collective, collective)

    @property
    def pair_sends(self) -> float:
        """How often each of two groups sends the whole tensor in an all-reduce by trees: once where the
        library has double trees, as those that lack no collective do; else twice."""
        return 2.0 if self.instead else 1.0


NATIVE = Backend(name="native", instead={})
"""The library of the devices' vendor, which has all collectives."""


# Efficiency
@dataclass(frozen=True, slots=True, kw_only=True)
class MatmulCurve:
    """Fraction of the dense peak of a matmul [m, k] x [k, n].

    `peak_fraction` is the fraction of large matmuls that fill all tiles. Outputs are computed in waves of
    `units` tiles of `tile_m` x `tile_n`. The factor `k / (k + k_half)` covers the prologue of short inner
    dimensions. `small_tile_fraction` is the relative speed of tiles of half the sides. `fp8_fraction` and
    `fp4_fraction` scale the fraction of these dtypes relative to 16-bit ones.
    """

    peak_fraction: float
    tile_m: int
    tile_n: int
    units: int
    k_half: float
    small_tile_fraction: float = 0.85
    fp8_fraction: float = 1.0
    fp4_fraction: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupedMatmulCurve:
    """Speed of a grouped matmul relative to a plain one: `fraction` * t / (t + tokens_half) for t tokens per
    expert."""

    fraction: float
    tokens_half: float


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionCurve:
    """Fraction of the dense peak that a fused attention kernel reaches, forward and backward, times
    s / (s + seq_half) for s keys."""

    forward_fraction: float
    backward_fraction: float
    seq_half: float


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryCurve:
    """Fraction of the memory bandwidth that memory-bound kernels reach, times b / (b + half_bytes) for b
    bytes of traffic."""

    fraction: float
    half_bytes: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveCurve:
    """Collectives on a tier reach `fraction` of the link's bandwidth and take `startup_s` before the first
    byte.

    Rings between nodes that use only some devices of nodes with several network cards reach
    `partial_fraction` of that. A tier that joins n groups loses the factor n^-crowding: with more senders,
    routes collide more often. Bidirectional collectives (all-to-all, and all-gather of two ranks) reach
    `exchange_fraction` of it. `lockstep_s` is the mean time in seconds that the ranks of a collective wait
    for the slowest of them.
    """

    fraction: float
    startup_s: float
    partial_fraction: float = 1.0
    crowding: float = 0.0
    exchange_fraction: float = 1.0
    lockstep_s: float = 0.0

    @property
    def before_s(self) -> float:
        """Call overhead: seconds of each collective before its first byte."""
        return self.startup_s + self.lockstep_s


MEASURED = "measured: "
"""Prefix of the source of a calibrated number; the machine follows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Efficiency:
    """All curves of one device class, and its costs that are not per byte or flop.

    `attention` has a curve per kernel (`flash-2`, `flash-3`, `efficient`); it is empty where only unfused
    attention runs.
    `launch_s` is per kernel. `overlap_slowdown` multiplies the time of computation that overlaps with
    communication. `speed_spread` is the standard deviation of the speed of devices of one kind, relative to
    its mean: ranks wait for the slowest device. `context_bytes` is the memory of driver and libraries before
    the first tensor, and `communicator_bytes` that of each communicator. `fragmentation_ratio` is reserved
    over allocated memory, minus 1. `provenance` names the source of every field. `is_calibrated` is true for
    measured or fitted numbers only; prediction bands are wider where it is false.
    """

    matmul: MatmulCurve
    grouped_matmul: GroupedMatmulCurve
    attention: Mapping[str, AttentionCurve]
    memory: MemoryCurve
    scale_up: CollectiveCurve
    scale_out: CollectiveCurve
    launch_s: float
    overlap_slowdown: float
    context_bytes: float
    communicator_bytes: float
    fragmentation_ratio: float
    is_calibrated: bool
    provenance: Mapping[str, str]
    speed_spread: float = 0.0

    def lag(self, devices: int) -> float:
        """Expected time of the slowest of `devices`, relative to their mean. At least 1.

        Times are normally distributed. The largest of n lies at the quantile (n - 3/8) / (n + 1/4) (Blom
        1958, Statistical Estimates and Transformed Beta-Variables).
        """
        if devices == 1:
            return 1.0
        return 1.0 + self.speed_spread * NormalDist().inv_cdf((devices - 0.375) / (devices + 0.25))

    @property
    def measured_on(self) -> tuple[str, ...]:
        """The machines, with dates, on which some of the numbers were calibrated."""
        sources = self.provenance.values()
        return tuple(sorted({source[len(MEASURED) :] for source in sources if source.startswith(MEASURED)}))


CURVES: Mapping[str, type[Any]] = {
    "matmul": MatmulCurve,
    "grouped_matmul": GroupedMatmulCurve,
    "memory": MemoryCurve,
    "scale_up": CollectiveCurve,
    "scale_out": CollectiveCurve,
}


def efficiency_from_numbers(
    names: Sequence[str], numbers: Iterable[Number], *, units: int, units_source: str
) -> Efficiency:
    """The efficiency of the device with these `names` (its architecture, its own name), from `numbers`."""
    found = most_specific(numbers, names)
    record = nested({field: number.value for field, number in found.items()})
    record["matmul"]["units"] = units
    record["attention"] = {
        kernel: AttentionCurve(**values) for kernel, values in record.get("attention", {}).items()
    }
    record |= {name: curve(**record[name]) for name, curve in CURVES.items()}
    return Efficiency(
        **record,
        is_calibrated=found["matmul.peak_fraction"].is_fitted,
        provenance={field: number.source for field, number in found.items()} | {"matmul.units": units_source},
    )


# Device
@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """Figures of one accelerator; every figure has its entry in `sources`.

    `peak_flop_per_s` maps a dtype (`fp32`, `tf32`, `fp16`, `bf16`, `fp8`, `fp4`) to the *dense* matrix peak.
    `memory_bytes` is the total that the driver reports, not the nominal gigabytes. `scale_up_domain` devices
    share the fast fabric at `scale_up_bytes_per_s` per device and direction. Between domains each device has
    `scale_out_bytes_per_s` per direction by default. `devices_per_node` and `nics_per_node` (network cards)
    describe the default node. Where devices have direct links and no switch, `scale_up_links` lists pairs
    (devices of a group, links of a device inside the group); the last pair has all links of a device.
    `backend` is the library that runs collectives between such devices.
    """

    name: str
    vendor: str
    peak_flop_per_s: Mapping[str, float]
    memory_bytes: int
    memory_bytes_per_s: float
    devices_per_node: int
    nics_per_node: int
    scale_up_name: str
    scale_up_domain: int
    scale_up_bytes_per_s: float
    scale_up_latency_s: float
    scale_up_in_switch_reduction: bool
    scale_up_links: tuple[tuple[int, int], ...] = ()
    scale_out_name: str
    scale_out_bytes_per_s: float
    scale_out_latency_s: float
    host_link_bytes_per_s: float
    host_memory_bytes: float
    price_usd_per_hour: float | None
    efficiency: Efficiency
    sources: Mapping[str, str]
    backend: Backend = NATIVE
