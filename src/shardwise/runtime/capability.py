"""Which plans this runtime runs: `launch` says it, for those too that only start plans."""

from __future__ import annotations

from shardwise.launch import TARGET, check_graph_runnable, check_runnable, check_uneven_runnable

__all__ = ["TARGET", "check_graph_runnable", "check_runnable", "check_uneven_runnable"]
