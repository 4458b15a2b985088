"""What a step did and when, on one rank, as spans like those of a simulated step.

Marks in profiles, of what runs of a graph. Where no profile is taken they cost next to nothing.

Passes of operators and of blocks as spans, from the events of a profile.

Forward passes have marks. Backward ones have none: autograd numbers the nodes of its graph as they are made,
and computes those of a pass from the last to the first, on the thread that asked. The nodes of an operator
are those from the first one that was made in its mark to before the first one of the next operator.

Spans of all ranks on one clock: hosts have their own.
"""

from __future__ import annotations

import contextlib
import re
import time
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import torch
from torch import distributed
from torch.profiler import ProfilerActivity, profile, record_function

from shardwise.runtime.collectives import all_gather_json
from shardwise.runtime.private import ProfiledEvent, is_profiled, profiled_events
from shardwise.sim import BLOCKS, COMMUNICATION, COMPUTE, OPERATORS, TRAFFIC, Span

BLOCK, OPERATOR, TRAFFIC_MARK = "BLOCK:", "OP:", "TO:"
"""What names of marks begin with: the forward pass of a block or of an operator, whose name follows, and what
is done for tensors to be where they are read."""

OPERATOR_COLLECTIVES, CONVERSIONS, GATHERS, GRADIENTS = "exchanges", "conversions", "gathers", "gradients"
"""Kinds of traffic, as breakdowns of plans call them: what ranks tell each other inside an operator, from one
operator to the next, parameters on their way to readers, and gradients of parameters on their way back."""

_NOTHING = nullcontext()


def profiled_range(kind: str, name: str) -> AbstractContextManager[object]:
    """What runs inside is told in a profile as `name`; made where it is entered."""
    return record_function(kind + name) if is_profiled() else _NOTHING


_PASS = re.compile(r"PP:\d+([FB])(\d+)")


def operator_spans(rank: int, events: Sequence[ProfiledEvent]) -> list[Span]:
    """The passes of operators and blocks in a step of one stage of a graph, by their names behind those of
    the pass: `F0` forward of the first micro-batch, `B0` backward, and `R0` forward once more on the way
    back. Of what has no gradient there is no backward pass. Nothing where nothing is marked.
    """
    passes = [_Pass(match[1], match[2], event) for event in events if (match := _PASS.fullmatch(event.name))]
    passes.sort(key=lambda each: each.event.start_s)
    made = sorted(
        (event.start_s, event.node) for event in events if event.node >= 0 and not event.is_backward
    )
    for mark in _marks(events, OPERATOR):
        if (own := _containing(passes, mark)) is not None:
            own.operators.append(_Operator(mark, _first_node(mark, made)))
    for mark in _marks(events, BLOCK):
        if (own := _containing(passes, mark)) is not None:
            own.blocks.append(mark)
    forward = {each.number: each for each in passes if each.kind == "F"}
    computed = sorted(
        (event for event in events if event.node >= 0 and event.is_backward), key=lambda event: event.start_s
    )
    spans: list[Span] = []
    for each in passes:
        spans += each.forward(rank)
        if each.kind == "B" and each.number in forward:
            own_nodes = _within(computed, each.event)
            spans += _backward(rank, each.number, forward[each.number], own_nodes)
    return spans


@dataclass(frozen=True, slots=True)
class _Operator:
    """A forward pass of an operator, and the first node that it may have made for the backward pass."""

    mark: ProfiledEvent
    node: int | None

    @property
    def name(self) -> str:
        return self.mark.name.removeprefix(OPERATOR)


@dataclass(frozen=True, slots=True)
class _Pass:
    """A pass F or B of a micro-batch, and what is marked in it: in a pass B that is computed again."""

    kind: str
    number: str
    event: ProfiledEvent
    operators: list[_Operator] = field(default_factory=list)
    blocks: list[ProfiledEvent] = field(default_factory=list)

    def forward(self, rank: int) -> Iterator[Span]:
        """The marks themselves."""
        word = "F" if self.kind == "F" else "R"
        for each in self.operators:
            name = f"{word}{self.number} {each.name}"
            yield Span(rank, OPERATORS, name, each.mark.start_s, each.mark.finish_s)
        if self.kind == "F":
            for block in self.blocks:
                name = f"F{self.number} {block.name.removeprefix(BLOCK)}"
                yield Span(rank, BLOCKS, name, block.start_s, block.finish_s)

    def block_of(self, operator: _Operator) -> str:
        """The name of the block whose mark an operator's lies in."""
        starts = [block.start_s for block in self.blocks]
        return self.blocks[bisect_right(starts, operator.mark.start_s) - 1].name.removeprefix(BLOCK)


