"""A schedule table with its durations as a task graph: the event engine simulates the same step as
max-plus."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from shardwise.errors import InternalError
from shardwise.schedule import KINDS, Schedule
from shardwise.sim.engine import COMPUTE, DATA_PARALLEL, FlowLink, TaskGraph, TaskGraphBuilder, Timeline
from shardwise.sim.maxplus import (
    BACKWARD,
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    FORWARD,
    Durations,
    Floats,
    Ints,
    compile_schedule,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfers:
    """Bytes of the hops between stages, and the shared links they use.

    `forward_bytes` and `backward_bytes` have shape (stages - 1,): between stages s and s + 1. The routes, one
    per hop, are indices in `links`; a hop with an empty route shares no link. The hop times in `Durations`
    are then latencies, before the first byte.
    """

    links: tuple[FlowLink, ...]
    forward_bytes: Sequence[float]
    backward_bytes: Sequence[float]
    forward_routes: Sequence[Sequence[int]]
    backward_routes: Sequence[Sequence[int]]


def task_graph(
    schedule: Schedule, durations: Durations, row: int = 0, *, transfers: Transfers | None = None
) -> TaskGraph:
    """The tasks of case `row` of `durations`: compute in table order per rank, hops, gathers and reductions.

    Hops are pure delays (with `transfers`, flows over shared links) that occupy no rank. Gathers and
    reductions share the rank's data-parallel stream. Without shared links the makespan in the engine equals
    that of max-plus to 1e-9. Compute tasks have the names of their actions (`2F0`).
    """
    compiled = compile_schedule(schedule)
    compiled.check(durations)
    lowering = _Lowering(schedule, durations, row, transfers)
    for stages in compiled.gather_order:
        for stage in stages:
            lowering.add_gather(stage)
    for action in compiled.rows.action_of_row[1:].tolist():
        lowering.add_action(action)
    last = compiled.last_backward.tolist()
    for stages in compiled.reduce_order:
        for stage in stages:
            lowering.add_reduce(stage, last[stage])
    return lowering.builder.build()


class _Lowering:
    """A task graph under construction; actions are added after all their dependencies."""

    def __init__(
        self, schedule: Schedule, durations: Durations, row: int, transfers: Transfers | None
    ) -> None:
        self.builder = TaskGraphBuilder()
        self._stages = schedule.stages
        self._stage_rank = schedule.stage_rank
        columns = schedule.columns
        self._actions = list(
            zip(columns.stage.tolist(), columns.kind.tolist(), columns.microbatch.tolist(), strict=True)
        )
        self._length = {
            FORWARD: durations.forward_s[row].tolist(),
            BACKWARD: durations.backward_s[row].tolist(),
            BACKWARD_INPUT: durations.backward_input_s[row].tolist(),
            BACKWARD_WEIGHT: durations.backward_weight_s[row].tolist(),
        }
        self._hop = (durations.hop_forward_s[row].tolist(), durations.hop_backward_s[row].tolist())
        self._gather, self._reduce = durations.gather_s[row].tolist(), durations.reduce_s[row].tolist()
        self._gathered: dict[int, int] = {}
        # Tasks by direction (0 forward, 1 backward), stage and microbatch; and by action.
        self._done: dict[tuple[int, int, int], int] = {}
        self._task_of: dict[int, int] = {}
        self._transfers = transfers
        for link in transfers.links if transfers else ():
            self.builder.add_link(link.name, link.capacity)

    def add_gather(self, stage: int) -> None:
        if self._gather[stage]:
            self._gathered[stage] = self.builder.add_task(
                f"gather {stage}", self._gather[stage], rank=self._stage_rank[stage], stream=DATA_PARALLEL
            )

    def add_reduce(self, stage: int, last_action: int) -> None:
        if self._reduce[stage]:
            after = [self._task_of[last_action]]
            rank = self._stage_rank[stage]
            self.builder.add_task(
                f"reduce {stage}", self._reduce[stage], rank=rank, stream=DATA_PARALLEL, after=after
            )

    def add_action(self, action: int) -> None:
        stage, kind, microbatch = self._actions[action]
        after = []
        producer = None
        if kind == FORWARD and stage in self._gathered:
            after.append(self._gathered[stage])
        if kind != BACKWARD_WEIGHT:
            direction = 0 if kind == FORWARD else 1
            source = stage - 1 if kind == FORWARD else stage + 1
            if 0 <= source < self._stages:
                producer = self._done[direction, source, microbatch]
                after.append(self._add_hop(direction, source, stage, microbatch, producer))
        task = self.builder.add_task(
            f"{stage}{KINDS[kind]}{microbatch}",
            self._length[kind][stage],
            rank=self._stage_rank[stage],
            stream=COMPUTE,
            after=after,
        )
        if producer is not None and self._stage_rank[stage] != self._stage_rank[source]:
            self.builder.add_send(producer, task)
        if kind != BACKWARD_WEIGHT:
            self._done[direction, stage, microbatch] = task
        self._task_of[action] = task

    def _add_hop(self, direction: int, source: int, stage: int, microbatch: int, producer: int) -> int:
        """The task after which the result of `producer` has arrived: a hop, or `producer` itself for a hop of
        no time."""
        edge = min(source, stage)
        latency = self._hop[direction][edge]
        name = f"{source} to {stage} {'FB'[direction]}{microbatch}"
        rank = self._stage_rank[source]
        if self._transfers is not None:
            sides = (self._transfers.forward_bytes, self._transfers.backward_bytes)
            routes = (self._transfers.forward_routes, self._transfers.backward_routes)
            if route := routes[direction][edge]:
                nbytes = sides[direction][edge]
                flow = self.builder.add_flow(
                    name, nbytes, route, latency_s=latency, rank=rank, after=[producer]
                )
                return flow
        if latency == 0.0:
            return producer
        return self.builder.add_task(name, latency, rank=rank, after=[producer])


def activation_bytes(
    schedule: Schedule, timeline: Timeline, bytes_per_microbatch: Sequence[float]
) -> list[tuple[Floats, Floats]]:
    """Per rank, the instants at which its activations in flight change, and the bytes from each instant on.

    A forward adds `bytes_per_microbatch[stage]` when it starts; B or W of the same stage and micro-batch
    frees them when it ends (I frees nothing). `timeline` is that of `task_graph(schedule, ...)`.
    """
    task_of = {name: task for task, name in enumerate(timeline.graph.names)}
    stage, kind, microbatch, offsets = schedule.columns
    names = [
        f"{s}{KINDS[k]}{m}"
        for s, k, m in zip(stage.tolist(), kind.tolist(), microbatch.tolist(), strict=True)
    ]
    if any(name not in task_of for name in names):
        raise InternalError("the timeline is of another schedule")
    tasks = np.array([task_of[name] for name in names], np.int64)
    amount = np.asarray(bytes_per_microbatch, np.float64)[stage]
    change = np.where(kind == FORWARD, amount, np.where(kind == BACKWARD_INPUT, 0.0, -amount))
    when = np.where(kind == FORWARD, timeline.start_s[tasks], timeline.finish_s[tasks])
    return [_running_sums(when[which], change[which]) for which in _rank_slices(offsets)]


def _rank_slices(offsets: Ints) -> list[slice]:
    return [
        slice(start, stop) for start, stop in zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True)
    ]


def _running_sums(when: Floats, change: Floats) -> tuple[Floats, Floats]:
    """Instants in order, and the sum of changes up to and including each."""
    # At one instant, memory is freed before it is allocated.
    order = np.lexsort((change > 0, when))
    in_flight_bytes = np.cumsum(change[order])
    last = np.append(np.flatnonzero(np.diff(when[order])), len(order) - 1)
    return when[order][last], np.maximum(in_flight_bytes[last], 0.0)
