"""The max-plus evaluator: step time and action times of a schedule table, for a batch of cases.

An action starts at the maximum of two times: the finish of the previous action on its rank, and the arrival
of its dependency. It ends its duration later. `CompiledSchedule` sorts actions by topological level and
computes each level for all cases at once: rows are actions, columns are cases. A single case is computed
action by action instead (`action_finishes`). `Durations` defines the semantics of a step. `rerouted_s`
evaluates a table whose micro-batches change between pipelines (re-routing).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from itertools import pairwise

import numpy as np
from numpy.typing import ArrayLike, NDArray

from shardwise.errors import ConfigError, InternalError
from shardwise.schedule import KINDS, ActionKind, Rerouted, Schedule, Table

# Dependencies

Ints = NDArray[np.int64]


def dependencies(schedule: Table) -> tuple[Ints, Ints]:
    """Per action, the action that it waits for over a hop (-1 if none), and the hop's row in
    `FinishTimes.parts`.

    F waits for F of the previous stage, B and I for B or I of the next stage. Dependencies within a stage (B
    and I on F, W on I) are on the same rank, so the table's order implies them; this is checked. ConfigError
    where the order violates one, or where an action is missing, duplicate, or on a rank that does not hold
    its stage.
    """
    stage, kind, microbatch, offsets = schedule.columns
    stages, microbatches = schedule.stages, schedule.microbatches
    actions = len(stage)
    if actions and (stage.max() >= stages or microbatch.max() >= microbatches):
        raise ConfigError("an action names a stage or microbatch that does not exist", key="schedule")
    rank = np.repeat(np.arange(schedule.pp), np.diff(offsets))
    if (rank != schedule.rank_for(stage, microbatch)).any():
        raise ConfigError("an action is on a rank that does not hold its stage", key="schedule")
    # Rows: F, B or I, W. Two extra stages, -1 and `stages`, mean "no action".
    place = np.full((3, stages + 2, microbatches), -1)
    role = np.array([0, 1, 1, 2])[kind]
    place[role, stage + 1, microbatch] = np.arange(actions)
    if np.count_nonzero(place >= 0) != actions:
        raise ConfigError("an action is in the table twice", key="schedule")
    own = place[np.maximum(role - 1, 0), stage + 1, microbatch]
    forward = role == 0
    out_of_order = ~forward & ((own < 0) | (own >= np.arange(actions)))
    if out_of_order.any():
        raise ConfigError(
            f"{_named(schedule, int(np.argmax(out_of_order)))} runs before its dependency", key="schedule"
        )
    across = role < 2
    neighbour = np.where(forward, stage, stage + 2)
    source = np.where(across, place[np.minimum(role, 1), neighbour, microbatch], -1)
    expected = across & np.where(forward, stage > 0, stage < stages - 1)
    if (missing := expected & (source < 0)).any():
        raise ConfigError(
            f"{_named(schedule, int(np.argmax(missing)))} waits for an action that is not in the table",
            key="schedule",
        )
    hop = np.where(forward, stage - 1, stages - 1 + stage)
    return source, np.where(expected, hop, 2 * (stages - 1))


def action_finishes(
    schedule: Table, source: list[int], length: list[float], hop: list[float], earliest: list[float]
) -> list[float]:
    """The finish of every action, from its `length`, its `earliest` start, and its `source` action over
    `hop`.

    With unit lengths and all else zero, these are the topological levels, from 1. Runs every rank as far as
    possible, in ascending and descending order of ranks, as forwards and backwards travel. ConfigError for a
    deadlock.
    """
    finish = [-1.0] * len(source)
    bounds = schedule.columns.offsets.tolist()
    reached, free = bounds[:-1], [0.0] * schedule.pp
    up = range(schedule.pp)
    left = len(source)
    while left:
        before = left
        for rank in (*up, *reversed(up)):
            action = first = reached[rank]
            now = free[rank]
            stop = bounds[rank + 1]
            while action < stop:
                needed = source[action]
                if needed >= 0:
                    arrival = finish[needed]
                    if arrival < 0.0:
                        break
                    arrival += hop[action]
                    if arrival > now:
                        now = arrival
                if earliest[action] > now:
                    now = earliest[action]
                now += length[action]
                finish[action] = now
                action += 1
            if action > first:
                reached[rank], free[rank] = action, now
                left -= action - first
        if left == before:
            deadlocked = next(action for action, end in enumerate(finish) if end < 0.0)
            raise ConfigError(
                f"the schedule deadlocks, first at {_named(schedule, deadlocked)}", key="schedule"
            )
    return finish


def _named(schedule: Table, action: int) -> str:
    stage, kind, microbatch, _ = schedule.columns
    return f"{stage[action]}{KINDS[kind[action]]}{microbatch[action]}"


# Durations

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Durations:
    """Seconds of every part of a step; per stage of shape (batch, stages), per hop of shape (batch, stages -
    1).

    Overlap is included: these are the times of the actions with slowdown by communication, and the exposed
    times of gathers and reductions. Both evaluators use these semantics of a step:

    - Each rank runs its actions in table order on its compute stream.
    - F of stage s waits for F of stage s - 1 and `hop_forward_s[s - 1]` after it. B (or I) waits for the B
      (or I) of stage s + 1 and `hop_backward_s[s]` after it. W waits for its own I. A hop occupies no rank.
    - Gathers run from time 0 on the rank's communication stream, in the order in which its stages first run.
      A stage's first F waits for its gather.
    - Reductions run on the same stream. That of a stage starts after its last B or W and after the rank's
      earlier reductions, in the order of those last actions.
    - The step ends when everything has ended.
    """

    forward_s: Floats
    backward_s: Floats
    backward_input_s: Floats
    backward_weight_s: Floats
    gather_s: Floats
    reduce_s: Floats
    hop_forward_s: Floats
    hop_backward_s: Floats

    def __post_init__(self) -> None:
        batch, stages = self.forward_s.shape
        for field in fields(self):
            values: Floats = getattr(self, field.name)
            expected_shape = (batch, stages - 1 if field.name.startswith("hop") else stages)
            if values.shape != expected_shape:
                raise InternalError(f"durations: {field.name} has shape {values.shape}, not {expected_shape}")
            # Comparisons with NaN are false; `initial` covers arrays without values.
            if not (values.min(initial=0.0) >= 0.0 and values.max(initial=0.0) < np.inf):
                raise InternalError(f"durations: {field.name} is negative or not finite")

    @staticmethod
    def of(
        *,
        stages: int,
        batch: int = 1,
        forward_s: ArrayLike,
        backward_s: ArrayLike = 0.0,
        backward_input_s: ArrayLike = 0.0,
        backward_weight_s: ArrayLike = 0.0,
        gather_s: ArrayLike = 0.0,
        reduce_s: ArrayLike = 0.0,
        hop_forward_s: ArrayLike = 0.0,
        hop_backward_s: ArrayLike = 0.0,
    ) -> Durations:
        """Durations from values that broadcast to the shapes above: a number, one value per stage, or a
        batch."""

        def filled(values: ArrayLike, columns: int) -> Floats:
            return np.ascontiguousarray(np.broadcast_to(np.asarray(values, np.float64), (batch, columns)))

        return Durations(
            forward_s=filled(forward_s, stages),
            backward_s=filled(backward_s, stages),
            backward_input_s=filled(backward_input_s, stages),
            backward_weight_s=filled(backward_weight_s, stages),
            gather_s=filled(gather_s, stages),
            reduce_s=filled(reduce_s, stages),
            hop_forward_s=filled(hop_forward_s, stages - 1),
            hop_backward_s=filled(hop_backward_s, stages - 1),
        )

    @staticmethod
    def joined(several: Sequence[Durations]) -> Durations:
        """The cases of all of these in order; all have the same number of stages."""
        if len(several) == 1:
            return several[0]
        return Durations(
            **{
                field.name: np.concatenate([getattr(one, field.name) for one in several])
                for field in fields(Durations)
            }
        )

    @property
    def batch(self) -> int:
        """Number of cases."""
        return int(self.forward_s.shape[0])

    @property
    def stages(self) -> int:
        """Number of pipeline stages of each case."""
        return int(self.forward_s.shape[1])

    def rows(self, which: slice | NDArray[np.bool_] | NDArray[np.int64]) -> Durations:
        """The cases of the batch that `which` selects."""
        return Durations(**{field.name: getattr(self, field.name)[which] for field in fields(self)})


# Levels


@dataclass(frozen=True, slots=True)
class Level:
    """Rows `start` to before `stop` of the finish times, with their operands.

    For the level's w actions, `before` has w rows of the previous actions on their ranks, then w rows of
    their dependencies. `parts` has w rows of hops, then w rows of durations in `FinishTimes.parts`.
    `gathered` has pairs of a position in the level and the stage whose gather that action waits for.
    """

    start: int
    stop: int
    before: Ints
    parts: Ints
    gathered: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LevelRows:
    """The actions sorted by level. Row 0 of the finish times is time zero; action i has row `row_of[i]`.

    `action_of_row` is the inverse (-1 for row 0). Level l has rows `level_starts[l]` to before
    `level_starts[l + 1]`. `previous` and `source` have, by row, the rows of the previous action on the rank
    and of the dependency over a hop (0 if none). `widest` is the largest number of actions of a level.
    """

    row_of: Ints
    action_of_row: Ints
    level_starts: Ints
    previous: Ints
    source: Ints
    levels: list[Level]
    widest: int


def level_rows(
    *, level: Ints, source: Ints, hop: Ints, duration_row: Ints, first_forward: Ints, offsets: Ints
) -> LevelRows:
    """Sort actions by `level`; `offsets` are those of `Schedule.columns`, the other arrays are by action."""
    actions = len(level)
    order = np.argsort(level, kind="stable")
    row_of = np.empty(actions + 1, np.int64)
    row_of[order] = np.arange(1, actions + 1)
    row_of[-1] = 0  # an action without a dependency waits for row 0
    widths = np.bincount(level)
    starts = 1 + np.concatenate(([0], np.cumsum(widths)))
    before = np.arange(-1, actions - 1)
    before[offsets[:-1]] = -1
    previous, sources = row_of[before[order]], row_of[source[order]]
    gathered: dict[int, list[tuple[int, int]]] = {}
    for stage, action in enumerate(first_forward.tolist()):
        at = int(level[action])
        gathered.setdefault(at, []).append((int(row_of[action] - starts[at]), stage))
    rows, parts = _paired(starts, previous, sources), _paired(starts, hop[order], duration_row[order])
    return LevelRows(
        row_of=row_of[:-1],
        action_of_row=np.concatenate(([-1], order)),
        level_starts=starts,
        previous=np.concatenate(([0], previous)),
        source=np.concatenate(([0], sources)),
        levels=[
            Level(
                start,
                stop,
                rows[2 * start - 2 : 2 * stop - 2],
                parts[2 * start - 2 : 2 * stop - 2],
                tuple(gathered.get(number, ())),
            )
            for number, (start, stop) in enumerate(pairwise(starts.tolist()))
        ],
        widest=int(widths.max(initial=0)),
    )


def _paired(starts: Ints, left: Ints, right: Ints) -> Ints:
    """Per level its rows of `left`, then its rows of `right`, level after level."""
    begins = starts[:-1] - 1
    widths = np.diff(starts)
    place = np.arange(len(left)) + np.repeat(begins, widths)
    paired = np.empty(2 * len(left), np.int64)
    paired[place] = left
    paired[place + np.repeat(widths, widths)] = right
    return paired


# Evaluation

Bools = NDArray[np.bool_]

FORWARD, BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT = map(KINDS.index, ActionKind)

# Cases per chunk: enough to amortise one numpy call per level, few enough that finish times stay in cache.
_LARGEST_CHUNK = 512
_FINISH_TIMES = 1 << 21


@dataclass(frozen=True, slots=True, kw_only=True)
class ActionTimes:
    """Seconds of one case: of each action its start, its finish and the hop before it, in the order of
    `Schedule.columns`; the ends of each stage's gather and reduction; and the end of all."""

    start_s: Floats
    finish_s: Floats
    hop_s: Floats
    gathered_s: Floats
    reduced_s: Floats
    makespan_s: float


