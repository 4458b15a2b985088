"""One kind of accelerator, from its datasheet and driver.

What the library that carries collectives between devices has, and what it does instead of the rest.

How much of a device's peak real kernels reach: data with provenance, never code.

One `Efficiency` belongs to one device class. The numbers are parameters of the curves in `equations.compute`
and `equations.comm`; calibration and fits replace them, the equations stay.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from shardwise.numbers import Number, most_specific, nested


@dataclass(frozen=True, slots=True, kw_only=True)
class Backend:
    """One library: by collective that it does not have, the one that it does in its place, on the same whole
    tensor."""

    name: str
    instead: Mapping[str, str] = field(hash=False)

    def substitute(self, collective: str) -> str:
        """The collective that is carried out where this one is asked for."""
        return self.instead.get(collective, collective)


NATIVE = Backend(name="native", instead={})
"""The devices' own library, which has all collectives."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MatmulCurve:
    """Fraction of the dense peak of a matmul [m, k] x [k, n].

    `peak_fraction` of a large multiple of the tile on all `units`; tiles of `tile_m` x `tile_n`, waves of
    `units` tiles, and `k / (k + k_half)` for the prologue of short inner dimensions. `fp8_fraction` and
    `fp4_fraction` are what matmuls of these dtypes reach of it, relative to 16-bit ones.
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
    """Grouped matmul relative to a plain one: `fraction`, times t / (t + tokens_half) for t tokens per
    expert."""

    fraction: float
    tokens_half: float


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionCurve:
    """A fused attention kernel: fraction of the dense peak forward and backward, times s / (s + seq_half) for
    s keys."""

    forward_fraction: float
    backward_fraction: float
    seq_half: float


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryCurve:
    """Memory-bound kernels: fraction of the memory bandwidth, times b / (b + half_bytes) for b bytes
    moved."""

    fraction: float
    half_bytes: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveCurve:
    """Collectives on a tier: fraction of the link's bandwidth, and seconds that each one takes before the
    first byte moves.

    Rings through some but not all devices of a node that has several network cards reach `partial_fraction`
    of that between nodes. A tier
    that joins n groups has n^-crowding of it: the more senders, the more often their ways cross. Where ranks
    send whole parts to each other, both ways at once, they reach `exchange_fraction` of it: all-gathers of
    two, and all-to-alls. For `lockstep_s` the ranks of a collective wait for the last of them, which is now
    this one, now that.
    """

    fraction: float
    startup_s: float
    partial_fraction: float = 1.0
    crowding: float = 0.0
    exchange_fraction: float = 1.0
    lockstep_s: float = 0.0

    @property
    def before_s(self) -> float:
        """Seconds of each collective before its first byte moves."""
        return self.startup_s + self.lockstep_s


MEASURED = "measured: "
"""What the source of a number of a calibration begins with, before its machine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Efficiency:
    """All curves of one device class, and the costs that are not per byte or flop.

    `attention` by kernel (`flash-2`, `flash-3`), empty where only unfused attention runs; `launch_s` per
    kernel; `overlap_slowdown` multiplies computation while communication runs beside it; `context_bytes` is
    what the driver and libraries take before the first tensor; `communicator_bytes` per communicator;
    `fragmentation_ratio` is reserved over allocated, minus 1; `provenance` names the source of every field;
    `is_calibrated` is True only for measured or fitted data, and the bands widen where it is False.
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

    @property
    def measured_on(self) -> tuple[str, ...]:
        """The machines, with dates, whose calibrations some of it is from."""
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
    """The efficiency that `numbers` give to what is called by `names` (its architecture, its own name)."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """Figures of one accelerator; every one has its entry in `sources`.

    `peak_flop_per_s` maps a dtype (`fp32`, `tf32`, `fp16`, `bf16`, `fp8`, `fp4`) to the *dense* matrix peak.
    `memory_bytes` is the total that the driver reports, not the nominal gigabytes. `scale_up_domain` devices
    share the fast fabric at `scale_up_bytes_per_s` per device and direction; beyond it each device has
    `scale_out_bytes_per_s` per direction by custom. `devices_per_node` and `nics_per_node` (network cards)
    are the customary node. `scale_up_links` lists, where devices have links to each other and no switch,
    (devices of a group, links of one of them that stay inside): the last entry is all its links. `backend`
    carries collectives between such devices.
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
