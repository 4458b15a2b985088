"""Adds communication to a schedule: which actions, and where in each rank's row.

The kinds, their letters and their places are PyTorch's (`torch.distributed.pipelining.schedules`, 2.13): a
send follows its producer; the receive is put into the peer's row at that same moment (`receive="early"`) or
just before what consumes it (`receive="late"`, PyTorch's `defer_pp_recv`, but see `_with_late_receives`);
UNSHARD comes before the first use of a stage among the next few, RESHARD when the stage is no longer
among them; REDUCE_GRAD follows a stage's last B or W. Stages that are neighbours on one rank exchange
nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal, NamedTuple

from shardwise.errors import ConfigError
from shardwise.schedule.action import Action, ActionKind, Schedule

MAX_UNSHARDED_STAGES = 3


class CommunicationKind(StrEnum):
    """What a communication action does, in PyTorch's words."""

    SEND_F = "SEND_F"
    RECV_F = "RECV_F"
    SEND_B = "SEND_B"
    RECV_B = "RECV_B"
    UNSHARD = "UNSHARD"
    RESHARD = "RESHARD"
    REDUCE_GRAD = "REDUCE_GRAD"


class Communication(NamedTuple):
    """A transfer of `stage`: what it sends or receives for `microbatch`, or its parameters or gradients
    (None)."""

    stage: int
    kind: CommunicationKind
    microbatch: int | None = None

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{'' if self.microbatch is None else self.microbatch}"


PEER_OFFSET: dict[CommunicationKind, int] = {
    CommunicationKind.SEND_F: 1,
    CommunicationKind.RECV_F: -1,
    CommunicationKind.SEND_B: -1,
    CommunicationKind.RECV_B: 1,
}
"""Where the other end of a transfer lies, counted in stages."""

_RECEIVES = (CommunicationKind.RECV_F, CommunicationKind.RECV_B)

Step = Action | Communication


@dataclass(frozen=True, slots=True, kw_only=True)
class LoweredSchedule:
    """A schedule with communication; `ranks[r]` is what rank r starts, in order. Other fields as in
    Schedule."""

    name: str
    microbatches: int
    stage_rank: tuple[int, ...]
    ranks: tuple[tuple[Step, ...], ...]


def lower(
    schedule: Schedule, *, receive: Literal["early", "late"] = "early", unshard: bool = True
) -> LoweredSchedule:
    """The schedule with its communication. Without `unshard` parameters stay where they are (no UNSHARD,
    RESHARD).

    Raises ConfigError where the schedule cannot be run to its end (see `violations`).
    """
    rows: list[list[Step]] = [list(row) for row in schedule.ranks]
    if unshard:
        rows = [_with_unshards(row) for row in schedule.ranks]
    rows = [_with_reductions(row, schedule.microbatches) for row in rows]
    rows = _with_transfers(rows, schedule.stage_rank)
    if receive == "late":
        rows = [_with_late_receives(rank, row, schedule.stage_rank) for rank, row in enumerate(rows)]
    return LoweredSchedule(
        name=schedule.name,
        microbatches=schedule.microbatches,
        stage_rank=schedule.stage_rank,
        ranks=tuple(tuple(row) for row in rows),
    )


def _with_unshards(row: Sequence[Action]) -> list[Step]:
    """The row with parameters gathered ahead for the next MAX_UNSHARDED_STAGES distinct stages, and dropped
    after."""
    lowered: list[Step] = []
    present: list[int] = []
    for action, upcoming in zip(row, _upcoming_stages(row), strict=True):
        dropped = [stage for stage in present if stage not in upcoming]
        fetched = [stage for stage in upcoming if stage not in present]
        lowered += [Communication(stage, CommunicationKind.RESHARD) for stage in dropped]
        lowered += [Communication(stage, CommunicationKind.UNSHARD) for stage in fetched]
        lowered.append(action)
        present = [stage for stage in present if stage in upcoming] + fetched
    return lowered + [Communication(stage, CommunicationKind.RESHARD) for stage in present]


def _upcoming_stages(row: Sequence[Action]) -> list[list[int]]:
    """For each place of the row the next distinct stages from there on, soonest first, MAX_UNSHARDED_STAGES
    at most."""
    upcoming: list[list[int]] = []
    next_stages: list[int] = []
    for action in reversed(row):
        others = [stage for stage in next_stages if stage != action.stage]
        next_stages = [action.stage, *others][:MAX_UNSHARDED_STAGES]
        upcoming.append(next_stages)
    return upcoming[::-1]


