"""PyTorch's recurrent layers and cells, as kinds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from shardwise.runtime.capture_build import (
    Builder,
    IndexSpace,
    Names,
    View,
    names_with_unit_dims,
    view_of,
    view_with_unit_dims,
)
from shardwise.runtime.capture_sizes import Dim, Dims
from shardwise.runtime.capture_trace import TracedCall, refs_of
from shardwise.runtime.capture_views import (
    Handler,
    HandlerResult,
    TupleHandler,
    concatenated,
    optional_tensor,
    sliced,
    tensor,
)

ZERO_STATE = "layers that begin with zeros, for a given state a loop over nn.LSTMCell or nn.GRUCell"

GATES: Mapping[str, int] = {"lstm": 4, "gru": 3, "lstm_cell": 4, "gru_cell": 3}


def _layers(builder: Builder, call: TracedCall, results: tuple[Dims, ...]) -> HandlerResult:
    """Layers over time, one operator each; of the results only the outputs of the last one."""
    _, kind, overload = call.target.split(".")
    if overload != "input":
        raise builder.refused(call, "reads packed sequences", "sequences of the same length")
    if not all(ref.name in builder.zeros for ref in refs_of(call.arguments[1])):
        raise builder.refused(call, "begins with a state that is not known to be zeros", ZERO_STATE)
    weights, has_biases, layers, _, _, is_bidirectional, batch_first = call.arguments[2:9]
    if is_bidirectional:
        raise builder.refused(call, "works in both directions", "one direction")
    view = tensor(builder, call, 0)
    each = len(weights) // layers
    if each != (4 if has_biases else 2):
        raise builder.refused(call, "projects its state", "layers without proj_size")
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
    """Weights and biases with a dim of gates, and the names of units and of those that they read."""
    found = [item for item in weights if isinstance(item, View)]
    if not all(view.is_parameter and view.is_plain for view in found):
        raise builder.refused(call, "has weights that are computed", "parameters as weights")
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
    """A step; the hidden state and the cell that it makes lie behind each other, and are cut out where they
    are read apart."""
    refs = refs_of(call.arguments[1])
    hidden, cell = (builder.views[ref.name] for ref in refs)
    if not isinstance(hidden, View) or not isinstance(cell, View):
        raise builder.refused(call, "reads several tensors as one", "tensors as operands")
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
    """Two tensors, one behind the other: what another step made, where they are its two."""
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
    """A cell's operator, which reads and makes states of `dims`."""
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
"""Those with several results, by the name of the operator without `aten.` and its overload."""

CELLS: Mapping[str, Handler] = {"gru_cell": _gru_cell}
