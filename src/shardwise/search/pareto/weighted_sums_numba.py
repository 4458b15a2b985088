"""Weighted sums in compiled loops.

A step of elimination adds tables over the choices of all of its variables and keeps the least for each cell
of the result. The axes are those of the result, with the variables it does not have before its last axis.
Along the last axis all values are contiguous, so the loops vectorise, and each row of the result is finished
before the next one.

Sums along a chain are stored weight by weight, so the loops over borders are contiguous. Sums of every choice
of the shared variables with every pair of borders are never in memory at once.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from shardwise.search.pareto.compilation import numba_compiled
from shardwise.search.pareto.joins_numba import NONE, fractions, whole_numbers

Indices = npt.NDArray[np.intp]
Values = npt.NDArray[np.float64]


class EliminationProgram(NamedTuple):
    """Tables and steps of an elimination order as arrays. The variables of table t are variables[of_table[t]
    : of_table[t + 1]]. The first `factors` tables are given. Step s makes table factors + s from
    inputs[of_step[s] : of_step[s + 1]] and eliminates variable taken[s], or none (-1)."""

    of_table: Indices
    variables: Indices
    factors: int
    of_step: Indices
    inputs: Indices
    taken: Indices


@numba_compiled
def weighted_costs(costs: Values, weights: Values, sums: Values) -> None:
    """Fill the first columns of `sums` (weights, cells) with weighted costs (6, cells): the four columns that
    add, and the last row unweighted."""
    cells = costs.shape[1]
    for j in range(len(weights)):
        a, b, c, d = weights[j, 0], weights[j, 1], weights[j, 2], weights[j, 3]
        row = sums[j]
        for k in range(cells):
            row[k] = a * costs[0, k] + b * costs[1, k] + c * costs[2, k] + d * costs[3, k] + costs[5, k]


@numba_compiled
def table_sizes(program: EliminationProgram, sizes: Indices) -> Indices:
    """Number of cells of each table; `sizes` are the choices of each variable."""
    count = len(program.of_table) - 1
    found = whole_numbers(count, NONE + 1)
    for table in range(count):
        for at in range(program.of_table[table], program.of_table[table + 1]):
            found[table] *= sizes[program.variables[at]]
    return found


@numba_compiled
def _is_among(variable: int, variables: Indices) -> bool:
    found = False
    for each in variables:
        found |= each == variable
    return found


@numba_compiled
def _axes(program: EliminationProgram, sizes: Indices, step: int, table: int) -> Indices:
    """The variables of a step as axes for the result `table`. Its own variables come first, the one with most
    choices last. The variables it does not have come before that one; the one with most choices is the last
    of them. -1 where there is none."""
    made = program.factors + step
    own = program.variables[program.of_table[table] : program.of_table[table + 1]]
    lead, through = -1, -1
    for variable in own:
        if lead < 0 or sizes[variable] >= sizes[lead]:
            lead = variable
    found = whole_numbers(len(program.variables) + 3, NONE - 1)
    count = 0
    for variable in own:
        if variable != lead:
            found[count] = variable
            count += 1
    stop = program.of_table[made + 1]
    for at in range(program.of_table[made], stop + 1):
        variable = program.taken[step] if at == stop else program.variables[at]
        if variable < 0 or _is_among(variable, own):
            continue
        smaller = variable
        if through < 0 or sizes[variable] >= sizes[through]:
            smaller, through = through, variable
        if smaller >= 0:
            found[count] = smaller
            count += 1
    found[count], found[count + 1] = through, lead
    return found[: count + 2]


@numba_compiled
def _strides(program: EliminationProgram, sizes: Indices, table: int, axes: Indices) -> Indices:
    """Strides of a table's cells along axes; 0 along axes that it does not have."""
    found = whole_numbers(len(axes), NONE)
    stride = 1
    for at in range(program.of_table[table + 1] - 1, program.of_table[table] - 1, -1):
        variable = program.variables[at]
        for axis in range(len(axes)):
            if axes[axis] == variable:
                found[axis] = stride
        stride *= sizes[variable]
    return found


@numba_compiled
def _packed_strides(shape: Indices, strides: Indices) -> Indices:
    """Strides once the cells are stored in the order of the axes."""
    found = whole_numbers(len(shape), NONE)
    stride = 1
    for axis in range(len(shape) - 1, -1, -1):
        if strides[axis] > 0:
            found[axis] = stride
            stride *= shape[axis]
    return found


@numba_compiled
def _places(shape: Indices, strides: Indices) -> Indices:
    """Positions of the cells of a table, in the order of the axes."""
    index = whole_numbers(len(shape), NONE)
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


