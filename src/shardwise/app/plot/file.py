"""Writes a plot to a file: PNG, SVG or HTML by its suffix.

`page_of` makes a self-contained HTML page: the drawing, details of each dot on hover, and all dots as a
table.
"""

from __future__ import annotations

import json
import os
from html import escape
from importlib.resources import files
from importlib.util import find_spec
from string import Template

from shardwise.app.plot.draw import GIB, HEIGHT_IN, POINTS_PER_IN, WIDTH_IN, RenderedFigure, render
from shardwise.app.plot.record import Plot
from shardwise.errors import ConfigError
from shardwise.inputs import printable
from shardwise.plans import write_file

TEMPLATE = "page.html"


def page_of(plot: Plot, figure: RenderedFigure) -> bytes:
    """The HTML page, in UTF-8."""
    svg = figure.as_bytes("svg").decode("utf-8")
    template = Template(files(__package__).joinpath(TEMPLATE).read_text("utf-8"))
    return template.substitute(
        title=escape(plot.title),
        subtitle=escape(plot.subtitle),
        svg=svg[svg.index("<svg") :],
        view=f"0 0 {WIDTH_IN * POINTS_PER_IN:g} {HEIGHT_IN * POINTS_PER_IN:g}",
        dots=_script_json(_dots(plot, figure)),
        wholes=_script_json(_details(plot)),
        rows="\n".join(_rows(plot)),
    ).encode("utf-8")


def _dots(plot: Plot, figure: RenderedFigure) -> list[dict[str, object]]:
    """Every dot with its position, the colour of its line (ink for marks), its texts, and the indices of its
    further texts in `_details`."""
    colours = [colour for line, colour in zip(plot.lines, figure.colours, strict=True) for _ in line.dots] + [
        "#1d2733"
    ] * len(plot.marks)
    place = {text: place for place, text in enumerate(_details(plot))}
    return [
        {
            "x": round(x, 2),
            "y": round(y, 2),
            "colour": colour,
            "name": name,
            "lines": list(dot.lines),
            "more": [place[text] for text in dot.more],
        }
        for (name, dot), (x, y), colour in zip(plot.dots(), figure.places, colours, strict=True)
    ]


def _details(plot: Plot) -> list[str]:
    """The distinct further texts of dots: layouts of neighbouring points share most lines."""
    return list(dict.fromkeys(text for _, dot in plot.dots() for text in dot.more))


def _rows(plot: Plot) -> list[str]:
    return [
        f"<tr><td>{escape(name)}</td><td>{dot.time_s:.6g}</td><td>{dot.memory_bytes / GIB:.4g}</td>"
        f"<td>{escape(' · '.join(dot.lines))}</td></tr>"
        for name, dot in plot.dots()
    ]


def _script_json(value: object) -> str:
    """JSON for a script element: escaped so that it cannot end the element or open a comment."""
    text = json.dumps(value, ensure_ascii=True, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


SUFFIXES = (".png", ".svg", ".html")


def check_plot_file(path: str, *, key: str) -> None:
    """ConfigError, before the search, for a name without a known suffix, and without matplotlib."""
    if _suffix(path) not in SUFFIXES:
        raise ConfigError(
            "has no suffix of a plot file",
            key=key,
            found=printable(path) or "''",
            allowed=", ".join(SUFFIXES),
        )
    if find_spec("matplotlib") is None:
        raise ConfigError(
            "needs matplotlib, which is not installed",
            key=key,
            found=printable(path),
            allowed="after `pip install 'shardwise[plot]'`, or `pip install 'matplotlib>=3.9,<4'`",
        )


def write_plot(path: str, plot: Plot) -> None:
    """Write `plot` to the file at `path` atomically."""
    found = render(plot)
    form = _suffix(path).removeprefix(".")
    write_file(path, page_of(plot, found) if form == "html" else found.as_bytes(form))


def _suffix(path: str) -> str:
    return os.path.splitext(path)[1].lower()
