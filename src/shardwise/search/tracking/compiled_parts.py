"""The labels of all tables of a part as machine code: what `eliminate` does step by step where numba is not
installed."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from shardwise.search.tracking.compiled import (
    NONE,
    TOO_MANY,
    Loss,
    Reach,
    Sided,
    machine_code,
    number_of_pairs,
    side_of,
)
from shardwise.search.tracking.compiled_labels import joined_sides
from shardwise.search.tracking.compiled_sums import Program

Indices = npt.NDArray[np.intp]
Values = npt.NDArray[np.float64]

_FEW = 4096
"""Labels that there is room for at first."""

_NOTHING = -1
"""The table of one label that costs nothing, on no variable."""


class Given(NamedTuple):
    """A part: its `program`, choices of each variable, `costs` of all factors (6, cells), the last infinite
    where they are, and of each table the `first` that is like it, how many factors are in it, and which part
    of the peak's weight is weighed there."""

    program: Program
    sizes: Indices
    costs: Values
    first: Indices
    factors: Indices
    shares: Values


class Wanted(NamedTuple):
    """Which labels may matter: under `weights` (forms, columns) with what is least outside of their table,
    column places[t] + c of `outside` (forms, cells) for cell c of table t, below `limit` in each form."""

    weights: Values
    limit: float
    places: Indices
    outside: Values


class Losing(NamedTuple):
    """What may be lost in all, by number and by excess (columns), and the potentials (1, cells) of all tables
    in the `places` of `Wanted`. Steps lose from so `many` pairs on, of which so many at most may be looked
    at; with nothing to lose, none is `many`."""

    base: Values
    rate: Values
    potentials: Values
    many: int
    most_pairs: int
    most_labels: int


class Most(NamedTuple):
    """Pairs of labels that a join may look at, and labels that it may leave, or for each cell if that is
    more."""

    pairs: int
    labels: int
    per_cell: int


class Made(NamedTuple):
    """Tables one after the other, those that the steps make behind the factors, and behind these what they
    join on the way: labels start[t] to stop[t] are of table t, made of those of `tables` (2, tables), -1
    where of none, and `rows` (2, labels) in these. `is_done` unless labels or pairs were too many."""

    points: Values
    cells: Indices
    rows: Indices
    start: Indices
    stop: Indices
    tables: Indices
    is_done: bool


class _Room(NamedTuple):
    """Room for labels of all tables."""

    points: Values
    cells: Indices
    rows: Indices


class _Tables(NamedTuple):
    """Labels start[t] to stop[t] are of table t, made of those of `origins` (2, tables); it is on the first
    widths[t] variables of `on` (tables, variables), has so many `factors`, and there the peak has so much of
    its weight (`shares`)."""

    start: Indices
    stop: Indices
    origins: Indices
    on: Indices
    widths: Indices
    factors: Indices
    shares: Values


