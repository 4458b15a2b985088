"""Least weighted sums of a part as machine code: what `scalars` does in numpy where numba is not installed.

A step adds up tables along the choices of all that it meets, and keeps the least. Its axes are those of the
table that it makes, with what it takes out before the last: along that one all numbers lie side by side, once
the inputs are packed in this order, so that the processor adds up several at a time.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from shardwise.search.tracking.compiled import machine_code

Indices = npt.NDArray[np.intp]
Values = npt.NDArray[np.float64]


class Program(NamedTuple):
    """Tables and steps of an order of elimination. The variables of table t are variables[of_table[t] :
    of_table[t + 1]]; the first `factors` tables are given, step s makes table factors + s of those of
    inputs[of_step[s] : of_step[s + 1]] and takes out variable taken[s], or none (-1)."""

    of_table: Indices
    variables: Indices
    factors: int
    of_step: Indices
    inputs: Indices
    taken: Indices


@machine_code
def weighted_costs(costs: Values, weights: Values, first: int, stop: int, sums: Values) -> None:
    """Fill the first columns of `sums` (weights, cells) with weighted costs (6, cells): five columns, of
    which the last counts from cell `first` to `stop` alone, and one that is added as it is."""
    cells = costs.shape[1]
    for j in range(len(weights)):
        a, b, c, d = weights[j, 0], weights[j, 1], weights[j, 2], weights[j, 3]
        row = sums[j]
        for k in range(cells):
            row[k] = a * costs[0, k] + b * costs[1, k] + c * costs[2, k] + d * costs[3, k] + costs[5, k]
        for k in range(first, stop):
            row[k] += weights[j, 4] * costs[4, k]


@machine_code
def table_sizes(program: Program, sizes: Indices) -> Indices:
    """How many cells each table has; `sizes` are the choices of each variable."""
    count = len(program.of_table) - 1
    found = np.ones(count, np.intp)
    for table in range(count):
        for at in range(program.of_table[table], program.of_table[table + 1]):
            found[table] *= sizes[program.variables[at]]
    return found


@machine_code
def _axes(program: Program, step: int) -> Indices:
    """The variables of a step: of what it makes all but the last, what it takes out, the last; at least one,
    -1 where nothing is chosen."""
    made = program.factors + step
    first, stop = program.of_table[made], program.of_table[made + 1]
    found = np.full(stop - first + 2, -1, np.intp)
    count = 0
    for at in range(first, stop - 1):
        found[count] = program.variables[at]
        count += 1
    if program.taken[step] >= 0:
        found[count] = program.taken[step]
        count += 1
    if stop > first:
        found[count] = program.variables[stop - 1]
    return found[: count + 1]


@machine_code
def _strides(program: Program, sizes: Indices, table: int, axes: Indices) -> Indices:
    """How far apart the cells of a table are along axes; 0 along those that it has not."""
    found = np.zeros(len(axes), np.intp)
    stride = 1
    for at in range(program.of_table[table + 1] - 1, program.of_table[table] - 1, -1):
        variable = program.variables[at]
        for axis in range(len(axes)):
            if axes[axis] == variable:
                found[axis] = stride
        stride *= sizes[variable]
    return found


@machine_code
def _packed_strides(shape: Indices, strides: Indices) -> Indices:
    """The same once the cells lie in the order of the axes."""
    found = np.zeros(len(shape), np.intp)
    stride = 1
    for axis in range(len(shape) - 1, -1, -1):
        if strides[axis] > 0:
            found[axis] = stride
            stride *= shape[axis]
    return found


@machine_code
def _places(shape: Indices, strides: Indices) -> Indices:
    """Where the cells of a table are, in the order of the axes."""
    index = np.zeros(len(shape), np.intp)
    cells = 1
    for axis in range(len(shape)):
        if strides[axis] > 0:
            cells *= shape[axis]
    found = np.empty(cells, np.intp)
    place = 0
    for cell in range(cells):
        found[cell] = place
        for axis in range(len(shape) - 1, -1, -1):
            if strides[axis] == 0:
                continue
            index[axis] += 1
            place += strides[axis]
            if index[axis] < shape[axis]:
                break
            place -= strides[axis] * shape[axis]
            index[axis] = 0
    return found


@machine_code
def _shape(sizes: Indices, axes: Indices) -> Indices:
    """How many choices there are along axes; one where nothing is chosen."""
    found = np.ones(len(axes), np.intp)
    for axis in range(len(axes)):
        if axes[axis] >= 0:
            found[axis] = sizes[axes[axis]]
    return found


@machine_code
def _packing(
    program: Program, sizes: Indices, tables: Indices, axes: Indices, shape: Indices
) -> tuple[Indices, Indices, Indices]:
    """How tables are packed one after the other: how far apart the cells of each are along the axes then,
    where each starts, and where its cells come from in the table."""
    strides = np.zeros((len(tables), len(axes)), np.intp)
    starts = np.zeros(len(tables) + 1, np.intp)
    cells = table_sizes(program, sizes)
    for row in range(len(tables)):
        starts[row + 1] = starts[row] + cells[tables[row]]
    where = np.empty(starts[-1], np.intp)
    for row in range(len(tables)):
        own = _strides(program, sizes, tables[row], axes)
        strides[row] = _packed_strides(shape, own)
        found = _places(shape, own)
        for cell in range(len(found)):
            where[starts[row] + cell] = found[cell]
    return strides, starts, where


@machine_code
def _add_up(
    shape: Indices, packed: Values, starts: Indices, strides: Indices, without: int, out: Values,
    out_strides: Indices,
) -> None:  # fmt: skip
    """Of the sums of all packed tables but one, for each cell of `out` the least."""
    last = len(shape) - 1
    width = shape[last]
    at = starts.copy()
    to = 0
    index = np.zeros(last, np.intp)
    outer = 1
    for axis in range(last):
        outer *= shape[axis]
    row = np.empty(width)
    for _ in range(outer):
        constant = 0.0
        one, two, more = -1, -1, False
        for table in range(len(at)):
            if table == without:
                continue
            if strides[table, last] == 0:
                constant += packed[at[table]]
            elif one < 0:
                one = at[table]
            elif two < 0:
                two = at[table]
            else:
                more = True
        if constant < np.inf:
            if more:
                for k in range(width):
                    row[k] = constant
                for table in range(len(at)):
                    if table != without and strides[table, last]:
                        own = packed[at[table] : at[table] + width]
                        for k in range(width):
                            row[k] += own[k]
            elif two >= 0:
                own, other = packed[one : one + width], packed[two : two + width]
                for k in range(width):
                    row[k] = constant + own[k] + other[k]
            elif one >= 0:
                own = packed[one : one + width]
                for k in range(width):
                    row[k] = constant + own[k]
            else:
                for k in range(width):
                    row[k] = constant
            if out_strides[last]:
                target = out[to : to + width]
                for k in range(width):
                    target[k] = min(target[k], row[k])
            else:
                least = out[to]
                for k in range(width):
                    least = min(least, row[k])
                out[to] = least
        for axis in range(last - 1, -1, -1):
            index[axis] += 1
            to += out_strides[axis]
            for table in range(len(at)):
                at[table] += strides[table, axis]
            if index[axis] < shape[axis]:
                break
            to -= out_strides[axis] * shape[axis]
            for table in range(len(at)):
                at[table] -= strides[table, axis] * shape[axis]
            index[axis] = 0


@machine_code
def least_sums(program: Program, sizes: Indices, first: Indices, offsets: Indices, sums: Values) -> None:
    """Fill in the tables that the steps make. Cell c of table t is column offsets[t] + c of `sums` (weights,
    cells); what is like an earlier table `first[t]` has its columns."""
    cells = table_sizes(program, sizes)
    for step in range(len(program.taken)):
        made = program.factors + step
        if first[made] != made:
            continue
        axes = _axes(program, step)
        shape = _shape(sizes, axes)
        inputs = program.inputs[program.of_step[step] : program.of_step[step + 1]]
        strides, starts, where = _packing(program, sizes, inputs, axes, shape)
        packed = np.empty(starts[-1])
        out_strides = _strides(program, sizes, made, axes)
        for j in range(len(sums)):
            for row in range(len(inputs)):
                for cell in range(starts[row], starts[row + 1]):
                    packed[cell] = sums[j, offsets[inputs[row]] + where[cell]]
            out = sums[j, offsets[made] : offsets[made] + cells[made]]
            for cell in range(len(out)):
                out[cell] = np.inf
            _add_up(shape, packed, starts[:-1], strides, -1, out, out_strides)


@machine_code
def sums_outside(
    program: Program, sizes: Indices, offsets: Indices, sums: Values, places: Indices, outside: Values
) -> None:
    """Fill in the least of all that is not in a table: cell c of table t is column places[t] + c of
    `outside`, of which that of the last table is given."""
    for step in range(len(program.taken) - 1, -1, -1):
        axes = _axes(program, step)
        shape = _shape(sizes, axes)
        count = program.of_step[step + 1] - program.of_step[step]
        tables = np.empty(count + 1, np.intp)  # the inputs, and what is made of them
        for row in range(count):
            tables[row] = program.inputs[program.of_step[step] + row]
        tables[count] = program.factors + step
        strides, starts, where = _packing(program, sizes, tables, axes, shape)
        packed = np.empty(starts[-1])
        for j in range(len(sums)):
            for row in range(count):
                for cell in range(starts[row], starts[row + 1]):
                    packed[cell] = sums[j, offsets[tables[row]] + where[cell]]
            for cell in range(starts[count], starts[count + 1]):
                packed[cell] = outside[j, places[tables[count]] + where[cell]]
            for row in range(count):
                out = np.full(starts[row + 1] - starts[row], np.inf)
                _add_up(shape, packed, starts[:-1], strides, row, out, strides[row])
                for cell in range(len(out)):
                    outside[j, places[tables[row]] + where[starts[row] + cell]] = out[cell]


@machine_code
def potential_sums(
    program: Program, sizes: Indices, offsets: Indices, sums: Values, places: Indices, found: Values
) -> None:
    """Fill in what a label of each table adds to the excess of the whole beside its own sum, under the first
    weights, as `Scalars.potentials` says: columns of `found` (1, cells) like those of `sums_outside`."""
    cells = table_sizes(program, sizes)
    counts = np.ones(len(cells), np.intp)
    for step in range(len(program.taken)):
        made = program.factors + step
        counts[made] = 0
        for at in range(program.of_step[step], program.of_step[step + 1]):
            counts[made] += counts[program.inputs[at]]
    for step in range(len(program.taken) - 1, -1, -1):
        made = program.factors + step
        axes = _axes(program, step)
        shape = _shape(sizes, axes)
        total = 1
        for axis in range(len(axes)):
            total *= shape[axis]
        inputs = program.inputs[program.of_step[step] : program.of_step[step + 1]].copy()
        for place in range(1, len(inputs)):  # that made of most first, of equal ones the first
            for at in range(place, 0, -1):
                one, other = inputs[at - 1], inputs[at]
                if counts[other] > counts[one] or (counts[other] == counts[one] and other < one):
                    inputs[at - 1], inputs[at] = other, one
        strides = np.zeros((len(inputs) + 1, len(axes)), np.intp)
        for place in range(len(inputs)):
            strides[place] = _strides(program, sizes, inputs[place], axes)
        strides[len(inputs)] = _strides(program, sizes, made, axes)
        where = np.empty((total, len(inputs) + 1), np.intp)
        rest = np.empty(total)
        for cell in range(total):
            for place in range(len(inputs) + 1):
                where[cell, place] = 0
            left = cell
            for axis in range(len(axes) - 1, -1, -1):
                choice = left % shape[axis]
                left //= shape[axis]
                for place in range(len(inputs) + 1):
                    where[cell, place] += choice * strides[place, axis]
            rest[cell] = found[0, places[made] + where[cell, len(inputs)]]
        for place in range(len(inputs)):
            start = places[inputs[place]]
            found[0, start : start + cells[inputs[place]]] = np.inf
            for cell in range(total):
                own = rest[cell]
                for other in range(place + 1, len(inputs)):
                    own += sums[0, offsets[inputs[other]] + where[cell, other]]
                target = start + where[cell, place]
                found[0, target] = min(found[0, target], own)
            for cell in range(total):
                own = found[0, start + where[cell, place]]
                rest[cell] = rest[cell] - own if own < np.inf else np.inf


@machine_code
def sums_through(
    program: Program, sizes: Indices, offsets: Indices, sums: Values, places: Indices, outside: Values
) -> tuple[Indices, Values]:
    """Totals that no solution with a choice of a variable is below, the largest that the factors on it tell:
    column start[v] + choice of variable v."""
    start = np.zeros(len(sizes) + 1, np.intp)
    for variable in range(len(sizes)):
        start[variable + 1] = start[variable] + sizes[variable]
    found = np.full((len(sums), start[-1]), -np.inf)
    for table in range(program.factors):
        first, stop = program.of_table[table], program.of_table[table + 1]
        cells = 1
        for at in range(first, stop):
            cells *= sizes[program.variables[at]]
        stride = 1
        for at in range(stop - 1, first - 1, -1):
            variable = program.variables[at]
            size = sizes[variable]
            for j in range(len(sums)):
                least = np.full(size, np.inf)
                for cell in range(cells):
                    choice = cell // stride % size
                    total = sums[j, offsets[table] + cell] + outside[j, places[table] + cell]
                    least[choice] = min(least[choice], total)
                for choice in range(size):
                    column = start[variable] + choice
                    found[j, column] = max(found[j, column], least[choice])
            stride *= size
    return start, found


@machine_code
def least_choices(program: Program, sizes: Indices, offsets: Indices, sums: Values, chosen: Indices) -> None:
    """Fill in the choices (variables, weights) that reach the least sums, given those of what others see; of
    equal ones the first."""
    for step in range(len(program.taken) - 1, -1, -1):
        taken = program.taken[step]
        if taken < 0:
            continue
        for j in range(len(sums)):
            best, least = 0, np.inf
            for choice in range(sizes[taken]):
                chosen[taken, j] = choice
                total = 0.0
                for place in range(program.of_step[step], program.of_step[step + 1]):
                    table = program.inputs[place]
                    cell = 0
                    for at in range(program.of_table[table], program.of_table[table + 1]):
                        variable = program.variables[at]
                        cell = cell * sizes[variable] + chosen[variable, j]
                    total += sums[j, offsets[table] + cell]
                if total < least:
                    best, least = choice, total
            chosen[taken, j] = best
