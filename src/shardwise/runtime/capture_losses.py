"""PyTorch's losses, as kinds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from shardwise.runtime.capture_build import Builder, IndexSpace, View, producer_names
from shardwise.runtime.capture_pointwise import broadcast, reduced
from shardwise.runtime.capture_sizes import Dims
from shardwise.runtime.capture_trace import TracedCall
from shardwise.runtime.capture_views import Handler, HandlerResult, tensor


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
    """Of a log softmax it is the cross entropy of what that reads."""
    view = tensor(builder, call, 0)
    softmax = next((node for node in builder.nodes if node.name == view.producer), None)
    if softmax is None or softmax.attributes.get("function") != "log_softmax":
        raise builder.refused(call, "reads something else than a log softmax", "F.cross_entropy of logits")
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
    """A loss of each difference by itself, and their mean."""
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
"""By the name of the operator without `aten.` and its overload."""
