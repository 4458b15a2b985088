"""Plots of time against memory: one small record, drawn as PNG, SVG or a page for the browser."""

from shardwise.app.plot.file import check_plot_file, write_plot
from shardwise.app.plot.record import Dot, Line, Mark, Plot

__all__ = ["Dot", "Line", "Mark", "Plot", "check_plot_file", "write_plot"]
