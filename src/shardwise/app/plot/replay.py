"""The plot of `replay`: tokens over time of several policies, above the number of nodes; PNG, SVG or HTML."""

from __future__ import annotations

import io
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from shardwise.app.plot.draw import DPI, FAINT, GRID, INK, STYLE
from shardwise.app.plot.glyphs import drawable
from shardwise.app.web import page_of
from shardwise.plans import write_file
from shardwise.units import format_count

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


PAGE_SCHEMA = "shardwise.replay-page"
WIDTH_IN, HEIGHT_IN = 10.0, 6.5

COLOURS = {
    "static": "#9aa5b1",
    "robust": "#c98b2b",
    "expected": "#8a5fbf",
    "adaptive": "#1f6f8b",
    "oracle": "#1d2733",
}
"""Colours of the policies; `DASHES` distinguish them in grey."""

DASHES = {
    "static": (0, (1, 1.5)),
    "robust": (0, (5, 2)),
    "expected": (0, (3, 1, 1, 1)),
    "oracle": (0, (6, 2)),
}

MARKERS = {"patch": "|", "move": "D", "wait": "x"}
"""Markers of the kinds of change."""

HOUR_S = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenCurve:
    """Tokens of one policy at the ends of epochs (`times_s`); `figures` follow its name in the legend;
    `changes_s` are the times of its changes by kind."""

    name: str
    figures: str
    times_s: tuple[float, ...]
    tokens: tuple[float, ...]
    changes_s: Mapping[str, tuple[float, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayPlot:
    """The contents of the plot. `nodes` are the available nodes from each of `times_s` on. `policies` and
    `decisions` are rows of the tables of the page."""

    title: str
    subtitle: str
    curves: tuple[TokenCurve, ...]
    times_s: tuple[float, ...]
    nodes: tuple[int, ...]
    end_s: float
    policies: tuple[tuple[str, ...], ...]
    decisions: tuple[tuple[str, ...], ...]


def write_replay_plot(path: str, plot: ReplayPlot) -> None:
    """Write `plot` to the file at `path` atomically."""
    form = os.path.splitext(path)[1].lower().removeprefix(".")
    is_page = form == "html"
    write_file(path, page_of(plot.title, replay_document(plot)) if is_page else _bytes(plot, form))


def _bytes(plot: ReplayPlot, form: str) -> bytes:
    import matplotlib

    buffer = io.BytesIO()
    metadata = {"Software": None} if form == "png" else {"Date": None, "Creator": None}
    with matplotlib.rc_context(STYLE):
        _render(plot).savefig(buffer, format=form, dpi=DPI, metadata=metadata)
    return buffer.getvalue()


def _render(plot: ReplayPlot) -> Figure:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH_IN, HEIGHT_IN), dpi=DPI, facecolor="white")
    FigureCanvasAgg(figure)
    above = figure.add_axes((0.12, 0.33, 0.64, 0.52))
    below = figure.add_axes((0.12, 0.09, 0.64, 0.17), sharex=above)
    _tokens(above, plot)
    _nodes(below, plot)
    for axes in (above, below):
        axes.grid(True, color=GRID, linewidth=0.8)
        axes.set_axisbelow(True)
        axes.tick_params(length=0, pad=5)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
    figure.text(0.12, 0.955, drawable(plot.title), fontsize=15, fontweight="bold", va="center")
    figure.text(0.12, 0.905, drawable(plot.subtitle), fontsize=10, color=FAINT, va="center")
    return figure


def _tokens(axes: Axes, plot: ReplayPlot) -> None:
    """A line per policy, with its figures in the legend since curves may overlap; and marks at the changes of
    the adaptive policy."""
    from matplotlib.ticker import FuncFormatter

    for curve in plot.curves:
        hours = [time_s / HOUR_S for time_s in curve.times_s]
        width = 2.0 if curve.name == "adaptive" else 1.4
        dashes, colour = DASHES.get(curve.name, "-"), COLOURS[curve.name]
        label = f"{curve.name}  {format_count(curve.tokens[-1])}\n{curve.figures}"
        axes.plot(hours, curve.tokens, color=colour, linewidth=width, linestyle=dashes, label=label)
    adaptive = next((curve for curve in plot.curves if curve.name == "adaptive"), None)
    for kind, times_s in ({} if adaptive is None else adaptive.changes_s).items():
        hours = [time_s / HOUR_S for time_s in times_s]
        axes.plot(
            hours, [0.0] * len(hours), MARKERS[kind], linestyle="", color=COLOURS["adaptive"],
            markersize=7 if kind == "patch" else 5, clip_on=False, label=f"{kind} (adaptive)",
        )  # fmt: skip
    axes.set_xlim(0.0, plot.end_s / HOUR_S)
    axes.set_ylim(0.0)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: format_count(value)))
    axes.set_ylabel("tokens", labelpad=6)
    axes.tick_params(labelbottom=False)
    handles, labels = axes.get_legend_handles_labels()
    count = len(plot.curves)
    tops = sorted(range(count), key=lambda place: -plot.curves[place].tokens[-1])
    order = [*tops, *range(count, len(labels))]
    axes.legend(
        [handles[place] for place in order], [labels[place] for place in order], loc="upper left",
        bbox_to_anchor=(1.015, 1.0), borderaxespad=0.0, frameon=False, handlelength=2.4, labelspacing=0.6,
    )  # fmt: skip


def _nodes(axes: Axes, plot: ReplayPlot) -> None:
    hours = [*(time_s / HOUR_S for time_s in plot.times_s), plot.end_s / HOUR_S]
    counts = [*plot.nodes, plot.nodes[-1]]
    axes.fill_between(hours, counts, step="post", color="#cfd8e0", linewidth=0.0)
    axes.step(hours, counts, where="post", color=FAINT, linewidth=1.0)
    axes.set_ylim(0.0, max(counts) * 1.15 + 0.1)
    axes.set_ylabel("nodes", labelpad=6)
    axes.set_xlabel("hours", labelpad=6)
    axes.yaxis.label.set_color(INK)


def replay_document(plot: ReplayPlot) -> dict[str, object]:
    """The document of the page of a replay."""
    return {"schema": PAGE_SCHEMA, "version": 1, **asdict(plot)}
