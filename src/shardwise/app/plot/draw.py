"""Draws a frontier with matplotlib (extra `plot`): `render` gives the figure.

The first part chooses ticks and limits of logarithmic axes; the second draws lines, marks and labels. Labels
of marks go where they overlap least.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from math import ceil, floor, log, log10
from typing import TYPE_CHECKING, Any

from shardwise.app.plot.glyphs import drawable
from shardwise.app.plot.record import Plot, PlotLine

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


# Axes

MIN_TICKS, MAX_TICKS = 4, 10
"""Fewest and most ticks of an axis."""

TIME_STEPS = ((1.0,), (1.0, 2.0, 5.0), (1.0, 1.5, 2.0, 3.0, 5.0, 7.0))
"""Multiples of powers of ten for ticks of time, coarsest first."""

MEMORY_STEPS = ((1.0,), (1.0, 1.5))
"""Multiples of powers of two for ticks of memory, coarsest first."""

EVEN_STEPS = (1.0, 2.0, 2.5, 5.0)
"""Distances of evenly spaced ticks, times powers of ten, where an axis is too short for multiples."""

GIB = 2.0**30


def range_of(values: Iterable[float], *, padding: float) -> tuple[float, float]:
    """Limits of a logarithmic axis for positive values: their range, padded on both sides by the share
    `padding` of it; a single value gets a factor of 1.5."""
    found = list(values)
    low, high = min(found), max(found)
    factor = (high / low) ** padding if high > low * 1.01 else 1.5
    return low / factor, high * factor


def ticks(low: float, high: float, steps: Sequence[Sequence[float]], base: float) -> list[float]:
    """Ticks between `low` and `high`: multiples of powers of `base`, the coarsest of `steps` with at least
    MIN_TICKS; evenly spaced ticks where none has. Above MAX_TICKS every second tick is dropped."""
    powers = range(floor(log(low, base)) - 1, ceil(log(high, base)) + 1)
    for multiples in steps:
        found = [m * base**k for k in powers for m in multiples if low <= m * base**k <= high]
        if len(found) >= MIN_TICKS:
            break
    else:
        found = even_ticks(low, high)
    while len(found) > MAX_TICKS:
        found = found[::2]
    return found


def even_ticks(low: float, high: float) -> list[float]:
    """Evenly spaced ticks between `low` and `high`, with the largest distance that gives at least
    MIN_TICKS."""
    power = floor(log10(high - low))
    for step in (step * 10.0**k for k in (power, power - 1) for step in reversed(EVEN_STEPS)):
        found = [step * number for number in range(ceil(low / step), floor(high / step) + 1)]
        if len(found) >= MIN_TICKS:
            return found
    return [low, high]


def time_ticks(low_s: float, high_s: float) -> tuple[list[float], list[str]]:
    """Ticks in seconds with labels in s, or in ms where the axis ends below 1 s."""
    unit_s, name = (1e-3, "ms") if high_s < 1.0 else (1.0, "s")
    return _labelled(low_s, high_s, TIME_STEPS, 10.0, lambda value: f"{value / unit_s:.6g} {name}")


def memory_ticks(low_bytes: float, high_bytes: float) -> tuple[list[float], list[str]]:
    """Ticks in bytes with labels in GiB."""
    low, high = low_bytes / GIB, high_bytes / GIB
    places, labels = _labelled(low, high, MEMORY_STEPS, 2.0, lambda value: f"{value:.6g} GiB")
    return [place * GIB for place in places], labels


def _labelled(
    low: float, high: float, steps: Sequence[Sequence[float]], base: float, text: Callable[[float], str]
) -> tuple[list[float], list[str]]:
    places = ticks(low, high, steps, base)
    return places, [text(place) for place in places]


# The figure

WIDTH_IN, HEIGHT_IN = 10.0, 6.25
"""Size of the figure, inches."""

DPI = 160
POINTS_PER_IN = 72.0

INK, FAINT, GRID = "#1d2733", "#6b7785", "#e6e9ed"
ALONE = "#1f6f8b"

LEFT, EDGE = 0.095, 0.01
"""Left edge of the axes unless their labels need more, and smallest left edge of these labels; shares of the
width."""

SHAPES = ("*", "s", "^", "P", "v", "X", "p")

STYLE: Any = {
    "font.size": 10.0,
    "font.family": ["DejaVu Sans"],  # whose characters `drawable` knows
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": FAINT,
    "xtick.color": FAINT,
    "ytick.color": FAINT,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    # Letters as outlines, so that labels do not depend on the reader's fonts.
    "svg.fonttype": "path",
    "svg.hashsalt": "shardwise",
    "text.parse_math": False,  # names may contain dollar signs
}

DISTANCES = (11.0, 20.0, 32.0, 46.0, 62.0)
DIRECTIONS = ((1, 1), (1, -1), (-1, 1), (-1, -1), (0, 1), (0, -1), (1, 0), (-1, 0))
"""Candidate positions of the label of a mark: distances in points, and directions (right, up)."""

OUTSIDE_COST, OVERLAP_COST = 1000, 30
"""Penalties of a label outside the axes, and on another label or mark; a label on a dot costs 1."""


@dataclass(frozen=True, slots=True)
class RenderedFigure:
    """A finished figure."""

    figure: Figure

    def as_bytes(self, form: str) -> bytes:
        """The figure as `png` or `svg`; the same figure gives the same bytes."""
        import matplotlib

        buffer = io.BytesIO()
        metadata = {"Software": None} if form == "png" else {"Date": None, "Creator": None}
        with matplotlib.rc_context(STYLE):
            self.figure.savefig(buffer, format=form, dpi=DPI, metadata=metadata)
        return buffer.getvalue()


def render(plot: Plot) -> RenderedFigure:
    """The plot as a figure."""
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    plot = _drawable(plot)
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(WIDTH_IN, HEIGHT_IN), dpi=DPI, facecolor="white")
        canvas = FigureCanvasAgg(figure)
        has_legend = len(plot.lines) > 1
        right = 0.85 if has_legend else 0.97
        axes = figure.add_axes((LEFT, 0.1, right - LEFT, 0.755))
        colours = _colours(len(plot.lines))
        _frame(axes, plot)
        left = _left(axes, canvas)
        axes.set_position((left, 0.1, right - left, 0.755))
        for line, colour in zip(plot.lines, colours, strict=True):
            _line(axes, line, colour)
        _limit(axes, plot)
        _marks(axes, plot, canvas)
        _legend(axes, plot, colours)
        figure.text(left, 0.955, plot.title, fontsize=15, fontweight="bold", va="center")
        figure.text(left, 0.905, plot.subtitle, fontsize=10, color=FAINT, va="center")
    return RenderedFigure(figure)


def _drawable(plot: Plot) -> Plot:
    return replace(
        plot,
        title=drawable(plot.title),
        subtitle=drawable(plot.subtitle),
        lines=tuple(replace(line, name=drawable(line.name)) for line in plot.lines),
        marks=tuple(replace(mark, name=drawable(mark.name)) for mark in plot.marks),
    )


def _colours(count: int) -> tuple[str, ...]:
    """From dark for the first line to light for the last: the order is visible in grey too."""
    from matplotlib import colormaps
    from matplotlib.colors import to_hex

    if count == 1:
        return (ALONE,)
    return tuple(to_hex(colormaps["viridis"](0.05 + 0.77 * place / (count - 1))) for place in range(count))


def _frame(axes: Axes, plot: Plot) -> None:
    """Logarithmic axes with units, a faint grid, no box."""
    dots = [dot for _, dot in plot.dots()]
    limit = [] if plot.limit_bytes is None else [plot.limit_bytes]
    low_s, high_s = range_of((dot.time_s for dot in dots), padding=0.06)
    low_bytes, high_bytes = range_of([*(dot.memory_bytes for dot in dots), *limit], padding=0.08)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlim(low_s, high_s)
    axes.set_ylim(low_bytes, high_bytes)
    axes.set_xticks(*time_ticks(low_s, high_s))
    axes.set_yticks(*memory_ticks(low_bytes, high_bytes))
    axes.minorticks_off()
    axes.set_xlabel("step time (logarithmic)", labelpad=6)
    axes.set_ylabel("peak memory per device (logarithmic)", labelpad=6)
    axes.grid(True, color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(length=0, pad=5)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def _left(axes: Axes, canvas: Any) -> float:
    """Left edge of the axes, as a share of the width, at which all labels are visible."""
    labels = axes.yaxis.get_tightbbox(canvas.get_renderer())
    lost = 0.0 if labels is None else EDGE - labels.x0 / axes.figure.bbox.width
    return LEFT + max(lost, 0.0)


def _line(axes: Axes, line: PlotLine, colour: str) -> None:
    """A frontier as a step function, since between two points the faster one is the best; a dot per point,
    and a diamond at the knee."""
    times = [dot.time_s for dot in line.dots]
    nbytes = [dot.memory_bytes for dot in line.dots]
    axes.step(times, nbytes, where="post", color=colour, linewidth=1.4, alpha=0.75, zorder=2)
    axes.plot(times, nbytes, "o", color=colour, markersize=3.4, markeredgewidth=0.0, zorder=3)
    if line.knee is not None:
        axes.plot(
            times[line.knee], nbytes[line.knee], "D", color=colour, markersize=7.5, markeredgecolor="white",
            markeredgewidth=1.4, zorder=4,
        )  # fmt: skip


def _limit(axes: Axes, plot: Plot) -> None:
    if plot.limit_bytes is None:
        return
    axes.axhline(plot.limit_bytes, color=INK, linewidth=1.0, linestyle=(0, (5, 4)), zorder=1.5)
    axes.annotate(
        f"limit {plot.limit_bytes / GIB:.4g} GiB",
        (1.0, plot.limit_bytes), xycoords=axes.get_yaxis_transform(),
        xytext=(-4, 4), textcoords="offset points", ha="right", va="bottom", fontsize=9, color=INK,
        path_effects=_halo(),
    )  # fmt: skip


def _marks(axes: Axes, plot: Plot, canvas: Any) -> None:
    """Named points with labels where they overlap no label, no mark, few dots and not the edge. Marks at one
    point share a label."""
    names: dict[tuple[float, float], list[str]] = {}
    for mark in plot.marks:
        names.setdefault((mark.dot.time_s, mark.dot.memory_bytes), []).append(mark.name)
    for shape, place in zip(_repeated(SHAPES, len(names)), names, strict=True):
        axes.plot(
            *place, shape, color="white", markersize=12, markeredgecolor=INK, markeredgewidth=1.3, zorder=5
        )
    dots = axes.transData.transform([(dot.time_s, dot.memory_bytes) for _, dot in plot.dots()])
    occupied = _OccupiedArea([box_of(text, canvas.get_renderer()) for text in axes.texts])
    occupied.boxes += [_square(axes, place) for place in names]
    # From the top, so that leaders do not cross.
    for place, own in sorted(names.items(), key=lambda item: -item[0][1]):
        _label(axes, " · ".join(own), place, occupied, dots, canvas)


@dataclass(slots=True)
class _OccupiedArea:
    """Occupied areas in pixels: boxes of marks and other texts, of the labels so far, and the leaders of
    these labels."""

    boxes: list[Any]
    labels: list[Any] = field(default_factory=list)
    leads: list[Any] = field(default_factory=list)

    def overlap_count(self, box: Any, lead: Any) -> int:
        """The number of overlaps of a label at `box` and of its leader `lead`."""
        overlap_count = [box.overlaps(other) for other in (*self.boxes, *self.labels)]
        overlap_count += [lead.intersects_bbox(other) for other in self.labels]
        overlap_count += [other.intersects_bbox(box) for other in self.leads]
        return sum(map(bool, overlap_count))


def _label(
    axes: Axes, name: str, place: tuple[float, float], occupied: _OccupiedArea, dots: Any, canvas: Any
) -> None:
    """Write the name of a mark at the candidate position with the least penalty."""
    renderer, frame = canvas.get_renderer(), axes.get_window_extent()
    text = axes.annotate(
        name, place, xytext=(0, 0), textcoords="offset points", fontsize=10, fontweight="bold",
        path_effects=_halo(), zorder=6,
        arrowprops={"arrowstyle": "-", "color": FAINT, "linewidth": 0.8, "shrinkA": 0.0, "shrinkB": 6.0},
    )  # fmt: skip

    def put(distance: float, right: int, up: int) -> Any:
        text.set_position((distance * right, distance * up))
        text.set_horizontalalignment(("center", "left", "right")[right])
        text.set_verticalalignment(("center", "bottom", "top")[up])
        return box_of(text, renderer)

    def cost(choice: tuple[float, int, int]) -> float:
        box = put(*choice)
        is_inside = frame.x0 <= box.x0 and box.x1 <= frame.x1 and frame.y0 <= box.y0 and box.y1 <= frame.y1
        overlap_count = occupied.overlap_count(box, leader_of(axes, place, box))
        on_dots = int(box.count_contains(dots))
        return (
            float(OUTSIDE_COST * (not is_inside) + OVERLAP_COST * overlap_count + on_dots) + choice[0] / 20.0
        )

    choices = [(distance, *direction) for distance in DISTANCES for direction in DIRECTIONS]
    box = put(*min(choices, key=cost))
    occupied.labels.append(box)
    occupied.leads.append(leader_of(axes, place, box))


def box_of(text: Any, renderer: Any) -> Any:
    """The box of an annotation's text in pixels, without its leader."""
    from matplotlib.text import Text

    text.update_positions(renderer)
    return Text.get_window_extent(text, renderer)


