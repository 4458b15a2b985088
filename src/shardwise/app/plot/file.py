"""Writes a plot to a file: PNG, SVG or HTML by its suffix. The HTML page needs no matplotlib: it has the
points as data, and the scripts of `app/web` draw them."""

from __future__ import annotations

import os
from importlib.util import find_spec

from shardwise.app.plot.draw import render
from shardwise.app.plot.record import Dot, Plot
from shardwise.app.web import page_of
from shardwise.errors import ConfigError
from shardwise.inputs import install_text, printable
from shardwise.plans import write_file

SUFFIXES = (".png", ".svg", ".html")
PAGE_SCHEMA = "shardwise.frontier-page"


def plot_document(plot: Plot) -> dict[str, object]:
    """The document of the page of a plot. `more` of a point has the indices of its further lines in
    `texts`."""
    place = {text: place for place, text in enumerate(_details(plot))}

    def record(dot: Dot) -> dict[str, object]:
        return {
            "step_time_s": dot.time_s,
            "device_bytes": dot.memory_bytes,
            "lines": list(dot.lines),
            "more": [place[text] for text in dot.more],
        }

    return {
        "schema": PAGE_SCHEMA,
        "version": 1,
        "title": plot.title,
        "subtitle": plot.subtitle,
        "lines": [
            {"name": line.name, "knee": line.knee, "dots": list(map(record, line.dots))}
            for line in plot.lines
        ],
        "marks": [{"name": mark.name, "dot": record(mark.dot)} for mark in plot.marks],
        "limit_bytes": plot.limit_bytes,
        "texts": list(place),
    }


def _details(plot: Plot) -> list[str]:
    """The distinct further texts of dots: layouts of neighbouring points share most lines."""
    return list(dict.fromkeys(text for _, dot in plot.dots() for text in dot.more))


def check_plot_file(path: str, *, key: str) -> None:
    """ConfigError, before the search, for a name without a known suffix, and for a PNG or SVG without
    matplotlib."""
    if _suffix(path) not in SUFFIXES:
        raise ConfigError(
            "has no suffix of a plot file",
            key=key,
            found=printable(path) or "''",
            allowed=", ".join(SUFFIXES),
        )
    if _suffix(path) != ".html" and find_spec("matplotlib") is None:
        raise ConfigError(
            "needs matplotlib, which is not installed",
            key=key,
            found=printable(path),
            allowed=f"a name in .html, or after {install_text('plot')}",
        )


def write_plot(path: str, plot: Plot) -> None:
    """Write `plot` to the file at `path` atomically."""
    form = _suffix(path).removeprefix(".")
    is_page = form == "html"
    write_file(path, page_of(plot.title, plot_document(plot)) if is_page else render(plot).as_bytes(form))


def _suffix(path: str) -> str:
    return os.path.splitext(path)[1].lower()
