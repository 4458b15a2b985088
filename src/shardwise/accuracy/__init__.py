"""How true predictions are: measured rows read, made into cases, predicted, and judged."""

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
    "GROUPINGS",
    "LEAST_PLANS",
    "LEVELS",
    "SHIPPED",
    "Comparison",
    "Errors",
    "Fault",
    "Fitted",
    "Group",
    "Judged",
    "Row",
    "Skipped",
    "StageTimes",
    "Validation",
    "Workload",
    "bands_of",
    "compare",
    "fit_document",
    "fit_rows",
    "read_rows",
    "skipped_by_reason",
    "validate",
]
