"""Plots: time against memory, and tokens over time; small records, drawn as PNG, SVG or a page."""

from shardwise.app.plot.file import check_plot_file, write_plot
from shardwise.app.plot.over_time import Growth, OverTime, write_over_time
from shardwise.app.plot.record import Dot, Line, Mark, Plot

__all__ = [
    "Dot",
    "Growth",
    "Line",
    "Mark",
    "OverTime",
    "Plot",
    "check_plot_file",
    "write_over_time",
    "write_plot",
]
