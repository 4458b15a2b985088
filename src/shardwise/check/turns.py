"""Where a schedule turns round: what a rank does before its first backward and after its last forward.

Read from the table of the schedule itself (docs/cost-model.md, section 13). From 4 pp microbatches on, both
ends of a row stay as they are; only the middle grows.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from shardwise.check.rows import NO_ROWS, Column, Family
from shardwise.check.schedules import in_flight, table_of, waiting


@dataclass(frozen=True, slots=True)
class Turns:
    """Of one schedule: counts of actions per stage, shape (stages,), and places per rank, shape (pp,).

    `before`: forwards of a stage before the first backward of its rank; `backwards`, `inputs`, `weights`:
    B, I and W after the last forward. `first_back` and `last_forward` are the stages of these two actions,
    the one of the first microbatch, the other of the last; `in_order`: the one comes before the other.
    """

    before: Column
    backwards: Column
    inputs: Column
    weights: Column
    first_back: Column
    last_forward: Column
    in_order: Column


@lru_cache(maxsize=4096)
def turns_of(schedule: str, pp: int, vpp: int, microbatches: int) -> Turns:
    """The turns of a legal combination."""
    if schedule == "gpipe":
        ranks = np.arange(pp)
        all_of = np.full(pp, microbatches)
        none = np.zeros(pp, dtype=np.int64)
        return Turns(all_of, all_of, none, none, ranks, ranks, np.zeros(pp, dtype=bool))
    family = empty_family(schedule, pp, vpp, min(microbatches, 4 * pp))
    counts = {name: np.zeros(pp * vpp, dtype=np.int64) for name in ("before", "B", "I", "W")}
    places = []
    for row in table_of(family):
        first = next(place for place, act in enumerate(row) if act[1] in "BI")
        last = max(place for place, act in enumerate(row) if act[1] == "F")
        for stage, kind, _ in row[:first]:
            counts["before"][stage] += kind == "F"
        for stage, kind, _ in row[last + 1 :]:
            counts[kind][stage] += 1
        places.append((row[first][0], row[last][0], first < last))
    first_back, last_forward, in_order = map(np.array, zip(*places, strict=True))
    return Turns(counts["before"], counts["B"], counts["I"], counts["W"], first_back, last_forward, in_order)


@lru_cache(maxsize=4096)
def pairs_of(schedule: str, pp: int, vpp: int, microbatches: int) -> tuple[int, ...]:
    """What each rank holds in flight."""
    family = empty_family(schedule, pp, vpp, microbatches)
    return tuple(in_flight(family, rank) for rank in range(pp))


@lru_cache(maxsize=4096)
def waiting_of(schedule: str, pp: int, vpp: int, microbatches: int) -> tuple[int, ...]:
    """What waits on each rank for the weights' half of its backward."""
    family = empty_family(schedule, pp, vpp, microbatches)
    return tuple(waiting(family, rank) for rank in range(pp))


def empty_family(schedule: str, pp: int, vpp: int, microbatches: int) -> Family:
    """A family that has a table, and no rows."""
    return Family(schedule=schedule, pp=pp, vpp=vpp, microbatches=microbatches, rows=NO_ROWS)
