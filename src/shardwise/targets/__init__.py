"""Export plans to other training software, read back how that software parses them, and import its
configuration files."""

from shardwise.targets.export import EXPORTERS, Files, export_of
from shardwise.targets.imports import IMPORTERS, ImportedRun, ReviewFinding, Supplied, imported_run
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
    "imported_run",
    "step_time_line",
]
