"""PyTorch's normalisations and softmax, as kinds."""

from __future__ import annotations

from collections.abc import Mapping

from shardwise.runtime.capture_build import Builder, IndexSpace, Names, Setting, View
from shardwise.runtime.capture_sizes import Dims
from shardwise.runtime.capture_trace import TracedCall
from shardwise.runtime.capture_views import Handler, HandlerResult, argument, optional_tensor, tensor


def _norm(kind: str, weight_at: int) -> Handler:
    """A norm over the last dims: its input, their sizes, a scale and a shift."""

    def handler(builder: Builder, call: TracedCall, dims: Dims) -> HandlerResult:
        view = builder.plain(call, tensor(builder, call, 0))
        space = IndexSpace()
        names = space.names(view.dims)
        count = len(argument(call, 1, "normalized_shape"))
        over = [name for name in names[len(names) - count :] if name is not None]
        weights = _weights(builder, call, weight_at, names[len(names) - count :])
        return builder.emit(
            call, kind, space, [(view, names), *weights], names, dims, attributes={"over": " ".join(over)}
        )

    return handler


def _weights(builder: Builder, call: TracedCall, place: int, names: Names) -> list[tuple[View, Names]]:
    """Scale and shift, where there are."""
    found = (optional_tensor(builder, call, place + at, name) for at, name in enumerate(("weight", "bias")))
    return [(view, names) for view in found if view is not None and view.is_parameter]


def _batch_norm(builder: Builder, call: TracedCall, dims: Dims) -> HandlerResult:
    """Over the whole batch; by kept statistics it is a function of elements."""
    view = builder.plain(call, tensor(builder, call, 0))
    space = IndexSpace()
    names = space.names(view.dims)
    weights = _weights(builder, call, 1, names[1:2])
    if not argument(call, 5, "training", True):
        operands = [(view, names), *weights]
        return builder.emit(
            call, "elementwise", space, operands, names, dims, attributes={"function": "nonlinear"}
        )
    over = " ".join(name for at, name in enumerate(names) if at != 1 and name is not None)
    return builder.emit(
        call, "batch_norm", space, [(view, names), *weights], names, dims, attributes={"over": over}
    )


def _group_norm(builder: Builder, call: TracedCall, dims: Dims) -> HandlerResult:
    view = builder.plain(call, tensor(builder, call, 0))
    space = IndexSpace()
    names = space.names(view.dims)
    weights = _weights(builder, call, 2, names[1:2])
    groups = argument(call, 1, "num_groups")
    return builder.emit(
        call,
        "group_norm",
        space,
        [(view, names), *weights],
        names,
        dims,
        attributes={"groups": groups, "channel": str(names[1])},
    )


def _instance_norm(builder: Builder, call: TracedCall, dims: Dims) -> HandlerResult:
    """A group of each channel."""
    view = builder.plain(call, tensor(builder, call, 0))
    space = IndexSpace()
    names = space.names(view.dims)
    weights = _weights(builder, call, 1, names[1:2])
    settings: dict[str, Setting] = {"groups": view.dims[1].size, "channel": str(names[1])}
    operands = [(view, names), *weights]
    return builder.emit(call, "group_norm", space, operands, names, dims, attributes=settings)


def _softmax(builder: Builder, call: TracedCall, dims: Dims) -> HandlerResult:
    view = builder.plain(call, tensor(builder, call, 0))
    space = IndexSpace()
    names = space.names(view.dims)
    over = str(names[argument(call, 1, "dim")])
    function = "log_softmax" if "log" in call.target else "softmax"
    return builder.emit(
        call, "softmax", space, [(view, names)], names, dims, attributes={"over": over, "function": function}
    )


NORMS: Mapping[str, Handler] = {
    "layer_norm": _norm("layer_norm", 2),
    "rms_norm": _norm("rms_norm", 2),
    "batch_norm": _batch_norm,
    "group_norm": _group_norm,
    "instance_norm": _instance_norm,
    **dict.fromkeys(("softmax", "_softmax", "log_softmax", "_log_softmax"), _softmax),
}
"""By the name of the operator without `aten.` and its overload."""