def leader_of(axes: Axes, place: tuple[float, float], box: Any) -> Any:
    """The leader in pixels: from a mark to the middle of its label."""
    from matplotlib.path import Path

    x, y = axes.transData.transform(place)
    return Path([(x, y), ((box.x0 + box.x1) / 2, (box.y0 + box.y1) / 2)])


def _square(axes: Axes, place: tuple[float, float]) -> Any:
    """The box of the shape of a mark."""
    from matplotlib.transforms import Bbox

    x, y = axes.transData.transform(place)
    half = 6.0 * axes.figure.dpi / POINTS_PER_IN
    return Bbox.from_extents(x - half, y - half, x + half, y + half)


def _legend(axes: Axes, plot: Plot, colours: Sequence[str]) -> None:
    """The legend: next to the axes for several lines, above them for one; the knee is the last entry."""
    from matplotlib.lines import Line2D

    entries: list[Any] = [
        Line2D([], [], color=colour, linewidth=2.2, label=line.name)
        for line, colour in zip(plot.lines, colours, strict=True)
    ]
    if any(line.knee is not None for line in plot.lines):
        entries.append(Line2D([], [], marker="D", color=FAINT, markersize=7, linestyle="none", label="knee"))
    has_side_legend = len(plot.lines) > 1
    axes.legend(
        handles=entries, loc="upper left" if has_side_legend else "lower right", borderaxespad=0.0,
        frameon=False,
        bbox_to_anchor=(1.015, 1.0) if has_side_legend else (1.0, 1.0),
        ncols=1 if has_side_legend else len(entries),
        handlelength=1.4, labelspacing=0.55,
    )  # fmt: skip


def _halo() -> list[Any]:
    from matplotlib.patheffects import withStroke

    return [withStroke(linewidth=3.0, foreground="white")]


def _repeated(shapes: Sequence[str], count: int) -> list[str]:
    return [shapes[place % len(shapes)] for place in range(count)]
