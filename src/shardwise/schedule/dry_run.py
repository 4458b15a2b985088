"""Walks a table over all ranks with actions of one step each: when each could start, and where it sticks."""

from __future__ import annotations

from dataclasses import dataclass

from shardwise.schedule.action import Action, ActionKind, Table


@dataclass(frozen=True, slots=True, kw_only=True)
class DryRun:
    """`starts[r][i]` is the step in which action i of rank r starts.

    A rank that sticks has fewer starts than actions; `waits_for[r]` is then the stage whose result it waits
    for.
    """

    starts: tuple[tuple[int, ...], ...]
    waits_for: tuple[int | None, ...]

    @property
    def steps(self) -> int:
        """How many steps the actions that could start take."""
        return max((row[-1] + 1 for row in self.starts if row), default=0)


class _DryRunState:
    """Progress of a dry run: per rank the next action, per (stage, microbatch) when its results are there."""

    def __init__(self, schedule: Table) -> None:
        self.rows = schedule.ranks
        self.last_stage = schedule.stages - 1
        self.forward_end: dict[tuple[int, int], int] = {}
        self.backward_end: dict[tuple[int, int], int] = {}
        self.starts: list[list[int]] = [[] for _ in self.rows]

    def awaited(self, action: Action) -> tuple[dict[tuple[int, int], int], tuple[int, int]] | None:
        """The result of another stage that `action` needs: where it will be noted, and under which key."""
        stage, kind, microbatch = action
        if kind is ActionKind.FORWARD:
            return (self.forward_end, (stage - 1, microbatch)) if stage > 0 else None
        if kind is ActionKind.BACKWARD_WEIGHT:
            return None
        if stage < self.last_stage:
            return self.backward_end, (stage + 1, microbatch)
        return self.forward_end, (stage, microbatch)

    def advance(self, rank: int) -> bool:
        """Runs `rank` until it sticks or ends; whether it ran anything."""
        row, starts = self.rows[rank], self.starts[rank]
        first = len(starts)
        now = starts[-1] + 1 if starts else 0
        for action in row[first:]:
            need = self.awaited(action)
            if need is not None:
                notes, key = need
                ready = notes.get(key)
                if ready is None:
                    break
                now = max(now, ready)
            starts.append(now)
            now += 1
            if action.kind is ActionKind.FORWARD:
                self.forward_end[action.stage, action.microbatch] = now
            elif action.kind is not ActionKind.BACKWARD_WEIGHT:
                self.backward_end[action.stage, action.microbatch] = now
        return len(starts) > first

    def stage_awaited(self, rank: int) -> int | None:
        """The stage that `rank` waits for, or None where it has run its whole row."""
        place = len(self.starts[rank])
        if place == len(self.rows[rank]):
            return None
        need = self.awaited(self.rows[rank][place])
        return None if need is None else need[1][0]


def dry_run(schedule: Table) -> DryRun:
    """Runs the table as far as it goes. Needs no legality; never raises for a table that sticks."""
    state = _DryRunState(schedule)
    ranks = range(len(state.rows))
    while any([state.advance(rank) for rank in ranks]):
        pass
    return DryRun(
        starts=tuple(tuple(row) for row in state.starts),
        waits_for=tuple(state.stage_awaited(rank) for rank in ranks),
    )
