"""Export plans to other training software, and read back how that software parses them."""

from shardwise.targets.export import EXPORTERS, Files, export_of
from shardwise.targets.read_back import ReadBack
from shardwise.targets.writing import WRITTEN_BY, step_time_line

__all__ = ["EXPORTERS", "WRITTEN_BY", "Files", "ReadBack", "export_of", "step_time_line"]
