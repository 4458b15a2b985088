"""Handlers of ATen calls that turn each into graph operators: views, elementwise functions, norms, losses.

`VIEWS` and `TUPLES` are reshapes, slices and the like: most only change the names of dims. `POINTWISE` has
elementwise functions, pooling and reductions, `NORMS` norms and softmax, `LOSSES` losses. `aten_products` has
the other handlers.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from math import isfinite
from typing import Any

from shardwise.runtime.graph_capture.builder import (
    CONSTANT,
    Builder,
    Dims,
    IndexSpace,
    Names,
    Setting,
    View,
    permuted,
    producer_names,
    view_of,
)
from shardwise.runtime.graph_capture.torch_export import Ref, TracedCall

# Views

HandlerResult = View | tuple[View | None, ...]
TupleHandler = Callable[[Builder, TracedCall, tuple[Dims, ...]], HandlerResult]

UNSUPPORTED_RESULT: HandlerResult = ()
"""A result that graphs do not have, such as the final state of a recurrent layer."""

Handler = Callable[[Builder, TracedCall, Dims], HandlerResult]


def argument(call: TracedCall, place: int, name: str, default: Any = None) -> Any:
    """An argument of a call by its position or its name."""
    return call.arguments[place] if place < len(call.arguments) else call.named.get(name, default)


def tensor(builder: Builder, call: TracedCall, place: int, name: str = "input") -> View:
    """The view that is an argument of a call; ConfigError where there is none."""
    found = optional_tensor(builder, call, place, name)
    if found is None:
        raise builder.refused(call, f"has no tensor {name}", "tensors as operands")
    return found


def optional_tensor(builder: Builder, call: TracedCall, place: int, name: str) -> View | None:
    """The view that is an argument of a call, or None."""
    found = argument(call, place, name)
    view = builder.views[found.name] if isinstance(found, Ref) else None
    if view == UNSUPPORTED_RESULT:
        raise builder.refused(call, "reads a result that graphs do not have", "first results only")
    return view if isinstance(view, View) else None


def same(builder: Builder, call: TracedCall, dims: Dims) -> HandlerResult:
    """The tensor unchanged: casts, copies, detach."""
    return tensor(builder, call, 0)


def _reshape(builder: Builder, call: TracedCall, dims: Dims) -> HandlerResult:
    """A reshape operator; only new names where just dims of size 1 come or go."""
    view = tensor(builder, call, 0)
    if [dim for dim in view.dims if not dim.is_unit] == [dim for dim in dims if not dim.is_unit]:
        places = iter(axis for dim, axis in zip(view.dims, view.axes, strict=True) if not dim.is_unit)
        return replace(view, dims=dims, axes=tuple(None if dim.is_unit else next(places) for dim in dims))
    view = builder.plain(call, view)
    space = IndexSpace()
    operand = space.names(view.dims)
    alike = 0
    while alike < min(len(dims), len(view.dims)) and dims[alike] == view.dims[alike]:
        alike += 1
    output = (*operand[:alike], *space.names(dims[alike:]))
    return builder.emit(call, "reshape", space, [(view, operand)], output, dims)


def _expand(builder: Builder, call: TracedCall, dims: Dims) -> HandlerResult:
    """Broadcasting: new leading dims, and dims of size 1 that repeat."""
    return _expanded(tensor(builder, call, 0), dims)


def _expanded(view: View, dims: Dims) -> View:
    axes = (*(None for _ in range(len(dims) - len(view.dims))), *view.axes)
    return replace(view, dims=dims, axes=axes)


def broadcast_together(builder: Builder, call: TracedCall, results: tuple[Dims, ...]) -> HandlerResult:
    """Each tensor expanded to the dims of all."""
    views = (builder.views[ref.name] for ref in call.arguments[0])
    pairs = zip(views, results, strict=True)
    return tuple(_expanded(view, dims) for view, dims in pairs if isinstance(view, View))


def _transpose(builder: Builder, call: TracedCall, dims: Dims) -> HandlerResult:
    view = tensor(builder, call, 0)
    order = list(range(len(view.dims)))
    if len(order) > 1:
        one, two = (0, 1) if len(call.arguments) < 3 else call.arguments[1:3]
        order[one], order[two] = order[two], order[one]
    return permuted(view, order)


def _permute(builder: Builder, call: TracedCall, dims: Dims) -> HandlerResult:
    view = tensor(builder, call, 0)
    return permuted(view, [at % len(view.dims) for at in argument(call, 1, "dims")])


def sliced(
    builder: Builder, call: TracedCall, view: View, at: int, start: int, dims: Dims, *, drops_dim: bool
) -> View:
    """A range of elements along dim `at` from `start`; `drops_dim` selects one element and drops the dim."""
    if view.dims[at].is_unit or (not drops_dim and view.dims[at] == dims[at]):
        keep = [place for place in range(len(view.dims)) if not (drops_dim and place == at)]
        return permuted(view, keep)
    if view.axes[at] is None:  # repeated along this dim: a part equals the whole
        keep = [place for place in range(len(view.dims)) if not (drops_dim and place == at)]
        return replace(permuted(view, keep), dims=dims)
    if view.is_parameter:
        rows = range(start, start + (1 if drops_dim else dims[at].size))
        return _part_of_parameter(builder, call, view, at, rows, dims, drops_dim=drops_dim)
    view = builder.whole(call, view)
    space = IndexSpace()
    operand = space.names(view.dims)
    remaining = tuple(name for place, name in enumerate(operand) if place != at)
    if drops_dim:
        return builder.emit(
            call, "slice", space, [(view, operand)], remaining, dims, attributes={"start": start}
        )
    made = None if dims[at].is_unit else space.fresh(dims[at])
    output = (*operand[:at], made, *operand[at + 1 :])
    return builder.emit(call, "slice", space, [(view, operand)], output, dims, attributes={"start": start})


def _part_of_parameter(
    builder: Builder, call: TracedCall, view: View, at: int, rows: range, dims: Dims, *, drops_dim: bool
) -> View:
    """A range of a parameter as a parameter of its own, `in_proj.weight[0:64]`.

    It is an embedding lookup in the parameter instead where such parts do not tile it, or where the number of
    parts grows.
    """
    if view.is_expanded or "[" in view.producer:
        raise builder.refused(call, "slices a view of a parameter", "slices of whole parameters")
    is_growing = not drops_dim and dims[at].growth != CONSTANT
    if is_growing or rows.step > 1 or not view.is_plain or view.producer in builder.lookup_tables:
        return _embedding_lookup(builder, call, view, at, rows, dims, drops_dim=drops_dim)
    own = [place for place, size in enumerate(builder.shapes[view.producer]) if size != 1]
    front = ":, " * own[view.axes[at] or 0]
    return view_of(f"{view.producer}[{front}{rows.start}:{rows.stop}]", dims, is_parameter=True)


def _embedding_lookup(
    builder: Builder, call: TracedCall, view: View, at: int, rows: range, dims: Dims, *, drops_dim: bool
) -> View:
    """An embedding lookup of `rows` in a parameter that stays whole; the indices are data."""
    space = IndexSpace()
    table = space.names(view.dims)
    made = None if drops_dim or dims[at].is_unit else space.fresh(dims[at])
    output = (*table[:at], *(() if drops_dim else (made,)), *table[at + 1 :])
    own = builder.unique(f"{call.name}_rows")
    builder.rows[own] = rows
    indices = view_of(own, () if drops_dim else (dims[at],), is_data=True)
    operands = [(indices, () if drops_dim else (made,)), (view, table)]
    return builder.emit(call, "embedding", space, operands, output, dims, name=f"{call.name}_lookup")


def _slice(builder: Builder, call: TracedCall, dims: Dims) -> HandlerResult:
    """A slice. With a step, an activation's slice is modelled as the first elements of the same number; rows
    of a parameter are exact."""
    view = tensor(builder, call, 0)
    at = argument(call, 1, "dim", 0) % len(view.dims)
    start, step = argument(call, 2, "start", 0) or 0, argument(call, 4, "step", 1)
    first = max(start + view.dims[at].size, 0) if start < 0 else start
    if step > 1 and view.is_parameter and view.axes[at] is not None:
        rows = range(first, first + step * dims[at].size, step)
        return _part_of_parameter(builder, call, view, at, rows, dims, drops_dim=False)
    return sliced(builder, call, view, at, 0 if step > 1 else first, dims, drops_dim=False)


def _narrow(builder: Builder, call: TracedCall, dims: Dims) -> HandlerResult:
    view = tensor(builder, call, 0)
    return sliced(
        builder, call, view, call.arguments[1] % len(view.dims), call.arguments[2], dims, drops_dim=False
    )


def _select(builder: Builder, call: TracedCall, dims: Dims) -> HandlerResult:
    view = tensor(builder, call, 0)
    at = call.arguments[1] % len(view.dims)
    return sliced(builder, call, view, at, call.arguments[2] % view.dims[at].size, dims, drops_dim=True)


def parts(builder: Builder, call: TracedCall, results: tuple[Dims, ...]) -> HandlerResult:
    """Chunks and splits along a dim as one slice each; `unbind` drops the dim."""
    view = tensor(builder, call, 0)
    drops_dim = call.target.startswith("aten.unbind")
    at = argument(call, 1 if drops_dim else 2, "dim", 0) % len(view.dims)
    made, start = [], 0
    for place, dims in enumerate(results):
        one = replace(call, name=f"{call.name}_{place}")
        made.append(sliced(builder, one, view, at, start, dims, drops_dim=drops_dim))
        start += 1 if drops_dim else dims[at].size
    return tuple(made)


def _concat(builder: Builder, call: TracedCall, dims: Dims) -> HandlerResult:
    every = [view for ref in call.arguments[0] if isinstance(view := builder.views[ref.name], View)]
    # Caches start with tensors without elements, some with one dim; PyTorch ignores them.
    views = [view for view in every if all(dim.size for dim in view.dims)]
    at = argument(call, 1, "dim", 0) % len(dims)
    return views[0] if len(views) == 1 else concatenated(builder, call, views, at, dims)


def concatenated(builder: Builder, call: TracedCall, views: Sequence[View], at: int, dims: Dims) -> View:
    """A concat of tensors along the dim at `at`."""
    views = [builder.with_unit_dims(call, view, (at,)) for view in views]
    space = IndexSpace()
    output = space.names(dims)
    operands = [(view, (*output[:at], space.fresh(view.dims[at]), *output[at + 1 :])) for view in views]
    return builder.emit(call, "concat", space, operands, output, dims, attributes={"over": str(output[at])})


VIEWS: Mapping[str, Handler] = {
    **dict.fromkeys(
        ("view", "reshape", "_unsafe_view", "flatten", "unflatten", "squeeze", "unsqueeze", "view_as"),
        _reshape,
    ),
    **dict.fromkeys(("expand", "expand_as"), _expand),
    **dict.fromkeys(("transpose", "t", "swapaxes"), _transpose),
    **dict.fromkeys(
        (
            "contiguous", "clone", "detach", "alias", "to", "_to_copy", "type_as", "float", "half",
            "bfloat16", "lift_fresh_copy",
        ),
        same,
    ),
    "permute": _permute,
    "slice": _slice,
    "narrow": _narrow,
    "select": _select,
    "cat": _concat,
    "concat": _concat,
}  # fmt: skip
"""By the name of the ATen operator without `aten.` and its overload."""

TUPLES: Mapping[str, TupleHandler] = {
    **dict.fromkeys(("chunk", "split", "split_with_sizes", "tensor_split", "unbind"), parts),
    "broadcast_tensors": broadcast_together,
}
"""Operators with several results."""


# Elementwise functions, pooling and reductions

FUNCTIONS: Mapping[str, str] = {
    "add": "add", "sub": "subtract", "mul": "multiply", "div": "divide", "neg": "negate", "relu": "relu",
    "sigmoid": "sigmoid", "tanh": "tanh", "exp": "exp", "sqrt": "sqrt", "rsqrt": "rsqrt", "gelu": "gelu",
    "silu": "silu", "log": "log", "square": "square", "softplus": "softplus", "clamp": "clamp",
    "clamp_min": "clamp", "clamp_max": "clamp", "maximum": "maximum", "minimum": "minimum", "where": "where",
    "masked_fill": "masked_fill", "hardtanh": "clamp", "relu6": "clamp",
}  # fmt: skip
"""The graph's function of each ATen operator."""

