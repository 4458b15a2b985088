"""What a trace file shows: spans on tracks, arrows between them, counters. Simulated or measured, it is the
same.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from shardwise.errors import InternalError
from shardwise.sim.engine import Timeline
from shardwise.sim.task_graph import COMMUNICATION, COMPUTE, DATA_PARALLEL, Floats

BLOCKS, OPERATORS, TRAFFIC = "blocks", "operators", "traffic"
"""Tracks of a step of an operator graph: passes of its blocks and of its operators, and what is done for
tensors to be where they are read."""

_TRACK_ORDER = (COMPUTE, BLOCKS, OPERATORS, TRAFFIC, COMMUNICATION, DATA_PARALLEL)


@dataclass(frozen=True, slots=True)
class Span:
    """Something with a name that lasts from `start_s` to `finish_s` on a track of a rank."""

    rank: int
    track: str
    name: str
    start_s: float
    finish_s: float


@dataclass(frozen=True, slots=True)
class Arrow:
    """One span causes another; both by their places in `Trace.spans`."""

    source: int
    target: int


@dataclass(frozen=True, slots=True)
class Counter:
    """A value of a rank, from each instant of `times_s` on."""

    rank: int
    name: str
    times_s: Sequence[float]
    nbytes: Sequence[float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """Everything a trace file holds. Spans of one track may overlap; they are then drawn on tracks side by
    side.
    """

    spans: tuple[Span, ...]
    arrows: tuple[Arrow, ...] = ()
    counters: tuple[Counter, ...] = ()
    names: Mapping[int, str] = field(default_factory=dict)
    """What a rank is called where that is not `rank N`."""
    plan_hash: str | None = None
    """Of the plan whose step this is, where that is told."""

    @property
    def ranks(self) -> list[int]:
        return sorted({span.rank for span in self.spans} | {counter.rank for counter in self.counters})

    def name_of(self, rank: int) -> str:
        return self.names.get(rank, f"rank {rank}")

    def __post_init__(self) -> None:
        if any(not span.start_s <= span.finish_s for span in self.spans):
            raise InternalError("trace: a span ends before it starts")
        places = range(len(self.spans))
        if any(arrow.source not in places or arrow.target not in places for arrow in self.arrows):
            raise InternalError("trace: an arrow without a span")


@dataclass(frozen=True, slots=True)
class Track:
    """One row of the picture: spans by their places in the trace, in order of time, none overlapping."""

    rank: int
    name: str
    spans: tuple[int, ...]


def tracks_of(trace: Trace) -> list[Track]:
    """The rows to draw, by rank, then compute, communication, data parallel, then others by name.

    Where spans of one track overlap, each goes on the first row that is free.
    """
    groups: dict[tuple[int, int, str], list[int]] = {}
    for place, span in enumerate(trace.spans):
        order = _TRACK_ORDER.index(span.track) if span.track in _TRACK_ORDER else len(_TRACK_ORDER)
        groups.setdefault((span.rank, order, span.track), []).append(place)
    tracks = []
    for (rank, _, name), places in sorted(groups.items()):
        for number, track_row in enumerate(_non_overlapping(trace, places), start=1):
            tracks.append(Track(rank, name if number == 1 else f"{name} {number}", tuple(track_row)))
    return tracks


def _non_overlapping(trace: Trace, places: Iterable[int]) -> list[list[int]]:
    track_rows: list[list[int]] = []
    free_s: list[float] = []
    for place in sorted(
        places, key=lambda place: (trace.spans[place].start_s, trace.spans[place].finish_s, place)
    ):
        span = trace.spans[place]
        number = next(
            (track_row for track_row, free in enumerate(free_s) if free <= span.start_s), len(track_rows)
        )
        if number == len(track_rows):
            track_rows.append([])
            free_s.append(0.0)
        track_rows[number].append(place)
        free_s[number] = span.finish_s
    return track_rows


def trace_of(timeline: Timeline, *, activations: Sequence[tuple[Floats, Floats]] = ()) -> Trace:
    """The trace of a simulated step; `activations` are per rank instants and bytes held (see
    `activation_bytes`).

    Tasks of a rank without a stream (hops) are drawn as its communication; tasks of no rank are not drawn.
    """
    graph = timeline.graph
    ranks = graph.ranks.tolist()
    place_of: dict[int, int] = {}
    spans: list[Span] = []
    times = zip(timeline.start_s.tolist(), timeline.finish_s.tolist(), strict=True)
    for task, (start, finish) in enumerate(times):
        if ranks[task] >= 0:
            place_of[task] = len(spans)
            track = graph.streams[task] or COMMUNICATION
            spans.append(Span(ranks[task], track, graph.names[task], start, finish))
    arrows = [
        Arrow(place_of[source], place_of[target])
        for source, target in graph.sends.tolist()
        if source in place_of and target in place_of
    ]
    counters = [
        Counter(rank, "activations in flight", times.tolist(), nbytes.tolist())
        for rank, (times, nbytes) in enumerate(activations)
    ]
    return Trace(spans=tuple(spans), arrows=tuple(arrows), counters=tuple(counters))
