"""The labels of all tables of a factor graph in one compiled pass: the same as `elimination.eliminated`
without numba."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from shardwise.search.pareto.joins_numba import (
    NONE,
    TOO_MANY,
    DominanceArrays,
    PreparedSide,
    PruningArrays,
    numba_compiled,
    number_of_pairs,
    side_of,
)
from shardwise.search.pareto.labels_numba import joined_sides
from shardwise.search.pareto.weighted_sums_numba import EliminationProgram

Indices = npt.NDArray[np.intp]
Values = npt.NDArray[np.float64]

_FEW = 4096
"""Initial capacity for labels."""

_NOTHING = -1
"""The table of a single label without cost, on no variable."""


class FactorGraphArrays(NamedTuple):
    """A factor graph as arrays: its `program`, the number of choices of each variable, and the `costs` of all
    factors (6, cells); the last row is infinite where a cost is. Of each table: the `first` one equal to it,
    its number of factors, and its part of the peak's weight."""

    program: EliminationProgram
    sizes: Indices
    costs: Values
    first: Indices
    factors: Indices
    shares: Values


class OutsideSums(NamedTuple):
    """Pruning of labels: the sum under `weights` (multipliers, columns) plus the least outside the table must
    be below `limit` under each multiplier. Cell c of table t has column places[t] + c of `outside`
    (multipliers, cells)."""

    weights: Values
    limit: float
    places: Indices
    outside: Values


class ToleranceArrays(NamedTuple):
    """Tolerance of the whole factor graph: `base` and `rate` (columns), and the potentials (1, cells) of all
    tables, in the `places` of `OutsideSums`.

    Steps with `tolerance_from_pairs` pairs or more spend it; `most_pairs` and `most_labels` are their limits.
    Without a tolerance no step has so many pairs.
    """

    base: Values
    rate: Values
    potentials: Values
    tolerance_from_pairs: int
    most_pairs: int
    most_labels: int


class JoinLimits(NamedTuple):
    """Limits of a join without tolerance: pairs of labels, labels that it leaves, and labels per cell if that
    allows more."""

    pairs: int
    labels: int
    per_cell: int


class EliminatedTables(NamedTuple):
    """Tables one after the other: the factors, those of the steps, then those of joins within steps.

    Labels start[t] to stop[t] are of table t. They were made of the tables `tables` (2, tables), -1 where
    there is none, from the rows `rows` (2, labels). `is_done` is False if a limit was exceeded.
    """

    points: Values
    cells: Indices
    rows: Indices
    start: Indices
    stop: Indices
    tables: Indices
    is_done: bool


class _LabelBuffer(NamedTuple):
    """Buffer for the labels of all tables."""

    points: Values
    cells: Indices
    rows: Indices


class _Tables(NamedTuple):
    """Tables during elimination. Labels start[t] to stop[t] are of table t, made of the tables `origins` (2,
    tables). It is on the first widths[t] variables of `on` (tables, variables), has `factors[t]` factors and
    the part `shares[t]` of the peak's weight."""

    start: Indices
    stop: Indices
    origins: Indices
    on: Indices
    widths: Indices
    factors: Indices
    shares: Values


@numba_compiled
def eliminated_labels(
    given: FactorGraphArrays, outside_sums: OutsideSums, tolerance: ToleranceArrays, join_limits: JoinLimits
) -> EliminatedTables:
    """The labels of all tables of a factor graph that pass the pruning, up to the tolerance."""
    program = given.program
    tables = _tables(given)
    buffer = _LabelBuffer(np.empty((_FEW, 5)), np.empty(_FEW, np.intp), np.empty((2, _FEW), np.intp))
    used = NONE
    for table in range(program.factors):
        tables.start[table] = used
        buffer, used = _given_labels(
            given.costs, outside_sums.places[table], outside_sums.places[table + 1], buffer, used
        )
        tables.stop[table] = used
    spent, fresh = np.zeros(len(given.first)), len(given.first)
    for step in range(len(program.taken)):
        made = program.factors + step
        first = given.first[made]
        if first != made:
            tables.start[made], tables.stop[made] = tables.start[first], tables.stop[first]
            continue
        waiting = program.inputs[program.of_step[step] : program.of_step[step + 1]].copy()
        for table in waiting:
            spent[made] = max(spent[made], spent[given.first[table]])
        is_made = False
        while not is_made:  # small tables are joined first
            _smallest_first(waiting, tables)
            is_made, table, choices = len(waiting) <= 2, fresh, NONE + 1
            pairs, labels = join_limits.pairs, join_limits.labels
            if is_made:
                table = made
                if program.taken[step] >= 0:
                    choices = given.sizes[program.taken[step]]
            else:
                _set_variables(tables, table, waiting[0], waiting[1])
            for which in range(min(len(waiting), 2)):
                tables.origins[which, table] = waiting[which]
            a, b = _sides(given, outside_sums, tables, buffer, table)
            cells = len(a[0].base)
            dominance = DominanceArrays(np.zeros(5), 0.0, np.zeros(5), np.zeros(cells))
            pruning = _pruning(given, outside_sums, made, is_made, cells)
            if is_made and _has_many_pairs(a, b, choices, pruning, tolerance.tolerance_from_pairs):
                share = tables.factors[made] / program.factors
                part = max(math.sqrt(share) - spent[made], 0.0)
                spent[made] += part
                dominance = _dominance_arrays(
                    given, outside_sums, tolerance, made, part, share, pruning.weights[0]
                )
                pairs, labels = tolerance.most_pairs, tolerance.most_labels
            labels = max(labels, join_limits.per_cell * cells)
            count, rows, points = joined_sides(a, b, choices, pruning, dominance, pairs, labels)
            buffer, used = _append(count, rows, points, tables, table, buffer, used)
            if used < 0:
                return _made(tables, buffer, used)
            if not is_made:
                waiting[1] = fresh
                waiting = waiting[1:]
                fresh += 1
    return _made(tables, buffer, used)