NONLINEAR = (
    "leaky_relu", "elu", "selu", "celu", "mish", "hardswish", "hardsigmoid", "logsigmoid", "log_sigmoid",
    "erf", "abs", "sin", "cos", "reciprocal", "log1p", "expm1", "sign", "floor", "addcmul", "lerp",
    "rsub", "prelu",
)  # fmt: skip
"""ATen operators that the graph has as the function `nonlinear`."""

WITH_SCALAR: Mapping[str, str] = {
    "add": "shift",
    "sub": "shift",
    "mul": "scale",
    "div": "scale",
    "rsub": "shift",
}
"""The functions of a tensor and a number."""

OPERANDS: Mapping[str, int] = {"masked_fill": 2, "where": 3}
"""Number of tensor operands of a function. With another number of tensors it becomes `nonlinear`."""


def broadcast(
    builder: Builder,
    call: TracedCall,
    function: str,
    views: Sequence[View],
    dims: Dims,
    *,
    number: float | None = None,
) -> View:
    """An elementwise operator with broadcasting; `number` is the function's number."""
    space = IndexSpace()
    output = space.names(dims)
    operands = []
    for view in views:
        own = output[len(output) - len(view.dims) :]
        seen = tuple(None if dim.is_unit else name for dim, name in zip(view.dims, own, strict=True))
        operands.append((view, producer_names(view, seen)))
    attributes: dict[str, Setting] = {"function": function}
    if number is not None:
        attributes["number"] = number
    return builder.emit(call, "elementwise", space, operands, output, dims, attributes=attributes)


