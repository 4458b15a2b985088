"""Handlers of ATen calls for products, convolution, attention, embedding (`PRODUCTS`), and recurrent layers.

`RECURRENT` and `CELLS` handle LSTM and GRU layers and cells. `aten_elementwise` has the other handlers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from shardwise.runtime.graph_capture.aten_elementwise import (
    Handler,
    HandlerResult,
    TupleHandler,
    argument,
    concatenated,
    optional_tensor,
    sliced,
    tensor,
    uniform_setting,
)
from shardwise.runtime.graph_capture.builder import (
    Attributes,
    Builder,
    Dim,
    Dims,
    IndexSpace,
    Names,
    Setting,
    View,
    names_with_unit_dims,
    producer_names,
    view_of,
    view_with_unit_dims,
)
from shardwise.runtime.graph_capture.torch_export import TracedCall, refs_of

# Products, convolution, attention and embedding


def _contracted(
    builder: Builder,
    call: TracedCall,
    space: IndexSpace,
    operands: Sequence[tuple[View, Names]],
    output: Names,
    dims: Dims,
) -> View:
    """A product of two operands: a `linear` or `matmul` where it is one, otherwise an `einsum`."""
    (_, left), (two, right) = operands
    summed = {name for name in left if name in right and name is not None} - set(output)
    weights = [view for view, _ in operands if view.is_parameter]
    features = set(right) & set(output) - {None}
    kind = "einsum"
    if summed and weights == [two] and features and not features & set(left):
        kind = "linear"
    elif summed and not weights:
        kind = "matmul"
    return builder.emit(call, kind, space, operands, output, dims)


def _linear(builder: Builder, call: TracedCall, dims: Dims) -> HandlerResult:
    view, weight = builder.whole(call, tensor(builder, call, 0)), tensor(builder, call, 1, "weight")
    bias = optional_tensor(builder, call, 2, "bias")
    space = IndexSpace()
    names = space.names(view.dims)
    (made,) = space.names(weight.dims[:1])
    output = (*names[:-1], made)
    operands = [(view, names), (weight, (made, names[-1]))]
    if bias is not None and bias.is_parameter and made is not None and names[-1] is not None:
        return builder.emit(call, "linear", space, [*operands, (bias, (made,))], output, dims)
    return _with_bias(builder, call, _contracted(builder, call, space, operands, output, dims), bias, dims)


def _with_bias(builder: Builder, call: TracedCall, product: View, bias: View | None, dims: Dims) -> View:
    if bias is None:
        return product
    space = IndexSpace()
    output = space.names(dims)
    added = producer_names(bias, output[len(output) - len(bias.dims) :])
    name = f"{call.name}_bias"
    operands = [(product, output), (bias, added)]
    return builder.emit(
        call, "elementwise", space, operands, output, dims, name=name, attributes={"function": "add"}
    )


def _matmul(builder: Builder, call: TracedCall, dims: Dims) -> HandlerResult:
    return _product(builder, call, tensor(builder, call, 0), tensor(builder, call, 1, "mat2"), dims)


def _addmm(builder: Builder, call: TracedCall, dims: Dims) -> HandlerResult:
    one, two = tensor(builder, call, 1, "mat1"), tensor(builder, call, 2, "mat2")
    return _with_bias(builder, call, _product(builder, call, one, two, dims), tensor(builder, call, 0), dims)


def _product(builder: Builder, call: TracedCall, one: View, two: View, dims: Dims) -> View:
    """Batched matmul with broadcasting. A vector is a matrix of one row or one column."""
    if len(one.dims) == 1:
        one = replace(one, dims=(Dim(1), *one.dims), axes=(None, *one.axes))
    if len(two.dims) == 1:
        two = replace(two, dims=(*two.dims, Dim(1)), axes=(*two.axes, None))
    space = IndexSpace()
    batch = space.names(dims[: max(len(one.dims), len(two.dims)) - 2])
    left = (*batch[len(batch) - len(one.dims) + 2 :], *space.names(one.dims[-2:]))
    (made,) = space.names(two.dims[-1:])
    right = (*batch[len(batch) - len(two.dims) + 2 :], left[-1], made)
    operands = [(view, producer_names(view, names)) for view, names in ((one, left), (two, right))]
    return _contracted(builder, call, space, operands, (*batch, left[-2], made), dims)


def _einsum(builder: Builder, call: TracedCall, dims: Dims) -> HandlerResult:
    equation = "".join(str(call.arguments[0]).split())
    left, arrow, right = equation.partition("->")
    terms = left.split(",")
    if not arrow or "." in equation or any(len(set(term)) < len(term) for term in terms):
        raise builder.refused(call, f"has the equation {equation}", "letters, each once per tensor, and ->")
    space = IndexSpace()
    indices: dict[str, str | None] = {}
    operands = []
    for term, ref in zip(terms, call.arguments[1], strict=True):
        view = builder.views[ref.name]
        if not isinstance(view, View):
            raise builder.refused(call, "reads a list of tensors as one operand", "tensors as operands")
        for letter, dim in zip(term, view.dims, strict=True):
            if indices.get(letter) is None:
                indices[letter] = None if dim.is_unit else space.fresh(dim)
        names = tuple(
            None if d.is_unit else indices[letter] for letter, d in zip(term, view.dims, strict=True)
        )
        operands.append((view, producer_names(view, names)))
    output = tuple(indices[letter] for letter in right)
    if len(operands) == 2:
        return _contracted(builder, call, space, operands, output, dims)
    return builder.emit(call, "einsum", space, operands, output, dims)


def _convolution(builder: Builder, call: TracedCall, dims: Dims) -> HandlerResult:
    """A convolution. Channel, spatial and kernel dims are kept where they are 1: they are identified by
    position."""
    weight, bias = tensor(builder, call, 1, "weight"), optional_tensor(builder, call, 2, "bias")
    if not all(view.is_parameter and view.is_plain for view in (weight, bias) if view is not None):
        raise builder.refused(call, "computes its filters", "parameters as filters and bias")
    spatial = len(weight.dims) - 2
    view = tensor(builder, call, 0)
    view = builder.with_unit_dims(call, view, range(len(view.dims) - spatial - 1, len(view.dims)))
    groups = argument(call, 6, "groups", 1)
    space = IndexSpace()
    names = names_with_unit_dims(view, space)
    read = names[-spatial - 1]
    kernel = tuple(map(space.fresh, weight.dims[-spatial:]))
    windows = tuple(map(space.fresh, dims[-spatial:]))
    is_depthwise = 1 < groups == view.dims[-spatial - 1].size == weight.dims[0].size
    if is_depthwise:
        made, filters = read, (read, *kernel)
    else:
        made = space.fresh(weight.dims[0])
        filters = (made, read if groups == 1 else space.fresh(weight.dims[1]), *kernel)
    own = View(
        producer=weight.producer,
        dims=tuple(space.dims[str(name)] for name in filters),
        axes=tuple(range(len(filters))),
        is_parameter=True,
    )
    operands = [(view, names), (own, filters), *([(bias, (made,))] if bias is not None else [])]
    output = (*names[: -spatial - 1], made, *windows)
    attributes = _windows(builder, call, weight.dims[-spatial:], 1 if is_depthwise else groups)
    has_units = any(dim.is_unit for dim in dims[-spatial - 1 :])
    name = f"{call.name}_spelled_out" if has_units else call.name
    found = builder.emit(call, "convolution", space, operands, output, dims, name=name, attributes=attributes)
    return (
        builder.without_unit_dims(call, view_with_unit_dims(found.producer, dims, output))
        if has_units
        else found
    )


def _windows(builder: Builder, call: TracedCall, kernel: Dims, groups: int) -> Attributes:
    """Stride, padding, dilation and groups, where they are not the defaults."""
    stride = uniform_setting(builder, call, argument(call, 3, "stride", 1))
    dilation = uniform_setting(builder, call, argument(call, 5, "dilation", 1))
    padding = argument(call, 4, "padding", 0)
    if padding == "same":
        padding = [dilation * (dim.size - 1) // 2 for dim in kernel]
    padding = 0 if padding == "valid" else uniform_setting(builder, call, padding)
    found = {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups}
    return {name: value for name, value in found.items() if value != (0 if name == "padding" else 1)}


def _attention(builder: Builder, call: TracedCall, dims: Dims) -> HandlerResult:
    query, key, value = (
        builder.whole(call, tensor(builder, call, at, name))
        for at, name in enumerate(("query", "key", "value"))
    )
    mask = optional_tensor(builder, call, 3, "attn_mask")
    space = IndexSpace()
    lead, (queries, width) = space.names(query.dims[:-2]), space.names(query.dims[-2:])
    key_dims = [
        None if dim.is_unit else (own if dim == query_heads else space.fresh(dim))
        for dim, query_heads, own in zip(key.dims[:-2], query.dims[:-2], lead, strict=True)
    ]
    (keys, value_width) = space.names((key.dims[-2], value.dims[-1]))
    operands = [
        (query, (*lead, queries, width)),
        (key, (*key_dims, keys, width)),
        (value, (*key_dims, keys, value_width)),
    ]
    if mask is not None:
        rows = (*lead, queries, keys)
        seen = rows[len(rows) - len(mask.dims) :]
        units = tuple(None if dim.is_unit else name for dim, name in zip(mask.dims, seen, strict=True))
        operands.append((mask, producer_names(mask, units)))
    attributes: dict[str, Setting] = {}
    if argument(call, 5, "is_causal", False):
        attributes["causal"] = True
    query_heads = [
        name for name, other in zip(lead, key_dims, strict=True) if name is not None and name != other
    ]
    own = [name for name in key_dims if name is not None and name not in lead]
    if query_heads:
        attributes["heads"] = " ".join(query_heads)
    if own:
        attributes["kv_heads"] = " ".join(own)
    output = (*lead, queries, value_width)
    return builder.emit(call, "attention", space, operands, output, dims, attributes=attributes)


def _embedding(builder: Builder, call: TracedCall, dims: Dims) -> HandlerResult:
    table, indices = tensor(builder, call, 0, "weight"), tensor(builder, call, 1, "indices")
    if not table.is_parameter:
        raise builder.refused(
            call, "looks up rows of a tensor that is not a parameter", "a parameter as table"
        )
    space = IndexSpace()
    names, rows = space.names(indices.dims), space.names(table.dims)
    return builder.emit(call, "embedding", space, [(indices, names), (table, rows)], (*names, rows[1]), dims)


PRODUCTS: Mapping[str, Handler] = {
    "linear": _linear,
    **dict.fromkeys(("matmul", "mm", "bmm"), _matmul),
    **dict.fromkeys(("addmm", "baddbmm"), _addmm),
    "einsum": _einsum,
    **{f"conv{n}d": _convolution for n in (1, 2, 3)},
    "scaled_dot_product_attention": _attention,
    "embedding": _embedding,
}
"""By the name of the ATen operator without `aten.` and its overload."""


# Recurrent layers and cells

ZERO_STATE = "a zero initial state; for another one, a loop over nn.LSTMCell or nn.GRUCell"

GATES: Mapping[str, int] = {"lstm": 4, "gru": 3, "lstm_cell": 4, "gru_cell": 3}


def _layers(builder: Builder, call: TracedCall, results: tuple[Dims, ...]) -> HandlerResult:
    """Recurrent layers over time, one operator each. Only the outputs of the last layer are results."""
    _, kind, overload = call.target.split(".")
    if overload != "input":
        raise builder.refused(call, "reads packed sequences", "sequences of equal length")
    if not all(ref.name in builder.zeros for ref in refs_of(call.arguments[1])):
        raise builder.refused(call, "has an initial state that is not known to be zero", ZERO_STATE)
    weights, has_biases, layers, _, _, is_bidirectional, batch_first = call.arguments[2:9]
    if is_bidirectional:
        raise builder.refused(call, "is bidirectional", "bidirectional=False")
    view = tensor(builder, call, 0)
    each = len(weights) // layers
    if each != (4 if has_biases else 2):
        raise builder.refused(call, "projects its state", "no proj_size")
    for layer in range(layers):
        own = [builder.views[ref.name] for ref in weights[layer * each : (layer + 1) * each]]
        name = call.name if layers == 1 else f"{call.name}_{layer}"
        view = _layer(builder, call, view, own, kind, batch_first, name)
    return (view, *(None for _ in results[1:]))


def _layer(
    builder: Builder, call: TracedCall, view: View, weights: Sequence[object], kind: str, batch_first: bool,
    name: str,
) -> View:  # fmt: skip
    place = 1 if batch_first and len(view.dims) > 2 else 0
    view = builder.with_unit_dims(call, view, (place, len(view.dims) - 1))
    space = IndexSpace()
    names = names_with_unit_dims(view, space)
    gated, units, _ = _gate_weights(builder, call, space, weights, GATES[kind], names[-1])
    dims = (*view.dims[:-1], space.dims[units])
    output = (*names[:-1], units)
    settings = {"time": str(names[place])}
    operands = [(view, names), *gated]
    found = builder.emit(call, kind, space, operands, output, dims, name=name, attributes=settings)
    return builder.without_unit_dims(call, view_with_unit_dims(found.producer, dims, output))


def _gate_weights(
    builder: Builder,
    call: TracedCall,
    space: IndexSpace,
    weights: Sequence[object],
    gates: int,
    width: str | None,
) -> tuple[list[tuple[View, Names]], str, str]:
    """Weights and biases with a gate dim, and the names of the unit dim and of the state dim that they
    read."""
    found = [item for item in weights if isinstance(item, View)]
    if not all(view.is_parameter and view.is_plain for view in found):
        raise builder.refused(call, "computes its weights", "parameters as weights")
    first, second, *biases = found
    gate = space.fresh(Dim(gates))
    units = space.fresh(Dim(first.dims[0].size // gates))
    read = space.fresh(Dim(second.dims[1].size))
    shapes = ((gate, units, width), (gate, units, read), *((gate, units) for _ in biases))
    operands: list[tuple[View, Names]] = []
    for weight, shape in zip(found, shapes, strict=True):
        dims = tuple(space.dims[str(dim)] for dim in shape)
        axes = tuple(range(len(shape)))
        operands.append((View(producer=weight.producer, dims=dims, axes=axes, is_parameter=True), shape))
    return operands, units, read


def _lstm_cell(builder: Builder, call: TracedCall, results: tuple[Dims, ...]) -> HandlerResult:
    """One time step. Hidden state and cell state are one tensor; a slice reads each of them."""
    refs = refs_of(call.arguments[1])
    hidden, cell = (builder.views[ref.name] for ref in refs)
    if not isinstance(hidden, View) or not isinstance(cell, View):
        raise builder.refused(call, "reads a list of tensors as one operand", "tensors as operands")
    dims = (Dim(2), *results[0])
    if all(ref.name in builder.zeros for ref in refs):
        state = view_of(builder.unique(f"{call.name}_state"), dims, is_data=True)
    else:
        state = _pair(builder, call, hidden, cell, dims)
    made = _step(builder, call, state, dims)
    return tuple(
        sliced(builder, replace(call, name=f"{call.name}_{name}"), made, 0, place, results[0], drops_dim=True)
        for place, name in enumerate(("hidden", "cell"))
    )


def _pair(builder: Builder, call: TracedCall, hidden: View, cell: View, dims: Dims) -> View:
    """Two states as one tensor: the result of the previous step where they come from it, otherwise a
    concat."""
    made = {node.name: node for node in builder.nodes}
    halves = [made.get(view.producer) for view in (hidden, cell)]
    if all(view.is_plain for view in (hidden, cell)):
        sources = [
            (node.inputs[0].source, node.attributes["start"])
            for node in halves
            if node is not None and node.kind == "slice"
        ]
        if len(sources) == 2 and sources[0][0] == sources[1][0]:
            before = made.get(sources[0][0])
            if before is not None and before.kind == "lstm_cell" and [at for _, at in sources] == [0, 1]:
                return view_of(before.name, dims)
    stacked = [replace(view, dims=(Dim(1), *view.dims), axes=(None, *view.axes)) for view in (hidden, cell)]
    return concatenated(builder, replace(call, name=f"{call.name}_state"), stacked, 0, dims)


def _gru_cell(builder: Builder, call: TracedCall, dims: Dims) -> HandlerResult:
    return _step(builder, call, tensor(builder, call, 1, "hx"), dims)


def _step(builder: Builder, call: TracedCall, state: View, dims: Dims) -> View:
    """The operator of a cell, which reads and makes states of `dims`."""
    view = tensor(builder, call, 0)
    view = builder.with_unit_dims(call, view, (len(view.dims) - 1,))
    state = builder.with_unit_dims(replace(call, name=f"{call.name}_before"), state, (len(dims) - 1,))
    weights = [optional_tensor(builder, call, at, name) for at, name in enumerate(
        ("w_ih", "w_hh", "b_ih", "b_hh"), start=2
    )]  # fmt: skip
    space = IndexSpace()
    names = names_with_unit_dims(view, space)
    kind = call.target.split(".")[1]
    gated, units, read = _gate_weights(builder, call, space, weights, GATES[kind], names[-1])
    lead = space.names(dims[: len(dims) - len(view.dims)])
    before, after = (*lead, *names[:-1], read), (*lead, *names[:-1], units)
    found = builder.emit(call, kind, space, [(view, names), (state, before), *gated], after, dims)
    return builder.without_unit_dims(call, view_with_unit_dims(found.producer, dims, after))


RECURRENT: Mapping[str, TupleHandler] = {"lstm": _layers, "gru": _layers, "lstm_cell": _lstm_cell}
"""Handlers with several results, by the name of the ATen operator without `aten.` and its overload."""

CELLS: Mapping[str, Handler] = {"gru_cell": _gru_cell}