@machine_code
def eliminated_labels(given: Given, wanted: Wanted, losing: Losing, most: Most) -> Made:
    """The labels of all tables of a part that may matter, up to what may be lost."""
    program = given.program
    tables = _tables(given)
    room = _Room(np.empty((_FEW, 5)), np.empty(_FEW, np.intp), np.empty((2, _FEW), np.intp))
    used = NONE
    for table in range(program.factors):
        tables.start[table] = used
        room, used = _given_labels(given.costs, wanted.places[table], wanted.places[table + 1], room, used)
        tables.stop[table] = used
    lost, fresh = np.zeros(len(given.first)), len(given.first)
    for step in range(len(program.taken)):
        made = program.factors + step
        first = given.first[made]
        if first != made:
            tables.start[made], tables.stop[made] = tables.start[first], tables.stop[first]
            continue
        waiting = program.inputs[program.of_step[step] : program.of_step[step + 1]].copy()
        for table in waiting:
            lost[made] = max(lost[made], lost[given.first[table]])
        is_made = False
        while not is_made:  # small tables are joined first
            _smallest_first(waiting, tables)
            is_made, table, choices = len(waiting) <= 2, fresh, NONE + 1
            pairs, labels = most.pairs, most.labels
            if is_made:
                table = made
                if program.taken[step] >= 0:
                    choices = given.sizes[program.taken[step]]
            else:
                _put_on(tables, table, waiting[0], waiting[1])
            for which in range(min(len(waiting), 2)):
                tables.origins[which, table] = waiting[which]
            a, b = _sides(given, wanted, tables, room, table)
            cells = len(a[0].base)
            loss = Loss(np.zeros(5), 0.0, np.zeros(5), np.zeros(cells))
            reach = _within(given, wanted, made, is_made, cells)
            if is_made and _are_many(a, b, choices, reach, losing.many):
                share = tables.factors[made] / program.factors
                part = max(math.sqrt(share) - lost[made], 0.0)
                lost[made] += part
                loss = _loss(given, wanted, losing, made, part, share, reach.weights[0])
                pairs, labels = losing.most_pairs, losing.most_labels
            labels = max(labels, most.per_cell * cells)
            count, rows, points = joined_sides(a, b, choices, reach, loss, pairs, labels)
            room, used = _taken_in(count, rows, points, tables, table, room, used)
            if used < 0:
                return _made(tables, room, used)
            if not is_made:
                waiting[1] = fresh
                waiting = waiting[1:]
                fresh += 1
    return _made(tables, room, used)


@machine_code
def _made(tables: _Tables, room: _Room, used: int) -> Made:
    size = max(used, 0)
    return Made(
        room.points[:size], room.cells[:size], room.rows[:, :size], tables.start, tables.stop, tables.origins,
        used >= 0,
    )  # fmt: skip


@machine_code
def _tables(given: Given) -> _Tables:
    """All tables, those between included, before they have labels."""
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


@machine_code
def _given_labels(costs: Values, first: int, stop: int, room: _Room, used: int) -> tuple[_Room, int]:
    """A label for each finite cost of a factor."""
    room = _with_room(room, used, stop - first)
    for cell in range(first, stop):
        if costs[5, cell] == 0.0:
            for k in range(5):
                room.points[used, k] = costs[k, cell]
            room.cells[used], room.rows[0, used], room.rows[1, used] = cell - first, 0, 0
            used += 1
    return room, used


@machine_code
def _taken_in(
    count: int, rows: Indices, points: Values, tables: _Tables, table: int, room: _Room, used: int
) -> tuple[_Room, int]:
    """So many labels of a table behind those that there are; TOO_MANY are used where they are that."""
    if count < 0:
        return room, TOO_MANY
    room = _with_room(room, used, count)
    tables.start[table] = used
    for row in range(count):
        for k in range(5):
            room.points[used, k] = points[row, k]
        room.cells[used], room.rows[0, used], room.rows[1, used] = rows[2, row], rows[0, row], rows[1, row]
        used += 1
    tables.stop[table] = used
    return room, used


@machine_code
def _with_room(room: _Room, used: int, more: int) -> _Room:
    """Room for more labels than are used."""
    size = len(room.cells)
    if used + more <= size:
        return room
    size = max(2 * size, used + more)
    found = _Room(np.empty((size, 5)), np.empty(size, np.intp), np.empty((2, size), np.intp))
    for row in range(used):
        for k in range(5):
            found.points[row, k] = room.points[row, k]
        found.cells[row] = room.cells[row]
        found.rows[0, row], found.rows[1, row] = room.rows[0, row], room.rows[1, row]
    return found


@machine_code
def _smallest_first(waiting: Indices, tables: _Tables) -> None:
    """Order tables by how many labels they have; of equal ones by their variables."""
    for place in range(1, len(waiting)):
        for at in range(place, 0, -1):
            one, other = waiting[at - 1], waiting[at]
            more = tables.stop[one] - tables.start[one] - (tables.stop[other] - tables.start[other])
            if more > 0 or (more == 0 and _is_after(tables, one, other)):
                waiting[at - 1], waiting[at] = other, one


