"""Plots as PNG, SVG or HTML: Pareto frontiers (`write_plot`), and tokens over time (`write_replay_plot`)."""

from shardwise.app.plot.file import check_plot_file, write_plot
from shardwise.app.plot.record import Dot, Mark, Plot, PlotLine
from shardwise.app.plot.replay import ReplayPlot, TokenCurve, write_replay_plot

__all__ = [
    "Dot",
    "Mark",
    "Plot",
    "PlotLine",
    "ReplayPlot",
    "TokenCurve",
    "check_plot_file",
    "write_plot",
    "write_replay_plot",
]
