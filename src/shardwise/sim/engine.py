"""The event engine: simulates a task graph over streams and shared links (`simulate`).

One heap keyed (time, priority, insertion counter) orders events, so equal runs are equal to the last bit. At
one instant capacities change first; everything else happens in the order of insertion. The order of tasks on
a stream is part of the graph's dependencies. Rates of flows that join or leave at one instant are shared
once, when time advances. `TaskGraphBuilder` compiles tasks and dependencies to integer arrays (`TaskGraph`).

`Network` shares links max-min fairly: no link carries more than its capacity, and every flow crosses a
saturated link on which no other flow is faster. Progressive filling finds these rates: all rates rise
together until a link is full; its flows keep their rate, the others rise further (Bertsekas and Gallager,
Data Networks, section 6.5.2). Flows of one route have equal rates and form one flow class. A link is loose
while its flow classes cannot fill it even if each had the narrowest link of its route alone; a loose link
limits no flow. Only the flow classes connected over tight links to a changed link are filled again.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from heapq import heapify, heappop, heappush
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from shardwise.cluster import Capacity
from shardwise.errors import InternalError

# Task graphs

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

COMPUTE = "compute"
COMMUNICATION = "communication"
DATA_PARALLEL = "data parallel"


@dataclass(frozen=True, slots=True)
class FlowLink:
    """One direction of a link; a full-duplex link is two of these."""

    name: str
    capacity: Capacity


@dataclass(frozen=True, slots=True)
class Speed:
    """A device's speed as a factor of its nominal one, from each instant of `times_s` on.

    `times_s` starts at 0 and increases strictly; a factor of 0 means that the device stops.
    """

    times_s: tuple[float, ...]
    factors: tuple[float, ...]

    def finish_s(self, start_s: float, duration_s: float) -> float:
        """The time when work of `duration_s` nominal seconds that starts at `start_s` ends; infinity if
        never."""
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
    """The input of the engine; `TaskGraphBuilder` makes it.

    Per task: `names`, `ranks` (-1: none), `streams` (empty: none), `duration_s` (of a flow its latency,
    before the first byte), `nbytes` (-1 for a task that is not a flow), `routes` (links and how often each is
    crossed), `speeds` (index in `speed_profiles`, -1: nominal), `waits` (number of tasks that it waits for).
    The tasks that wait for task t are `dependents[offsets[t]:offsets[t + 1]]`; stream order is among these
    dependencies. `sends` has pairs of tasks, shape (n, 2), for the arrows of a trace.
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

    A stream is identified by rank and name. It runs one task at a time, in the order in which they were
    added. A task without a stream only waits for its dependencies.
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
        """Add a directed link with its capacity in bytes per second; returns its index."""
        if not isinstance(capacity, Capacity):
            capacity = Capacity.constant(capacity)
        if not all(0.0 <= value < math.inf for value in capacity.bytes_per_s):
            raise InternalError(f"link {name}: a capacity is negative or not finite")
        self._links.append(FlowLink(name, capacity))
        return len(self._links) - 1

    def set_speed(self, rank: int, stream: str, speed: Speed) -> None:
        """Run tasks that are added to this stream from now on at `speed`."""
        self._profile_of[rank, stream] = len(self._profiles)
        self._profiles.append(speed)

    def add_task(
        self, name: str, duration_s: float, *, rank: int = -1, stream: str = "", after: Iterable[int] = ()
    ) -> int:
        """Add a task of fixed duration (a pure delay if it has no stream); returns its index."""
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
        """Add a flow of `nbytes` over all links of `route` at one rate; returns its index.

        A link that the route has twice carries the bytes twice. A ring collective is one flow over all its
        directed hops. `cap_bytes_per_s` limits the rate by a private link.
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
        """Record that `producer` sends to `consumer`: an arrow in the trace, not a dependency."""
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
                raise InternalError(f"task {name} waits for task {other}, which does not exist yet")
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


# Max-min fair rates

Route = tuple[tuple[int, int], ...]

# A link counts as tight slightly below its limit, so that rounding in `_potential` cannot hide a tight one.
_TIGHT_SHARE = 1.0 - 1e-9


class Network:
    """The flows in progress and their rates.

    `routes[f]` are flow f's links and how often it crosses each; `capacities` are bytes per second. `join`,
    `leave` and `set_capacity` add to `changed` the links where rates may change at an instant. `reshare` then
    computes the new `rates[f]` (-1 before flow f joins). `rate_changes` counts changes of rate of flows in
    progress. `rate_log`, if it is a list, collects (flow, instant, rate).
    """

    def __init__(self, routes: Sequence[Route], nbytes: Sequence[float], capacities: Sequence[float]) -> None:
        class_of_route: dict[Route, int] = {}
        self._class_of_flow = [class_of_route.setdefault(route, len(class_of_route)) for route in routes]
        self._routes = list(class_of_route)
        self._links_of = [tuple(link for link, _ in route) for route in self._routes]
        self._members: list[dict[int, None]] = [{} for _ in self._routes]
        self._solo_rate = [0.0] * len(self._routes)
        self._capacity = list(capacities)
        self._limit = [capacity * _TIGHT_SHARE for capacity in capacities]
        self._classes_on: list[dict[int, int]] = [{} for _ in capacities]
        self._crossings = [0] * len(capacities)
        self._potential = [0.0] * len(capacities)
        self._is_tight = [False] * len(capacities)
        self._left = list(nbytes)
        self._since = [0.0] * len(routes)
        self.changed: list[int] = []
        self.rates = [-1.0] * len(routes)
        self.rate_changes = 0
        self.rate_log: list[tuple[int, float, float]] | None = None

    def join(self, flow: int, now_s: float) -> None:
        """`flow` starts to transfer its bytes."""
        self._since[flow] = now_s
        flow_class = self._class_of_flow[flow]
        members = self._members[flow_class]
        if not members:
            self._open(flow_class)
        members[flow] = None
        for link, times in self._routes[flow_class]:
            self._crossings[link] += times
            if self._is_tight[link]:
                self.changed.append(link)

    def leave(self, flow: int) -> None:
        """`flow` has transferred its last byte."""
        self._left[flow] = 0.0
        flow_class = self._class_of_flow[flow]
        members = self._members[flow_class]
        del members[flow]
        for link, times in self._routes[flow_class]:
            self._crossings[link] -= times
            if self._is_tight[link] and self._crossings[link]:
                self.changed.append(link)
        if not members:
            self._close(flow_class)

    def _open(self, flow_class: int) -> None:
        solo_rate = self._solo_rate[flow_class] = self._narrowest(flow_class)
        for link, times in self._routes[flow_class]:
            self._classes_on[link][flow_class] = times
            self._potential[link] += solo_rate * times
            self._is_tight[link] = self._potential[link] >= self._limit[link]

    def _close(self, flow_class: int) -> None:
        solo_rate = self._solo_rate[flow_class]
        for link, times in self._routes[flow_class]:
            flow_classes = self._classes_on[link]
            del flow_classes[flow_class]
            self._potential[link] = self._potential[link] - solo_rate * times if flow_classes else 0.0
            self._is_tight[link] = self._potential[link] >= self._limit[link]

    def _narrowest(self, flow_class: int) -> float:
        """The rate of a flow that has the links of `flow_class` alone."""
        return min(self._capacity[link] / times for link, times in self._routes[flow_class])

    def set_capacity(self, link: int, bytes_per_s: float) -> None:
        """`link` has the capacity `bytes_per_s` from now on."""
        affected = sorted(
            {link, *(other for flow_class in self._classes_on[link] for other in self._links_of[flow_class])}
        )
        # Links that become loose with this one are included: they may have limited a flow.
        self.changed += [other for other in affected if self._is_tight[other]]
        self._capacity[link] = bytes_per_s
        self._limit[link] = bytes_per_s * _TIGHT_SHARE
        for flow_class in self._classes_on[link]:
            self._solo_rate[flow_class] = self._narrowest(flow_class)
        for other in affected:
            self._potential[other] = sum(
                self._solo_rate[flow_class] * times for flow_class, times in self._classes_on[other].items()
            )
            self._is_tight[other] = self._potential[other] >= self._limit[other]
        self.changed.append(link)

    def reshare(self, now_s: float) -> list[tuple[int, float]]:
        """The flows with a new rate at `now_s`, and when each ends (infinity at rate 0)."""
        seen: set[int] = set()
        updated: list[tuple[int, float]] = []
        members = self._members
        for link in self.changed:
            flow_classes = [flow_class for flow_class in self._classes_on[link] if flow_class not in seen]
            if not flow_classes:
                continue
            links = self._connected(flow_classes, seen)
            if len(flow_classes) == 1:
                flow_class = flow_classes[0]
                self._set_rate(
                    members[flow_class],
                    self._solo_rate[flow_class] / len(members[flow_class]),
                    now_s,
                    updated,
                )
            else:
                for flow_class, rate in self._progressive_filling(flow_classes, links):
                    self._set_rate(members[flow_class], rate, now_s, updated)
        self.changed.clear()
        return updated

    def _connected(self, flow_classes: list[int], seen: set[int]) -> dict[int, None]:
        """Add to `flow_classes` (and `seen`) all classes connected to them over tight links; returns these
        links."""
        links_of, classes_on, is_tight = self._links_of, self._classes_on, self._is_tight
        seen.update(flow_classes)
        links: dict[int, None] = {}
        for flow_class in flow_classes:
            for link in links_of[flow_class]:
                if is_tight[link] and link not in links:
                    links[link] = None
                    for neighbour in classes_on[link]:
                        if neighbour not in seen:
                            seen.add(neighbour)
                            flow_classes.append(neighbour)
        return links

    def _progressive_filling(
        self, flow_classes: list[int], links: dict[int, None]
    ) -> list[tuple[int, float]]:
        """Rates of the flows of `flow_classes` by progressive filling, where only `links` can be full."""
        capacity, classes_on, routes, members = self._capacity, self._classes_on, self._routes, self._members
        residual = {link: capacity[link] for link in links}
        crossings = {link: self._crossings[link] for link in links}
        levels = [(residual[link] / crossings[link], link) for link in links]
        heapify(levels)
        unsettled = set(flow_classes)
        rates: list[tuple[int, float]] = []
        while unsettled:
            level, link = heappop(levels)
            times = crossings[link]
            if not times:
                continue
            # Levels only rise as slower flows settle, so an outdated entry is put back with its current
            # level.
            rising = residual[link] / times
            if rising > level and levels and rising > levels[0][0]:
                heappush(levels, (rising, link))
                continue
            rising = max(rising, level)  # rounding must not lower a level
            for flow_class in classes_on[link]:
                if flow_class in unsettled:
                    unsettled.remove(flow_class)
                    rates.append((flow_class, rising))
                    flows = len(members[flow_class])
                    for other, often in routes[flow_class]:
                        if other in residual:
                            residual[other] -= rising * often * flows
                            crossings[other] -= often * flows
        return rates

    def _set_rate(
        self, flows: dict[int, None], rate: float, now_s: float, updated: list[tuple[int, float]]
    ) -> None:
        rates, lefts, since = self.rates, self._left, self._since
        for flow in flows:
            old = rates[flow]
            if rate == old:
                continue
            left = lefts[flow]
            if old >= 0.0:
                left -= old * (now_s - since[flow])
                if left < 0.0:
                    left = 0.0
                lefts[flow] = left
                since[flow] = now_s
                self.rate_changes += 1
            rates[flow] = rate
            if self.rate_log is not None:
                self.rate_log.append((flow, now_s, rate))
            if left == 0.0:
                updated.append((flow, now_s))
            else:
                updated.append((flow, now_s + left / rate if rate > 0.0 else math.inf))


def max_min_rates(routes: Sequence[Route], capacities: Sequence[float]) -> list[float]:
    """The max-min fair rates of flows over `routes` on links of `capacities`, in bytes per second.

    A route is pairs of a link and how often the flow crosses it.
    """
    network = Network(routes, [1.0] * len(routes), capacities)
    for flow in range(len(routes)):
        network.join(flow, 0.0)
    network.reshare(0.0)
    return network.rates


# Simulation

# Priority and insertion counter share one integer: capacity changes count from here, all other events from 0.
_FIRST = -(1 << 62)


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """Start and finish of every task of `graph`, in seconds; arrays of shape (tasks,).

    `events` counts task starts, task ends and changes of rate of flows in progress. `rates`, if requested,
    lists (task, start of the rate, bytes per second) of every flow.
    """

    graph: TaskGraph
    start_s: Floats
    finish_s: Floats
    events: int
    rates: tuple[tuple[int, float, float], ...] = ()

    @property
    def makespan_s(self) -> float:
        """The latest finish, in seconds."""
        return float(self.finish_s.max(initial=0.0))

    @cached_property
    def trace_hash(self) -> str:
        """SHA-256 over names, starts, finishes and number of events: equal for equal runs."""
        digest = hashlib.sha256("\0".join(self.graph.names).encode())
        digest.update(self.start_s.astype("<f8").tobytes())
        digest.update(self.finish_s.astype("<f8").tobytes())
        digest.update(str(self.events).encode())
        return digest.hexdigest()


def simulate(graph: TaskGraph, *, record_rates: bool = False) -> Timeline:
    """Run `graph` from time 0 to its end.

    InternalError where it never ends: tasks wait for each other, or their link or device has stopped for
    good.
    """
    tasks = len(graph.names)
    durations, nbytes = graph.duration_s.tolist(), graph.nbytes.tolist()
    capacities = [link.capacity.at(0.0) for link in graph.links]
    network = Network(graph.routes, nbytes, capacities)
    if record_rates:
        network.rate_log = []
    targets = graph.dependents.tolist()
    dependents = [targets[start:stop] for start, stop in pairwise(graph.offsets.tolist())]
    waits = graph.waits.tolist()
    speeds = graph.speeds.tolist() if graph.speed_profiles else None
    starts, finishes = [math.nan] * tasks, [math.nan] * tasks
    # The key of each flow's current end event; a heap entry with another key is outdated.
    due = [_FIRST] * tasks
    heap: list[tuple[float, int, int]] = []
    _add_capacity_changes(heap, graph)
    # Event codes in the heap: below `joins`, a task ends; from `joins`, the latency of a flow is over; from
    # `ends`, a flow may end; from `changes`, the capacity of a link changes.
    joins, ends, changes = tasks, 2 * tasks, 3 * tasks
    changed = network.changed
    counter = 0
    left = tasks
    now = 0.0
    begun = [task for task in range(tasks) if not waits[task]]
    while True:
        for task in begun:
            starts[task] = now
            counter += 1
            duration = durations[task]
            if nbytes[task] > 0.0:
                if duration:
                    heappush(heap, (now + duration, counter, joins + task))
                else:
                    network.join(task, now)
            elif speeds is None or speeds[task] < 0:
                heappush(heap, (now + duration, counter, task))
            else:
                end = graph.speed_profiles[speeds[task]].finish_s(now, duration)
                if end < math.inf:
                    heappush(heap, (end, counter, task))
        begun = []
        if changed and not (heap and heap[0][0] <= now):
            for task, end in network.reshare(now):
                counter += 1
                due[task] = counter
                if end < math.inf:
                    heappush(heap, (end, counter, ends + task))
        if not heap:
            break
        now, key, code = heappop(heap)
        if code >= joins:
            if code >= changes:
                network.set_capacity(code - changes, graph.links[code - changes].capacity.at(now))
                continue
            if code < ends:
                network.join(code - joins, now)
                continue
            if due[code - ends] != key:
                continue
            code -= ends
            network.leave(code)
        finishes[code] = now
        left -= 1
        if not left:
            break
        for task in dependents[code]:
            waits[task] -= 1
            if not waits[task]:
                begun.append(task)
    if left:
        unfinished = graph.names[next(task for task in range(tasks) if math.isnan(finishes[task]))]
        raise InternalError(f"the task graph never ends: {left} tasks are left, first {unfinished}")
    return Timeline(
        graph=graph,
        start_s=np.array(starts),
        finish_s=np.array(finishes),
        events=2 * tasks + network.rate_changes,
        rates=tuple(network.rate_log or ()),
    )


def _add_capacity_changes(heap: list[tuple[float, int, int]], graph: TaskGraph) -> None:
    """Add every change of a link's capacity after time 0 to the heap."""
    tasks = len(graph.names)
    counter = _FIRST
    for number, link in enumerate(graph.links):
        for time in link.capacity.times_s[1:]:
            counter += 1
            heap.append((time, counter, 3 * tasks + number))
    heapify(heap)