def _elementwise(builder: Builder, call: TracedCall, dims: Dims) -> HandlerResult:
    name = call.target.split(".")[1].rstrip("_")
    values = (*call.arguments, *call.named.values())
    views = [
        view
        for value in values
        if isinstance(value, Ref) and isinstance(view := builder.views[value.name], View)
    ]
    function = FUNCTIONS.get(name, "nonlinear")
    if len(views) == 1:
        function = WITH_SCALAR.get(name, function)
    if len(views) == 2 and views[0] == views[1] and function == "multiply":
        function, views = "square", views[:1]
    if call.named.get("rounding_mode") or len(views) != OPERANDS.get(function, len(views)):
        function = "nonlinear"
    return broadcast(builder, call, function, views, dims, number=_number(builder, call, name, function))


def _number(builder: Builder, call: TracedCall, name: str, function: str) -> float | None:
    """The number of a function that has one, if it is finite and equal at every batch and sequence length."""
    value = argument(call, 2 if function == "masked_fill" else 1, "value", None)
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value)
    if function not in ("scale", "shift", "masked_fill", "power") or not is_number or name == "rsub":
        return None
    if call.name in builder.varying:
        return None
    if function == "shift":
        return float(value) * float(call.named.get("alpha", 1)) * (-1.0 if name == "sub" else 1.0)
    return 1.0 / float(value) if name == "div" and value else float(value)


