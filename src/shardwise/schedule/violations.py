"""Faults of a schedule table and of a lowered schedule.

`violations` and `findings` validate a table; they share no code with `generate` and accept any placement of
stages. `lowering_violations` validates the communication of a lowered schedule; it shares no code with
`lower`. `dry_run` runs a table with actions of one step each: when each action starts, and where ranks
deadlock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from shardwise.schedule.action import Action, ActionKind, Table
from shardwise.schedule.lower import PEER_OFFSET, Communication, CommunicationKind, LoweredSchedule, Step


def lowering_violations(lowered: LoweredSchedule) -> list[str]:
    """Faults of the communication, one line each; empty if it is sound.

    Rules: each pair of ranks meets its sends and receives in the same order (messages carry no tag); a send
    follows its producer, and a consumer its receive, on the same rank; and no row deadlocks where receives
    wait for their sends and sends do not wait.
    """
    return list(_lone_ends(lowered)) or [*_order_faults(lowered), *_deadlock_faults(lowered)]


def _lone_ends(lowered: LoweredSchedule) -> Iterator[str]:
    """Sends and receives whose peer stage does not exist."""
    for rank, row in enumerate(lowered.ranks):
        for step in row:
            if isinstance(step, Communication) and step.kind in PEER_OFFSET:
                peer_stage = step.stage + PEER_OFFSET[step.kind]
                if not 0 <= peer_stage < len(lowered.stage_rank):
                    yield f"rank {rank}: {step} has no peer"


def _order_faults(lowered: LoweredSchedule) -> Iterator[str]:
    sent: dict[tuple[int, int], list[str]] = {}
    received: dict[tuple[int, int], list[str]] = {}
    for rank, row in enumerate(lowered.ranks):
        for step in row:
            if not isinstance(step, Communication) or step.kind not in PEER_OFFSET:
                continue
            offset = PEER_OFFSET[step.kind]
            peer_stage = step.stage + offset
            peer = lowered.stage_rank[peer_stage]
            direction = step.kind[-1]
            if step.kind in (CommunicationKind.SEND_F, CommunicationKind.SEND_B):
                sent.setdefault((rank, peer), []).append(f"{step.stage}{direction}{step.microbatch}")
            else:
                received.setdefault((peer, rank), []).append(f"{peer_stage}{direction}{step.microbatch}")
    for pair in sorted(sent.keys() | received.keys()):
        send_order, receive_order = sent.get(pair, []), received.get(pair, [])
        if send_order != receive_order:
            place = next(
                (i for i, (a, b) in enumerate(zip(send_order, receive_order, strict=False)) if a != b), None
            )
            what = (
                f"message {place}"
                if place is not None
                else f"{len(send_order)} sends, {len(receive_order)} receives"
            )
            yield f"rank {pair[0]} to rank {pair[1]}: sends and receives differ ({what})"


def _deadlock_faults(lowered: LoweredSchedule) -> Iterator[str]:
    queued = [deque(row) for row in lowered.ranks]
    done: list[set[Step]] = [set() for _ in queued]
    progressed = True
    while progressed:
        progressed = False
        for rank, steps in enumerate(queued):
            while steps and _can_start(steps[0], rank, done, lowered.stage_rank):
                done[rank].add(steps.popleft())
                progressed = True
    for rank, steps in enumerate(queued):
        if steps:
            yield f"rank {rank}: {steps[0]} waits forever"


def _can_start(step: Step, rank: int, done: Sequence[set[Step]], stage_rank: Sequence[int]) -> bool:
    stage, kind, microbatch = step
    if isinstance(step, Communication):
        if kind is CommunicationKind.SEND_F:
            return _made(stage, (ActionKind.FORWARD,), microbatch, done[rank])
        if kind is CommunicationKind.SEND_B:
            return _made(stage, (ActionKind.BACKWARD, ActionKind.BACKWARD_INPUT), microbatch, done[rank])
        if kind is CommunicationKind.RECV_F:
            send = Communication(stage - 1, CommunicationKind.SEND_F, microbatch)
            return send in done[stage_rank[stage - 1]]
        if kind is CommunicationKind.RECV_B:
            send = Communication(stage + 1, CommunicationKind.SEND_B, microbatch)
            return send in done[stage_rank[stage + 1]]
        return True
    if kind is ActionKind.FORWARD and stage > 0:
        if stage_rank[stage - 1] == rank:
            return _made(stage - 1, (ActionKind.FORWARD,), microbatch, done[rank])
        return Communication(stage, CommunicationKind.RECV_F, microbatch) in done[rank]
    if kind in (ActionKind.BACKWARD, ActionKind.BACKWARD_INPUT) and stage < len(stage_rank) - 1:
        if stage_rank[stage + 1] == rank:
            return _made(stage + 1, (ActionKind.BACKWARD, ActionKind.BACKWARD_INPUT), microbatch, done[rank])
        return Communication(stage, CommunicationKind.RECV_B, microbatch) in done[rank]
    return True


def _made(stage: int, kinds: Sequence[ActionKind], microbatch: int | None, done: set[Step]) -> bool:
    return microbatch is not None and any(Action(stage, kind, microbatch) in done for kind in kinds)


@dataclass(frozen=True, slots=True, kw_only=True)
class DryRun:
    """`starts[r][i]` is the step in which action i of rank r starts.

    A rank that deadlocks has fewer starts than actions; `waits_for[r]` is the stage whose result it waits
    for.
    """

    starts: tuple[tuple[int, ...], ...]
    waits_for: tuple[int | None, ...]

    @property
    def steps(self) -> int:
        """Number of steps of all actions that could start."""
        return max((row[-1] + 1 for row in self.starts if row), default=0)


class _DryRunState:
    """State of a dry run: per rank the started actions, per (stage, micro-batch) the step at which results
    exist."""

    def __init__(self, schedule: Table) -> None:
        self.rows = schedule.ranks
        self.last_stage = schedule.stages - 1
        self.forward_end: dict[tuple[int, int], int] = {}
        self.backward_end: dict[tuple[int, int], int] = {}
        self.starts: list[list[int]] = [[] for _ in self.rows]

    def awaited(self, action: Action) -> tuple[dict[tuple[int, int], int], tuple[int, int]] | None:
        """The result of another stage that `action` needs: the dict that will record it, and its key.
        None: no such result."""
        stage, kind, microbatch = action
        if kind is ActionKind.FORWARD:
            return (self.forward_end, (stage - 1, microbatch)) if stage > 0 else None
        if kind is ActionKind.BACKWARD_WEIGHT:
            return None
        if stage < self.last_stage:
            return self.backward_end, (stage + 1, microbatch)
        return self.forward_end, (stage, microbatch)

    def advance(self, rank: int) -> bool:
        """Run `rank` until it waits or ends; whether it ran any action."""
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
    """Run the table as far as possible. Accepts illegal tables; never raises for a deadlock."""
    state = _DryRunState(schedule)
    ranks = range(len(state.rows))
    while any([state.advance(rank) for rank in ranks]):
        pass
    return DryRun(
        starts=tuple(tuple(row) for row in state.starts),
        waits_for=tuple(state.stage_awaited(rank) for rank in ranks),
    )


_NEXT: dict[tuple[str, ActionKind], str] = {
    ("", ActionKind.FORWARD): "F",
    ("F", ActionKind.BACKWARD): "FB",
    ("F", ActionKind.BACKWARD_INPUT): "FI",
    ("FI", ActionKind.BACKWARD_WEIGHT): "FIW",
}
_COMPLETE = frozenset({"FB", "FIW"})


class Finding(NamedTuple):
    """One fault: the rank, the position in its row (None where an action is missing), and the fault in
    words."""

    rank: int
    place: int | None
    text: str

    def __str__(self) -> str:
        where = f"rank {self.rank}" if self.place is None else f"rank {self.rank}, action {self.place}"
        return f"{where}: {self.text}"


def violations(schedule: Table, in_flight_limit: Sequence[int] | None = None) -> list[str]:
    """The faults of the table, one line each; empty if it can be run and does all work exactly once.

    Rules: every stage is on ranks that exist. A rank runs only its own stages. Every (stage, micro-batch) has
    one F and then either one B, or one I and later one W. All rows can be run to their end, where each action
    waits for the stage before (F) or after (B, I). With `in_flight_limit` (one number per rank), no rank has
    more (stage, micro-batch) pairs between F and B or W.
    """
    return [str(finding) for finding in findings(schedule, in_flight_limit)]


def findings(schedule: Table, in_flight_limit: Sequence[int] | None = None) -> list[Finding]:
    """As `violations`, with the position of each fault. A later rule is checked only where the earlier
    ones hold."""
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
        yield Finding(0, None, f"there are {schedule.microbatches} micro-batches; at least 1 is needed")
    if not schedule.stages:
        yield Finding(0, None, "there is no stage")
    ranks = len(schedule.ranks)
    for stage in range(schedule.stages):
        for rank in schedule.ranks_for(stage):
            if not 0 <= rank < ranks:
                yield Finding(rank, None, f"holds stage {stage}, but ranks go from 0 to {ranks - 1}")


def _work(schedule: Table) -> Iterator[Finding]:
    """Faults in the work of each rank on its own: wrong stages; actions missing, repeated or out of order."""
    microbatches, stages = schedule.microbatches, schedule.stages
    ranks_for = schedule.rank_for(*np.indices((stages, microbatches))).tolist()
    done = [[""] * microbatches for _ in range(stages)]
    for rank, row in enumerate(schedule.ranks):
        for place, (stage, kind, microbatch) in enumerate(row):
            if not 0 <= stage < stages:
                yield Finding(rank, place, f"stage {stage} does not exist; the last is {stages - 1}")
            elif not 0 <= microbatch < microbatches:
                yield Finding(
                    rank, place, f"micro-batch {microbatch} does not exist; the last is {microbatches - 1}"
                )
            elif ranks_for[stage][microbatch] != rank:
                yield Finding(rank, place, f"stage {stage} is on rank {ranks_for[stage][microbatch]}")
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
                text = (
                    f"stage {stage}, micro-batch {microbatch} ends {_after(letters)}; it needs F B or F I W"
                )
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
                rank,
                len(starts),
                f"{action} waits forever for stage {stage}, micro-batch {action.microbatch}",
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
