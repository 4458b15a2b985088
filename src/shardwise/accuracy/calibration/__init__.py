"""Measured times of kernels and collectives, and the curves that explain them."""

from shardwise.accuracy.calibration.kernels import (
    KernelCurves,
    attention_curve,
    kernel_curves,
    mean_error,
)
from shardwise.accuracy.calibration.links import COLLECTIVES, LinkCurve, collective_s, link_curve
from shardwise.accuracy.calibration.samples import (
    AttentionSample,
    Collective,
    LinkSample,
    MatmulSample,
    MemorySample,
)

__all__ = [
    "COLLECTIVES",
    "AttentionSample",
    "Collective",
    "KernelCurves",
    "LinkCurve",
    "LinkSample",
    "MatmulSample",
    "MemorySample",
    "attention_curve",
    "collective_s",
    "kernel_curves",
    "link_curve",
    "mean_error",
]