@numba_compiled
def _shape(sizes: Indices, axes: Indices) -> Indices:
    """Number of choices along axes; 1 for an axis without a variable."""
    found = whole_numbers(len(axes), NONE + 1)
    for axis in range(len(axes)):
        if axes[axis] >= 0:
            found[axis] = sizes[axes[axis]]
    return found


class _Packing(NamedTuple):
    """Tables of a step, the result last, packed one after the other, along axes of this `shape`. Table i
    starts at starts[i], its cells have strides[i], and are contiguous along the last axis if it has that.
    They come from where[starts[i] + ...] of the table, or in the same order if is_same[i]."""

    shape: Indices
    starts: Indices
    strides: Indices
    where: Indices
    is_same: Indices


@numba_compiled
def _packing(program: EliminationProgram, sizes: Indices, step: int, tables: Indices) -> _Packing:
    """The packing of the tables of a step."""
    axes = _axes(program, sizes, step, tables[-1])
    shape = _shape(sizes, axes)
    strides = np.empty((len(tables), len(axes)), np.intp)
    starts = whole_numbers(len(tables) + 1, NONE)
    is_same = whole_numbers(len(tables), NONE + 1)
    cells = table_sizes(program, sizes)
    for row in range(len(tables)):
        starts[row + 1] = starts[row] + cells[tables[row]]
    where = np.empty(starts[-1], np.intp)
    for row in range(len(tables)):
        own = _strides(program, sizes, tables[row], axes)
        packed = own
        if own[-1] > 1:
            is_same[row] = 0
            packed = _packed_strides(shape, own)
            places = _places(shape, own)
            for cell in range(len(places)):
                where[starts[row] + cell] = places[cell]
        for axis in range(len(axes)):
            strides[row, axis] = packed[axis]
    return _Packing(shape, starts, strides, where, is_same)


@numba_compiled
def _pack(packing: _Packing, row: int, table: Values, packed: Values) -> None:
    """Copy one table to its place in the packed array."""
    first = packing.starts[row]
    own = packed[first : packing.starts[row + 1]]
    if packing.is_same[row]:
        for cell in range(len(own)):
            own[cell] = table[cell]
    else:
        for cell in range(len(own)):
            own[cell] = table[packing.where[first + cell]]


@numba_compiled
def _unpack(packing: _Packing, packed: Values, table: Values) -> None:
    """Copy the result from the packed array to its table."""
    row = len(packing.is_same) - 1
    first = packing.starts[row]
    own = packed[first : packing.starts[row + 1]]
    if packing.is_same[row]:
        for cell in range(len(own)):
            table[cell] = own[cell]
    else:
        for cell in range(len(own)):
            table[packing.where[first + cell]] = own[cell]


@numba_compiled
def _fill(packing: _Packing, packed: Values) -> None:
    """Fill the result: the least, over the variables it does not have, of the sums of the other tables."""
    shape, strides = packing.shape, packing.strides
    result = len(packing.is_same) - 1
    width, height = shape[-1], shape[-2]
    alone, still, moving = np.empty(result, np.intp), np.empty(result, np.intp), np.empty(result, np.intp)
    count_alone = count_still = count_moving = 0
    for table in range(result):
        if strides[table, -1] == 0:
            alone[count_alone] = table
            count_alone += 1
        elif strides[table, -2] == 0:
            still[count_still] = table
            count_still += 1
        else:
            moving[count_moving] = table
            count_moving += 1
    at = packing.starts.copy()
    _set(packed, at[result], at[result + 1], np.inf)
    constants, row, total = np.empty(height), np.empty(width), np.empty(width)
    index = whole_numbers(len(shape) - 2, NONE)
    outer = 1
    for axis in range(len(shape) - 2):
        outer *= shape[axis]
    for _ in range(outer):
        _set(constants, NONE, height, 0.0)
        for place in range(count_alone):
            start, stride = at[alone[place]], strides[alone[place], -2]
            for h in range(height):
                constants[h] += packed[start + h * stride]
        target = packed[at[result] : at[result] + width]
        if count_moving == 1 and count_still == 0:
            _lower(target, constants, packed, at[moving[0]], strides[moving[0], -2])
        else:
            _set(row, NONE, width, np.inf)
            if count_moving == 1:
                _lower(row, constants, packed, at[moving[0]], strides[moving[0], -2])
            elif count_moving == 0:
                least = np.inf
                for h in range(height):
                    least = min(least, constants[h])
                _set(row, NONE, width, least)
            else:
                for h in range(height):
                    _set(total, NONE, width, constants[h])
                    for place in range(count_moving):
                        table = moving[place]
                        _add(total, packed, at[table] + h * strides[table, -2])
                    for k in range(width):
                        row[k] = min(row[k], total[k])
            for place in range(count_still):
                _add(row, packed, at[still[place]])
            for k in range(width):
                target[k] = min(target[k], row[k])
        for axis in range(len(shape) - 3, -1, -1):
            index[axis] += 1
            for table in range(result + 1):
                at[table] += strides[table, axis]
            if index[axis] < shape[axis]:
                break
            for table in range(result + 1):
                at[table] -= strides[table, axis] * shape[axis]
            index[axis] = 0


