"""Lowering: add communication actions (send/recv, UNSHARD, RESHARD, REDUCE_GRAD) to the row of each rank.

Kinds, letters and positions are those of `torch.distributed.pipelining.schedules`, PyTorch 2.13:

- A send follows its producer.
- The receive goes into the peer's row at that same moment (`receive="early"`), or just before its consumer
  (`receive="late"`, PyTorch's `defer_pp_recv`, with an exception: see `_with_late_receives`).
- UNSHARD comes when a stage enters the next MAX_UNSHARDED_STAGES stages of the rank, RESHARD when it leaves
  them.
- REDUCE_GRAD follows a stage's last B or W.
- Neighbouring stages on one rank send nothing to each other.
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
"""Stages whose parameters a rank gathers ahead, at most; PyTorch's default (`max_active_stages`)."""


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
    """A communication of `stage`: send or receive of `microbatch`, or, where that is None, of its
    parameters or gradients."""

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
"""Stage of the peer of a transfer, relative to the own stage."""

_RECEIVES = (CommunicationKind.RECV_F, CommunicationKind.RECV_B)

Step = Action | Communication


@dataclass(frozen=True, slots=True, kw_only=True)
class LoweredSchedule:
    """A schedule with communication; `ranks[r]` are the actions of rank r, in order. Other fields as in
    Schedule."""

    name: str
    microbatches: int
    stage_rank: tuple[int, ...]
    ranks: tuple[tuple[Step, ...], ...]


def lower(
    schedule: Schedule, *, receive: Literal["early", "late"] = "early", unshard: bool = True
) -> LoweredSchedule:
    """The schedule with its communication. Without `unshard`, parameters are never sharded (no UNSHARD,
    RESHARD).

    Raises ConfigError where the schedule deadlocks (see `violations`).
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
    """The row with parameters unsharded ahead for the next MAX_UNSHARDED_STAGES distinct stages, and
    resharded after use."""
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
    """For each position of the row, the next distinct stages from there on, soonest first; at most
    MAX_UNSHARDED_STAGES."""
    upcoming: list[list[int]] = []
    next_stages: list[int] = []
    for action in reversed(row):
        others = [stage for stage in next_stages if stage != action.stage]
        next_stages = [action.stage, *others][:MAX_UNSHARDED_STAGES]
        upcoming.append(next_stages)
    return upcoming[::-1]


def _with_reductions(row: Sequence[Step], microbatches: int) -> list[Step]:
    """The row with a REDUCE_GRAD after the last B or W of each stage."""
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
    """The send and the receive of the output of `step`, or None where no other rank needs it."""
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
    """The rows with sends and receives.

    Ranks advance in turn, one step each, and a sender writes the receive into its peer's row. So two ranks
    meet their transfers in the same order.
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
            raise ConfigError("the schedule deadlocks", key="schedule", found=str(deadlocked))
    return lowered


def _is_ready(step: Step, available: set[tuple[int, bool, int | None]], stages: int) -> bool:
    """Whether all inputs of `step` from other stages exist."""
    if step.kind is ActionKind.FORWARD:
        return step.stage == 0 or (step.stage - 1, True, step.microbatch) in available
    if step.kind in (ActionKind.BACKWARD, ActionKind.BACKWARD_INPUT):
        return step.stage == stages - 1 or (step.stage + 1, False, step.microbatch) in available
    return True


def _with_late_receives(rank: int, row: Sequence[Step], stage_rank: Sequence[int]) -> list[Step]:
    """The row with each receive moved to just before its consumer, unless message order forbids it.

    Messages of one sender stay in order, so a receive moves together with the earlier receives from its
    sender. Of two ranks, the lower one still receives everything that is pending from the other before it
    sends to it. So one of the two is always receiving, and blocking sends cannot deadlock.
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
    """The receive that `step` consumes if the neighbouring stage is on another rank; None for steps
    without input."""
    if step.kind is ActionKind.FORWARD:
        return Communication(step.stage, CommunicationKind.RECV_F, step.microbatch)
    if step.kind in (ActionKind.BACKWARD, ActionKind.BACKWARD_INPUT):
        return Communication(step.stage, CommunicationKind.RECV_B, step.microbatch)
    return None
