"""The actions of a schedule table as rows sorted by topological level, for evaluation level by level."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Level:
    """Rows `start` to `stop` of the finish times, and what they are made from.

    `before` holds, for the level's w actions, w rows of the actions before them on their ranks and then w
    rows of what they depend on; `parts` holds w rows of hops and then w rows of durations in `Cases.parts`.
    `gathered` are pairs of a place in the level and the stage whose gather the action there waits for.
    """

    start: int
    stop: int
    before: Ints
    parts: Ints
    gathered: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LevelRows:
    """Row 0 of the finish times is time zero; action i of `Schedule.columns` has row `row_of[i]`.

    `action_of_row` is the way back (-1 for row 0). Level l has rows `level_starts[l]` to `level_starts[l +
    1]`. `previous` and `source` are, by row, the rows of the action before it on its rank and of the action
    it waits for over a hop (0 if none). `widest` is the length of the longest level.
    """

    row_of: Ints
    action_of_row: Ints
    level_starts: Ints
    previous: Ints
    source: Ints
    levels: list[Level]
    widest: int


def level_rows(
    *, level: Ints, source: Ints, hop: Ints, duration_row: Ints, first_forward: Ints, offsets: Ints
) -> LevelRows:
    """Sort actions of the given levels; `offsets` are those of `Schedule.columns`, the rest is by action."""
    actions = len(level)
    order = np.argsort(level, kind="stable")
    row_of = np.empty(actions + 1, np.int64)
    row_of[order] = np.arange(1, actions + 1)
    row_of[-1] = 0  # what waits for nothing waits for row 0
    widths = np.bincount(level)
    starts = 1 + np.concatenate(([0], np.cumsum(widths)))
    before = np.arange(-1, actions - 1)
    before[offsets[:-1]] = -1
    previous, sources = row_of[before[order]], row_of[source[order]]
    gathered: dict[int, list[tuple[int, int]]] = {}
    for stage, action in enumerate(first_forward.tolist()):
        at = int(level[action])
        gathered.setdefault(at, []).append((int(row_of[action] - starts[at]), stage))
    rows, parts = _paired(starts, previous, sources), _paired(starts, hop[order], duration_row[order])
    return LevelRows(
        row_of=row_of[:-1],
        action_of_row=np.concatenate(([-1], order)),
        level_starts=starts,
        previous=np.concatenate(([0], previous)),
        source=np.concatenate(([0], sources)),
        levels=[
            Level(
                start,
                stop,
                rows[2 * start - 2 : 2 * stop - 2],
                parts[2 * start - 2 : 2 * stop - 2],
                tuple(gathered.get(number, ())),
            )
            for number, (start, stop) in enumerate(pairwise(starts.tolist()))
        ],
        widest=int(widths.max(initial=0)),
    )


def _paired(starts: Ints, left: Ints, right: Ints) -> Ints:
    """Per level its rows of `left` and then its rows of `right`, level after level."""
    begins = starts[:-1] - 1
    widths = np.diff(starts)
    place = np.arange(len(left)) + np.repeat(begins, widths)
    paired = np.empty(2 * len(left), np.int64)
    paired[place] = left
    paired[place + np.repeat(widths, widths)] = right
    return paired
