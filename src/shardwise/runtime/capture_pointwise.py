"""PyTorch's functions of elements, pooling and reductions, as kinds of operators."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from math import isfinite

from shardwise.runtime.capture_build import Builder, IndexSpace, Setting, View, producer_names, view_of
from shardwise.runtime.capture_sizes import Dims
from shardwise.runtime.capture_trace import Ref, TracedCall
from shardwise.runtime.capture_views import Handler, HandlerResult, TupleHandler, argument, sliced, tensor

FUNCTIONS: Mapping[str, str] = {
    "add": "add", "sub": "subtract", "mul": "multiply", "div": "divide", "neg": "negate", "relu": "relu",
    "sigmoid": "sigmoid", "tanh": "tanh", "exp": "exp", "sqrt": "sqrt", "rsqrt": "rsqrt", "gelu": "gelu",
    "silu": "silu", "log": "log", "square": "square", "softplus": "softplus", "clamp": "clamp",
    "clamp_min": "clamp", "clamp_max": "clamp", "maximum": "maximum", "minimum": "minimum", "where": "where",
    "masked_fill": "masked_fill", "hardtanh": "clamp", "relu6": "clamp",
}  # fmt: skip
"""Kinds of functions by the name of the operator."""

NONLINEAR = (
    "leaky_relu", "elu", "selu", "celu", "mish", "hardswish", "hardsigmoid", "logsigmoid", "log_sigmoid",
    "erf", "abs", "sin", "cos", "reciprocal", "log1p", "expm1", "sign", "floor", "addcmul", "lerp",
    "rsub", "prelu",
)  # fmt: skip
"""Functions that count as any other."""

WITH_SCALAR: Mapping[str, str] = {
    "add": "shift",
    "sub": "shift",
    "mul": "scale",
    "div": "scale",
    "rsub": "shift",
}
"""What functions of a tensor and a number are."""

OPERANDS: Mapping[str, int] = {"masked_fill": 2, "where": 3}
"""Tensors that functions take; with a tensor where they have a number, or a number where they have a tensor,
they count as any other."""


def broadcast(
    builder: Builder,
    call: TracedCall,
    function: str,
    views: Sequence[View],
    dims: Dims,
    *,
    number: float | None = None,
) -> View:
    """A function of elements (with a `number` of its own): operands lie at the end of the output's dims."""
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
    """The number of a function that has one, where it is the same at every size and can be written."""
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
    """As many elements as it reads, in another order."""
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
    """A number of the elements along some dims (all where none is said), first each made another by `of`, and
    `then` what is made of them."""

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
    """A number of the elements along the dims at `reduced_dims`."""
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
    """A maximum along a dim, whose place graphs do not have."""

    def handler(builder: Builder, call: TracedCall, results: tuple[Dims, ...]) -> HandlerResult:
        view = tensor(builder, call, 0)
        if not call.is_tuple:
            everything = range(len(view.dims))
            return reduced(builder, call, view, function, everything, results[0])
        at = argument(call, 1, "dim") % len(view.dims)
        return (reduced(builder, call, view, function, (at,), results[0]), None)

    return handler


def _glu(builder: Builder, call: TracedCall, dims: Dims) -> HandlerResult:
    """One half of the elements times the sigmoid of the other."""
    view = tensor(builder, call, 0)
    at = argument(call, 1, "dim", -1) % len(view.dims)
    half = dims[at].size
    halves = [
        sliced(builder, replace(call, name=f"{call.name}_{n}"), view, at, n * half, dims, drops_dim=False)
        for n in range(2)
    ]
    return broadcast(builder, call, "nonlinear", halves, dims)


def _pool(function: str) -> Handler:
    """Windows over the last dims, as many as the operator's name says."""

    def handler(builder: Builder, call: TracedCall, dims: Dims) -> HandlerResult:
        spatial = int(call.target.split(".")[1].rstrip("_")[-2])
        view = builder.plain(call, tensor(builder, call, 0))
        is_adaptive = "adaptive" in call.target
        space = IndexSpace()
        names = space.names(view.dims)
        if is_adaptive and function == "average" and all(dim.is_unit for dim in dims[-spatial:]):
            remaining = names[:-spatial]
            return builder.emit(
                call, "reduce", space, [(view, names)], remaining, dims, attributes={"function": "mean"}
            )
        if any(dim.is_unit for dim in (*view.dims[-spatial:], *dims[-spatial:])):
            raise builder.refused(call, "makes a single window", "mean(), amax() or an adaptive average")
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
    """A setting that is the same along all spatial dims."""
    values = {value} if isinstance(value, int) else set(value)
    if len(values) != 1:
        raise builder.refused(
            call, "has windows that differ by direction", "square windows, strides, padding"
        )
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
