"""A user's PyTorch module as a graph of operators, found on the meta device: no tensor is ever filled.

The module is exported (torch.export) and its operators are named as kinds; the backward pass is what the
kinds say of it. What depends on no parameter (masks, tables of angles) is data, made before the step.
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
"""By the name of PyTorch's operator without `aten.` and its overload."""

TUPLE_HANDLERS: Mapping[str, TupleHandler] = {
    **TUPLES,
    **RECURRENT,
    "max": extremum("maximum"),
    "min": extremum("minimum"),
}
"""Those with several results."""


def capture(path: str, name: str, *, batch: int | None = None) -> OpGraph:
    """The graph of the module that the function `name` of the Python file at `path` makes.

    Runs the user's code, with meta as the default device. The function returns `(module, inputs)`, where the
    module's forward gives the loss. Where it takes `batch` (and `seq_len`), it is called with `batch` samples
    (else its default); otherwise the first dim of its first input is the batch, in all inputs that have one
    as long. What grows with it is found by tracing again at twice the size. Raises ConfigError with the line
    that stops the capture.
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
    """The module with its inputs, its trace at the sizes asked for, under "", and those with one of them
    doubled, by its name."""
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
                allowed=f"{error.allowed}; and tables that are long enough for twice the {what}",
            ) from error
    return example, traces, sizes


def operators_of_trace(
    trace: ModuleTrace, doubled: Mapping[str, ModuleTrace], file: str
) -> tuple[Builder, Nodes]:
    """The operators that the loss of a trace is made of, where `doubled` are traces at twice the batch or the
    sequence length. ConfigError where the graph would not compute what the trace does."""
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
    """What a call makes: one of several results, or what the handler of its operator says."""
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
        raise builder.refused(call, "is no operator that graphs have", ADVICE.get(name, OTHERWISE))
    return HANDLERS[name](builder, call, results[0])


def _loss_of(builder: Builder, trace: ModuleTrace) -> str:
    """The operator that makes the one result that is a number; others (logits) are left out."""
    found = {name: view for name in trace.results if isinstance(view := builder.views.get(name), View)}
    losses = {
        name: view
        for name, view in found.items()
        if not view.is_data and all(dim.is_unit for dim in view.dims)
    }
    if len(losses) != 1:
        shapes = ", ".join(str([dim.size for dim in view.dims]) for view in found.values())
        raise ConfigError(
            "does not return a loss" if not losses else "returns several numbers",
            file=builder.file,
            key="forward",
            found=f"results of shape {shapes}" if shapes else "nothing that depends on a parameter",
            allowed="a module whose forward returns one number, the loss that is trained",
        )
    ((name, view),) = losses.items()
    check_detached(trace, (name,), builder.file)
    return view.producer
