"""The independent checker: counts and judges by code of its own, from records alone."""

from shardwise.verification.checks import (
    REASON_EFFORT,
    REASON_QUESTION,
    REASON_SUM,
    REASON_TRACE,
    Check,
    UncheckedKey,
    fit_check,
    number_check,
    open_if_priced_as,
    parts_check,
    priced_as_check,
    unchecked,
    value_check,
)
from shardwise.verification.proof import PROOF_BUDGET_S
from shardwise.verification.space import PipelineCount, PoolSize, SpaceCount, count_pipelines, count_space
from shardwise.verification.verdict import Verdict, check_file

__all__ = [
    "PROOF_BUDGET_S",
    "REASON_EFFORT",
    "REASON_QUESTION",
    "REASON_SUM",
    "REASON_TRACE",
    "Check",
    "PipelineCount",
    "PoolSize",
    "SpaceCount",
    "UncheckedKey",
    "Verdict",
    "check_file",
    "count_pipelines",
    "count_space",
    "fit_check",
    "number_check",
    "open_if_priced_as",
    "parts_check",
    "priced_as_check",
    "unchecked",
    "value_check",
]
