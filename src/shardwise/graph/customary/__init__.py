"""Layouts that people choose without a search: what a frontier is held beside.

They are written from rules of operators alone, for any graph that they make sense of.
"""

from shardwise.graph.customary.data_parallel import data_parallel
from shardwise.graph.customary.megatron import megatron

__all__ = ["data_parallel", "megatron"]