def _marks(events: Iterable[ProfiledEvent], kind: str) -> list[ProfiledEvent]:
    return sorted((event for event in events if event.name.startswith(kind)), key=lambda each: each.start_s)


def _containing(passes: Sequence[_Pass], mark: ProfiledEvent) -> _Pass | None:
    """The pass in which `mark` lies; passes of a rank come one after the other."""
    place = bisect_right([each.event.start_s for each in passes], mark.start_s) - 1
    return passes[place] if place >= 0 and mark.finish_s <= passes[place].event.finish_s else None


def _first_node(mark: ProfiledEvent, made: Sequence[tuple[float, int]]) -> int | None:
    """The number that the next node had when the first thing happened inside `mark`."""
    place = bisect_left(made, (mark.start_s, -1))
    return made[place][1] if place < len(made) and made[place][0] <= mark.finish_s else None


def _within(events: Sequence[ProfiledEvent], whole: ProfiledEvent) -> Iterator[ProfiledEvent]:
    """Those of `events`, in order of time, that lie in `whole` and in none before them."""
    until_s = whole.start_s
    for event in events[bisect_left([event.start_s for event in events], whole.start_s) :]:
        if event.start_s > whole.finish_s:
            return
        if event.start_s >= until_s:
            yield event
            until_s = event.finish_s


def _backward(rank: int, number: str, forward: _Pass, nodes: Iterable[ProfiledEvent]) -> Iterator[Span]:
    """The backward passes of the operators of `forward`, in the order in which `nodes` were computed, each up
    to the next one, and of their blocks."""
    known = [each for each in forward.operators if each.node is not None]
    first_nodes = [each.node or 0 for each in known]
    runs: list[tuple[_Operator, float, float]] = []
    for event in nodes:
        place = bisect_right(first_nodes, event.node) - 1
        if place < 0:
            continue
        if runs and runs[-1][0] is known[place]:
            runs[-1] = (*runs[-1][:2], event.finish_s)
        else:
            if runs:
                runs[-1] = (*runs[-1][:2], event.start_s)
            runs.append((known[place], event.start_s, event.finish_s))
    for operator, start_s, finish_s in runs:
        yield Span(rank, OPERATORS, f"B{number} {operator.name}", start_s, finish_s)
    hulls: list[Span] = []
    for operator, start_s, finish_s in runs:
        name = f"B{number} {forward.block_of(operator)}"
        if hulls and hulls[-1].name == name:
            start_s = hulls.pop().start_s
        hulls.append(Span(rank, BLOCKS, name, start_s, finish_s))
    yield from hulls


_ACTION = re.compile(r"PP:(\d+[FBIW]\d+)")
_TRANSFER = re.compile(r"PP:(\d+(?:SEND|RECV)_[FB]\d+|\d+REDUCE_GRAD)")
_COLLECTIVE = re.compile(r"(?:gloo|nccl):(\w+)")
OPTIMIZER = "optimizer"
"""Name of the span of the optimizer."""
NORM = "norm"
"""Name of the spans of the norm of the gradients and of their clipping, without the sum over ranks."""
TO_HOST, FROM_HOST = "to host", "from host"
"""Names of the spans of what is offloaded, on its way."""


class StepTrace:
    """Spans of one step, once it is over; their times are seconds on a clock that all processes of a machine
    share."""

    def __init__(self) -> None:
        self.spans: tuple[Span, ...] = ()


@contextlib.contextmanager
def traced(rank: int) -> Iterator[StepTrace]:
    """Record what happens inside: schedule actions and the optimizer on the track of computation, transfers
    and collectives on that of communication. An action that waits for its input lasts as long as it waits.
    Of an operator graph passes of blocks and operators, and their traffic, are on tracks of their own.
    """
    trace = StepTrace()
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        yield trace
    events = list(profiled_events(profiler))
    spans = [
        Span(rank, track, name, event.start_s, event.finish_s)
        for event in events
        for track, name in _shown(event.name)
    ]
    spans += operator_spans(rank, events)
    trace.spans = tuple(sorted(spans, key=lambda span: (span.start_s, span.finish_s)))


def _shown(event: str) -> Iterator[tuple[str, str]]:
    """The track and the name under which `event` is shown; nothing for what is not."""
    if match := _ACTION.fullmatch(event):
        yield COMPUTE, match[1]
    elif event in (OPTIMIZER, NORM):
        yield COMPUTE, event
    elif event.startswith(TRAFFIC_MARK):
        yield TRAFFIC, event.removeprefix(TRAFFIC_MARK)
    elif event in (TO_HOST, FROM_HOST):
        yield COMMUNICATION, event
    elif match := _TRANSFER.fullmatch(event) or _COLLECTIVE.match(event):
        yield COMMUNICATION, match[1]


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
