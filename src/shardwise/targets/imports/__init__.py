"""Imports: configuration files that people have, read as strategies. A new kind is an `Importer` in
IMPORTERS."""

from shardwise.targets.imports.imported import ImportedRun, ReviewFinding, Severity, Supplied
from shardwise.targets.imports.importers import IMPORTERS, imported_run, is_configuration
from shardwise.targets.imports.log_steps import has_steps, logged_step_s

__all__ = [
    "IMPORTERS",
    "ImportedRun",
    "ReviewFinding",
    "Severity",
    "Supplied",
    "has_steps",
    "imported_run",
    "is_configuration",
    "logged_step_s",
]
