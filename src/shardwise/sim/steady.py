"""Makespans of long steps by the periodicity of their steady state (`makespan_s`, `SteadySchedule`).

The method relies on two periodicities, of the table and of the finish times; each is verified before use. The
table repeats: with `group` more micro-batches (1, or
pp for interleaved schedules), each rank's row has one more block of actions. Rank r's row is a prefix, a
block and a suffix. The longer row is the same prefix, the block twice, the second with its micro-batches
shifted by `group`, and the suffix shifted by `group`. The overlap of the common prefix and the common shifted
suffix of two rows shows this. That it continues for more micro-batches follows from how the generator counts;
property tests compare with whole tables. GPipe repeats twice: in its forwards and in its backwards.

A loop is a range of topological levels with one block of actions on every rank. Only the finish times of its
loop-carried actions enter it, and only those of the updated actions (shifted by `group`) leave it. So one
iteration maps the state x (carried times) to x' (updated times) by a map A, the same for each iteration.

The times repeat: A consists of maxima and sums with constants, so A(x + c) = A(x) + c for any number c. If
x(k) = x(k - p) + c in every component, then x(k + i) = x(k + i - p) + c for all i >= 0, and the last state is
one of the p states before k plus a multiple of c. Max-plus linear maps reach such a period after finitely
many iterations (Baccelli, Cohen, Olsder and Quadrat 1992, chapter 3); few suffice where one stage is slower
than the others. A case without a period is evaluated to its end. A does not expand distances, so the rounding
in x(k) = x(k - p) + c, at most 1e-14 of x, enters at most once per period.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from shardwise.schedule import Schedule, generate
from shardwise.sim.maxplus import (
    Bools,
    CompiledSchedule,
    Durations,
    FinishTimes,
    Floats,
    Ints,
    chunks,
    compile_schedule,
)

# Allowed spread of the components of x(k) - x(k - p), relative to x(k): a few dozen roundings.
_TOLERANCE = 1e-14
# A table with this many times pp micro-batches has a steady state in all schedules.
_BASE = 3
# Least number of levels between two checks for a period: a check costs as much as some dozens of levels.
_LEVELS_BETWEEN_CHECKS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Loop:
    """Levels `first` to before `stop` of a compiled table, which repeat (module docstring).

    `carried` and `updated` are rows of the finish times, in corresponding order.
    """

    first: int
    stop: int
    carried: Ints
    updated: Ints


@dataclass(frozen=True, slots=True, kw_only=True)
class SteadySchedule:
    """A schedule of `microbatches` micro-batches that represents those of `microbatches + n * group`."""

    compiled: CompiledSchedule
    loops: tuple[Loop, ...]
    microbatches: int
    group: int
    longest_period: int

    def makespan_s(self, microbatches: Ints, durations: Durations) -> Floats:
        """Step time in seconds for each case's `microbatches`, which exceed `self.microbatches` by multiples
        of `group`."""
        self.compiled.check(durations)
        iterations = 1 + (microbatches - self.microbatches) // self.group
        result = np.empty(durations.batch)
        for chunk in chunks(durations.batch, self.compiled.actions):
            cases = FinishTimes(self.compiled, durations.rows(chunk))
            levels = self.compiled.rows.levels
            done = 0
            for loop in self.loops:
                cases.run(levels[done : loop.first])
                cases.finish[loop.updated] = self._state_after(cases, loop, iterations[chunk])
                done = loop.stop
            cases.run(levels[done:])
            result[chunk] = cases.makespan_s()
        return result

    def _state_after(self, cases: FinishTimes, loop: Loop, iterations: Ints) -> Floats:
        """The times of the updated actions after each case's number of iterations of `loop`; shape (carried,
        batch)."""
        levels = self.compiled.rows.levels[loop.first : loop.stop]
        iterations_between_checks = -(-_LEVELS_BETWEEN_CHECKS // len(levels))
        state = cases.finish[loop.carried]
        result = np.empty_like(state)
        left = np.arange(state.shape[1])
        history = [state]
        iteration = 0
        while len(left):
            cases.run(levels)
            state = cases.finish[loop.updated]
            history.append(state)
            iteration += 1
            ended = iterations[left] == iteration
            result[:, left[ended]] = state[:, ended]
            if iteration % iterations_between_checks == 0:
                history = history[-self.longest_period - 1 :]
                periods = np.where(ended, 0, _periods(history))
                periodic = np.flatnonzero(periods)
                if len(periodic):
                    more = iterations[left[periodic]] - iteration
                    result[:, left[periodic]] = _extrapolated(history, periods, periodic, more)
                ended |= periods > 0
            if ended.any():
                cases, left = cases.select(~ended), left[~ended]
                history = [past[:, ~ended] for past in history]
                state = history[-1]
            cases.finish[loop.carried] = state
        return result


def makespan_s(name: str, *, pp: int, microbatches: Ints | int, vpp: int, durations: Durations) -> Floats:
    """Step time in seconds of schedule `name` for every case of `durations`; shape (batch,).

    Each case may have its own number of micro-batches. The result equals
    `compile_schedule(generate(...)).makespan_s(durations)` except for rounding (relative 1e-11); the run time
    hardly depends on `microbatches`. ConfigError where the combination is illegal.
    """
    each = np.broadcast_to(np.asarray(microbatches, dtype=np.int64), (durations.batch,))
    result, is_left = np.empty(durations.batch), np.ones(durations.batch, dtype=bool)
    if _uses_steady(name, pp, each).any():
        steady = steady_schedule(name, pp, vpp)
        if steady is not None:
            is_left = ~_uses_steady(name, pp, each)
            result[~is_left] = steady.makespan_s(each[~is_left], durations.rows(~is_left))
    for m in np.unique(each[is_left]).tolist():
        cases = is_left & (each == m)
        compiled = compiled_schedule(name, pp, m, vpp)
        result[cases] = compiled.makespan_s(durations.rows(cases))
    return result


def _uses_steady(name: str, pp: int, microbatches: Ints) -> Bools:
    """The cases that the steady schedule represents, where it saves work."""
    group = _group(name, pp)
    more = microbatches - _BASE * pp
    return np.asarray((more >= 2 * group) & (more % group == 0))


@lru_cache(maxsize=128)
def compiled_schedule(name: str, pp: int, microbatches: int, vpp: int) -> CompiledSchedule:
    """The generated table, compiled and cached."""
    return compile_schedule(generate(name, pp=pp, microbatches=microbatches, vpp=vpp))


@lru_cache(maxsize=128)
def steady_schedule(name: str, pp: int, vpp: int) -> SteadySchedule | None:
    """Schedule `name` with its loops, or None where no steady state is proven to repeat."""
    group = _group(name, pp)
    base = _BASE * pp
    short = generate(name, pp=pp, microbatches=base, vpp=vpp)
    longer = generate(name, pp=pp, microbatches=base + group, vpp=vpp)
    compiled = compile_schedule(short)
    counts = _counts_below_level(compiled)
    loops = []
    for phase in _phases(short, longer, group):
        loop = _loop(compiled, counts, phase, group)
        if loop is None:
            return None
        loops.append(loop)
    # A critical circuit advances by the micro-batches between two visits of a rank: at most 2 pp are in
    # flight.
    longest = max(2, 2 * pp // group)
    return SteadySchedule(
        compiled=compiled, loops=tuple(loops), microbatches=base, group=group, longest_period=longest
    )


def _group(name: str, pp: int) -> int:
    return pp if name == "interleaved_1f1b" else 1


@dataclass(frozen=True, slots=True)
class _Phase:
    """Per rank, where another `block` actions can be inserted in a row of the short table: from `low` to
    `high`."""

    low: Ints
    high: Ints
    block: Ints


def _phases(short: Schedule, longer: Schedule, group: int) -> list[_Phase]:
    """The parts of the tables that grow: the whole rows, or forwards and backwards where these are
    separate."""
    parts = [[_split_rows(table, rank) for rank in range(table.pp)] for table in (short, longer)]
    if not all(is_separate for table in parts for _, is_separate in table):
        return [_phase([row for row, _ in parts[0]], [row for row, _ in parts[1]], None, group)]
    return [
        _phase([row for row, _ in parts[0]], [row for row, _ in parts[1]], side, group) for side in (0, 1)
    ]


@dataclass(frozen=True, slots=True)
class _Row:
    """One rank's row: the work of each action (a code of stage and kind), its micro-batch, and the number of
    leading forwards."""

    work: Ints
    microbatch: Ints
    forwards: int

    def part(self, side: int | None) -> tuple[Ints, Ints, int]:
        """Work and micro-batches of the whole row (None), its leading forwards (0), or the rest (1); and its
        start."""
        which = (slice(None), slice(0, self.forwards), slice(self.forwards, None))[
            0 if side is None else side + 1
        ]
        return self.work[which], self.microbatch[which], which.start or 0


def _split_rows(schedule: Schedule, rank: int) -> tuple[_Row, bool]:
    """The row of `rank`, and whether all its forwards come first."""
    stage, kind, microbatch, offsets = schedule.columns
    which = slice(int(offsets[rank]), int(offsets[rank + 1]))
    forward = kind[which] == 0
    forwards = int(forward.sum())
    row = _Row(stage[which] * 4 + kind[which], microbatch[which], forwards)
    return row, bool(forward[:forwards].all())


def _phase(short: list[_Row], longer: list[_Row], side: int | None, group: int) -> _Phase:
    """Compare the rows from their starts, and from their ends with micro-batches shifted by `group`."""
    low, high, block = [], [], []
    for row, long_row in zip(short, longer, strict=True):
        work, microbatch, begin = row.part(side)
        long_work, long_microbatch, _ = long_row.part(side)
        size = len(work)
        more = len(long_work) - size
        prefix_equal = (work == long_work[:size]) & (microbatch == long_microbatch[:size])
        suffix_equal = (work == long_work[more:]) & (microbatch + group == long_microbatch[more:])
        high.append(begin + (size if prefix_equal.all() else int(np.argmin(prefix_equal))))
        low.append(begin + (0 if suffix_equal.all() else size - int(np.argmin(suffix_equal[::-1]))))
        block.append(more)
    return _Phase(np.array(low), np.array(high), np.array(block))


def _counts_below_level(compiled: CompiledSchedule) -> Ints:
    """Number of actions of each rank below each level; shape (levels + 1, ranks)."""
    rank_of_stage = np.asarray(compiled.schedule.stage_rank)
    ranks = rank_of_stage[compiled.schedule.columns.stage[compiled.rows.action_of_row[1:]]]
    levels = len(compiled.rows.level_starts) - 1
    level = np.repeat(np.arange(levels), np.diff(compiled.rows.level_starts))
    counts = np.zeros((levels + 1, compiled.schedule.pp), np.int64)
    np.add.at(counts, (level + 1, ranks), 1)
    return np.cumsum(counts, axis=0)


def _loop(compiled: CompiledSchedule, counts: Ints, phase: _Phase, group: int) -> Loop | None:
    """The first range of levels with one block on every rank, within `phase`, whose state is loop-carried."""
    # The range has few levels if the ranks work in parallel; never fewer than the longest block.
    shortest = int(phase.block.max())
    for height in range(shortest, 2 * shortest + 2):
        below, above = counts[:-height], counts[height:]
        fits = (below >= phase.low) & (above <= phase.high) & (above - below == phase.block)
        for first in np.flatnonzero(fits.all(axis=1)).tolist():
            rows = _carried(compiled, first, first + height, group)
            if rows is not None:
                return Loop(first=first, stop=first + height, carried=rows[0], updated=rows[1])
    return None


def _carried(compiled: CompiledSchedule, first: int, stop: int, group: int) -> tuple[Ints, Ints] | None:
    """Rows of the carried and updated actions of levels `first` to `stop`; None if they do not correspond."""
    start, end = int(compiled.rows.level_starts[first]), int(compiled.rows.level_starts[stop])
    row_of = compiled.rows.row_of
    ends = row_of[np.concatenate((compiled.last_actions, compiled.last_backward))]
    if int(row_of[compiled.first_forward].max()) >= start or int(ends.min()) < end:
        return None  # gathers must be before the loop, reductions after it
    later = _shifted_rows(compiled, group)
    earlier = _shifted_rows(compiled, -group)
    into, out = _crossing(compiled, start), _crossing(compiled, end)
    carried = set(into.tolist())
    for row in earlier[out].tolist():
        if not 0 < row < start:
            return None
        carried.add(row)
    waiting = sorted(carried)
    while waiting:
        row = int(later[waiting.pop()])
        if not 0 < row < end:
            return None
        if row < start and row not in carried:
            carried.add(row)
            waiting.append(row)
    rows = np.array(sorted(carried), dtype=np.int64)
    return rows, later[rows]


def _crossing(compiled: CompiledSchedule, start: int) -> Ints:
    """Rows before `start` that rows from `start` on wait for."""
    crossing = np.concatenate((compiled.rows.previous[start:], compiled.rows.source[start:]))
    return np.unique(crossing[(crossing > 0) & (crossing < start)])


def _shifted_rows(compiled: CompiledSchedule, shift: int) -> Ints:
    """Per row the row of the same stage and kind, `shift` micro-batches later; 0 if there is none."""
    stage, kind, microbatch, _ = compiled.schedule.columns
    microbatches = compiled.schedule.microbatches
    place = np.zeros((compiled.stages, 4, microbatches + 2 * abs(shift)), np.int64)
    origin = abs(shift)
    place[stage, kind, microbatch + origin] = compiled.rows.row_of
    rows = np.zeros(compiled.actions + 1, np.int64)
    rows[compiled.rows.row_of] = place[stage, kind, microbatch + origin + shift]
    return rows


def _periods(history: list[Floats]) -> Ints:
    """Per case the smallest period of the last state up to a constant, in iterations; 0 if there is none
    yet."""
    last = history[-1]
    gained = last - np.stack(history[-2::-1])
    spread = gained.max(axis=1) - gained.min(axis=1)
    repeats = spread <= _TOLERANCE * last.max(axis=0)
    return np.where(repeats.any(axis=0), np.argmax(repeats, axis=0) + 1, 0)


def _extrapolated(history: list[Floats], periods: Ints, columns: Ints, iterations: Ints) -> Floats:
    """The state of `columns` after `iterations` more iterations each, by their periods; shape (carried,
    columns)."""
    past: Floats = np.stack(history)[:, :, columns]
    period = periods[columns]
    places = np.arange(len(columns))
    gain = (past[-1] - past[-1 - period, :, places].T).max(axis=0)
    rounds = -(-iterations // period)
    base: Floats = past[-1 + iterations - rounds * period, :, places].T
    return np.asarray(base + rounds * gain, dtype=np.float64)