class CompiledSchedule:
    """A schedule table as integer arrays, to evaluate with any durations; `compile_schedule` makes it.

    By action, in the order of `Schedule.columns`: `source` is its dependency over a hop (-1: none); `hop` and
    `duration_row` are the rows of `FinishTimes.parts` with the times of that hop and of the action. By stage:
    `first_forward` and `last_backward` are its first F and its last B or W. By rank: `last_actions`, and the
    stages in the orders of their gathers and reductions.
    """

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
        """The actions sorted by level. ConfigError for a deadlock."""
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
        """Step time in seconds for every case; shape (batch,). `Durations` defines the semantics.

        ConfigError for a deadlock.
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
        """`makespan_s` of a single case, action by action: faster than by level, and needs no levels."""
        return np.array([self.times(durations).makespan_s])

    def times(self, durations: Durations) -> ActionTimes:
        """All times of a single case, action by action. ConfigError for a deadlock."""
        parts, gathered = _parts_s(durations), _gathered_s(self, durations)
        earliest = np.zeros(self.actions)
        earliest[self.first_forward] = gathered[:, 0]
        length, hop = parts[self.duration_row, 0], parts[self.hop, 0]
        simulated = action_finishes(
            self.schedule, self.source.tolist(), length.tolist(), hop.tolist(), earliest.tolist()
        )
        finish = np.array(simulated)[:, None]
        reduced = _reduced_s(self, finish[self.last_backward], durations.reduce_s.T)
        return ActionTimes(
            start_s=finish[:, 0] - length,
            finish_s=finish[:, 0],
            hop_s=hop,
            gathered_s=gathered[:, 0],
            reduced_s=reduced[:, 0],
            makespan_s=float(_latest_s(finish[self.last_actions], reduced, gathered)[0]),
        )

    def check(self, durations: Durations) -> None:
        """InternalError where `durations` has another number of stages."""
        if durations.stages != self.stages:
            raise InternalError(f"durations of {durations.stages} stages for a table of {self.stages}")


def compile_schedule(schedule: Schedule) -> CompiledSchedule:
    """`schedule` compiled for evaluation.

    ConfigError where an action is missing, duplicate, on a wrong rank or before its dependency on the same
    rank. A deadlock between ranks is found, and raised, at the first evaluation.
    """
    return CompiledSchedule(schedule)


class FinishTimes:
    """The finish times of one compiled table for a batch of durations, computed level by level.

    `finish` has shape (actions + 1, batch), see `LevelRows`. `parts` has forward hops, backward hops, a row
    of zeros, and then the durations of F, B, I and W by stage. `gathered` has the end of each stage's gather,
    (stages, batch).
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
        """The cases where `columns` is true, with their finish times."""
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
            # mode="clip" lets numpy write to `out` without a copy; the indices are in range by construction.
            finish.take(level.before, axis=0, out=times, mode="clip")
            parts.take(level.parts, axis=0, out=terms, mode="clip")
            add(arrival, hop, out=arrival)
            maximum(free, arrival, out=free)
            for place, stage in level.gathered:
                maximum(free[place], gathered[stage], out=free[place])
            add(free, length, out=finish[level.start : level.stop])

    def reduced_s(self) -> Floats:
        """The end of each stage's gradient reduction; shape (stages, batch)."""
        compiled = self.compiled
        return _reduced_s(compiled, self.finish[compiled.rows.row_of[compiled.last_backward]], self.reduce)

    def makespan_s(self) -> Floats:
        """The latest finish of everything; shape (batch,)."""
        last = self.finish[self.compiled.rows.row_of[self.compiled.last_actions]]
        return _latest_s(last, self.reduced_s(), self.gathered)


