"""How true predictions are: measured rows read, made into cases, predicted, and judged."""

from shardwise.accuracy.calibration import (
    COLLECTIVES,
    RINGS,
    AttentionSample,
    Collective,
    KernelCurves,
    LinkCurve,
    LinkSample,
    MatmulSample,
    MeasuredStep,
    MemorySample,
    TierCurve,
    attention_curve,
    calibration_document,
    calibration_plans,
    collective_s,
    eager_profile,
    kernel_curves,
    link_curve,
    mean_error,
    priced_s,
    software_costs,
    with_kernels,
    with_links,
)
from shardwise.accuracy.compare import Comparison, compare
from shardwise.accuracy.judge import Judged
from shardwise.accuracy.metrics import Errors
from shardwise.accuracy.record import Fitted, bands_of, fit_document, fit_rows
from shardwise.accuracy.rows import LEVELS, SHIPPED, Fault, Row, read_rows
from shardwise.accuracy.skipped import Skipped, skipped_by_reason
from shardwise.accuracy.stage_times import StageTimes
from shardwise.accuracy.validate import GROUPINGS, Group, Validation, validate
from shardwise.accuracy.workloads import LEAST_PLANS, Workload

__all__ = [
    "COLLECTIVES",
    "GROUPINGS",
    "LEAST_PLANS",
    "LEVELS",
    "RINGS",
    "SHIPPED",
    "AttentionSample",
    "Collective",
    "Comparison",
    "Errors",
    "Fault",
    "Fitted",
    "Group",
    "Judged",
    "KernelCurves",
    "LinkCurve",
    "LinkSample",
    "MatmulSample",
    "MeasuredStep",
    "MemorySample",
    "Row",
    "Skipped",
    "StageTimes",
    "TierCurve",
    "Validation",
    "Workload",
    "attention_curve",
    "bands_of",
    "calibration_document",
    "calibration_plans",
    "collective_s",
    "compare",
    "eager_profile",
    "fit_document",
    "fit_rows",
    "kernel_curves",
    "link_curve",
    "mean_error",
    "priced_s",
    "read_rows",
    "skipped_by_reason",
    "software_costs",
    "validate",
    "with_kernels",
    "with_links",
]