def _power(builder: Builder, call: TracedCall, dims: Dims) -> HandlerResult:
    function = "square" if argument(call, 1, "exponent") == 2 else "power"
    number = _number(builder, call, "pow", function)
    return broadcast(builder, call, function, [tensor(builder, call, 0)], dims, number=number)


def _dropout(builder: Builder, call: TracedCall, dims: Dims) -> HandlerResult:
    view = tensor(builder, call, 0)
    is_off = argument(call, 1, "p", 0.5) == 0.0 or not argument(call, 2, "train", True)
    return view if is_off else broadcast(builder, call, "dropout", [view], dims)


def _stack(builder: Builder, call: TracedCall, dims: Dims) -> HandlerResult:
    """An elementwise function with as many elements as its operands have together: models the cost of a
    stack."""
    at = argument(call, 1, "dim", 0) % len(dims)
    views = []
    for ref in call.arguments[0]:
        view = builder.views[ref.name]
        if isinstance(view, View):
            unit = view_of("", (*view.dims[:at], type(dims[at])(1), *view.dims[at:])).dims
            axes = (*view.axes[:at], None, *view.axes[at:])
            views.append(View(
                producer=view.producer, dims=unit, axes=axes, is_parameter=view.is_parameter,
                is_data=view.is_data
            ))  # fmt: skip
    return broadcast(builder, call, "nonlinear", views, dims)


