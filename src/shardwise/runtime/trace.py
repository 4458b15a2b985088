"""What a step did and when, on one rank, as spans like those of a simulated step."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator

from torch.profiler import ProfilerActivity, profile

from shardwise.runtime.marks import TRAFFIC_MARK
from shardwise.runtime.operator_spans import operator_spans
from shardwise.runtime.private import profiled_events
from shardwise.sim import COMMUNICATION, COMPUTE, TRAFFIC, Span

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
