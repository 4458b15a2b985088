"""Results in a notebook, as HTML: tables and bars without scripts, styles of the page or outside resources.
Every text is escaped."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from html import escape

LEAST_SHARE = 1e-3
"""Smallest part of a sum that has a bar of its own."""

_CELL = 'style="text-align:left;padding:1px 10px 1px 0"'
_FILLED = "background:#4c78a8;height:0.8em;display:inline-block;vertical-align:middle"


def panel(title: str, *parts: str) -> str:
    """A titled block with `parts`, which are HTML."""
    return f'<div style="margin:4px 0"><strong>{escape(title)}</strong>{"".join(parts)}</div>'


def line(words: str) -> str:
    """A line of text."""
    return f"<div>{escape(words)}</div>"


def table(headings: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A table with a row of headings, unless there are none; None is an empty cell."""
    head = "".join(f"<th {_CELL}>{escape(name)}</th>" for name in headings)
    body = "".join(f"<tr>{''.join(map(_cell, row))}</tr>" for row in rows)
    return f"<table>{f'<tr>{head}</tr>' if head else ''}{body}</table>"


def _cell(value: object) -> str:
    return f"<td {_CELL}>{'' if value is None else escape(str(value))}</td>"


def bars(title: str, parts: Mapping[str, float], text_of: Callable[[float], str]) -> str:
    """A bar for each part above a thousandth of the sum, the largest first; `text_of` writes its amount."""
    whole = sum(parts.values()) or 1.0
    largest = max(parts.values(), default=0.0) or 1.0
    rows = []
    for name, value in sorted(parts.items(), key=lambda part: -part[1]):
        if value >= LEAST_SHARE * whole:
            bar = f'<span style="{_FILLED};width:{120.0 * value / largest:.0f}px"></span>'
            label = escape(name.replace("_", " "))
            amount = f"{escape(text_of(value))} ({100.0 * value / whole:.0f} %)"
            rows.append(f"<tr><td {_CELL}>{label}</td><td {_CELL}>{bar}</td><td {_CELL}>{amount}</td></tr>")
    return f"<div>{escape(title)}</div><table>{''.join(rows)}</table>"
