"""The independent checker of plan files (`check_file`).

It imports nothing of `shardwise`. It reads the file with its own reader, re-derives claims with its own code,
and names those that it does not re-derive.
"""

from shardwise_verify.checks import (
    Check,
    fit_check,
    number_check,
    parts_check,
    value_check,
)
from shardwise_verify.proof import PROOF_BUDGET_S
from shardwise_verify.reading import InputError, read_document
from shardwise_verify.report import answer_of, check_lines, lines_of
from shardwise_verify.space import PipelineCount, PoolSize, SpaceCount, count_pipelines, count_space
from shardwise_verify.verdict import VERSION, Verdict, check_document, check_file, checked_hash

__all__ = [
    "PROOF_BUDGET_S",
    "VERSION",
    "Check",
    "InputError",
    "PipelineCount",
    "PoolSize",
    "SpaceCount",
    "Verdict",
    "answer_of",
    "check_document",
    "check_file",
    "check_lines",
    "checked_hash",
    "count_pipelines",
    "count_space",
    "fit_check",
    "lines_of",
    "number_check",
    "parts_check",
    "read_document",
    "value_check",
]
