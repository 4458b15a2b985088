"""The computation of a rank for each kind of operator, step by step, with the collectives that a
split needs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from tests.property.op_functions import ELEMENT_FUNCTIONS
from tests.property.spmd import Array, Dims, Rank, Spmd, Value, without

from shardwise.graph import OpNode

EPSILON = 1e-3

Program = Callable[[Spmd, OpNode, Sequence[Value]], Value]


def multiplied(run: Spmd, value: Value, other: Value) -> Value:
    """The product with a tensor of the same or fewer dims."""
    return run.einsum(value.dims, value, other)


def renamed(run: Spmd, value: Value, old: str, new: str) -> Value:
    """The same with another name of a dim."""
    return run.each(
        tuple(new if dim == old else dim for dim in value.dims),
        [value],
        lambda rank, arrays: arrays[0],
        lambda rank, arrays, gradient: [gradient],
    )


def summed(run: Spmd, first: Value, *others: Value) -> Value:
    values = (first, *others)
    return run.pointwise(first.dims, lambda *arrays: sum(arrays), [_one] * len(values), *values)


def _one(*arrays: Array) -> Array:
    return np.ones(arrays[0].shape)


def mapped(
    run: Spmd, value: Value, function: Callable[[Array], Array], slope: Callable[[Array], Array]
) -> Value:
    return run.pointwise(value.dims, function, [slope], value)


def scaled(run: Spmd, value: Value, factor: float) -> Value:
    return mapped(run, value, lambda x: factor * x, lambda x: np.full(x.shape, factor))


def product_of(run: Spmd, op: OpNode, operands: Sequence[Value]) -> Value:
    return run.einsum(op.output, *operands)


def linear(run: Spmd, op: OpNode, operands: Sequence[Value]) -> Value:
    product = run.einsum(op.output, *operands[:2])
    return summed(run, product, *operands[2:])


def elementwise(run: Spmd, op: OpNode, operands: Sequence[Value]) -> Value:
    name = str(op.attributes["function"])
    if name == "add":
        return run.pointwise(op.output, lambda *arrays: sum(arrays), [_one] * len(operands), *operands)
    if name == "dropout":
        rng = np.random.default_rng(5)
        mask = run.constant(op.output, 1.0 * (rng.random(op.shape(op.output)) < 0.5))
        return run.einsum(op.output, operands[0], mask)
    function, slopes = ELEMENT_FUNCTIONS[name]
    return run.pointwise(op.output, function, slopes, *operands)


def rotary(run: Spmd, op: OpNode, operands: Sequence[Value]) -> Value:
    value, cosines, sines = operands
    over = op.output[-1]
    half = op.dims[over] // 2
    turn = np.zeros((2 * half, 2 * half))
    turn[range(half, 2 * half), range(half)] = -1.0
    turn[range(half), range(half, 2 * half)] = 1.0
    turned = run.value((over, "turned"), dict.fromkeys(run.mesh.ranks, turn))
    other = run.einsum((*value.dims[:-1], "turned"), value, turned)
    crossed = multiplied(run, other, renamed(run, sines, over, "turned"))
    return summed(run, multiplied(run, value, cosines), renamed(run, crossed, "turned", over))


def embedding(run: Spmd, op: OpNode, operands: Sequence[Value]) -> Value:
    """The product of the table with a one for each index that is among a rank's rows."""
    indices, table = operands
    (rows,) = without(table.dims, (*indices.dims, *op.output))
    chosen = _ones(run, indices, rows)
    return run.einsum(op.output, chosen, table)


def _ones(run: Spmd, indices: Value, dim: str) -> Value:
    parts = {}
    for rank in run.mesh.ranks:
        start, stop = run.mesh.interval(dim, rank)
        parts[rank] = 1.0 * (indices.parts[rank][..., None] == np.arange(start, stop))
    return run.value((*indices.dims, dim), parts)


def norm(centred: bool, over_of: Callable[[OpNode], Dims]) -> Program:
    def program(run: Spmd, op: OpNode, operands: Sequence[Value]) -> Value:
        over = over_of(op)
        value = operands[0]
        rest = without(value.dims, over)
        share = 1.0 / op.elements(over)
        square = mapped(run, value, lambda x: x * x, lambda x: 2 * x)
        squares = run.einsum(rest, square)
        sums = run.stack(run.einsum(rest, value), squares) if centred else run.stack(squares)
        sums = scaled(run, run.all_reduce(run.mesh.splits(over), sums, gradients="summed"), share)
        mean = run.item(sums, 0) if centred else None
        return _normalised(run, value, mean, run.item(sums, -1), operands[1:])

    return program


