"""The max-plus evaluator: how long a schedule table takes, for many cases at once.

An action starts at the maximum of two times, the finish of the action before it on its rank and the arrival
of what it depends on, and ends its duration later. Sorted by topological level, all actions of one level are
computed together: rows are actions, columns are the cases of the batch. A single case is walked instead.

What every action of a schedule table waits for, and when it ends.

How long everything in a training step takes, for a batch of cases of one schedule table.

The actions of a schedule table as rows sorted by topological level, for evaluation level by level.

How long a table of several pipelines takes whose microbatches change between them.
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

Ints = NDArray[np.int64]


def dependencies(schedule: Table) -> tuple[Ints, Ints]:
    """Per action the action it waits for over a hop (-1 if none), and the hop's row in `Cases.parts`.

    F waits for F of the stage before, B and I for the B or I of the stage after. What an action waits for on
    its own stage (B and I for F, W for I) lies on its own rank, so that the order of the table takes care of
    it; it is checked here that it does. Raises ConfigError where it does not, or where an action is missing,
    twice there, or on a rank that does not hold its stage.
    """
    stage, kind, microbatch, offsets = schedule.columns
    stages, microbatches = schedule.stages, schedule.microbatches
    actions = len(stage)
    if actions and (stage.max() >= stages or microbatch.max() >= microbatches):
        raise ConfigError("an action names a stage or microbatch that does not exist", key="schedule")
    rank = np.repeat(np.arange(schedule.pp), np.diff(offsets))
    if (rank != schedule.rank_for(stage, microbatch)).any():
        raise ConfigError("an action is on a rank that does not hold its stage", key="schedule")
    # Rows: F, B or I, W. Two spare stages, -1 and `stages`, stand for "nothing".
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
            f"{_named(schedule, int(np.argmax(out_of_order)))} runs before what it needs", key="schedule"
        )
    across = role < 2
    neighbour = np.where(forward, stage, stage + 2)
    source = np.where(across, place[np.minimum(role, 1), neighbour, microbatch], -1)
    expected = across & np.where(forward, stage > 0, stage < stages - 1)
    if (missing := expected & (source < 0)).any():
        raise ConfigError(
            f"{_named(schedule, int(np.argmax(missing)))} waits for what is not in the table", key="schedule"
        )
    hop = np.where(forward, stage - 1, stages - 1 + stage)
    return source, np.where(expected, hop, 2 * (stages - 1))


def action_finishes(
    schedule: Table, source: list[int], length: list[float], hop: list[float], earliest: list[float]
) -> list[float]:
    """When every action ends that takes `length`, starts no earlier than `earliest`, and gets what it waits
    for from `source` over `hop`. With unit lengths and nothing else these are the topological levels, from 1.

    Walks every rank as far as it gets, up and down the ranks in turn, the way forwards and backwards travel.
    Raises ConfigError where the actions wait for each other.
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
                f"the schedule waits for itself, first at {_named(schedule, deadlocked)}", key="schedule"
            )
    return finish


def _named(schedule: Table, action: int) -> str:
    stage, kind, microbatch, _ = schedule.columns
    return f"{stage[action]}{KINDS[kind[action]]}{microbatch[action]}"


Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Durations:
    """Seconds of every piece of work; stages in rows of shape (batch, stages), hops of shape (batch, stages -
    1).

    Overlap is folded in already: these are the times that the actions take, and what is left of gathering and
    reduction beside them. The step they describe, read by both evaluators alike:

    - each rank runs its actions in table order on its compute stream;
    - F of stage s waits for F of stage s - 1 and `hop_forward_s[s - 1]` after it; B (or I) waits for the B
      (or I) of stage s + 1 and `hop_backward_s[s]` after it; W waits for its own I. A hop keeps neither rank
      busy;
    - gathers run from time 0 on the rank's communication stream, one after another in the order in which the
      rank's stages first run; a stage's first F waits for its gather;
    - reductions run on the same stream: a stage's starts when its last B or W has finished and the rank's
      earlier ones (in the order of those last actions) are done;
    - the step ends when everything has.
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
            # Comparisons with NaN fail; `initial` stands for columns without values.
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
        """Durations from anything that broadcasts to the shapes above: a number, one value per stage, or a
        batch.
        """

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
        """The cases of all of these, which have as many stages, in their order."""
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
        """How many cases there are."""
        return int(self.forward_s.shape[0])

    @property
    def stages(self) -> int:
        """How many pipeline stages each case has."""
        return int(self.forward_s.shape[1])

    def rows(self, which: slice | NDArray[np.bool_] | NDArray[np.int64]) -> Durations:
        """The cases of the batch that `which` selects."""
        return Durations(**{field.name: getattr(self, field.name)[which] for field in fields(self)})


@dataclass(frozen=True, slots=True)
class Level:
    """Rows `start` to `stop` of the finish times, and what they are made from.

    `before` holds, for the level's w actions, w rows of the actions before them on their ranks and then w
    rows of what they depend on; `parts` holds w rows of hops and then w rows of durations in `Cases.parts`.
    `gathered` are pairs of a place in the level and the stage whose gather the action there waits for.
    """

    start: int
    stop: int
    before: Ints
    parts: Ints
    gathered: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LevelRows:
    """Row 0 of the finish times is time zero; action i of `Schedule.columns` has row `row_of[i]`.

    `action_of_row` is the way back (-1 for row 0). Level l has rows `level_starts[l]` to `level_starts[l +
    1]`. `previous` and `source` are, by row, the rows of the action before it on its rank and of the action
    it waits for over a hop (0 if none). `widest` is the length of the longest level.
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
    """Sort actions of the given levels; `offsets` are those of `Schedule.columns`, the rest is by action."""
    actions = len(level)
    order = np.argsort(level, kind="stable")
    row_of = np.empty(actions + 1, np.int64)
    row_of[order] = np.arange(1, actions + 1)
    row_of[-1] = 0  # what waits for nothing waits for row 0
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
    """Per level its rows of `left` and then its rows of `right`, level after level."""
    begins = starts[:-1] - 1
    widths = np.diff(starts)
    place = np.arange(len(left)) + np.repeat(begins, widths)
    paired = np.empty(2 * len(left), np.int64)
    paired[place] = left
    paired[place + np.repeat(widths, widths)] = right
    return paired


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


_KINDS = ("forward_s", "backward_s", "backward_input_s", "backward_weight_s")
_BACKWARDS = [KINDS.index(ActionKind.BACKWARD), KINDS.index(ActionKind.BACKWARD_INPUT)]


def rerouted_s(table: Rerouted, durations: Durations, across_s: float) -> float:
    """Seconds until all ranks have done their actions and reduced their gradients; semantics as of
    `Durations`, whose case d has the times of pipeline d. A microbatch that changes the pipeline takes
    `across_s` for its hop where its own takes less.

    Raises ConfigError where an action is missing, twice there, on a wrong rank, or waits for itself.
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
    """Seconds from each source to the action that waits for it, of another stage."""
    stage, kind, pipeline = columns
    edge = np.minimum(stage[actions], stage[sources])
    ends = (pipeline[actions], pipeline[sources])
    forward = np.maximum(*(durations.hop_forward_s[end, edge] for end in ends))
    backward = np.maximum(*(durations.hop_backward_s[end, edge] for end in ends))
    own = np.where(np.isin(kind[actions], _BACKWARDS), backward, forward)
    found: NDArray[np.float64] = np.where(ends[0] == ends[1], own, np.maximum(own, across_s))
    return found