@numba_compiled
def _made(tables: _Tables, buffer: _LabelBuffer, used: int) -> EliminatedTables:
    size = max(used, 0)
    return EliminatedTables(
        buffer.points[:size], buffer.cells[:size], buffer.rows[:, :size], tables.start, tables.stop,
        tables.origins,
        used >= 0,
    )  # fmt: skip


@numba_compiled
def _tables(given: FactorGraphArrays) -> _Tables:
    """All tables, intermediate ones included, before they have labels."""
    program, count = given.program, len(given.first)
    every = count
    for step in range(len(program.taken)):
        every += max(program.of_step[step + 1] - program.of_step[step] - 2, 0)
    found = _Tables(
        np.zeros(every, np.intp), np.zeros(every, np.intp), np.full((2, every), _NOTHING, np.intp),
        np.zeros((every, len(given.sizes)), np.intp), np.zeros(every, np.intp), np.zeros(every, np.intp),
        np.zeros(every),
    )  # fmt: skip
    for table in range(count):
        for at in range(program.of_table[table], program.of_table[table + 1]):
            found.on[table, found.widths[table]] = program.variables[at]
            found.widths[table] += 1
        found.factors[table], found.shares[table] = given.factors[table], given.shares[table]
    return found


@numba_compiled
def _given_labels(
    costs: Values, first: int, stop: int, buffer: _LabelBuffer, used: int
) -> tuple[_LabelBuffer, int]:
    """Append a label for each finite cost of a factor."""
    buffer = _larger_buffer(buffer, used, stop - first)
    for cell in range(first, stop):
        if costs[5, cell] == 0.0:
            for k in range(5):
                buffer.points[used, k] = costs[k, cell]
            buffer.cells[used], buffer.rows[0, used], buffer.rows[1, used] = cell - first, 0, 0
            used += 1
    return buffer, used


@numba_compiled
def _append(
    count: int, rows: Indices, points: Values, tables: _Tables, table: int, buffer: _LabelBuffer, used: int
) -> tuple[_LabelBuffer, int]:
    """Append `count` labels of a table; the number used is TOO_MANY if the count is."""
    if count < 0:
        return buffer, TOO_MANY
    buffer = _larger_buffer(buffer, used, count)
    tables.start[table] = used
    for row in range(count):
        for k in range(5):
            buffer.points[used, k] = points[row, k]
        buffer.cells[used], buffer.rows[0, used], buffer.rows[1, used] = (
            rows[2, row],
            rows[0, row],
            rows[1, row],
        )
        used += 1
    tables.stop[table] = used
    return buffer, used


@numba_compiled
def _larger_buffer(buffer: _LabelBuffer, used: int, more: int) -> _LabelBuffer:
    """A buffer with capacity for `more` labels."""
    size = len(buffer.cells)
    if used + more <= size:
        return buffer
    size = max(2 * size, used + more)
    found = _LabelBuffer(np.empty((size, 5)), np.empty(size, np.intp), np.empty((2, size), np.intp))
    for row in range(used):
        for k in range(5):
            found.points[row, k] = buffer.points[row, k]
        found.cells[row] = buffer.cells[row]
        found.rows[0, row], found.rows[1, row] = buffer.rows[0, row], buffer.rows[1, row]
    return found


@numba_compiled
def _smallest_first(waiting: Indices, tables: _Tables) -> None:
    """Sort tables by their number of labels; equal ones by their variables."""
    for place in range(1, len(waiting)):
        for at in range(place, 0, -1):
            one, other = waiting[at - 1], waiting[at]
            more = tables.stop[one] - tables.start[one] - (tables.stop[other] - tables.start[other])
            if more > 0 or (more == 0 and _is_after(tables, one, other)):
                waiting[at - 1], waiting[at] = other, one


@numba_compiled
def _is_after(tables: _Tables, one: int, other: int) -> bool:
    """Whether the variables of a table come after those of another in lexicographic order."""
    for place in range(min(tables.widths[one], tables.widths[other])):
        if tables.on[one, place] != tables.on[other, place]:
            return bool(tables.on[one, place] > tables.on[other, place])
    return bool(tables.widths[one] > tables.widths[other])


