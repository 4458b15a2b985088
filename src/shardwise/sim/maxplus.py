"""The max-plus evaluator: how long a schedule table takes, for many cases at once.

An action starts at the maximum of two times, the finish of the action before it on its rank and the arrival
of what it depends on, and ends its duration later. Sorted by topological level, all actions of one level are
computed together: rows are actions, columns are the cases of the batch. A single case is walked instead.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from shardwise.errors import ConfigError, InternalError
from shardwise.schedule import KINDS, ActionKind, Schedule
from shardwise.sim.dependencies import action_finishes, dependencies
from shardwise.sim.durations import Durations
from shardwise.sim.rows import Level, LevelRows, level_rows

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

FORWARD, BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT = map(KINDS.index, ActionKind)

# Cases evaluated together: as many as amortise a call of numpy per level, while the finish times stay in a
# cache.
_LARGEST_CHUNK = 512
_FINISH_TIMES = 1 << 21


@dataclass(frozen=True, slots=True, kw_only=True)
class ActionTimes:
    """When everything of a step starts and finishes, in seconds.

    `start_s`, `finish_s` have shape (batch, actions), actions in the order of `Schedule.columns`; the
    gathers' and reductions' times have shape (batch, stages).
    """

    start_s: Floats
    finish_s: Floats
    gather_start_s: Floats
    gather_finish_s: Floats
    reduce_start_s: Floats
    reduce_finish_s: Floats

    @property
    def makespan_s(self) -> Floats:
        """The latest finish of everything; shape (batch,)."""
        parts = (self.finish_s, self.gather_finish_s, self.reduce_finish_s)
        latest: Floats = np.max([part.max(axis=1) for part in parts], axis=0)
        return latest


class CompiledSchedule:
    """A schedule table as integer arrays, ready to be evaluated for any durations.

    By action, in the order of `Schedule.columns`: `source`, what it waits for over a hop (-1: nothing); `hop`
    and `duration_row`, the rows of `FinishTimes.parts` with the times of that hop and of itself. By stage:
    `first_forward` and `last_backward`, its first F and its last B or W. By rank: `last_actions`, and the
    stages in the orders in which they gather and reduce. Made by `compile_schedule`."""

    def __init__(self, schedule: Schedule) -> None:
        stage, kind, _, offsets = schedule.columns
        self.schedule = schedule
        self.stages = schedule.stages
        self.actions = len(stage)
        self.source, self.hop = dependencies(schedule)
        self.duration_row = kind * self.stages + stage + 2 * self.stages - 1
        self.first_forward, self.last_backward = _ends(schedule)
        self.last_actions = offsets[1:] - 1
        rank_of_stage = np.asarray(schedule.stage_rank)
        by_first, by_last = np.argsort(self.first_forward), np.argsort(self.last_backward)
        ranks = range(schedule.pp)
        self.gather_order = [by_first[rank_of_stage[by_first] == rank].tolist() for rank in ranks]
        self.reduce_order = [by_last[rank_of_stage[by_last] == rank].tolist() for rank in ranks]

    @cached_property
    def rows(self) -> LevelRows:
        """The actions sorted by level. Raises ConfigError where they wait for each other."""
        ones, zeros = [1.0] * self.actions, [0.0] * self.actions
        finishes = action_finishes(self.schedule, self.source.tolist(), ones, zeros, zeros)
        return level_rows(
            level=np.array(finishes).astype(np.int64) - 1,
            source=self.source,
            hop=self.hop,
            duration_row=self.duration_row,
            first_forward=self.first_forward,
            offsets=self.schedule.columns.offsets,
        )

    def makespan_s(self, durations: Durations) -> Floats:
        """Seconds of the step for every case; shape (batch,). Semantics: see `Durations`.

        Raises ConfigError where the actions of the table wait for each other.
        """
        self.check(durations)
        if durations.batch == 1:
            return self._simulated_s(durations)
        result = np.empty(durations.batch)
        for chunk in chunks(durations.batch, self.actions):
            cases = FinishTimes(self, durations.rows(chunk))
            cases.run(self.rows.levels)
            result[chunk] = cases.makespan_s()
        return result

    def _simulated_s(self, durations: Durations) -> Floats:
        """`makespan_s` of a single case, action by action: sooner done than level by level, and needs no
        levels.
        """
        parts, gathered = _parts_s(durations), _gathered_s(self, durations)
        earliest = np.zeros(self.actions)
        earliest[self.first_forward] = gathered[:, 0]
        length, hop = parts[self.duration_row, 0], parts[self.hop, 0]
        simulated = action_finishes(
            self.schedule, self.source.tolist(), length.tolist(), hop.tolist(), earliest.tolist()
        )
        finish = np.array(simulated)[:, None]
        reduced = _reduced_s(self, finish[self.last_backward], durations.reduce_s.T)
        return _latest_s(finish[self.last_actions], reduced, gathered)

    def finish_s(self, durations: Durations) -> ActionTimes:
        """Start and finish of every action, gather and reduction, for every case."""
        self.check(durations)
        cases = FinishTimes(self, durations)
        cases.run(self.rows.levels)
        finish = cases.finish[self.rows.row_of].T
        reduced = cases.reduced_s().T
        return ActionTimes(
            start_s=finish - cases.parts[self.duration_row].T,
            finish_s=finish,
            gather_start_s=cases.gathered.T - durations.gather_s,
            gather_finish_s=cases.gathered.T.copy(),
            reduce_start_s=reduced - durations.reduce_s,
            reduce_finish_s=reduced,
        )

    def check(self, durations: Durations) -> None:
        """Raise InternalError where `durations` is for another number of stages."""
        if durations.stages != self.stages:
            raise InternalError(f"durations of {durations.stages} stages for a table of {self.stages}")


def compile_schedule(schedule: Schedule) -> CompiledSchedule:
    """`schedule` ready for evaluation.

    Raises ConfigError where an action is missing, twice there, on a wrong rank or before what it needs on its
    own rank. That ranks wait for each other in a circle is found, and raised, when it is first evaluated.
    """
    return CompiledSchedule(schedule)


class FinishTimes:
    """The finish times of one compiled table for a batch of durations, computed level by level.

    `finish` has shape (actions + 1, batch), see `LevelRows`; `parts` holds forward hops, backward hops, a row
    of zeros, and then the durations of F, B, I and W by stage; `gathered` is when each stage's parameters are
    there, (stages, batch).
    """

    def __init__(self, compiled: CompiledSchedule, durations: Durations) -> None:
        finish = np.zeros((compiled.actions + 1, durations.batch))
        reduce = np.ascontiguousarray(durations.reduce_s.T)
        self._set(compiled, finish, _parts_s(durations), _gathered_s(compiled, durations), reduce)

    def _set(
        self, compiled: CompiledSchedule, finish: Floats, parts: Floats, gathered: Floats, reduce: Floats
    ) -> None:
        self.compiled = compiled
        self.finish, self.parts, self.gathered, self.reduce = finish, parts, gathered, reduce
        width = compiled.rows.widest
        times, terms = np.empty((2, 2 * width, finish.shape[1]))
        self._scratch = {
            count: (
                times[: 2 * count],
                terms[: 2 * count],
                times[:count],
                times[count : 2 * count],
                terms[:count],
                terms[count : 2 * count],
            )
            for count in range(1, width + 1)
        }

    def select(self, columns: Bools) -> FinishTimes:
        """The cases of the batch where `columns` is true, with the finish times they have."""
        cases = FinishTimes.__new__(FinishTimes)
        arrays = (self.finish, self.parts, self.gathered, self.reduce)
        cases._set(self.compiled, *(np.ascontiguousarray(array[:, columns]) for array in arrays))
        return cases

    def run(self, levels: list[Level]) -> None:
        """Compute the finish times of `levels`, whose dependencies are computed."""
        finish, parts, gathered, scratch = self.finish, self.parts, self.gathered, self._scratch
        add, maximum = np.add, np.maximum
        for level in levels:
            times, terms, free, arrival, hop, length = scratch[level.stop - level.start]
            # mode="clip" lets numpy write straight to `out`; the indices are in range by construction.
            finish.take(level.before, axis=0, out=times, mode="clip")
            parts.take(level.parts, axis=0, out=terms, mode="clip")
            add(arrival, hop, out=arrival)
            maximum(free, arrival, out=free)
            for place, stage in level.gathered:
                maximum(free[place], gathered[stage], out=free[place])
            add(free, length, out=finish[level.start : level.stop])

    def reduced_s(self) -> Floats:
        """When each stage's gradients are reduced; shape (stages, batch)."""
        compiled = self.compiled
        return _reduced_s(compiled, self.finish[compiled.rows.row_of[compiled.last_backward]], self.reduce)

    def makespan_s(self) -> Floats:
        """The latest finish of everything; shape (batch,)."""
        last = self.finish[self.compiled.rows.row_of[self.compiled.last_actions]]
        return _latest_s(last, self.reduced_s(), self.gathered)