def _reduction(function: str, *, dim_at: int = 1, of: str = "", then: str = "") -> Handler:
    """A handler of a reduction over some dims (all if none is given).

    `of` is an elementwise function before the reduction, `then` one after it.
    """

    def handler(builder: Builder, call: TracedCall, dims: Dims) -> HandlerResult:
        view = tensor(builder, call, 0)
        found = argument(call, dim_at, "dim")
        over = [found] if isinstance(found, int) else found or list(range(len(view.dims)))
        if of:
            view = broadcast(builder, replace(call, name=f"{call.name}_{of}"), of, [view], view.dims)
        made = reduced(builder, call, view, function, {at % len(view.dims) for at in over}, dims)
        own = replace(call, name=f"{call.name}_{then}")
        return broadcast(builder, own, then, [made], dims) if then else made

    return handler


def reduced(
    builder: Builder, call: TracedCall, view: View, function: str, reduced_dims: Collection[int], dims: Dims
) -> View:
    """A reduction over the dims at `reduced_dims`."""
    view = builder.whole(call, view)
    every = range(len(view.dims))
    if all(view.dims[at].is_unit for at in reduced_dims):
        keep = [at for at in every if len(dims) == len(view.dims) or at not in reduced_dims]
        return replace(view, dims=dims, axes=tuple(view.axes[at] for at in keep))
    space = IndexSpace()
    names = space.names(view.dims)
    remaining = tuple(name for at, name in enumerate(names) if at not in reduced_dims)
    settings = {"function": function}
    return builder.emit(call, "reduce", space, [(view, names)], remaining, dims, attributes=settings)


def extremum(function: str) -> TupleHandler:
    """A handler of a maximum or minimum along a dim; graphs do not have its index."""

    def handler(builder: Builder, call: TracedCall, results: tuple[Dims, ...]) -> HandlerResult:
        view = tensor(builder, call, 0)
        if not call.is_tuple:
            everything = range(len(view.dims))
            return reduced(builder, call, view, function, everything, results[0])
        at = argument(call, 1, "dim") % len(view.dims)
        return (reduced(builder, call, view, function, (at,), results[0]), None)

    return handler


def _glu(builder: Builder, call: TracedCall, dims: Dims) -> HandlerResult:
    """Half of the elements times the sigmoid of the other half."""
    view = tensor(builder, call, 0)
    at = argument(call, 1, "dim", -1) % len(view.dims)
    half = dims[at].size
    halves = [
        sliced(builder, replace(call, name=f"{call.name}_{n}"), view, at, n * half, dims, drops_dim=False)
        for n in range(2)
    ]
    return broadcast(builder, call, "nonlinear", halves, dims)


