"""The event engine: runs a task graph over streams and shared links, instant by instant.

One heap keyed (time, priority, insertion counter) decides what happens next, so that runs are alike to the
last bit: at one instant capacities change first, then everything else happens in the order in which it was
put there. Streams in order are dependencies of the graph already. Flows that join or leave at one instant are
shared out once, when time moves on.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from functools import cached_property
from heapq import heapify, heappop, heappush
from itertools import pairwise

import numpy as np

from shardwise.errors import InternalError
from shardwise.sim.network import Network
from shardwise.sim.task_graph import Floats, TaskGraph

# Priority and insertion counter are one integer: capacity changes count from here, all else from 0.
_FIRST = -(1 << 62)


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """When every task of `graph` started and finished, in seconds; arrays of shape (tasks,).

    `events` counts tasks started, tasks ended and changes of rate of flows under way. `rates`, where asked
    for, lists (task, from when, bytes per second) of every flow.
    """

    graph: TaskGraph
    start_s: Floats
    finish_s: Floats
    events: int
    rates: tuple[tuple[int, float, float], ...] = ()

    @property
    def makespan_s(self) -> float:
        """The latest finish."""
        return float(self.finish_s.max(initial=0.0))

    @cached_property
    def trace_hash(self) -> str:
        """SHA-256 over names, starts, finishes and the count of events: equal for equal runs."""
        digest = hashlib.sha256("\0".join(self.graph.names).encode())
        digest.update(self.start_s.astype("<f8").tobytes())
        digest.update(self.finish_s.astype("<f8").tobytes())
        digest.update(str(self.events).encode())
        return digest.hexdigest()


def simulate(graph: TaskGraph, *, record_rates: bool = False) -> Timeline:
    """Run `graph` from time 0 to the end.

    Raises InternalError where it has none: tasks that wait for each other, or whose link or device stands
    still.
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
    # The key under which each flow's end is due; an entry of the heap with another key is out of date.
    due = [_FIRST] * tasks
    heap: list[tuple[float, int, int]] = []
    _add_capacity_changes(heap, graph)
    # Codes in the heap: a task that ends; from `joins` on a flow whose latency is over; from `ends` on a flow
    # that may end; from `changes` on a link whose capacity changes.
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
    """Put every change of a link's capacity after time 0 in the heap."""
    tasks = len(graph.names)
    counter = _FIRST
    for number, link in enumerate(graph.links):
        for time in link.capacity.times_s[1:]:
            counter += 1
            heap.append((time, counter, 3 * tasks + number))
    heapify(heap)
