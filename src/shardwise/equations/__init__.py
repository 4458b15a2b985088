"""Formulas on plain numbers: communication, computation, goodput, memory, pipelines. They need numpy only."""

from shardwise.equations import comm, compute, goodput, memory, pipeline

__all__ = [
    "comm",
    "compute",
    "goodput",
    "memory",
    "pipeline",
]
