"""A cluster on one Linux machine: hosts as network namespaces, links with their bandwidth, devices as shares
of a core."""

from shardwise.emulate.run import Emulation, emulated

__all__ = ["Emulation", "emulated"]
