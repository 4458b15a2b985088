"""Captures a user's PyTorch module as an operator graph, on the meta device: `capture`.

torch.export exports the module and handlers turn its ATen calls into operators; the backward pass follows
from their kinds. Values that depend on no parameter (masks, tables of angles) are data, computed before the
step.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

from shardwise.errors import ConfigError
from shardwise.graph import OpGraph, check_graph
from shardwise.inputs import printable
from shardwise.runtime.graph_capture.aten_elementwise import (
    LOSSES,
    NORMS,
    POINTWISE,
    TUPLES,
    UNSUPPORTED_RESULT,
    VIEWS,
    Handler,
    HandlerResult,
    TupleHandler,
    extremum,
)
from shardwise.runtime.graph_capture.aten_products import CELLS, PRODUCTS, RECURRENT
from shardwise.runtime.graph_capture.blocks import Nodes, blocks_of, needed
from shardwise.runtime.graph_capture.builder import (
    Builder,
    Dims,
    View,
    dims_by_value,
    varying_numbers,
    view_of,
)
from shardwise.runtime.graph_capture.checks import (
    ADVICE,
    OTHERWISE,
    check_detached,
    check_parameters,
    check_trace,
    partly_read_parameters,
    zeros_of,
)
from shardwise.runtime.graph_capture.torch_export import (
    DEFAULT_BATCH,
    Example,
    ModuleTrace,
    TracedCall,
    batch_of,
    example_of,
    parameter_default,
    trace_of,
    user_function,
    with_batch,
)

HANDLERS: Mapping[str, Handler] = {**VIEWS, **POINTWISE, **NORMS, **PRODUCTS, **CELLS, **LOSSES}
"""By the name of the ATen operator without `aten.` and its overload."""

TUPLE_HANDLERS: Mapping[str, TupleHandler] = {
    **TUPLES,
    **RECURRENT,
    "max": extremum("maximum"),
    "min": extremum("minimum"),
}
"""Handlers of operators with several results."""


def capture(path: str, name: str, *, batch: int | None = None) -> OpGraph:
    """The graph of the module that the function `name` of the Python file at `path` makes.

    Runs the user's code with meta as the default device. The function returns `(module, inputs)`; the
    module's forward returns the loss. A function with a parameter `batch` (and `seq_len`) is called with it;
    `batch` None means its default. Otherwise the batch is the first dim of the first input, and of all inputs
    with an equal first dim. Growth of sizes is found by tracing again at twice the size. ConfigError with the
    source line that stops the capture.
    """
    file = os.path.realpath(path)
    function = user_function(path, name)
    example, traces, sizes = _traces(function, file, batch)
    trace = traces.pop("")
    builder, nodes = operators_of_trace(trace, traces, file)
    check_parameters(builder, nodes, example.module, trace.gradients)
    read = {operand.source for node in nodes for operand in node.inputs}
    inputs = {value: shape for value, shape in builder.inputs.items() if value in read}
    blocks = blocks_of(nodes, inputs)
    used = {operand.source for block in blocks for node in block.operators for operand in node.inputs}
    graph = OpGraph(
        name=printable(name),
        inputs={value: shape for value, shape in inputs.items() if value in used},
        blocks=blocks,
        batch=sizes["batch"],
        seq_len=sizes.get("seq_len"),
        growth={
            dim: growth
            for dim, growth in builder.growth.items()
            if any(dim in node.dims for block in blocks for node in block.operators)
        },
        source=f"captured from {printable(os.path.basename(path))}:{printable(name)}",
    )
    check_graph(graph)
    return graph


def _traces(
    function: Callable[..., Any], file: str, batch: int | None
) -> tuple[Example, dict[str, ModuleTrace], dict[str, int]]:
    """The module with its inputs, its traces, and its sizes.

    The trace at the requested sizes has the key "", the traces with one size doubled have the name of that
    size.
    """
    has_batch, own_batch = parameter_default(function, "batch")
    has_seq_len, seq_len = parameter_default(function, "seq_len")
    if has_seq_len and seq_len is None:
        raise ConfigError(
            "has no default", file=file, key=f"{function.__name__}(seq_len)", allowed="seq_len: int = 2048"
        )
    sizes = {"batch": batch or own_batch or DEFAULT_BATCH} if has_batch else {}
    if seq_len is not None:
        sizes["seq_len"] = seq_len
    example = example_of(function, file, sizes)
    if not has_batch:
        found = batch_of(example, file)
        sizes["batch"] = batch or found
        example = with_batch(example, found, sizes["batch"])
    traces = {"": trace_of(example.module, example.inputs, example.named, file)}
    for what, size in sizes.items():
        if what == "batch" and not has_batch:
            other = with_batch(example, size, 2 * size)
        else:
            other = example_of(function, file, {**sizes, what: 2 * size})
        try:
            traces[what] = trace_of(other.module, other.inputs, other.named, file)
        except ConfigError as error:
            raise ConfigError(
                f"{error.message} when the {what} doubles, to {2 * size}",
                file=error.file,
                key=error.key,
                found=error.found,
                allowed=f"{error.allowed}; and tables that suffice for twice the {what}",
            ) from error
    return example, traces, sizes


def operators_of_trace(
    trace: ModuleTrace, doubled: Mapping[str, ModuleTrace], file: str
) -> tuple[Builder, Nodes]:
    """The operators that the loss of a trace depends on.

    `doubled` are traces at twice the batch or the sequence length. ConfigError where the graph would not
    compute what the trace computes.
    """
    check_trace(trace, file)
    builder = _built(trace, doubled, file, frozenset())
    nodes = needed(builder.nodes, _loss_of(builder, trace))
    partly_read = partly_read_parameters(nodes, builder.shapes)
    if partly_read:
        builder = _built(trace, doubled, file, partly_read)
        nodes = needed(builder.nodes, _loss_of(builder, trace))
    return builder, nodes


def _built(
    trace: ModuleTrace, doubled: Mapping[str, ModuleTrace], file: str, lookup_tables: frozenset[str]
) -> Builder:
    dims = dims_by_value(trace, doubled, file)
    builder = Builder(
        file=file,
        varying=varying_numbers(trace, doubled),
        zeros=zeros_of(trace),
        shapes=dict(trace.parameters.values()),
        lookup_tables=lookup_tables,
    )
    builder.views = {value: view_of(value, found[0], is_data=True) for value, found in dims.items()}
    for value, (own, _) in trace.parameters.items():
        builder.views[value] = view_of(own, dims[value][0], is_parameter=True)
    for call in trace.trained:
        builder.views[call.name] = _result_of(builder, call, dims[call.name])
    return builder


def _result_of(builder: Builder, call: TracedCall, results: tuple[Dims, ...]) -> HandlerResult:
    """The view of a call's result: one of several results, or what the handler of its operator returns."""
    name = call.target.split(".")[1].rstrip("_") if call.target.startswith("aten.") else call.target
    if name == "getitem":
        whole = builder.views[call.arguments[0].name]
        made = whole[call.arguments[1]] if isinstance(whole, tuple) else whole
        return UNSUPPORTED_RESULT if made is None else made
    if name in TUPLE_HANDLERS:
        return TUPLE_HANDLERS[name](builder, call, results)
    if name.startswith("_assert"):
        return UNSUPPORTED_RESULT
    if name not in HANDLERS:
        raise builder.refused(call, "has no operator in graphs", ADVICE.get(name, OTHERWISE))
    return HANDLERS[name](builder, call, results[0])


def _loss_of(builder: Builder, trace: ModuleTrace) -> str:
    """The operator that makes the scalar result, which is the loss; other results (logits) are left out."""
    found = {name: view for name in trace.results if isinstance(view := builder.views.get(name), View)}
    losses = {
        name: view
        for name, view in found.items()
        if not view.is_data and all(dim.is_unit for dim in view.dims)
    }
    if len(losses) != 1:
        shapes = ", ".join(str([dim.size for dim in view.dims]) for view in found.values())
        raise ConfigError(
            "does not return a loss" if not losses else "returns several scalars",
            file=builder.file,
            key="forward",
            found=f"results of shape {shapes}" if shapes else "nothing that depends on a parameter",
            allowed="a module whose forward returns one scalar, the loss",
        )
    ((name, view),) = losses.items()
    check_detached(trace, (name,), builder.file)
    return view.producer