def chunks(batch: int, actions: int) -> Iterator[slice]:
    """Slices of a batch whose finish times, for a table of `actions`, fit in cache."""
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
    """The table that `hop` and `duration_row` index; shape (6 * stages - 1, batch)."""
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
    """The end of each stage's gather; shape (stages, batch)."""
    gathered = np.zeros((compiled.stages, durations.batch))
    for stages in compiled.gather_order:
        gathered[stages] = np.cumsum(durations.gather_s.T[stages], axis=0)
    return gathered


def _reduced_s(compiled: CompiledSchedule, done: Floats, reduce: Floats) -> Floats:
    """The end of each stage's gradient reduction, where `done` is its last B or W; all of shape (stages,
    batch)."""
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


# Re-routing

_KINDS = ("forward_s", "backward_s", "backward_input_s", "backward_weight_s")
_BACKWARDS = [KINDS.index(ActionKind.BACKWARD), KINDS.index(ActionKind.BACKWARD_INPUT)]


def rerouted_s(table: Rerouted, durations: Durations, across_s: float) -> float:
    """Seconds until all ranks have run their actions and reduced their gradients, for a re-routed table.

    Semantics are those of `Durations`, whose case d has the times of pipeline d. The hop of a micro-batch
    that changes the pipeline takes at least `across_s`. ConfigError where an action is missing, duplicate or
    on a wrong rank, or for a deadlock.
    """
    stage, kind, _, offsets = table.columns
    rank = np.repeat(np.arange(table.pp), np.diff(offsets))
    pipeline = np.array([one for one, _ in table.rank_stages])[rank]
    source, _ = dependencies(table)
    by_kind = np.stack([getattr(durations, name) for name in _KINDS])
    length = by_kind[kind, pipeline, stage]
    hop = np.zeros(len(stage))
    (arriving,) = np.nonzero((source >= 0) & (stage[source] != stage))
    if len(arriving):
        hop[arriving] = _hops(durations, across_s, arriving, source[arriving], (stage, kind, pipeline))
    first = offsets[:-1]
    earliest = np.zeros(len(stage))
    earliest[first] = durations.gather_s[pipeline[first], stage[first]]
    finish = np.array(
        action_finishes(table, source.tolist(), length.tolist(), hop.tolist(), earliest.tolist())
    )
    last = offsets[1:] - 1
    reduced = finish[last] + durations.reduce_s[pipeline[last], stage[last]]
    return float(reduced.max())


def _hops(
    durations: Durations, across_s: float, actions: Ints, sources: Ints, columns: tuple[Ints, Ints, Ints]
) -> NDArray[np.float64]:
    """Seconds from each source action to the action of another stage that waits for it."""
    stage, kind, pipeline = columns
    edge = np.minimum(stage[actions], stage[sources])
    ends = (pipeline[actions], pipeline[sources])
    forward = np.maximum(*(durations.hop_forward_s[end, edge] for end in ends))
    backward = np.maximum(*(durations.hop_backward_s[end, edge] for end in ends))
    own = np.where(np.isin(kind[actions], _BACKWARDS), backward, forward)
    found: NDArray[np.float64] = np.where(ends[0] == ends[1], own, np.maximum(own, across_s))
    return found
