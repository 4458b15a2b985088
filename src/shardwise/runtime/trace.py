"""What a step did and when, on one rank, as spans like those of a simulated step."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator

from torch.profiler import ProfilerActivity, profile

from shardwise.runtime.private import profiled_events
from shardwise.sim import COMMUNICATION, COMPUTE, Span

_ACTION = re.compile(r"PP:(\d+[FBIW]\d+)")
_TRANSFER = re.compile(r"PP:(\d+(?:SEND|RECV)_[FB]\d+|\d+REDUCE_GRAD)")
_COLLECTIVE = re.compile(r"(?:gloo|nccl):(\w+)")
OPTIMIZER = "optimizer"
"""Name of the span of the optimizer."""
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
    """
    trace = StepTrace()
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        yield trace
    spans = [
        Span(rank, track, name, start_s, finish_s)
        for event, start_s, finish_s in profiled_events(profiler)
        for track, name in _shown(event)
    ]
    trace.spans = tuple(sorted(spans, key=lambda span: (span.start_s, span.finish_s)))


def _shown(event: str) -> Iterator[tuple[str, str]]:
    """The track and the name under which `event` is shown; nothing for what is not."""
    if match := _ACTION.fullmatch(event):
        yield COMPUTE, match[1]
    elif event == OPTIMIZER:
        yield COMPUTE, event
    elif event in (TO_HOST, FROM_HOST):
        yield COMMUNICATION, event
    elif match := _TRANSFER.fullmatch(event) or _COLLECTIVE.match(event):
        yield COMMUNICATION, match[1]