def _pool(function: str) -> Handler:
    """A handler of pooling over the last dims; the operator's name ends with their number."""

    def handler(builder: Builder, call: TracedCall, dims: Dims) -> HandlerResult:
        spatial = int(call.target.split(".")[1].rstrip("_")[-2])
        view, space, names = _named(builder, call)
        is_adaptive = "adaptive" in call.target
        if is_adaptive and function == "average" and all(dim.is_unit for dim in dims[-spatial:]):
            remaining = names[:-spatial]
            return builder.emit(
                call, "reduce", space, [(view, names)], remaining, dims, attributes={"function": "mean"}
            )
        if any(dim.is_unit for dim in (*view.dims[-spatial:], *dims[-spatial:])):
            raise builder.refused(call, "has a single window", "mean(), amax() or an adaptive average")
        attributes: dict[str, Setting] = {"function": function, "spatial": spatial}
        if not is_adaptive:
            kernel = uniform_setting(builder, call, argument(call, 1, "kernel_size"))
            attributes["kernel"] = kernel
            attributes["stride"] = uniform_setting(builder, call, argument(call, 2, "stride") or kernel)
            if padding := uniform_setting(builder, call, argument(call, 3, "padding", 0)):
                attributes["padding"] = padding
        output = (*names[:-spatial], *space.names(dims[-spatial:]))
        return builder.emit(call, "pool", space, [(view, names)], output, dims, attributes=attributes)

    return handler


def uniform_setting(builder: Builder, call: TracedCall, value: int | list[int]) -> int:
    """A setting that is equal along all spatial dims; ConfigError otherwise."""
    values = {value} if isinstance(value, int) else set(value)
    if len(values) != 1:
        raise builder.refused(call, "has windows that differ by dim", "square windows, strides and padding")
    return int(values.pop())


POINTWISE: Mapping[str, Handler] = {
    **dict.fromkeys((*FUNCTIONS, *NONLINEAR), _elementwise),
    "pow": _power,
    "dropout": _dropout,
    "stack": _stack,
    "sum": _reduction("sum"),
    "mean": _reduction("mean"),
    "amax": _reduction("maximum"),
    "amin": _reduction("minimum"),
    "linalg_vector_norm": _reduction("sum", dim_at=2, of="square", then="sqrt"),
    "std": _reduction("mean", of="square", then="sqrt"),
    "var": _reduction("mean", of="square", then="nonlinear"),
    "logsumexp": _reduction("sum", of="exp", then="log"),
    "glu": _glu,
    **{f"max_pool{n}d": _pool("maximum") for n in (1, 2, 3)},
    **{f"avg_pool{n}d": _pool("average") for n in (1, 2, 3)},
    **{f"adaptive_avg_pool{n}d": _pool("average") for n in (1, 2, 3)},
}


# Norms and softmax


def _named(builder: Builder, call: TracedCall) -> tuple[View, IndexSpace, Names]:
    """The first operand of a call, with the names of its dims in an index space of its own."""
    view = builder.plain(call, tensor(builder, call, 0))
    space = IndexSpace()
    return view, space, space.names(view.dims)


def _norm(kind: str, weight_at: int) -> Handler:
    """A handler of a norm over the last dims, with optional scale and shift."""

    def handler(builder: Builder, call: TracedCall, dims: Dims) -> HandlerResult:
        view, space, names = _named(builder, call)
        count = len(argument(call, 1, "normalized_shape"))
        over = [name for name in names[len(names) - count :] if name is not None]
        weights = _weights(builder, call, weight_at, names[len(names) - count :])
        return builder.emit(
            call, kind, space, [(view, names), *weights], names, dims, attributes={"over": " ".join(over)}
        )

    return handler


def _weights(builder: Builder, call: TracedCall, place: int, names: Names) -> list[tuple[View, Names]]:
    """Scale and shift, where present."""
    found = (optional_tensor(builder, call, place + at, name) for at, name in enumerate(("weight", "bias")))
    return [(view, names) for view in found if view is not None and view.is_parameter]


