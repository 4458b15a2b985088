"""Says what is wrong with a schedule table. Knows nothing of how tables are made, and takes any stage
placement."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from shardwise.schedule.action import ActionKind, Table
from shardwise.schedule.dry_run import dry_run

_NEXT: dict[tuple[str, ActionKind], str] = {
    ("", ActionKind.FORWARD): "F",
    ("F", ActionKind.BACKWARD): "FB",
    ("F", ActionKind.BACKWARD_INPUT): "FI",
    ("FI", ActionKind.BACKWARD_WEIGHT): "FIW",
}
_COMPLETE = frozenset({"FB", "FIW"})


class Finding(NamedTuple):
    """One fault: the rank, the place in its row (None where something is missing), and the fault in words."""

    rank: int
    place: int | None
    text: str

    def __str__(self) -> str:
        where = f"rank {self.rank}" if self.place is None else f"rank {self.rank}, action {self.place}"
        return f"{where}: {self.text}"


def violations(schedule: Table, in_flight_limit: Sequence[int] | None = None) -> list[str]:
    """The faults of the table in plain words, none if it can be run and does all the work once.

    Rules: every stage lies on ranks that exist; a rank runs only what lies on it; every (stage,
    microbatch) has one F and then either one B or one I and later one W; and all rows can be run to their
    end, each action waiting for the stage before (F) or after (B, I). With `in_flight_limit` (one number
    per rank) no rank may hold more (stage, microbatch) pairs between F and B or W.
    """
    return [str(finding) for finding in findings(schedule, in_flight_limit)]


def findings(schedule: Table, in_flight_limit: Sequence[int] | None = None) -> list[Finding]:
    """As `violations`, with the place of each fault; a later rule is looked at only where the earlier ones
    hold."""
    found = list(_shape(schedule))
    if not found:
        found = list(_work(schedule))
    if not found:
        found = list(_deadlocks(schedule))
    if not found and in_flight_limit is not None:
        found = list(_too_many_in_flight(schedule, in_flight_limit))
    return found


def _shape(schedule: Table) -> Iterator[Finding]:
    if schedule.microbatches < 1:
        yield Finding(0, None, f"there are {schedule.microbatches} microbatches; at least 1 is needed")
    if not schedule.stages:
        yield Finding(0, None, "there is no stage")
    ranks = len(schedule.ranks)
    for stage in range(schedule.stages):
        for rank in schedule.ranks_for(stage):
            if not 0 <= rank < ranks:
                yield Finding(rank, None, f"holds stage {stage}, but ranks go from 0 to {ranks - 1}")


def _work(schedule: Table) -> Iterator[Finding]:
    """Faults in what each rank does, seen on its own: wrong stages, and work missing, repeated or out of
    order."""
    microbatches, stages = schedule.microbatches, schedule.stages
    ranks_for = schedule.rank_for(*np.indices((stages, microbatches))).tolist()
    done = [[""] * microbatches for _ in range(stages)]
    for rank, row in enumerate(schedule.ranks):
        for place, (stage, kind, microbatch) in enumerate(row):
            if not 0 <= stage < stages:
                yield Finding(rank, place, f"stage {stage} does not exist; the last is {stages - 1}")
            elif not 0 <= microbatch < microbatches:
                yield Finding(
                    rank, place, f"microbatch {microbatch} does not exist; the last is {microbatches - 1}"
                )
            elif ranks_for[stage][microbatch] != rank:
                yield Finding(rank, place, f"stage {stage} lies on rank {ranks_for[stage][microbatch]}")
            else:
                before = done[stage][microbatch]
                after = _NEXT.get((before, kind))
                if after is None:
                    yield Finding(rank, place, f"{stage}{kind}{microbatch} comes {_after(before)}")
                else:
                    done[stage][microbatch] = after
    for stage, row_done in enumerate(done):
        for microbatch, letters in enumerate(row_done):
            if letters not in _COMPLETE:
                text = f"stage {stage}, microbatch {microbatch} ends {_after(letters)}; it needs F B or F I W"
                yield Finding(ranks_for[stage][microbatch], None, text)


def _after(letters: str) -> str:
    return f"after {' '.join(letters)}" if letters else "before its F"


def _deadlocks(schedule: Table) -> Iterator[Finding]:
    """Ranks that wait for each other."""
    run = dry_run(schedule)
    for rank, (row, starts) in enumerate(zip(schedule.ranks, run.starts, strict=True)):
        if len(starts) < len(row):
            action, stage = row[len(starts)], run.waits_for[rank]
            yield Finding(
                rank, len(starts), f"{action} waits forever for stage {stage}, microbatch {action.microbatch}"
            )


def _too_many_in_flight(schedule: Table, limit: Sequence[int]) -> Iterator[Finding]:
    for rank, row in enumerate(schedule.ranks):
        in_flight = 0
        for place, action in enumerate(row):
            if action.kind is ActionKind.FORWARD:
                in_flight += 1
            elif action.kind is not ActionKind.BACKWARD_INPUT:
                in_flight -= 1
            if in_flight > limit[rank]:
                yield Finding(
                    rank, place, f"{action} makes {in_flight} in flight; the limit is {limit[rank]}"
                )
                break
