"""Prints a schedule as a grid: one column per rank, one line per step."""

from __future__ import annotations

from collections.abc import Iterable

from shardwise.schedule.action import Schedule
from shardwise.schedule.dry_run import dry_run
from shardwise.schedule.violations import Finding, findings

IDLE = "."
MARK = " <-- here"


def format_grid(
    schedule: Schedule, *, marks: Iterable[tuple[int, int]] = (), max_steps: int | None = None
) -> str:
    """The table as text, each action in the step where it could start if all took one step; idle cells are
    dots.

    `marks` are (rank, place in the rank's row) to be marked. Actions that can never start follow in the
    order of their row. With `max_steps`, later lines are left out and their number is said.
    """
    marked = set(marks)
    columns: list[dict[int, str]] = []
    for rank, (row, starts) in enumerate(zip(schedule.ranks, dry_run(schedule).starts, strict=True)):
        after = starts[-1] + 1 if starts else 0
        steps = [*starts, *range(after, after + len(row) - len(starts))]
        entries = (f"{action}{MARK if (rank, place) in marked else ''}" for place, action in enumerate(row))
        columns.append(dict(zip(steps, entries, strict=True)))
    return _table(columns, max_steps)


def _table(columns: list[dict[int, str]], max_steps: int | None) -> str:
    """The columns (step to cell) side by side under a heading."""
    steps = max((max(column) + 1 for column in columns if column), default=0)
    shown = steps if max_steps is None else min(steps, max_steps)
    titles = [f"rank {rank}" for rank in range(len(columns))]
    widths = [
        max(len(title), *(len(column.get(step, IDLE)) for step in range(shown)), 1)
        for title, column in zip(titles, columns, strict=True)
    ]
    margin = len(f"step {max(shown - 1, 0)}")
    lines = [_line(" " * margin, titles, widths)]
    for step in range(shown):
        entries = [column.get(step, IDLE) for column in columns]
        lines.append(_line(f"step {step}".ljust(margin), entries, widths))
    if shown < steps:
        lines.append(f"({steps - shown} more steps)")
    return "\n".join(lines)


def _line(margin: str, entries: list[str], widths: list[int]) -> str:
    return "  ".join(
        [margin, *(entry.ljust(width) for entry, width in zip(entries, widths, strict=True))]
    ).rstrip()


def format_findings(schedule: Schedule, found: list[Finding] | None = None, *, context: int = 4) -> str:
    """What is wrong with the table, one line per fault, and the grid up to a little after the last marked
    cell.

    Empty where nothing is wrong. `found` defaults to `findings(schedule)`.
    """
    found = findings(schedule) if found is None else found
    if not found:
        return ""
    marks = [(finding.rank, finding.place) for finding in found if finding.place is not None]
    lines = [str(finding) for finding in found]
    grid = format_grid(schedule, marks=marks).split("\n")
    last = max((index for index, line in enumerate(grid) if MARK in line), default=len(grid))
    return "\n".join([*lines, *grid[: last + 1 + context]])
