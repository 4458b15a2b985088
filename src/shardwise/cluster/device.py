"""One kind of accelerator, from its datasheet and driver."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from shardwise.cluster.backend import NATIVE, Backend
from shardwise.cluster.efficiency import Efficiency


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
