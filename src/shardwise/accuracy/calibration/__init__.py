"""Measured times of kernels and collectives, and the curves that explain them."""

from shardwise.accuracy.calibration.cases import AcceleratorPlans, accelerator_plans, calibration_plans
from shardwise.accuracy.calibration.kernels import (
    KernelCurves,
    Tiles,
    attention_curve,
    kernel_curves,
    mean_error,
)
from shardwise.accuracy.calibration.links import (
    COLLECTIVES,
    UNSHARDED,
    LinkCurve,
    collective_s,
    hidden_share,
    link_curve,
    with_bidirectional,
)
from shardwise.accuracy.calibration.nccl_tests import NcclTable, nccl_tables
from shardwise.accuracy.calibration.record import (
    TierCurve,
    calibration_document,
    eager_profile,
    tiles_of,
    with_accelerated_kernels,
    with_kernels,
    with_link_fractions,
    with_links,
    with_speed,
)
from shardwise.accuracy.calibration.samples import (
    AttentionSample,
    Collective,
    LinkSample,
    MatmulSample,
    MemorySample,
    OverlapSample,
)
from shardwise.accuracy.calibration.step_log import logged_times
from shardwise.accuracy.calibration.steps import (
    MeasuredStep,
    device_speed,
    predicted_step_s,
    queued_costs,
    software_costs,
    with_dispatch,
)
from shardwise.accuracy.calibration.tables import table_samples, with_tables

__all__ = [
    "COLLECTIVES",
    "UNSHARDED",
    "AcceleratorPlans",
    "AttentionSample",
    "Collective",
    "KernelCurves",
    "LinkCurve",
    "LinkSample",
    "MatmulSample",
    "MeasuredStep",
    "MemorySample",
    "NcclTable",
    "OverlapSample",
    "TierCurve",
    "Tiles",
    "accelerator_plans",
    "attention_curve",
    "calibration_document",
    "calibration_plans",
    "collective_s",
    "device_speed",
    "eager_profile",
    "hidden_share",
    "kernel_curves",
    "link_curve",
    "logged_times",
    "mean_error",
    "nccl_tables",
    "predicted_step_s",
    "queued_costs",
    "software_costs",
    "table_samples",
    "tiles_of",
    "with_accelerated_kernels",
    "with_bidirectional",
    "with_dispatch",
    "with_kernels",
    "with_link_fractions",
    "with_links",
    "with_speed",
    "with_tables",
]
