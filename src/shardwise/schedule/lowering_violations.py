"""Says what is wrong with the communication of a lowered schedule; shares no code with the lowering."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence

from shardwise.schedule.action import Action, ActionKind
from shardwise.schedule.lower import (
    PEER_OFFSET,
    Communication,
    CommunicationKind,
    LoweredSchedule,
    Step,
)


def lowering_violations(lowered: LoweredSchedule) -> list[str]:
    """Faults of the communication in plain words, none if it is sound.

    Rules: each rank pair meets its sends and receives in the same order (messages carry no address); a send
    follows its producer, and a consumer its receive, on the same rank; and all rows run to their end where a
    receive waits for its send and sends do not wait.
    """
    return list(_lone_ends(lowered)) or [*_order_faults(lowered), *_deadlock_faults(lowered)]


def _lone_ends(lowered: LoweredSchedule) -> Iterator[str]:
    """Sends and receives that lack a neighbour."""
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