def _batch_norm(builder: Builder, call: TracedCall, dims: Dims) -> HandlerResult:
    """Statistics over the whole batch. With running statistics it is an elementwise function."""
    view, space, names = _named(builder, call)
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
    """A group norm; an instance norm has one group per channel."""
    view, space, names = _named(builder, call)
    has_groups = "group_norm" in call.target
    weights = _weights(builder, call, 2 if has_groups else 1, names[1:2])
    groups = argument(call, 1, "num_groups") if has_groups else view.dims[1].size
    settings: dict[str, Setting] = {"groups": groups, "channel": str(names[1])}
    operands = [(view, names), *weights]
    return builder.emit(call, "group_norm", space, operands, names, dims, attributes=settings)


def _softmax(builder: Builder, call: TracedCall, dims: Dims) -> HandlerResult:
    view, space, names = _named(builder, call)
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
    "instance_norm": _group_norm,
    **dict.fromkeys(("softmax", "_softmax", "log_softmax", "_log_softmax"), _softmax),
}
"""By the name of the ATen operator without `aten.` and its overload."""


# Losses


def _cross_entropy(builder: Builder, call: TracedCall, dims: Dims) -> HandlerResult:
    return _entropy(builder, call, tensor(builder, call, 0), dims)


def _entropy(builder: Builder, call: TracedCall, logits: View, dims: Dims) -> View:
    targets = tensor(builder, call, 1, "target")
    if len(targets.dims) == len(logits.dims):
        raise builder.refused(call, "has probabilities as targets", "classes as targets")
    logits = builder.whole(call, logits)
    space = IndexSpace()
    names = space.names(logits.dims)
    at = 1 if len(names) > 1 else 0
    rows = (*names[:at], *names[at + 1 :])
    output = rows if len(dims) else ()
    return builder.emit(call, "cross_entropy", space, [(logits, names), (targets, rows)], output, dims)


def _nll_loss(builder: Builder, call: TracedCall, dims: Dims) -> HandlerResult:
    """The cross entropy of the logits, where the input is a log softmax."""
    view = tensor(builder, call, 0)
    softmax = next((node for node in builder.nodes if node.name == view.producer), None)
    if softmax is None or softmax.attributes.get("function") != "log_softmax":
        raise builder.refused(call, "does not read a log softmax", "F.cross_entropy of logits")
    axes = dict(zip(softmax.output, range(len(softmax.output)), strict=True))
    order = tuple(axes[dim] for dim in softmax.inputs[0].dims)
    logits = replace(view, producer=softmax.inputs[0].source, axes=tuple(
        None if axis is None else order.index(axis) for axis in view.axes
    ))  # fmt: skip
    return _entropy(builder, call, logits, dims)


def _difference(kind: str) -> Handler:
    def handler(builder: Builder, call: TracedCall, dims: Dims) -> HandlerResult:
        prediction, target = tensor(builder, call, 0), tensor(builder, call, 1, "target")
        prediction = builder.whole(call, prediction)
        space = IndexSpace()
        names = space.names(prediction.dims)
        seen = producer_names(target, names[len(names) - len(target.dims) :])
        output = names if len(dims) else ()
        return builder.emit(call, kind, space, [(prediction, names), (target, seen)], output, dims)

    return handler


def _elementwise_loss(builder: Builder, call: TracedCall, dims: Dims) -> HandlerResult:
    """An elementwise loss and its mean."""
    views = [tensor(builder, call, at, name) for at, name in enumerate(("input", "target"))]
    full = views[0].dims
    each = broadcast(builder, replace(call, name=f"{call.name}_each"), "nonlinear", views, full)
    return each if dims == full else reduced(builder, call, each, "mean", range(len(full)), dims)


LOSSES: Mapping[str, Handler] = {
    "cross_entropy_loss": _cross_entropy,
    **dict.fromkeys(("nll_loss", "nll_loss_nd"), _nll_loss),
    "mse_loss": _difference("mean_square"),
    **dict.fromkeys(
        ("binary_cross_entropy_with_logits", "binary_cross_entropy"), _difference("binary_cross_entropy")
    ),
    **dict.fromkeys(("l1_loss", "smooth_l1_loss", "huber_loss"), _elementwise_loss),
}
"""By the name of the ATen operator without `aten.` and its overload."""
