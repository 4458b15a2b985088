"""Re-routing around lost ranks: their peers in other pipelines do their work (ReCycle, Gandhi et al. 2024,
arXiv 2405.14009).

Rank (pipeline, stage) runs its own micro-batches. At its stage only, it also runs micro-batches re-routed
from lost ranks; at the next stage they are back in their own pipeline. No rank exceeds its in-flight limit. A
greedy simulation finds the order: a ready backward first, else a forward within the in-flight limit, else a
deferred weight gradient. So re-routed work fills bubbles. Entry point: `reroute`.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from heapq import heappop, heappush

import numpy as np

from shardwise.errors import ConfigError
from shardwise.schedule.action import Action, ActionKind, Columns, Ints, columns_of, rows_of

PipelineStage = tuple[int, int]
"""A pipeline and a stage of it, both from 0."""


@dataclass(frozen=True, eq=False)
class Rerouted:
    """The actions of all ranks of several pipelines together; a `Table` like `Schedule`.

    `rank_stages[r]` is the pipeline and the stage of rank r. `rank_of`, of shape (stages, microbatches), is
    the rank that runs each stage of each micro-batch. `pipeline_of` is the pipeline that each micro-batch
    belongs to.
    """

    rank_stages: tuple[PipelineStage, ...]
    rank_of: Ints
    pipeline_of: Ints
    columns: Columns

    @property
    def microbatches(self) -> int:
        """Micro-batches of all pipelines together."""
        return int(self.rank_of.shape[1])

    @property
    def stages(self) -> int:
        """Stages of each pipeline."""
        return int(self.rank_of.shape[0])

    @property
    def pp(self) -> int:
        """Ranks of all pipelines together."""
        return len(self.rank_stages)

    @cached_property
    def ranks(self) -> tuple[tuple[Action, ...], ...]:
        """The actions of every rank, in order."""
        return rows_of(self.columns)

    def rank_for(self, stage: Ints | int, microbatch: Ints | int) -> Ints:
        """The rank that runs `stage` of `microbatch`."""
        return np.asarray(self.rank_of[stage, microbatch])

    def ranks_for(self, stage: int) -> Sequence[int]:
        """All ranks that run `stage`."""
        found: list[int] = np.unique(self.rank_of[stage]).tolist()
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class RelativeDurations:
    """Relative durations of actions by stage: forwards and full backwards or, where `is_split`, input and
    weight gradients. Any unit. The durations only decide the order; the table is valid for any other
    durations."""

    forward: Sequence[float]
    backward: Sequence[float]
    weight: Sequence[float]
    is_split: bool


def reroute(
    microbatches: Sequence[int],
    stages: int,
    lost: Collection[PipelineStage],
    *,
    max_in_flight: Sequence[int],
    relative_durations: RelativeDurations,
) -> Rerouted:
    """The table of pipelines of `stages` stages with these `microbatches` each, without the `lost` ranks.

    A rank of stage s has at most `max_in_flight[s]` micro-batches between their forward and the end of their
    backward. Raises ConfigError where a stage is lost in all pipelines, or an in-flight limit is below 1.
    """
    pipelines = range(len(microbatches))
    rank_stages = [
        (one, stage) for one in pipelines for stage in range(stages) if (one, stage) not in set(lost)
    ]
    place = {pipeline_stage: rank for rank, pipeline_stage in enumerate(rank_stages)}
    for stage in range(stages):
        if all((one, stage) not in place for one in pipelines):
            raise ConfigError(f"stage {stage} is lost in all pipelines", key="lost")
    if min(max_in_flight) < 1:
        raise ConfigError(
            "the in-flight limit is too small",
            key="max_in_flight",
            found=str(min(max_in_flight)),
            allowed="1 or more",
        )
    order = sorted((position, one) for one in pipelines for position in range(microbatches[one]))
    pipeline_of = np.array([one for _, one in order], dtype=np.int64)
    rank_of = np.array(
        [_ranks_of_stage(stage, pipeline_of.tolist(), place, len(microbatches)) for stage in range(stages)],
        dtype=np.int64,
    )
    rows = _GreedyScheduler(rank_stages, rank_of.tolist(), max_in_flight, relative_durations).rows()
    return Rerouted(tuple(rank_stages), rank_of, pipeline_of, columns_of(rows))


def _ranks_of_stage(
    stage: int, pipeline_of: Sequence[int], place: dict[PipelineStage, int], pipelines: int
) -> list[int]:
    """The rank that runs the stage of each micro-batch: its own rank, or the least loaded peer, in
    round-robin order."""
    peers = [place[one, stage] for one in range(pipelines) if (one, stage) in place]
    load = dict.fromkeys(peers, 0)
    found = [place.get((one, stage), -1) for one in pipeline_of]
    for rank in found:
        if rank >= 0:
            load[rank] += 1
    position = 0
    for microbatch, rank in enumerate(found):
        if rank < 0:
            least = min(load.values())
            while load[peers[position % len(peers)]] > least:
                position += 1
            found[microbatch] = peers[position % len(peers)]
            load[found[microbatch]] += 1
            position += 1
    return found


class _GreedyScheduler:
    """Simulates all ranks event by event and records what each runs.

    It never deadlocks: the last stage waits for no later stage, so its micro-batches finish; then so do those
    of the stage before it, and so on.
    """

    def __init__(
        self,
        rank_stages: Sequence[PipelineStage],
        rank_of: Sequence[Sequence[int]],
        max_in_flight: Sequence[int],
        relative_durations: RelativeDurations,
    ) -> None:
        self._stage = [stage for _, stage in rank_stages]
        self._rank_of, self._max_in_flight, self._relative_durations = (
            rank_of,
            max_in_flight,
            relative_durations,
        )
        self._last = len(rank_of) - 1
        self._rows: list[list[Action]] = [[] for _ in rank_stages]
        self._forwards: list[list[int]] = [[] for _ in rank_stages]
        self._backwards: list[list[int]] = [[] for _ in rank_stages]
        self._deferred_weights: list[list[int]] = [[] for _ in rank_stages]
        self._in_flight = [0] * len(rank_stages)
        self._ends: list[tuple[float, int, Action]] = []
        self._is_busy = [False] * len(rank_stages)

    def rows(self) -> list[list[Action]]:
        """The actions of every rank, in order."""
        for microbatch, rank in enumerate(self._rank_of[0]):
            heappush(self._forwards[rank], microbatch)
        for rank in range(len(self._rows)):
            self._start(rank, 0.0)
        while self._ends:
            now = self._ends[0][0]
            woken: set[int] = set()
            while self._ends and self._ends[0][0] == now:
                _, rank, action = heappop(self._ends)
                self._is_busy[rank] = False
                woken |= {rank, *self._done(rank, action)}
            for rank in sorted(woken):
                self._start(rank, now)
        return self._rows

    def _done(self, rank: int, action: Action) -> list[int]:
        """Record what became ready; return the other ranks that may continue."""
        stage, kind, microbatch = action
        if kind in (ActionKind.BACKWARD, ActionKind.BACKWARD_WEIGHT):
            self._in_flight[rank] -= 1
        if kind is ActionKind.BACKWARD_WEIGHT:
            return []
        if kind is ActionKind.FORWARD and stage == self._last:
            heappush(self._backwards[rank], microbatch)
            return []
        ahead = stage + 1 if kind is ActionKind.FORWARD else stage - 1
        if ahead < 0:
            return []
        other = self._rank_of[ahead][microbatch]
        heappush(self._forwards[other] if kind is ActionKind.FORWARD else self._backwards[other], microbatch)
        return [other]

    def _start(self, rank: int, now: float) -> None:
        stage, relative_durations = self._stage[rank], self._relative_durations
        if self._is_busy[rank]:
            return
        if self._backwards[rank]:
            microbatch = heappop(self._backwards[rank])
            kind, length = ActionKind.BACKWARD, relative_durations.backward[stage]
            if relative_durations.is_split:
                kind = ActionKind.BACKWARD_INPUT
                self._deferred_weights[rank].append(microbatch)
        elif self._forwards[rank] and self._in_flight[rank] < self._max_in_flight[stage]:
            microbatch = heappop(self._forwards[rank])
            kind, length = ActionKind.FORWARD, relative_durations.forward[stage]
            self._in_flight[rank] += 1
        elif self._deferred_weights[rank]:
            microbatch = self._deferred_weights[rank].pop(0)
            kind, length = ActionKind.BACKWARD_WEIGHT, relative_durations.weight[stage]
        else:
            return
        action = Action(stage, kind, microbatch)
        self._rows[rank].append(action)
        self._is_busy[rank] = True
        heappush(self._ends, (now + length, rank, action))
