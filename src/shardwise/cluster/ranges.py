"""Allowed ranges of all figures of a cluster, by record and field, for cluster, device and plan files."""

from __future__ import annotations

from collections.abc import Mapping

Range = Mapping[str, float]
"""`low` and `high`, both included; keyword arguments of the readers of `Fields`."""

MAX_DEVICES = 10_000_000

RATE: Range = {"low": 1e3, "high": 1e15}
LATENCY: Range = {"low": 0.0, "high": 10.0}
PEAK: Range = {"low": 1e6, "high": 1e18}
MEMORY: Range = {"low": 1e6, "high": 1e15}
HOST_MEMORY: Range = {"low": 0.0, "high": 1e16}
COUNT: Range = {"low": 1, "high": 1e6}
SPEED: Range = {"low": 1e-3, "high": 1e3}
DEVICE_PRICE: Range = {"low": 0.0, "high": 1e6}
NODE_PRICE: Range = {"low": 0.0, "high": 1e9}

DERIVED_RATE: Range = {"low": 1e-30, "high": 1e20}
"""A RATE after sharing, oversubscription and events, as in plan files. It is above 0, since message sizes are
divided by it."""

DERIVED_SPEED: Range = {"low": 1e-30, "high": 1e6}
DERIVED_LATENCY: Range = {"low": 0.0, "high": 1e4}
"""A SPEED and a LATENCY after events, as in plan files."""

LARGE_NODE_PRICE: Range = {"low": 0.0, "high": 1e16}
LARGE_NODE_NICS: Range = {"low": 1, "high": 1e13}
"""Price and network cards of a node that is as large as the whole cluster."""

DEVICE: Mapping[str, Range] = {
    "memory_bytes": MEMORY,
    "memory_bytes_per_s": RATE,
    "devices_per_node": COUNT,
    "nics_per_node": COUNT,
    "scale_up_domain": COUNT,
    "scale_up_bytes_per_s": RATE,
    "scale_up_latency_s": LATENCY,
    "scale_out_bytes_per_s": RATE,
    "scale_out_latency_s": LATENCY,
    "host_link_bytes_per_s": RATE,
    "host_memory_bytes": HOST_MEMORY,
    "price_usd_per_hour": DEVICE_PRICE,
}

NODE: Mapping[str, Range] = {
    "devices": {"low": 1, "high": MAX_DEVICES},
    "speed": DERIVED_SPEED,
    "nics": LARGE_NODE_NICS,
    "nic_bytes_per_s": DERIVED_RATE,
    "host_memory_bytes": HOST_MEMORY,
    "host_link_bytes_per_s": RATE,
    "price_usd_per_hour": LARGE_NODE_PRICE,
    "scale_up_bytes_per_s": RATE,
}

TIER: Mapping[str, Range] = {
    "span": {"low": 1, "high": MAX_DEVICES},
    "bytes_per_s": DERIVED_RATE,
    "flow_bytes_per_s": DERIVED_RATE,
    "latency_s": DERIVED_LATENCY,
}

LINK: Mapping[str, Range] = {"latency_s": DERIVED_LATENCY}
