"""Measured times of kernels and collectives, and the curves that explain them."""

from shardwise.accuracy.calibration.cases import calibration_plans
from shardwise.accuracy.calibration.kernels import (
    KernelCurves,
    attention_curve,
    kernel_curves,
    mean_error,
)
from shardwise.accuracy.calibration.links import COLLECTIVES, UNSHARDED, LinkCurve, collective_s, link_curve
from shardwise.accuracy.calibration.record import (
    TierCurve,
    calibration_document,
    eager_profile,
    with_kernels,
    with_links,
)
from shardwise.accuracy.calibration.samples import (
    AttentionSample,
    Collective,
    LinkSample,
    MatmulSample,
    MemorySample,
)
from shardwise.accuracy.calibration.steps import MeasuredStep, priced_s, software_costs

__all__ = [
    "COLLECTIVES",
    "UNSHARDED",
    "AttentionSample",
    "Collective",
    "KernelCurves",
    "LinkCurve",
    "LinkSample",
    "MatmulSample",
    "MeasuredStep",
    "MemorySample",
    "TierCurve",
    "attention_curve",
    "calibration_document",
    "calibration_plans",
    "collective_s",
    "eager_profile",
    "kernel_curves",
    "link_curve",
    "mean_error",
    "priced_s",
    "software_costs",
    "with_kernels",
    "with_links",
]
