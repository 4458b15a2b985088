"""Emulates a cluster on one Linux machine: nodes as network namespaces, links with limited bandwidth, devices
as CPU shares."""

from shardwise.emulate.run import Emulation, run_emulation

__all__ = ["Emulation", "run_emulation"]