def _with_reductions(row: Sequence[Step], microbatches: int) -> list[Step]:
    """The row with a REDUCE_GRAD behind the last B or W of each stage."""
    lowered: list[Step] = []
    finished: dict[int, int] = {}
    for step in row:
        lowered.append(step)
        if step.kind in (ActionKind.BACKWARD, ActionKind.BACKWARD_WEIGHT):
            finished[step.stage] = finished.get(step.stage, 0) + 1
            if finished[step.stage] == microbatches:
                lowered.append(Communication(step.stage, CommunicationKind.REDUCE_GRAD))
    return lowered


def _transfer(step: Step, stage_rank: Sequence[int]) -> tuple[Communication, Communication] | None:
    """The send and the receive of what `step` makes, or None where no other rank needs it."""
    stage, kind, microbatch = step
    if kind is ActionKind.FORWARD:
        peer, send, receive = stage + 1, CommunicationKind.SEND_F, CommunicationKind.RECV_F
    elif kind in (ActionKind.BACKWARD, ActionKind.BACKWARD_INPUT):
        peer, send, receive = stage - 1, CommunicationKind.SEND_B, CommunicationKind.RECV_B
    else:
        return None
    if not 0 <= peer < len(stage_rank) or stage_rank[peer] == stage_rank[stage]:
        return None
    return Communication(stage, send, microbatch), Communication(peer, receive, microbatch)


def _with_transfers(rows: Sequence[Sequence[Step]], stage_rank: Sequence[int]) -> list[list[Step]]:
    """The rows with sends and receives: ranks take turns, one step each, and a sender writes into its
    peer's row.

    So two ranks meet their transfers in the same order.
    """
    lowered: list[list[Step]] = [[] for _ in rows]
    queued = [deque(row) for row in rows]
    available: set[tuple[int, bool, int | None]] = set()
    while any(queued):
        progressed = False
        for rank, steps in enumerate(queued):
            if not steps or not _is_ready(steps[0], available, len(stage_rank)):
                continue
            progressed = True
            step = steps.popleft()
            lowered[rank].append(step)
            if isinstance(step, Action) and step.kind is not ActionKind.BACKWARD_WEIGHT:
                available.add((step.stage, step.kind is ActionKind.FORWARD, step.microbatch))
            transfer = _transfer(step, stage_rank)
            if transfer is not None:
                send, receive = transfer
                lowered[rank].append(send)
                lowered[stage_rank[receive.stage]].append(receive)
        if not progressed:
            deadlocked = next(steps[0] for steps in queued if steps)
            raise ConfigError("the schedule cannot be run to its end", key="schedule", found=str(deadlocked))
    return lowered


def _is_ready(step: Step, available: set[tuple[int, bool, int | None]], stages: int) -> bool:
    """Whether what `step` needs from other stages is there."""
    if step.kind is ActionKind.FORWARD:
        return step.stage == 0 or (step.stage - 1, True, step.microbatch) in available
    if step.kind in (ActionKind.BACKWARD, ActionKind.BACKWARD_INPUT):
        return step.stage == stages - 1 or (step.stage + 1, False, step.microbatch) in available
    return True


def _with_late_receives(rank: int, row: Sequence[Step], stage_rank: Sequence[int]) -> list[Step]:
    """The row with each receive moved to just before its consumer, unless order forbids it.

    Messages of one sender stay in their order, so a receive takes with it those of its sender that come
    before. Of two ranks the lower one still receives all that is pending from the other before it sends
    to it: so one of the two is always receiving, and blocking sends cannot wait for each other.
    """
    lowered: list[Step] = []
    pending: dict[int, list[Step]] = {}
    for step in row:
        if isinstance(step, Communication) and step.kind in PEER_OFFSET:
            peer = stage_rank[step.stage + PEER_OFFSET[step.kind]]
            if step.kind in _RECEIVES:
                pending.setdefault(peer, []).append(step)
                continue
            if rank < peer:
                lowered += pending.pop(peer, [])
        consumed = _received_for(step)
        for receives in pending.values():
            if consumed in receives:
                last = receives.index(consumed) + 1
                lowered += receives[:last]
                del receives[:last]
        lowered.append(step)
    return lowered


def _received_for(step: Step) -> Communication | None:
    """The receive that `step` consumes, if its neighbour lies on another rank."""
    if step.kind is ActionKind.FORWARD:
        return Communication(step.stage, CommunicationKind.RECV_F, step.microbatch)
    if step.kind in (ActionKind.BACKWARD, ActionKind.BACKWARD_INPUT):
        return Communication(step.stage, CommunicationKind.RECV_B, step.microbatch)
    return None
