"""The computation of a rank for convolutions, pooling and recurrent layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from tests.property.op_programs import (
    Program,
    attention,
    concat,
    cross_entropy,
    cut,
    difference,
    elementwise,
    embedding,
    group_norm,
    linear,
    mapped,
    multiplied,
    norm,
    product_of,
    reduction,
    renamed,
    reshape,
    rotary,
    softmax,
    summed,
)
from tests.property.spmd import Array, Dims, Rank, Spmd, Value, without

from shardwise.graph import OpNode


def _with_halo(run: Spmd, value: Value, read: str, made: str) -> tuple[Value, dict[Rank, int]]:
    """A tensor with the neighbours' rows that the rules name, and the index of the first row on each rank."""
    rows = 0
    for axis, rule in enumerate(run.mesh.rules):
        if rule.split == made and rule.collectives:
            (call,) = rule.collectives
            rows = int(call.copies)
            value = run.neighbours(axis, value, read, rows)
    return value, {rank: run.mesh.interval(read, rank)[0] - rows for rank in run.mesh.ranks}


def _taps(
    run: Spmd, op: OpNode, value: Value, read: str, made: str, tap: str, places: Array
) -> tuple[Value, Value]:
    """The tensor with its halo, and a one where a tap of a window meets a row: `places` are the rows, zeros
    beyond the ends. A row that a rank needs and lacks is an error.
    """
    value, first = _with_halo(run, value, read, made)
    at = value.dims.index(read)
    parts = {}
    for rank in run.mesh.ranks:
        start, stop = run.mesh.interval(made, rank)
        low, high = run.mesh.interval(tap, rank) if tap in op.dims else (0, places.shape[1])
        own = places[start:stop, low:high]
        rows = first[rank] + np.arange(value.parts[rank].shape[at])
        inside = (own >= 0) & (own < op.dims[read])
        if inside.any() and not set(own[inside].tolist()) <= set(rows.tolist()):
            raise AssertionError(f"rank {rank} lacks rows of {read}")
        parts[rank] = 1.0 * (own[..., None] == rows) * inside[..., None]
    rows_name = f"{read} rows"
    return renamed(run, value, read, rows_name), run.value((made, tap, rows_name), parts)


def _places(op: OpNode, made: str, kernel: int, stride: int) -> Array:
    """Row of each window and tap."""
    dilation, padding = int(op.attributes.get("dilation", 1)), int(op.attributes.get("padding", 0))
    windows = np.arange(op.dims[made])[:, None] * stride - padding
    return np.asarray(windows + np.arange(kernel) * dilation)


def convolution(run: Spmd, op: OpNode, operands: Sequence[Value]) -> Value:
    value, weight, *biases = operands
    groups = int(op.attributes.get("groups", 1))
    kernel = without(weight.dims, (*value.dims, *op.output))[1 if groups > 1 else 0 :]
    tables = []
    for at, tap in enumerate(kernel):
        read, made = op.inputs[0].dims[at - len(kernel)], op.output[at - len(kernel)]
        places = _places(op, made, op.dims[tap], int(op.attributes.get("stride", 1)))
        value, table = _taps(run, op, value, read, made, tap, places)
        tables.append(table)
    if groups > 1:
        read, made, within = op.inputs[0].dims[-len(kernel) - 1], weight.dims[0], weight.dims[1]
        channels, sizes = np.arange(op.dims[read]), op.dims
        own_group = np.arange(sizes[made])[:, None] // (sizes[made] // groups) == channels // sizes[within]
        member = own_group[..., None] & (channels[:, None] % sizes[within] == np.arange(sizes[within]))
        tables.append(run.constant((made, read, within), 1.0 * member))
    product = run.einsum(op.output, value, *tables, weight)
    return summed(run, product, *biases)


def pool(run: Spmd, op: OpNode, operands: Sequence[Value]) -> Value:
    """Average pooling is a product with weights of each row; maximum pooling takes the rows of each
    window.
    """
    (value,) = operands
    spatial = int(op.attributes.get("spatial", 2))
    average = op.attributes["function"] == "average"
    for at in range(-spatial, 0):
        read, made = op.inputs[0].dims[at], op.output[at]
        places, count = _pool_places(op, read, made)
        value, table = _taps(run, op, value, read, made, f"{read} taps", places)
        dims = tuple(made if dim == f"{read} rows" else dim for dim in value.dims)
        if average:
            share = run.constant((made,), 1.0 / count)
            value = run.einsum(dims, value, table, share)
        else:
            value = _window_maximum(run, value, table, dims)
    return value


