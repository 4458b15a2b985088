"""Profiles of steps as spans, like those of simulated steps, on one clock for all ranks.

`traced` records a step; `gather_spans` collects the spans of all ranks on rank 0's clock; `operator_spans`
finds the passes of operators and blocks of a graph.

Forward passes of operators are marked (`profiled_range`), backward passes are not. Autograd numbers the nodes
of its graph when they are created. It runs those of a backward pass from last to first, on the calling
thread. So the nodes of an operator are those from the first one created within its mark up to the first one
of the next operator.
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

# Marks

BLOCK, OPERATOR, TRAFFIC_MARK = "BLOCK:", "OP:", "TO:"
"""Prefixes of marks: forward pass of a block or an operator, whose name follows, and communication that
redistributes tensors for their readers."""

OPERATOR_COLLECTIVES, CONVERSIONS, GATHERS, GRADIENTS = "exchanges", "conversions", "gathers", "gradients"
"""Kinds of communication, as in the breakdowns of plans: collectives inside operators, redistribution between
operators, all-gathers of parameters, and reductions of gradients."""

_NOTHING = nullcontext()


def profiled_range(kind: str, name: str) -> AbstractContextManager[object]:
    """A context whose content appears in a profile as `kind` + `name`. Costs nearly nothing without a
    profile."""
    return record_function(kind + name) if is_profiled() else _NOTHING


# Passes of operators and blocks

_PASS = re.compile(r"PP:\d+([FB])(\d+)")


def operator_spans(rank: int, events: Sequence[ProfiledEvent]) -> list[Span]:
    """Passes of operators and blocks in a step of one stage of a graph; empty if nothing is marked.

    Names have the pass in front: `F0` forward pass of the first micro-batch, `B0` backward pass, `R0`
    recomputation during the backward pass. Operators without gradients have no backward pass.
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
    """The forward pass of an operator, and the first autograd node that it may have created."""

    mark: ProfiledEvent
    node: int | None

    @property
    def name(self) -> str:
        return self.mark.name.removeprefix(OPERATOR)


@dataclass(frozen=True, slots=True)
class _Pass:
    """A forward (F) or backward (B) pass of a micro-batch, and the marks in it. Those in a backward pass are
    recomputed."""

    kind: str
    number: str
    event: ProfiledEvent
    operators: list[_Operator] = field(default_factory=list)
    blocks: list[ProfiledEvent] = field(default_factory=list)

    def forward(self, rank: int) -> Iterator[Span]:
        """Spans of the marks themselves."""
        word = "F" if self.kind == "F" else "R"
        for each in self.operators:
            name = f"{word}{self.number} {each.name}"
            yield Span(rank, OPERATORS, name, each.mark.start_s, each.mark.finish_s)
        if self.kind == "F":
            for block in self.blocks:
                name = f"F{self.number} {block.name.removeprefix(BLOCK)}"
                yield Span(rank, BLOCKS, name, block.start_s, block.finish_s)

    def block_of(self, operator: _Operator) -> str:
        """Name of the block that contains the operator's mark."""
        starts = [block.start_s for block in self.blocks]
        return self.blocks[bisect_right(starts, operator.mark.start_s) - 1].name.removeprefix(BLOCK)


def _marks(events: Iterable[ProfiledEvent], kind: str) -> list[ProfiledEvent]:
    return sorted((event for event in events if event.name.startswith(kind)), key=lambda each: each.start_s)


def _containing(passes: Sequence[_Pass], mark: ProfiledEvent) -> _Pass | None:
    """The pass that contains `mark`. The passes of a rank do not overlap."""
    place = bisect_right([each.event.start_s for each in passes], mark.start_s) - 1
    return passes[place] if place >= 0 and mark.finish_s <= passes[place].event.finish_s else None


def _first_node(mark: ProfiledEvent, made: Sequence[tuple[float, int]]) -> int | None:
    """The number of the first autograd node created inside `mark`."""
    place = bisect_left(made, (mark.start_s, -1))
    return made[place][1] if place < len(made) and made[place][0] <= mark.finish_s else None


def _within(events: Sequence[ProfiledEvent], whole: ProfiledEvent) -> Iterator[ProfiledEvent]:
    """Those of `events`, sorted by time, that start within `whole` and do not overlap earlier ones."""
    until_s = whole.start_s
    for event in events[bisect_left([event.start_s for event in events], whole.start_s) :]:
        if event.start_s > whole.finish_s:
            return
        if event.start_s >= until_s:
            yield event
            until_s = event.finish_s


def _backward(rank: int, number: str, forward: _Pass, nodes: Iterable[ProfiledEvent]) -> Iterator[Span]:
    """Backward passes of the operators of `forward` and of their blocks. `nodes` are in the order of
    computation; each operator lasts until the next one starts."""
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


# Traces of a step

_ACTION = re.compile(r"PP:(\d+[FBIW]\d+)")
_TRANSFER = re.compile(r"PP:(\d+(?:SEND|RECV)_[FB]\d+|\d+REDUCE_GRAD)")
_COLLECTIVE = re.compile(r"(?:gloo|nccl):(\w+)")
OPTIMIZER = "optimizer"
"""Name of the optimizer's span."""
NORM = "norm"
"""Name of the spans of gradient norm and clipping, without the all-reduce."""
TO_HOST, FROM_HOST = "to host", "from host"
"""Names of the spans of offload copies."""


class StepTrace:
    """Spans of one step, available after it. Times are seconds on a clock that all processes of a machine
    share."""

    def __init__(self) -> None:
        self.spans: tuple[Span, ...] = ()


@contextlib.contextmanager
def traced(rank: int) -> Iterator[StepTrace]:
    """Record the content of this context.

    Schedule actions and the optimizer are on the track of computation; transfers and collectives are on that
    of communication. An action that waits for its input includes the wait. For an operator graph, blocks,
    operators and their communication have their own tracks.
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
    """Track and name of `event` in the trace; nothing if it is not shown."""
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


# One clock for all ranks

ROUNDS = 8
"""Number of round trips by which a clock offset is measured; the fastest one counts."""

_FIRST = 0
"""Rank whose clock is the reference."""


def gather_spans(spans: Sequence[Span], *, now: Callable[[], float] = time.time) -> tuple[Span, ...]:
    """The spans of all ranks in seconds of rank 0's clock, on rank 0; empty on others.

    Every rank of the default process group calls it with its own spans, in seconds of `now`. A clock offset
    is accurate to half of a round trip (Cristian 1989).
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
    """Offset of rank `other`'s clock relative to this one, in seconds."""
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
    """Answer each request of rank 0 with this rank's time."""
    request = torch.zeros(1, dtype=torch.float64)
    for _ in range(ROUNDS):
        distributed.recv(request, _FIRST)
        distributed.send(torch.tensor([now()], dtype=torch.float64), _FIRST)