def _normalised(
    run: Spmd, value: Value, mean: Value | None, square: Value, weights: Sequence[Value]
) -> Value:
    if mean is not None:
        value = run.pointwise(
            value.dims, lambda x, m: x - m, [lambda x, m: np.ones(x.shape), lambda x, m: -np.ones(x.shape)],
            value, mean,
        )  # fmt: skip
        square = run.pointwise(
            square.dims, lambda s, m: s - m * m, [lambda s, m: np.ones(s.shape), lambda s, m: -2 * m],
            square, mean,
        )  # fmt: skip
    scale = mapped(run, square, lambda s: (s + EPSILON) ** -0.5, lambda s: -0.5 * (s + EPSILON) ** -1.5)
    result = multiplied(run, value, scale)
    if weights:
        result = multiplied(run, result, weights[0])
    return summed(run, result, weights[1]) if len(weights) > 1 else result


def group_norm(run: Spmd, op: OpNode, operands: Sequence[Value]) -> Value:
    """Channels are grouped by a constant that gives the group of each channel; a group without channels on a
    rank has zeros there.
    """
    value = operands[0]
    first, channel = value.dims[:2]
    groups = int(op.attributes["groups"])
    size = op.dims[channel] // groups
    own = run.constant((channel,), np.arange(op.dims[channel]) // size)
    member = _members(run, own, groups)
    across = [
        axis for axis in range(len(run.mesh.counts))
        if run.mesh.rules[axis].collectives and run.mesh.rules[axis].split in value.dims[1:]
    ]  # fmt: skip
    dims = (first, "group")
    share = groups / op.elements(value.dims[1:])
    square = mapped(run, value, lambda x: x * x, lambda x: 2 * x)
    sums = run.stack(run.einsum(dims, value, member), run.einsum(dims, square, member))
    sums = scaled(run, run.all_reduce(across, sums, gradients="summed"), share)
    mean, squares = (run.einsum((first, channel), run.item(sums, at), member) for at in (0, 1))
    return _normalised(run, value, mean, squares, operands[1:])


def _members(run: Spmd, own: Value, groups: int) -> Value:
    parts = {rank: 1.0 * (part[:, None] == np.arange(groups)) for rank, part in own.parts.items()}
    return run.value((*own.dims, "group"), parts)


def distribution(run: Spmd, value: Value, over: Dims) -> tuple[Value, Value]:
    """Elements less their maximum, and the sum of their exponentials, over `over` and all ranks."""
    rest = without(value.dims, over)
    axes = run.mesh.splits(over)
    tops = run.value(
        rest,
        {
            rank: part.max(axis=tuple(value.dims.index(dim) for dim in over), initial=-np.inf)
            for rank, part in value.parts.items()
        },
    )
    top = run.maximum(axes, tops)
    less = run.pointwise(
        value.dims, lambda x, m: x - m, [lambda x, m: np.ones(x.shape), lambda x, m: 0 * x], value, top
    )
    total = run.einsum(rest, mapped(run, less, np.exp, np.exp))
    return less, total


def softmax(run: Spmd, op: OpNode, operands: Sequence[Value]) -> Value:
    over = op.output[-1:]
    less, total = distribution(run, operands[0], over)
    total = run.all_reduce(run.mesh.splits(over), total, gradients="summed")
    if op.attributes.get("function") == "log_softmax":
        logs = mapped(run, total, lambda s: -np.log(s), lambda s: -1 / s)
        return summed(run, less, logs)
    return multiplied(run, mapped(run, less, np.exp, np.exp), _inverse(run, total))


def _inverse(run: Spmd, value: Value) -> Value:
    return mapped(run, value, lambda s: 1 / s, lambda s: -(s**-2))


def attention(run: Spmd, op: OpNode, operands: Sequence[Value]) -> Value:
    """Key and value heads are repeated by a constant that gives the key head of each query head."""
    queries, keys, values, *biases = operands
    (width,) = without(queries.dims, op.output)
    (at,) = without(queries.dims, (*keys.dims, str(op.attributes.get("heads", ""))))
    (to,) = without(keys.dims, (*queries.dims, str(op.attributes.get("kv_heads", ""))))
    if "kv_heads" in op.attributes:
        heads, kv_heads = str(op.attributes["heads"]), str(op.attributes["kv_heads"])
        repeats = op.dims[heads] // op.dims[kv_heads]
        table = 1.0 * (np.arange(op.dims[heads])[:, None] // repeats == np.arange(op.dims[kv_heads]))
        repeat = run.constant((heads, kv_heads), table)
        keys, values = (
            run.einsum(tuple(heads if dim == kv_heads else dim for dim in kv.dims), kv, repeat)
            for kv in (keys, values)
        )
    rows = without(op.output, (without(values.dims, keys.dims)))
    scores = scaled(run, run.einsum((*rows, to), queries, keys), op.dims[width] ** -0.5)
    scores = summed(run, scores, *biases, _mask(run, op, at, to))
    less, total = distribution(run, scores, (to,))
    total = run.all_reduce(run.mesh.splits((to,)), total, gradients="summed")
    weights = multiplied(run, mapped(run, less, np.exp, np.exp), _inverse(run, total))
    return run.einsum(op.output, weights, values)


def _mask(run: Spmd, op: OpNode, at: str, to: str) -> Value:
    distance = np.arange(op.dims[at])[:, None] - np.arange(op.dims[to])
    hidden = np.zeros(distance.shape, dtype=bool)
    if op.attributes.get("causal"):
        hidden |= distance < 0
    if "window" in op.attributes:
        hidden |= distance >= int(op.attributes["window"])
    return run.constant((at, to), np.where(hidden, -50.0, 0.0))


def cross_entropy(run: Spmd, op: OpNode, operands: Sequence[Value]) -> Value:
    logits, targets = operands
    (classes,) = without(logits.dims, targets.dims)
    axes = run.mesh.splits((classes,))
    less, total = distribution(run, logits, (classes,))
    total = run.all_reduce(axes, total, gradients="whole")
    chosen = run.einsum(targets.dims, less, _ones(run, targets, classes))
    chosen = run.all_reduce(axes, chosen, gradients="whole")
    loss = run.pointwise(
        targets.dims, lambda s, c: np.log(s) - c, [lambda s, c: 1 / s, lambda s, c: -np.ones(c.shape)],
        total, chosen,
    )  # fmt: skip
    return scaled(run, run.einsum(op.output, loss), 1 / op.elements(without(targets.dims, op.output)))


def difference(function: Callable[[Array, Array], Array], slopes: Sequence[Callable[..., Array]]) -> Program:
    def program(run: Spmd, op: OpNode, operands: Sequence[Value]) -> Value:
        loss = run.pointwise(operands[0].dims, function, slopes, *operands)
        return scaled(run, run.einsum(op.output, loss), 1 / op.elements(without(loss.dims, op.output)))

    return program


def reduction(run: Spmd, op: OpNode, operands: Sequence[Value]) -> Value:
    value = operands[0]
    over = without(value.dims, op.output)
    name = op.attributes["function"]
    if name in ("sum", "mean"):
        share = 1 / op.elements(over) if name == "mean" else 1.0
        return scaled(run, run.einsum(op.output, value), share)
    sign = 1.0 if name == "maximum" else -1.0
    axes = tuple(value.dims.index(dim) for dim in over)
    tops = run.maximum(
        run.mesh.splits(over),
        run.value(op.output, {rank: (sign * part).max(axis=axes) for rank, part in value.parts.items()}),
    )
    return run.each(
        op.output,
        [value, tops],
        lambda rank, arrays: sign * arrays[1],
        lambda rank, arrays, gradient: [
            np.expand_dims(gradient, axes) * (sign * arrays[0] == np.expand_dims(arrays[1], axes)),
            np.zeros(gradient.shape),
        ],
    )


def reshape(run: Spmd, op: OpNode, operands: Sequence[Value]) -> Value:
    def forward(rank: Rank, arrays: list[Array]) -> Array:
        bounds = (run.mesh.interval(dim, rank) for dim in op.output)
        return arrays[0].reshape([stop - start for start, stop in bounds])

    return run.each(
        op.output, operands, forward, lambda rank, arrays, gradient: [gradient.reshape(arrays[0].shape)]
    )


def concat(run: Spmd, op: OpNode, operands: Sequence[Value]) -> Value:
    (at,) = (
        index for index, dim in enumerate(op.output) if any(dim not in operand.dims for operand in operands)
    )

    def back(rank: Rank, arrays: list[Array], gradient: Array) -> list[Array]:
        bounds = np.cumsum([array.shape[at] for array in arrays])[:-1]
        return np.split(gradient, bounds, axis=at)

    return run.each(op.output, operands, lambda rank, arrays: np.concatenate(arrays, axis=at), back)


def cut(run: Spmd, op: OpNode, operands: Sequence[Value]) -> Value:
    before = operands[0].dims
    (dim,) = without(before, op.output)
    made = without(op.output, before)
    at, start = before.index(dim), int(op.attributes.get("start", 0))
    stop = start + (op.dims[made[0]] if made else 1)
    after = [made[0] if made and own == dim else own for own in before if made or own != dim]
    order = [after.index(own) for own in op.output]

    def forward(rank: Rank, arrays: list[Array]) -> Array:
        own = np.take(arrays[0], range(start, stop), axis=at)
        return (own if made else own.squeeze(at)).transpose(order)

    def back(rank: Rank, arrays: list[Array], gradient: Array) -> list[Array]:
        own = gradient.transpose(np.argsort(order))
        own = own if made else np.expand_dims(own, at)
        whole = np.zeros(arrays[0].shape)
        np.moveaxis(whole, at, 0)[start:stop] = np.moveaxis(own, at, 0)
        return [whole]

    return run.each(op.output, operands, forward, back)