def _pool_places(op: OpNode, read: str, made: str) -> tuple[Array, Array]:
    """Rows of the windows, -1 where a window has fewer rows than others; and the number of rows of each."""
    if "kernel" in op.attributes:
        kernel = int(op.attributes["kernel"])
        places = _places(op, made, kernel, int(op.attributes.get("stride", kernel)))
        return places, np.full(op.dims[made], kernel)
    windows = np.arange(op.dims[made])
    starts = windows * op.dims[read] // op.dims[made]
    stops = -(-(windows + 1) * op.dims[read] // op.dims[made])
    places = starts[:, None] + np.arange((stops - starts).max())
    return np.where(places < stops[:, None], places, -1), stops - starts


def _window_maximum(run: Spmd, value: Value, table: Value, dims: Dims) -> Value:
    rows = value.dims.index(table.dims[2])

    def candidates(rank: Rank, array: Array) -> Array:
        met = table.parts[rank].sum(axis=1) > 0
        return np.where(met, np.moveaxis(array, rows, -1)[..., None, :], -np.inf)

    def back(rank: Rank, arrays: list[Array], gradient: Array) -> list[Array]:
        found = candidates(rank, arrays[0])
        chosen = found == found.max(axis=-1, keepdims=True)
        spread = (chosen * np.moveaxis(gradient, rows, -1)[..., None]).sum(axis=-2)
        return [np.moveaxis(spread, -1, rows)]

    return run.each(
        dims,
        [value],
        lambda rank, arrays: np.moveaxis(candidates(rank, arrays[0]).max(axis=-1), -1, rows),
        back,
    )


def recurrent(run: Spmd, op: OpNode, operands: Sequence[Value]) -> Value:
    """Step by step; gates are input, forget, cell, output for an LSTM, and reset, update, candidate for a
    GRU.
    """
    value, of_input, of_state, *biases = operands
    gates, units, width = op.parameters[0].dims
    time = str(op.attributes["time"])
    batch = without(value.dims, (width, time))
    inputs = run.einsum((*batch, time, gates, units), value, of_input)
    inputs = run.all_reduce(run.mesh.splits((width,)), inputs, gradients="whole")
    state: Value | None = None
    cell: Value | None = None
    made = []
    for step in range(op.dims[time]):
        own = run.item(inputs, step, time)
        carried = _carried(run, op, state, of_state) if state is not None else None
        advance = _lstm_step if op.kind == "lstm" else _gru_step
        state, cell = advance(run, own, carried, biases, state, cell, gates)
        made.append(state)
    stacked = run.stack(*made)
    return run.each(
        op.output,
        [stacked],
        lambda rank, arrays: np.moveaxis(arrays[0], 0, op.output.index(time)),
        lambda rank, arrays, gradient: [np.moveaxis(gradient, op.output.index(time), 0)],
    )


def cell(run: Spmd, op: OpNode, operands: Sequence[Value]) -> Value:
    """A step on a state that every rank has whole; a rank that computes some units takes their part of it."""
    value, before, of_input, of_state, *biases = operands
    gates, units, width = op.parameters[0].dims
    batch = without(value.dims, (width,))
    inputs = run.einsum((*batch, gates, units), value, of_input)
    inputs = run.all_reduce(run.mesh.splits((width,)), inputs, gradients="whole")
    is_lstm = op.kind == "lstm_cell"
    states = [run.item(before, at, before.dims[0]) for at in (0, 1)] if is_lstm else [before]
    carried = run.einsum((*batch, gates, units), states[0], of_state)
    parts = [_part(run, state, units) for state in states]
    if not is_lstm:
        return _gru_step(run, inputs, carried, biases, parts[0], None, gates)[0]
    made = _lstm_step(run, inputs, carried, biases, parts[0], parts[1], gates)
    return renamed(run, run.stack(*(each for each in made if each)), "stacked", op.output[0])


def _part(run: Spmd, state: Value, units: str) -> Value:
    """The part of the whole state for the rank's own units, along the last dim."""

    def bounds(rank: Rank) -> slice:
        return slice(*run.mesh.interval(units, rank))

    def back(rank: Rank, arrays: list[Array], gradient: Array) -> list[Array]:
        whole = np.zeros(arrays[0].shape)
        whole[..., bounds(rank)] = gradient
        return [whole]

    return run.each(
        (*state.dims[:-1], units), [state], lambda rank, arrays: arrays[0][..., bounds(rank)], back
    )


def _carried(run: Spmd, op: OpNode, state: Value, of_state: Value) -> Value:
    """The product of the state's weight and the whole state of the previous step."""
    gates, units, recurrent_dim = op.parameters[1].dims
    by_units, by_state = run.mesh.splits((units,)), run.mesh.splits((recurrent_dim,))
    for axis in reversed(by_units):
        state = run.all_gather(axis, state, units)
    rest = without(state.dims, (units,))
    state = renamed(run, state, units, recurrent_dim)
    for axis in by_state:
        state = run.own_part(axis, state, recurrent_dim)
    product = run.einsum((*rest, gates, units), state, of_state)
    return run.all_reduce(by_state, product, gradients="whole")


def _gate(run: Spmd, values: Sequence[Value], gates: str, index: int) -> Value:
    picked = [run.item(value, index, gates) for value in values]
    return summed(run, *picked)


def _sigmoid(run: Spmd, value: Value) -> Value:
    return mapped(run, value, lambda x: 1 / (1 + np.exp(-x)), lambda x: np.exp(-x) / (1 + np.exp(-x)) ** 2)


def _tanh(run: Spmd, value: Value) -> Value:
    return mapped(run, value, np.tanh, lambda x: 1 - np.tanh(x) ** 2)


def _lstm_step(
    run: Spmd,
    own: Value,
    carried: Value | None,
    biases: Sequence[Value],
    state: Value | None,
    cell: Value | None,
    gates: str,
) -> tuple[Value, Value | None]:
    terms = [own, *((carried,) if carried else ()), *biases]
    enter, forget, leave = (_sigmoid(run, _gate(run, terms, gates, index)) for index in (0, 1, 3))
    fresh = multiplied(run, enter, _tanh(run, _gate(run, terms, gates, 2)))
    cell = fresh if cell is None else summed(run, fresh, multiplied(run, forget, cell))
    return multiplied(run, leave, _tanh(run, cell)), cell


def _gru_step(
    run: Spmd,
    own: Value,
    carried: Value | None,
    biases: Sequence[Value],
    state: Value | None,
    cell: Value | None,
    gates: str,
) -> tuple[Value, Value | None]:
    """The first bias is that of the input, the second that of the state, which the reset gate scales."""
    of_input, of_state = [own, *biases[:1]], [*((carried,) if carried else ()), *biases[1:]]
    terms = [*of_input, *of_state]
    reset, update = (_sigmoid(run, _gate(run, terms, gates, index)) for index in (0, 1))
    argument = _gate(run, of_input, gates, 2)
    if of_state:
        argument = summed(run, argument, multiplied(run, reset, _gate(run, of_state, gates, 2)))
    candidate = _tanh(run, argument)
    keep = mapped(run, update, lambda u: 1 - u, lambda u: -np.ones(u.shape))
    fresh = multiplied(run, keep, candidate)
    return (fresh if state is None else summed(run, fresh, multiplied(run, update, state))), None


def _scales(op: OpNode) -> Dims:
    return op.parameters[0].dims if op.parameters else op.output[-1:]


PROGRAMS: Mapping[str, Program] = {
    "einsum": product_of,
    "matmul": product_of,
    "linear": linear,
    "convolution": convolution,
    "pool": pool,
    "lstm": recurrent,
    "gru": recurrent,
    "lstm_cell": cell,
    "gru_cell": cell,
    "elementwise": elementwise,
    "rotary": rotary,
    "embedding": embedding,
    "layer_norm": norm(True, _scales),
    "rms_norm": norm(False, _scales),
    "batch_norm": norm(True, lambda op: without(op.output, op.parameters[0].dims)),
    "group_norm": group_norm,
    "softmax": softmax,
    "attention": attention,
    "cross_entropy": cross_entropy,
    "mean_square": difference(
        lambda x, y: (x - y) ** 2, [lambda x, y: 2 * (x - y), lambda x, y: -2 * (x - y)]
    ),
    "binary_cross_entropy": difference(
        lambda x, y: np.log1p(np.exp(x)) - x * y,
        [lambda x, y: 1 / (1 + np.exp(-x)) - y, lambda x, y: -x],
    ),
    "reduce": reduction,
    "reshape": reshape,
    "transpose": product_of,
    "concat": concat,
    "slice": cut,
}
"""By kind."""
