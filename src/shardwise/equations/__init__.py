"""Formulas on plain numbers: communication, computation, goodput, memory, pipelines. They need numpy only."""

from shardwise.equations import comm, compute, goodput, memory, pipeline
from shardwise.equations.quantity import Quantity

__all__ = ["Quantity", "comm", "compute", "goodput", "memory", "pipeline"]
