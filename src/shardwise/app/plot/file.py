"""From a plot to a file: PNG, SVG or a page, by the suffix of its name."""

from __future__ import annotations

import os
from importlib.util import find_spec

from shardwise.app.plot.draw import render
from shardwise.app.plot.page import page_of
from shardwise.app.plot.record import Plot
from shardwise.errors import ConfigError
from shardwise.inputs import printable
from shardwise.plan import write_file

SUFFIXES = (".png", ".svg", ".html")


def check_plot_file(path: str, *, key: str) -> None:
    """Refuse, before any work is done, a name without a known suffix, and any where nothing can be drawn."""
    if _suffix(path) not in SUFFIXES:
        raise ConfigError(
            "has no suffix of a plot", key=key, found=printable(path) or "''", allowed=", ".join(SUFFIXES)
        )
    if find_spec("matplotlib") is None:
        raise ConfigError(
            "needs matplotlib, which is not installed",
            key=key,
            found=printable(path),
            allowed="after `pip install 'shardwise[plot]'`, or `pip install 'matplotlib>=3.9,<4'`",
        )


def write_plot(path: str, plot: Plot) -> None:
    """Draws `plot` into the file at `path`, whole or not at all."""
    found = render(plot)
    form = _suffix(path).removeprefix(".")
    write_file(path, page_of(plot, found) if form == "html" else found.as_bytes(form))


def _suffix(path: str) -> str:
    return os.path.splitext(path)[1].lower()
