"""The plot of `benchmarks.emulated`: errors of predictions, with a panel per cluster and a row per plan.

`python -m benchmarks.emulated_picture RESULTS.json ... OUT.svg` draws the files that `--out` wrote. It needs
matplotlib.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.emulated import GOALS
from benchmarks.graph_trade_picture import FAINT, GRID, STYLE

if TYPE_CHECKING:
    from matplotlib.axes import Axes

DOT, SPREAD = "#1f6f8b", "#9fc1cd"
WIDTH_IN, LINE_IN, TITLE_IN = 9.0, 0.19, 0.5
MOST = 0.45
"""Largest relative error on the axis."""


def panels_of(documents: Sequence[Mapping[str, Any]]) -> dict[str, list[Mapping[str, Any]]]:
    """The rows of each cluster, and of each epoch where its network changes."""
    found: dict[str, list[Mapping[str, Any]]] = {}
    for document in documents:
        for row in document["rows"]:
            name = row["cluster"] if row["epoch"] == 0 else f"{row['cluster']}, then"
            found.setdefault(name, []).append(row)
    return found


def draw(path: Path, panels: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
    """Draws errors relative to a plan's median step (dots) and to its shortest and longest step (bars)."""
    import matplotlib
    from matplotlib.figure import Figure

    heights = [TITLE_IN + LINE_IN * len(rows) for rows in panels.values()]
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(WIDTH_IN, sum(heights) + 0.4), layout="constrained", facecolor="white")
        axes = figure.subplots(len(panels), 1, sharex=True, squeeze=False, height_ratios=heights)
        for axis, (name, rows) in zip(axes.ravel().tolist(), panels.items(), strict=True):
            _panel(axis, name, rows)
        figure.supxlabel("predicted step time over measured step time, minus 1", fontsize=10)
        figure.savefig(path, metadata={"Date": None, "Creator": None} if path.suffix == ".svg" else None)


def _panel(axis: Axes, name: str, rows: Sequence[Mapping[str, Any]]) -> None:
    from matplotlib.ticker import PercentFormatter

    worst = 1.0 - GOALS["worst_accuracy"]
    axis.axvspan(-worst, worst, color=GRID, zorder=0)
    axis.axvline(0.0, color=FAINT, linewidth=0.8, zorder=1)
    for place, row in enumerate(rows):
        off = [row["predicted_s"] / seconds - 1.0 for seconds in row["times_s"]]
        axis.plot([min(off), max(off)], [place, place], color=SPREAD, linewidth=3.0, solid_capstyle="butt")
        axis.plot(row["predicted_s"] / row["measured_s"] - 1.0, place, "o", color=DOT, markersize=4.0)
    axis.set_yticks(range(len(rows)), labels=[_label(row["plan"]) for row in rows], fontsize=7.5)
    axis.set_ylim(len(rows) - 0.4, -0.6)
    axis.set_xlim(-MOST, MOST)
    axis.xaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axis.set_title(name, fontsize=9, loc="left")
    axis.tick_params(length=0)
    for side in ("top", "right", "left"):
        axis.spines[side].set_visible(False)


def _label(plan: str) -> str:
    """The fields of a plan with short names."""
    short = {"micro_batch_size": "mbs", "zero_stage": "zero", "sequence_parallel=false": "whole sequence"}
    for name, word in short.items():
        plan = plan.replace(name, word)
    return plan.replace(",", "  ")


def main(arguments: Sequence[str]) -> int:
    *files, out = map(Path, arguments)
    draw(out, panels_of([json.loads(file.read_text()) for file in files]))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
