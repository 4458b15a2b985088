"""Tasks and their dependencies, compiled to integer arrays for the event engine."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shardwise.cluster import Capacity
from shardwise.errors import InternalError

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

COMPUTE = "compute"
COMMUNICATION = "communication"
DATA_PARALLEL = "data parallel"


@dataclass(frozen=True, slots=True)
class FlowLink:
    """One direction of a connection; a full-duplex connection is two of these."""

    name: str
    capacity: Capacity


@dataclass(frozen=True, slots=True)
class Speed:
    """A device's speed as a factor of its nominal one, from each instant of `times_s` on.

    `times_s` starts at 0 and increases strictly; a factor of 0 means that the device stands still.
    """

    times_s: tuple[float, ...]
    factors: tuple[float, ...]

    def finish_s(self, start_s: float, duration_s: float) -> float:
        """When work of `duration_s` nominal seconds that starts at `start_s` is done; infinity if never."""
        left, now = duration_s, start_s
        for factor, end in zip(self.factors, (*self.times_s[1:], math.inf), strict=True):
            if end <= now:
                continue
            if left <= factor * (end - now):
                return now + left / factor if left else now
            left -= factor * (end - now)
            now = end
        return now


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskGraph:
    """What the engine runs; made by `TaskGraphBuilder`.

    Per task: `names`, `ranks` (-1: none), `streams` (empty: none), `duration_s` (of a flow: its latency, paid
    before the first byte), `nbytes` (-1 for what is not a flow), `routes` (links and how often each is
    crossed), `speeds` (index in `speed_profiles`, -1: nominal), `waits` (how many tasks it waits for). The
    tasks that wait for task t are `dependents[offsets[t]:offsets[t + 1]]`; streams in order are dependencies
    among these. `sends` pairs tasks, (n, 2), for the arrows of a trace.
    """

    names: tuple[str, ...]
    ranks: Ints
    streams: tuple[str, ...]
    duration_s: Floats
    nbytes: Floats
    routes: tuple[tuple[tuple[int, int], ...], ...]
    speeds: Ints
    speed_profiles: tuple[Speed, ...]
    waits: Ints
    offsets: Ints
    dependents: Ints
    links: tuple[FlowLink, ...]
    sends: Ints


class TaskGraphBuilder:
    """Collects tasks in the order in which each stream runs them; `build` compiles them.

    A stream is named by its rank and a word, and does one task at a time, in the order in which they were
    added. A task without a stream only waits for what it is put after.
    """

    def __init__(self) -> None:
        self._names: list[str] = []
        self._ranks: list[int] = []
        self._streams: list[str] = []
        self._durations: list[float] = []
        self._nbytes: list[float] = []
        self._routes: list[tuple[tuple[int, int], ...]] = []
        self._speeds: list[int] = []
        self._profiles: list[Speed] = []
        self._profile_of: dict[tuple[int, str], int] = {}
        self._links: list[FlowLink] = []
        self._last: dict[tuple[int, str], int] = {}
        self._before: list[int] = []
        self._after: list[int] = []
        self._sends: list[tuple[int, int]] = []

    def add_link(self, name: str, capacity: Capacity | float) -> int:
        """A new directed link, by bytes per second; returns its number."""
        if not isinstance(capacity, Capacity):
            capacity = Capacity.constant(capacity)
        if not all(0.0 <= value < math.inf for value in capacity.bytes_per_s):
            raise InternalError(f"link {name}: a capacity is negative or not finite")
        self._links.append(FlowLink(name, capacity))
        return len(self._links) - 1

    def set_speed(self, rank: int, stream: str, speed: Speed) -> None:
        """Run what is added to this stream from now on at `speed`."""
        self._profile_of[rank, stream] = len(self._profiles)
        self._profiles.append(speed)

    def add_task(
        self, name: str, duration_s: float, *, rank: int = -1, stream: str = "", after: Iterable[int] = ()
    ) -> int:
        """A task of fixed duration (a pure delay, where it has no stream); returns its number."""
        return self._add(name, duration_s, -1.0, (), rank, stream, after)

    def add_flow(
        self,
        name: str,
        nbytes: float,
        route: Sequence[int],
        *,
        latency_s: float = 0.0,
        cap_bytes_per_s: float | None = None,
        rank: int = -1,
        stream: str = "",
        after: Iterable[int] = (),
    ) -> int:
        """`nbytes` over all links of `route` at one rate (a link named twice carries them twice); returns its
        number.

        A ring collective is one flow over all its directed hops. `cap_bytes_per_s` bounds the rate: a private
        link.
        """
        if not 0.0 <= nbytes < math.inf:
            raise InternalError(f"flow {name}: {nbytes} bytes")
        route = list(route)
        if cap_bytes_per_s is not None:
            route.append(self.add_link(f"cap of {name}", cap_bytes_per_s))
        if not route and nbytes:
            raise InternalError(f"flow {name} has neither a link nor a cap")
        return self._add(name, latency_s, nbytes, tuple(sorted(Counter(route).items())), rank, stream, after)

    def add_send(self, producer: int, consumer: int) -> None:
        """Note that `producer` sends to `consumer`: an arrow in the trace, not a dependency."""
        self._sends.append((producer, consumer))

    def _add(
        self,
        name: str,
        duration_s: float,
        nbytes: float,
        route: tuple[tuple[int, int], ...],
        rank: int,
        stream: str,
        after: Iterable[int],
    ) -> int:
        if not 0.0 <= duration_s < math.inf:
            raise InternalError(f"task {name}: {duration_s} seconds")
        task = len(self._names)
        self._names.append(name)
        self._ranks.append(rank)
        self._streams.append(stream)
        self._durations.append(duration_s)
        self._nbytes.append(nbytes)
        self._routes.append(route)
        self._speeds.append(self._profile_of.get((rank, stream), -1) if nbytes < 0 else -1)
        before = set(after)
        if stream:
            if (rank, stream) in self._last:
                before.add(self._last[rank, stream])
            self._last[rank, stream] = task
        for other in sorted(before):
            if not 0 <= other < task:
                raise InternalError(f"task {name} is put after task {other}, which does not exist yet")
            self._before.append(other)
            self._after.append(task)
        return task

    def build(self) -> TaskGraph:
        """The graph of everything added so far."""
        tasks = len(self._names)
        before, after = np.array(self._before, np.int64), np.array(self._after, np.int64)
        order = np.argsort(before, kind="stable")
        return TaskGraph(
            names=tuple(self._names),
            ranks=np.array(self._ranks, np.int64),
            streams=tuple(self._streams),
            duration_s=np.array(self._durations, np.float64),
            nbytes=np.array(self._nbytes, np.float64),
            routes=tuple(self._routes),
            speeds=np.array(self._speeds, np.int64),
            speed_profiles=tuple(self._profiles),
            waits=np.bincount(after, minlength=tasks),
            offsets=np.concatenate(([0], np.cumsum(np.bincount(before, minlength=tasks)))),
            dependents=after[order],
            links=tuple(self._links),
            sends=np.array(self._sends, np.int64).reshape(-1, 2),
        )
