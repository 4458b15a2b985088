"""Formulas on plain numbers: communication, computation, goodput, memory, pipelines. numpy only."""

from shardwise.equations import comm, compute, goodput, memory, pipeline
from shardwise.equations.number import Quantity

__all__ = ["Quantity", "comm", "compute", "goodput", "memory", "pipeline"]
