"""Export plans to other training software, read back how that software parses them, and import its
configuration files."""

from shardwise.targets.export import EXPORTERS, Files, export_of, refuse_older
from shardwise.targets.imports import (
    IMPORTERS,
    ImportedRun,
    ReviewFinding,
    Supplied,
    has_steps,
    imported_run,
    is_configuration,
    logged_step_s,
)
from shardwise.targets.read_back import ReadBack
from shardwise.targets.writing import WRITTEN_BY, step_time_line

__all__ = [
    "EXPORTERS",
    "IMPORTERS",
    "WRITTEN_BY",
    "Files",
    "ImportedRun",
    "ReadBack",
    "ReviewFinding",
    "Supplied",
    "export_of",
    "has_steps",
    "imported_run",
    "is_configuration",
    "logged_step_s",
    "refuse_older",
    "step_time_line",
]
