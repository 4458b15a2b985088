"""Spans of all ranks on one clock: hosts have their own."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch
from torch import distributed

from shardwise.runtime.texts import all_gather_json
from shardwise.sim import Span

ROUNDS = 8
"""Messages there and back by which a clock is read; the fastest pair counts."""

_FIRST = 0
"""The rank whose clock all spans get."""


def gather_spans(spans: Sequence[Span], *, now: Callable[[], float] = time.time) -> tuple[Span, ...]:
    """On rank 0 the spans of all ranks, in seconds of its own clock; nothing on the others.

    Every rank of the default process group calls this with its own spans, whose seconds are those of `now`. A
    clock is read within half of the time that a message takes there and back (Cristian 1989).
    """
    rank, ranks = distributed.get_rank(), distributed.get_world_size()
    offsets_s = [0.0] * ranks
    for other in range(ranks):
        if other == _FIRST:
            continue
        if rank == _FIRST:
            offsets_s[other] = _clock_offset_s(other, now)
        elif rank == other:
            _answer_clock_requests(now)
    every = all_gather_json([(s.rank, s.track, s.name, s.start_s, s.finish_s) for s in spans])
    if rank != _FIRST:
        return ()
    return tuple(
        Span(owner, track, name, start_s - offset_s, finish_s - offset_s)
        for own, offset_s in zip(every, offsets_s, strict=True)
        for owner, track, name, start_s, finish_s in own
    )


def _clock_offset_s(other: int, now: Callable[[], float]) -> float:
    """How much more the clock of a rank shows than this one's."""
    reply = torch.zeros(1, dtype=torch.float64)
    found = []
    for _ in range(ROUNDS):
        sent_s = now()
        distributed.send(reply, other)
        distributed.recv(reply, other)
        received_s = now()
        found.append((received_s - sent_s, float(reply) - (sent_s + received_s) / 2.0))
    return min(found)[1]


def _answer_clock_requests(now: Callable[[], float]) -> None:
    """Answer each message of rank 0 with the time that it is here."""
    request = torch.zeros(1, dtype=torch.float64)
    for _ in range(ROUNDS):
        distributed.recv(request, _FIRST)
        distributed.send(torch.tensor([now()], dtype=torch.float64), _FIRST)