@machine_code
def _is_after(tables: _Tables, one: int, other: int) -> bool:
    """Whether the variables of a table come after those of another, number by number."""
    for place in range(min(tables.widths[one], tables.widths[other])):
        if tables.on[one, place] != tables.on[other, place]:
            return bool(tables.on[one, place] > tables.on[other, place])
    return bool(tables.widths[one] > tables.widths[other])


@machine_code
def _put_on(tables: _Tables, table: int, one: int, other: int) -> None:
    """A table of two others is on all of their variables, ascending."""
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


@machine_code
def _sides(given: Given, wanted: Wanted, tables: _Tables, room: _Room, made: int) -> tuple[Sided, Sided]:
    """The tables that another is made of, as loops take them."""
    return _side(given, wanted, tables, room, made, NONE), _side(given, wanted, tables, room, made, NONE + 1)


@machine_code
def _side(given: Given, wanted: Wanted, tables: _Tables, room: _Room, made: int, which: int) -> Sided:
    """One of them."""
    left = np.empty(tables.widths[made], np.intp)
    for axis in range(len(left)):
        left[axis] = given.sizes[tables.on[made, axis]]
    table = tables.origins[which, made]
    points, cells, weights = np.zeros((1, 5)), np.zeros(1, np.intp), wanted.weights[0].copy()
    width = NONE
    if table >= 0:
        start, stop = tables.start[table], tables.stop[table]
        points, cells, width = room.points[start:stop], room.cells[start:stop], tables.widths[table]
        weights[4] *= tables.shares[table]
    sizes, axes = np.empty(width, np.intp), np.empty(width, np.intp)
    for place in range(width):
        variable = tables.on[table, place]
        sizes[place], axes[place] = given.sizes[variable], -1
        for axis in range(len(left)):
            if tables.on[made, axis] == variable:
                axes[place] = axis
    return side_of(points, cells, weights, sizes, axes, left)


@machine_code
def _within(given: Given, wanted: Wanted, made: int, is_made: bool, cells: int) -> Reach:
    """What matters of a table: what does of any that is like it; all of what is joined on the way to it."""
    if not is_made:
        return Reach(np.zeros((0, 5)), np.zeros((cells, 0)), np.inf, np.full(cells, -np.inf))
    forms = len(wanted.weights)
    weights, outside = wanted.weights.copy(), np.full((cells, forms), np.inf)
    for form in range(forms):
        weights[form, 4] *= given.shares[made]
    for table in range(made, len(given.first)):
        if given.first[table] == made:
            for cell in range(cells):
                for form in range(forms):
                    own = wanted.outside[form, wanted.places[table] + cell]
                    outside[cell, form] = min(outside[cell, form], own)
    return Reach(weights, outside, wanted.limit, np.full(cells, -np.inf))


@machine_code
def _are_many(one: Sided, other: Sided, choices: int, reach: Reach, many: int) -> bool:
    """Whether a step loses something."""
    a, b = one[0], other[0]
    if len(a.points) * len(b.points) < many:
        return False
    return bool(number_of_pairs(a, b, choices, reach, many) >= many)


@machine_code
def _loss(
    given: Given, wanted: Wanted, losing: Losing, made: int, part: float, share: float, weights: Values
) -> Loss:
    """What a table loses: so much of all by number, for its share of the factors, and by excess."""
    cells = wanted.places[made + 1] - wanted.places[made]
    potential = np.full(cells, np.inf)
    for table in range(made, len(given.first)):
        if given.first[table] == made:
            for cell in range(cells):
                potential[cell] = min(potential[cell], losing.potentials[0, wanted.places[table] + cell])
    for cell in range(cells):
        if potential[cell] == np.inf:
            potential[cell] = 0.0  # no label matters there
    steps, growth = np.empty(5), np.inf
    for k in range(5):
        steps[k] = part * share * losing.base[k]
        if part * losing.rate[k] > 0.0:
            growth = min(growth, part * losing.rate[k] / steps[k])
    return Loss(steps, growth if growth < np.inf else 0.0, weights, potential)
