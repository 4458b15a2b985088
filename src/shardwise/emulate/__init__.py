"""A cluster on one Linux machine: hosts as network namespaces, links with their bandwidth, devices as shares
of a core."""

from shardwise.emulate.run import Emulation, run_emulation

__all__ = ["Emulation", "run_emulation"]