def chunks(batch: int, actions: int) -> Iterator[slice]:
    """Slices of a batch, small enough that the finish times of a table of `actions` stay in a cache."""
    size = max(64, min(_LARGEST_CHUNK, _FINISH_TIMES // (actions + 1)))
    for start in range(0, batch, size):
        yield slice(start, min(start + size, batch))


def _ends(schedule: Schedule) -> tuple[Ints, Ints]:
    """Each stage's first F and its last B or W."""
    stage, kind, _, offsets = schedule.columns
    if (np.diff(offsets) == 0).any():
        raise ConfigError("a rank has no actions", key="schedule")
    places = np.arange(len(stage))
    first = np.full(schedule.stages, len(stage))
    forward = kind == FORWARD
    np.minimum.at(first, stage[forward], places[forward])
    last = np.full(schedule.stages, -1)
    backward = (kind == BACKWARD) | (kind == BACKWARD_WEIGHT)
    np.maximum.at(last, stage[backward], places[backward])
    if (first == len(stage)).any() or (last < 0).any():
        raise ConfigError("a stage has no forward or no backward", key="schedule")
    return first, last


def _parts_s(durations: Durations) -> Floats:
    """The table that `hop` and `duration_row` refer to; shape (6 * stages - 1, batch)."""
    parts = (
        durations.hop_forward_s.T,
        durations.hop_backward_s.T,
        np.zeros((1, durations.batch)),
        durations.forward_s.T,
        durations.backward_s.T,
        durations.backward_input_s.T,
        durations.backward_weight_s.T,
    )
    return np.concatenate(parts)


def _gathered_s(compiled: CompiledSchedule, durations: Durations) -> Floats:
    """When each stage's parameters are there; shape (stages, batch)."""
    gathered = np.zeros((compiled.stages, durations.batch))
    for stages in compiled.gather_order:
        gathered[stages] = np.cumsum(durations.gather_s.T[stages], axis=0)
    return gathered


def _reduced_s(compiled: CompiledSchedule, done: Floats, reduce: Floats) -> Floats:
    """When each stage's gradients are reduced, its last B or W being `done`; all of shape (stages, batch)."""
    reduced = done.copy()
    for stages in compiled.reduce_order:
        free: Floats | float = 0.0
        for stage in stages:
            free = np.maximum(done[stage], free) + reduce[stage]
            reduced[stage] = free
    return reduced


def _latest_s(last: Floats, reduced: Floats, gathered: Floats) -> Floats:
    latest: Floats = np.maximum(last.max(axis=0), np.maximum(reduced.max(axis=0), gathered.max(axis=0)))
    return latest
