"""The plot of `benchmarks.graph_trade`: a panel per graph with a curve per bandwidth."""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil, sqrt
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = {"0.25": "#b5523b", "1.0": "#1d2733", "4.0": "#1f6f8b"}
INK, FAINT, GRID = "#1d2733", "#6b7785", "#e6e9ed"

DOTTED = 100
"""Most points of a curve that are drawn as dots; more points would overlap."""

STYLE: Any = {
    "font.size": 9.0, "text.color": INK, "axes.labelcolor": INK, "axes.edgecolor": FAINT,
    "xtick.labelcolor": INK, "ytick.labelcolor": INK, "svg.fonttype": "path", "svg.hashsalt": "shardwise",
}  # fmt: skip


def draw(path: str, found: Mapping[str, Mapping[str, Any]]) -> None:
    """Draws each graph's curves relative to the fastest point at the default bandwidth."""
    import matplotlib
    from matplotlib.figure import Figure

    columns = ceil(sqrt(len(found)))
    rows = ceil(len(found) / columns)
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(4.1 * columns, 3.0 * rows + 0.8), layout="constrained", facecolor="white")
        panels = figure.subplots(rows, columns, squeeze=False).ravel().tolist()
        for axes, (title, curves) in zip(panels, found.items(), strict=False):
            _panel(axes, title, curves)
        for axes in panels[len(found) :]:
            axes.set_visible(False)
        handles, labels = panels[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside upper center", ncols=len(labels), frameon=False)
        figure.supxlabel(
            "step time relative to the fastest at the default bandwidth (log scale)", fontsize=10
        )
        figure.supylabel("peak memory per device relative to the same", fontsize=10)
        figure.savefig(path, metadata={"Date": None, "Creator": None} if path.endswith(".svg") else None)


def _panel(axes: Axes, title: str, curves: Mapping[str, Any]) -> None:
    """Draws the curves and bends of one graph."""
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    base_s, base_bytes = curves["1.0"]["points"][0]
    for bandwidth, curve in curves.items():
        times = [time_s / base_s for time_s, _ in curve["points"]]
        memory_shares = [nbytes / base_bytes for _, nbytes in curve["points"]]
        colour = COLOURS[bandwidth]
        axes.step(
            times,
            memory_shares,
            where="post",
            color=colour,
            linewidth=1.2,
            label=f"bandwidth x {float(bandwidth):g}",
        )
        if len(times) <= DOTTED:
            axes.plot(times, memory_shares, "o", color=colour, markersize=2.0, markeredgewidth=0.0)
        if curve["bend"] is not None:
            place = curve["bend"]
            axes.plot(
                times[place], memory_shares[place], "D", color=colour, markersize=6.5,
                markeredgecolor="white",
                markeredgewidth=1.0, zorder=4,
            )  # fmt: skip
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 2.5, 5, 10]))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.3g}"))
    axes.xaxis.set_minor_locator(MaxNLocator(1))
    axes.xaxis.set_minor_formatter(FuncFormatter(lambda *_: ""))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.0%}"))
    axes.set_ylim(0.0, 1.06 * axes.dataLim.ymax)
    axes.set_title(title, fontsize=9, loc="left")
    axes.grid(True, color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(length=0)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
