"""Imports: configuration files that people have, read as strategies. A new kind is an `Importer` in
IMPORTERS."""

from shardwise.targets.imports.imported import ImportedRun, ReviewFinding, Severity, Supplied
from shardwise.targets.imports.importers import IMPORTERS, imported_run

__all__ = ["IMPORTERS", "ImportedRun", "ReviewFinding", "Severity", "Supplied", "imported_run"]