@numba_compiled
def _set(values: Values, first: int, stop: int, value: float) -> None:
    for k in range(first, stop):
        values[k] = value


@numba_compiled
def _add(row: Values, packed: Values, start: int) -> None:
    """Add a row to another."""
    own = packed[start : start + len(row)]
    for k in range(len(row)):
        row[k] += own[k]


@numba_compiled
def _lower(target: Values, constants: Values, packed: Values, start: int, stride: int) -> None:
    """Lower a row to the least of others, each plus its constant. Four at a time, so that the row is read and
    written once for all of them."""
    width, height = len(target), len(constants)
    for h in range(0, height - 3, 4):
        a, b, c, d = constants[h], constants[h + 1], constants[h + 2], constants[h + 3]
        if not min(min(a, b), min(c, d)) < np.inf:
            continue
        first = start + h * stride
        one, two = packed[first : first + width], packed[first + stride : first + stride + width]
        first += 2 * stride
        three, four = packed[first : first + width], packed[first + stride : first + stride + width]
        for k in range(width):
            some = min(min(a + one[k], b + two[k]), min(c + three[k], d + four[k]))
            target[k] = min(target[k], some)
    for h in range(height - height % 4, height):
        a = constants[h]
        first = start + h * stride
        own = packed[first : first + width]
        for k in range(width):
            target[k] = min(target[k], a + own[k])


@numba_compiled
def least_sums(
    program: EliminationProgram, sizes: Indices, first: Indices, offsets: Indices, sums: Values
) -> None:
    """Fill the tables that the steps make. Cell c of table t is column offsets[t] + c of `sums` (weights,
    cells). A table equal to an earlier one, `first[t]`, has its columns."""
    for step in range(len(program.taken)):
        made = program.factors + step
        if first[made] != made:
            continue
        count = program.of_step[step + 1] - program.of_step[step]
        tables = np.empty(count + 1, np.intp)
        for row in range(count):
            tables[row] = program.inputs[program.of_step[step] + row]
        tables[count] = made
        packing = _packing(program, sizes, step, tables)
        packed = np.empty(packing.starts[-1])
        for j in range(len(sums)):
            for row in range(count):
                _pack(packing, row, sums[j, offsets[tables[row]] :], packed)
            _fill(packing, packed)
            _unpack(packing, packed, sums[j, offsets[made] :])


@numba_compiled
def sums_outside(
    program: EliminationProgram,
    sizes: Indices,
    offsets: Indices,
    sums: Values,
    places: Indices,
    outside: Values,
) -> None:
    """Fill the least sums outside each table: cell c of table t is column places[t] + c of `outside`. That of
    the last table is given."""
    for step in range(len(program.taken) - 1, -1, -1):
        made = program.factors + step
        inputs = program.inputs[program.of_step[step] : program.of_step[step + 1]]
        count = len(inputs)
        tables = np.empty(count + 1, np.intp)  # the output, the other inputs, and the result
        tables[0] = made
        for result in range(count):
            tables[count] = inputs[result]
            at = 1
            for other in range(count):
                if other != result:
                    tables[at] = inputs[other]
                    at += 1
            packing = _packing(program, sizes, step, tables)
            packed = np.empty(packing.starts[-1])
            for j in range(len(sums)):
                _pack(packing, NONE, outside[j, places[made] :], packed)
                for row in range(1, count):
                    _pack(packing, row, sums[j, offsets[tables[row]] :], packed)
                _fill(packing, packed)
                _unpack(packing, packed, outside[j, places[tables[count]] :])


