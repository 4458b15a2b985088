"""The text form of a schedule (lossless, compact, strict), and its grid for reading.

    schedule=1f1b microbatches=8 stage_rank=0,1
    0F0 [0F1 0B0]*7 0B7
    [1F0 1B0]*8

One line per rank. `2F0*3` stands for `2F0 2F1 2F2`; `[2F4 2B0]*3` for `2F4 2B0 2F5 2B1 2F6 2B2`: every
repetition takes the next micro-batch. A rank without actions is a line with `-`. `to_text` and `from_text`
convert; `format_grid` prints one column per rank and one line per step.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from itertools import chain, pairwise

import numpy as np
from numpy.typing import NDArray

from shardwise.errors import ConfigError
from shardwise.schedule.action import CODE_OF_KIND, KINDS, Columns, Schedule
from shardwise.schedule.violations import Finding, dry_run, findings

Ints = NDArray[np.int64]
Triple = tuple[int, int, int]

MAX_CHARS = 1 << 20
MAX_ACTIONS = 1 << 22
MAX_RANKS = 1 << 12
"""Limits of a schedule text, so that a short text cannot expand to a huge table."""
_LONGEST_PATTERN = 8
"""Actions of the longest repeated pattern that `to_text` looks for; the steady state of ZB-V has 6."""

_NUMBER = r"(?:0|[1-9][0-9]{0,6})"
_ACTION = re.compile(rf"({_NUMBER})([FBIW])({_NUMBER})")
_PLAIN = rf"{_NUMBER}[FBIW]{_NUMBER}"
_RUN = re.compile(rf"(?P<pattern>\[{_PLAIN}(?: {_PLAIN})*\]|{_PLAIN})(?:\*(?P<times>{_NUMBER}))?")
_HEADER = re.compile(
    rf"schedule=([A-Za-z0-9_.-]{{1,64}}) microbatches=({_NUMBER}) stage_rank=({_NUMBER}(?:,{_NUMBER})*)"
)


def to_text(schedule: Schedule) -> str:
    """The schedule as text that `from_text` turns into an equal one. No newline at the end.

    Raises ConfigError where a name or number is outside the format.
    """
    stage, kind, microbatch, offsets = (column.tolist() for column in schedule.columns)
    triples = list(zip(stage, kind, microbatch, strict=True))
    ranks = ",".join(map(str, schedule.stage_rank))
    header = f"schedule={schedule.name} microbatches={schedule.microbatches} stage_rank={ranks}"
    _parsed_header(header)
    if min(chain(stage, microbatch), default=0) < 0 or max(chain(stage, microbatch), default=0) >= 10**7:
        raise ConfigError(
            "a stage or micro-batch number is out of range", key="schedule", allowed="0 to 9999999"
        )
    rows = (_row_text(triples[start:stop]) for start, stop in pairwise(offsets))
    return "\n".join([header, *rows])


def _row_text(row: list[Triple]) -> str:
    parts: list[str] = []
    place = 0
    while place < len(row):
        length, times = _best_run(row, place)
        actions = " ".join(f"{stage}{KINDS[kind]}{mb}" for stage, kind, mb in row[place : place + length])
        pattern = f"[{actions}]" if length > 1 else actions
        parts.append(f"{pattern}*{times}" if times > 1 else pattern)
        place += length * times
    return " ".join(parts) or "-"


def _best_run(row: list[Triple], place: int) -> tuple[int, int]:
    """Length and repetitions of the run at `place` that covers most actions; (1, 1) where nothing repeats."""
    best = (1, 1)
    for length in range(1, _LONGEST_PATTERN + 1):
        end = place
        while end + length < len(row):
            stage, kind, mb = row[end]
            if row[end + length] != (stage, kind, mb + 1):
                break
            end += 1
        times = (end - place) // length + 1
        if times > 1 and length * times > best[0] * best[1]:
            best = (length, times)
    return best


def from_text(text: str) -> Schedule:
    """The schedule that `text` describes. Checks the form only; `violations` checks whether it can be run.

    Raises ConfigError, with the line and the text found there; also for text of more than MAX_CHARS
    characters and for more than MAX_ACTIONS actions.
    """
    if len(text) > MAX_CHARS:
        raise ConfigError(
            "schedule text is too long", found=f"{len(text)} characters", allowed=f"{MAX_CHARS}"
        )
    header, *lines = text.split("\n")
    name, microbatches, stage_rank = _parsed_header(header)
    if not 1 <= len(lines) <= MAX_RANKS:
        raise ConfigError(
            "a schedule has a line for each rank",
            key="line 2",
            found=f"{len(lines)} lines",
            allowed=f"1 to {MAX_RANKS}",
        )
    rows: list[Ints] = []
    remaining = MAX_ACTIONS
    for number, line in enumerate(lines, start=2):
        row = _parsed_row(line, f"line {number}", remaining)
        remaining -= len(row)
        rows.append(row)
    table = np.concatenate(rows)
    offsets = np.cumsum([0, *map(len, rows)], dtype=np.int64)
    stage, kind, microbatch = (np.ascontiguousarray(column) for column in table.T)
    columns = Columns(stage, kind, microbatch, offsets)
    return Schedule.from_columns(name=name, microbatches=microbatches, stage_rank=stage_rank, columns=columns)


def _parsed_header(line: str) -> tuple[str, int, tuple[int, ...]]:
    match = _HEADER.fullmatch(line)
    if match is None:
        raise ConfigError(
            "not the first line of a schedule",
            key="line 1",
            found=repr(line[:80]),
            allowed="schedule=NAME microbatches=N stage_rank=R,R,...",
        )
    name, microbatches, ranks = match.groups()
    return name, int(microbatches), tuple(map(int, ranks.split(",")))


def _parsed_row(line: str, key: str, remaining: int) -> Ints:
    """Stage, kind code and micro-batch of each action of a line; shape (actions, 3), at most `remaining`
    rows."""
    actions: list[tuple[str, str, str]] = []
    repetitions: list[int] = []
    lengths: list[int] = []
    place = 0 if line != "-" else len(line) + 1
    while place <= len(line):
        match = _RUN.match(line, place)
        if match is None or line[match.end() : match.end() + 1] not in ("", " "):
            found = repr(line[place : place + 40])
            raise ConfigError("not an action", key=key, found=found, allowed="2F0, 2F0*4 or [2F4 2B0]*4")
        pattern = _ACTION.findall(match["pattern"])
        times = int(match["times"] or 1)
        remaining -= times * len(pattern)
        if times < 1 or remaining < 0:
            raise ConfigError(
                "too few or too many actions", key=key, found=match[0][:40], allowed=f"1 to {MAX_ACTIONS}"
            )
        actions += pattern
        repetitions.append(times)
        lengths.append(len(pattern))
        place = match.end() + 1
    triples = [(int(stage), CODE_OF_KIND[kind], int(mb)) for stage, kind, mb in actions]
    return _expanded(
        np.array(triples, dtype=np.int64).reshape(-1, 3), np.array(lengths), np.array(repetitions)
    )


def _expanded(actions: Ints, lengths: Ints, repetitions: Ints) -> Ints:
    """Each pattern repeated, every repetition with the next micro-batch; shape (sum of products, 3).

    `actions` has shape (sum(lengths), 3): the patterns one after the other.
    """
    if len(lengths) == 0 or repetitions.max() == 1:
        return actions
    first = np.cumsum(lengths) - lengths
    sizes = lengths * repetitions
    within = np.arange(sizes.sum()) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    length = np.repeat(lengths, sizes)
    rows: Ints = actions[np.repeat(first, sizes) + within % length]
    rows[:, 2] += within // length
    return rows


IDLE = "."
MARK = " <-- here"


def format_grid(
    schedule: Schedule, *, marks: Iterable[tuple[int, int]] = (), max_steps: int | None = None
) -> str:
    """The table as text: each action in the step where it could start if all took one step; idle steps are
    dots.

    `marks` are (rank, position in the rank's row) to be marked. Actions that can never start come last, in
    the order of their row. With `max_steps`, later lines are omitted and counted.
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
    """The columns (step -> entry) next to each other under a heading."""
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
    """The faults of the table, one per line, then the grid up to `context` lines after the last marked entry.

    Empty where there is no fault. `found` defaults to `findings(schedule)`.
    """
    found = findings(schedule) if found is None else found
    if not found:
        return ""
    marks = [(finding.rank, finding.place) for finding in found if finding.place is not None]
    lines = [str(finding) for finding in found]
    grid = format_grid(schedule, marks=marks).split("\n")
    last = max((index for index, line in enumerate(grid) if MARK in line), default=len(grid))
    return "\n".join([*lines, *grid[: last + 1 + context]])