@numba_compiled
def _set_variables(tables: _Tables, table: int, one: int, other: int) -> None:
    """Set the variables of a table made of two others: all of theirs, ascending."""
    on, count = tables.on[table], 0
    for own in (one, other):
        for place in range(tables.widths[own]):
            variable, at = tables.on[own, place], count
            is_there = False
            for before in range(count):
                is_there |= on[before] == variable
            if is_there:
                continue
            while at > 0 and on[at - 1] > variable:
                on[at] = on[at - 1]
                at -= 1
            on[at] = variable
            count += 1
    tables.widths[table] = count
    tables.factors[table] = tables.factors[one] + tables.factors[other]
    tables.shares[table] = tables.shares[one] + tables.shares[other]


@numba_compiled
def _sides(
    given: FactorGraphArrays, outside_sums: OutsideSums, tables: _Tables, buffer: _LabelBuffer, made: int
) -> tuple[PreparedSide, PreparedSide]:
    """Both input tables of a table, prepared for the loops."""
    return _side(given, outside_sums, tables, buffer, made, NONE), _side(
        given, outside_sums, tables, buffer, made, NONE + 1
    )


@numba_compiled
def _side(
    given: FactorGraphArrays,
    outside_sums: OutsideSums,
    tables: _Tables,
    buffer: _LabelBuffer,
    made: int,
    which: int,
) -> PreparedSide:
    """One input table, prepared for the loops."""
    left = np.empty(tables.widths[made], np.intp)
    for axis in range(len(left)):
        left[axis] = given.sizes[tables.on[made, axis]]
    table = tables.origins[which, made]
    points, cells, weights = np.zeros((1, 5)), np.zeros(1, np.intp), outside_sums.weights[0].copy()
    width = NONE
    if table >= 0:
        start, stop = tables.start[table], tables.stop[table]
        points, cells, width = buffer.points[start:stop], buffer.cells[start:stop], tables.widths[table]
        weights[4] *= tables.shares[table]
    sizes, axes = np.empty(width, np.intp), np.empty(width, np.intp)
    for place in range(width):
        variable = tables.on[table, place]
        sizes[place], axes[place] = given.sizes[variable], -1
        for axis in range(len(left)):
            if tables.on[made, axis] == variable:
                axes[place] = axis
    return side_of(points, cells, weights, sizes, axes, left)


@numba_compiled
def _pruning(
    given: FactorGraphArrays, outside_sums: OutsideSums, made: int, is_made: bool, cells: int
) -> PruningArrays:
    """Pruning of a table: labels needed in any table equal to it. Intermediate tables are not pruned."""
    if not is_made:
        return PruningArrays(np.zeros((0, 5)), np.zeros((cells, 0)), np.inf, np.full(cells, -np.inf))
    multipliers = len(outside_sums.weights)
    weights, outside = outside_sums.weights.copy(), np.full((cells, multipliers), np.inf)
    for multiplier in range(multipliers):
        weights[multiplier, 4] *= given.shares[made]
    for table in range(made, len(given.first)):
        if given.first[table] == made:
            for cell in range(cells):
                for multiplier in range(multipliers):
                    own = outside_sums.outside[multiplier, outside_sums.places[table] + cell]
                    outside[cell, multiplier] = min(outside[cell, multiplier], own)
    return PruningArrays(weights, outside, outside_sums.limit, np.full(cells, -np.inf))


@numba_compiled
def _has_many_pairs(
    one: PreparedSide, other: PreparedSide, choices: int, pruning: PruningArrays, tolerance_from_pairs: int
) -> bool:
    """Whether a step spends tolerance."""
    a, b = one[0], other[0]
    if len(a.points) * len(b.points) < tolerance_from_pairs:
        return False
    return bool(number_of_pairs(a, b, choices, pruning, tolerance_from_pairs) >= tolerance_from_pairs)


@numba_compiled
def _dominance_arrays(
    given: FactorGraphArrays,
    outside_sums: OutsideSums,
    tolerance: ToleranceArrays,
    made: int,
    part: float,
    share: float,
    weights: Values,
) -> DominanceArrays:
    """Epsilon-dominance of a step's table: `part` of the tolerance, for its share of the factors and by
    excess."""
    cells = outside_sums.places[made + 1] - outside_sums.places[made]
    potential = np.full(cells, np.inf)
    for table in range(made, len(given.first)):
        if given.first[table] == made:
            for cell in range(cells):
                potential[cell] = min(
                    potential[cell], tolerance.potentials[0, outside_sums.places[table] + cell]
                )
    for cell in range(cells):
        if potential[cell] == np.inf:
            potential[cell] = 0.0  # no label is feasible there
    steps, growth = np.empty(5), np.inf
    for k in range(5):
        steps[k] = part * share * tolerance.base[k]
        if part * tolerance.rate[k] > 0.0:
            growth = min(growth, part * tolerance.rate[k] / steps[k])
    return DominanceArrays(steps, growth if growth < np.inf else 0.0, weights, potential)