@numba_compiled
def potential_sums(
    program: EliminationProgram,
    sizes: Indices,
    offsets: Indices,
    sums: Values,
    places: Indices,
    found: Values,
) -> None:
    """Fill the potentials of all tables under the first weights, as `FactorSums.potentials` defines them:
    columns of `found` (1, cells), placed as in `sums_outside`."""
    cells = table_sizes(program, sizes)
    counts = whole_numbers(len(cells), NONE + 1)
    for step in range(len(program.taken)):
        made = program.factors + step
        counts[made] = 0
        for at in range(program.of_step[step], program.of_step[step + 1]):
            counts[made] += counts[program.inputs[at]]
    for step in range(len(program.taken) - 1, -1, -1):
        made = program.factors + step
        axes = _axes(program, sizes, step, made)
        shape = _shape(sizes, axes)
        total = 1
        for axis in range(len(axes)):
            total *= shape[axis]
        inputs = np.empty(program.of_step[step + 1] - program.of_step[step], np.intp)
        for place in range(len(inputs)):
            inputs[place] = program.inputs[program.of_step[step] + place]
        for place in range(1, len(inputs)):  # most factors first, of equal ones the first
            for at in range(place, 0, -1):
                one, other = inputs[at - 1], inputs[at]
                if counts[other] > counts[one] or (counts[other] == counts[one] and other < one):
                    inputs[at - 1], inputs[at] = other, one
        strides = np.empty((len(inputs) + 1, len(axes)), np.intp)
        for place in range(len(inputs) + 1):
            own_strides = _strides(program, sizes, inputs[place] if place < len(inputs) else made, axes)
            for axis in range(len(axes)):
                strides[place, axis] = own_strides[axis]
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
            _set(found[0], start, start + cells[inputs[place]], np.inf)
            for cell in range(total):
                own = rest[cell]
                for other in range(place + 1, len(inputs)):
                    own += sums[0, offsets[inputs[other]] + where[cell, other]]
                target = start + where[cell, place]
                found[0, target] = min(found[0, target], own)
            for cell in range(total):
                own = found[0, start + where[cell, place]]
                rest[cell] = rest[cell] - own if own < np.inf else np.inf


@numba_compiled
def min_marginal_sums(
    program: EliminationProgram,
    sizes: Indices,
    offsets: Indices,
    sums: Values,
    places: Indices,
    outside: Values,
) -> tuple[Indices, Values]:
    """The min-marginals of all variables: column start[v] + choice of variable v. Each is the largest bound
    of any factor on the variable."""
    start = whole_numbers(len(sizes) + 1, NONE)
    for variable in range(len(sizes)):
        start[variable + 1] = start[variable] + sizes[variable]
    found = np.empty((len(sums), start[-1]))
    for j in range(len(sums)):
        _set(found[j], NONE, found.shape[1], -np.inf)
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
                least = fractions(size, np.inf)
                for cell in range(cells):
                    choice = cell // stride % size
                    total = sums[j, offsets[table] + cell] + outside[j, places[table] + cell]
                    least[choice] = min(least[choice], total)
                for choice in range(size):
                    column = start[variable] + choice
                    found[j, column] = max(found[j, column], least[choice])
            stride *= size
    return start, found


@numba_compiled
def least_choices(
    program: EliminationProgram, sizes: Indices, offsets: Indices, sums: Values, chosen: Indices
) -> None:
    """Fill the choices (variables, weights) that reach the least sums, given those of the separator; of equal
    ones the first."""
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


@numba_compiled
def extended_sums(
    before: Values, table: Values, before_at: Indices, table_at: Indices, found: Values
) -> None:
    """Lower `found` (weights, shared choices, after) to the least total of `before` (weights, shared choices,
    from) and `table` (weights, shared choices, from, after). Choice h of the shared variables has row
    before_at[h] and row table_at[h] there."""
    for j in range(len(found)):
        for h in range(found.shape[1]):
            target, own, rows = found[j, h], before[j, before_at[h]], table[j, table_at[h]]
            for start in range(len(own)):
                first, row = own[start], rows[start]
                for end in range(len(target)):
                    target[end] = min(target[end], first + row[end])


@numba_compiled
def least_outside(
    prefix: Values, suffix: Values, prefix_at: Indices, suffix_at: Indices, into: Indices, found: Values
) -> None:
    """Lower `found` (weights, remaining shared choices, entry, exit) to the least total of `prefix` (weights,
    shared choices, entry) and `suffix` (weights, shared choices, exit). Choice h of the shared variables has
    row prefix_at[h], row suffix_at[h] and row into[h]."""
    for j in range(len(found)):
        for h in range(len(into)):
            one, other, target = prefix[j, prefix_at[h]], suffix[j, suffix_at[h]], found[j, into[h]]
            for entry in range(len(one)):
                first, row = one[entry], target[entry]
                for end in range(len(row)):
                    row[end] = min(row[end], first + other[end])
