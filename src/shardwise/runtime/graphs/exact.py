"""What an operator computes exactly, from the call of PyTorch's that it was captured from."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from shardwise.errors import ConfigError
from shardwise.graph import OpNode
from shardwise.runtime.capture_build import Builder, View
from shardwise.runtime.capture_trace import Ref, TracedCall, refs_of
from shardwise.runtime.capture_views import argument

Settings = Mapping[str, Any]

COST_ONLY = (
    "std", "var", "linalg_vector_norm", "logsumexp", "stack", "prelu", "binary_cross_entropy",
)  # fmt: skip
"""Operators of PyTorch that graphs have for their cost alone: they compute something else."""

EPSILONS: Mapping[str, int] = {
    "layer_norm": 4, "rms_norm": 3, "group_norm": 4, "batch_norm": 7, "instance_norm": 7
}  # fmt: skip
"""The place of the epsilon among the arguments."""

ELEMENTWISE_LOSSES: Mapping[str, Callable[..., Tensor]] = {
    "l1_loss": lambda x, y: (x - y).abs(),
    "smooth_l1_loss": lambda x, y, beta=1.0: functional.smooth_l1_loss(x, y, reduction="none", beta=beta),
    "huber_loss": lambda x, y, delta=1.0: functional.huber_loss(x, y, reduction="none", delta=delta),
}
"""Losses that graphs have as a function of elements and a mean."""

MEAN = 1
"""PyTorch's number for losses that are a mean."""


def settings_of(builder: Builder, node: OpNode, call: TracedCall, targets: Mapping[str, Any]) -> Settings:
    """What `node` computes beside what its kind says. ConfigError by the line of a call that is not carried
    out."""
    name = call.target.split(".")[1].rstrip("_") if call.target.startswith("aten.") else call.target
    _check(builder, node, call, name)
    if node.kind == "elementwise":
        return _element_settings(builder, node, call, name, targets)
    if name in EPSILONS:
        epsilon = argument(call, EPSILONS[name], "eps", 1e-5)
        return {"epsilon": epsilon}
    if node.kind == "attention":
        return {"scale": call.named.get("scale")}
    return {}


def _check(builder: Builder, node: OpNode, call: TracedCall, name: str) -> None:
    """Refuses what graphs do not say of a call."""
    if name in COST_ONLY:
        raise builder.refused(call, "is captured for its cost alone", "it written with other operators")
    wrong = ""
    if node.kind == "elementwise" and node.attributes["function"] == "dropout":
        wrong = "draws random numbers, which depend on the layout; module.eval() or p=0"
    if name == "batch_norm" and node.kind == "elementwise":
        wrong = "uses kept statistics; training mode"
    if node.kind == "embedding" and int(argument(call, 2, "padding_idx", -1)) >= 0 and name == "embedding":
        wrong = "has a row without gradient; no padding_idx"
    if node.kind == "slice" and name == "slice" and int(argument(call, 4, "step", 1)) != 1:
        wrong = "has a step; steps of 1"
    if node.kind == "attention" and argument(call, 4, "dropout_p", 0.0):
        wrong = "draws random numbers, which depend on the layout; dropout_p=0"
    if name in ("lstm", "gru") and call.arguments[5] and call.arguments[6] and call.arguments[4] > 1:
        wrong = "draws random numbers, which depend on the layout; dropout=0"
    if name in ("addmm", "baddbmm") and {call.named.get("beta", 1), call.named.get("alpha", 1)} != {1}:
        wrong = "is scaled; alpha and beta of 1"
    wrong = wrong or _pool_problem(call, name) or _loss_problem(node, call, name)
    if wrong:
        problem, _, allowed = wrong.partition("; ")
        raise builder.refused(call, problem, allowed)


def _pool_problem(call: TracedCall, name: str) -> str:
    if name.startswith("max_pool") and argument(call, 4, "dilation", 1) not in (1, [1], [1, 1], [1, 1, 1]):
        return "has dilated windows; dilation of 1"
    if name.startswith("avg_pool"):
        padding = argument(call, 3, "padding", 0)
        has_padding = any(padding) if isinstance(padding, list) else bool(padding)
        if argument(call, 4, "ceil_mode", False):
            return "has windows beyond its rows; ceil_mode=False"
        if has_padding and not argument(call, 5, "count_include_pad", True):
            return "counts fewer rows at the edges; count_include_pad=True"
        if argument(call, 6, "divisor_override") is not None:
            return "divides by another number; no divisor_override"
    return ""


def _loss_problem(node: OpNode, call: TracedCall, name: str) -> str:
    if name in ("cross_entropy_loss", "nll_loss", "nll_loss_nd"):
        if argument(call, 2, "weight") is not None:
            return "weighs classes; no weight"
        if not node.output and argument(call, 3, "reduction", MEAN) != MEAN:
            return "is no mean; reduction='mean'"
        if name == "cross_entropy_loss" and argument(call, 5, "label_smoothing", 0.0):
            return "smooths labels; label_smoothing=0"
    if name == "mse_loss" and not node.output and argument(call, 2, "reduction", MEAN) != MEAN:
        return "is no mean; reduction='mean'"
    if name == "binary_cross_entropy_with_logits":
        if argument(call, 2, "weight") is not None or argument(call, 3, "pos_weight") is not None:
            return "weighs classes; no weight"
        if not node.output and argument(call, 4, "reduction", MEAN) != MEAN:
            return "is no mean; reduction='mean'"
    if name in ELEMENTWISE_LOSSES and argument(call, 2, "reduction", MEAN) != MEAN:
        return "is no mean; reduction='mean'"
    return ""


def _element_settings(
    builder: Builder, node: OpNode, call: TracedCall, name: str, targets: Mapping[str, Any]
) -> Settings:
    """The function of elements: PyTorch's own with the call's numbers."""
    if node.name == f"{call.name}_bias" or node.name.endswith("_repeat"):
        return {}
    if name in ELEMENTWISE_LOSSES:
        numbers = [value for value in call.arguments[3:] if isinstance(value, int | float)]
        return {"function": lambda x, y: ELEMENTWISE_LOSSES[name](x, y, *numbers)}
    if name == "glu":
        return {"function": lambda x, y: x * y.sigmoid()}
    return {"function": _called(builder, node, call, _out_of_place(targets[call.name]))}


def _out_of_place(target: Any) -> Any:
    """`target` as a function that makes a tensor of its own, where it changes the one that it is given:
    several may read that, and under some layouts it is a view."""
    space, name, *overload = str(target).split(".")
    if space != "aten" or not name.endswith("_") or name.endswith("__"):
        return target
    return getattr(getattr(torch.ops.aten, name.removesuffix("_")), overload[0])


def _called(builder: Builder, node: OpNode, call: TracedCall, target: Any) -> Callable[..., Tensor]:
    """The call with its tensors replaced by operands: inputs in order, then parameters in order."""
    slots: dict[str, int] = {}
    seen: list[View] = []
    counts = [0, len(node.inputs)]
    for ref in refs_of(call):
        view = builder.views[ref.name]
        if not isinstance(view, View):
            raise ConfigError("reads several tensors as one", key=call.where)
        if view in seen and len(node.inputs) + len(node.parameters) < len(refs_of(call)):
            slots[ref.name] = slots[next(name for name in slots if builder.views[name] == view)]
            continue
        seen.append(view)
        slots[ref.name] = counts[view.is_parameter]
        counts[view.is_parameter] += 1

    def filled(value: Any, operands: tuple[Tensor, ...]) -> Any:
        if isinstance(value, Ref):
            return operands[slots[value.name]]
        return [filled(item, operands) for item in value] if isinstance(value, list) else value

    def function(*operands: Tensor) -> Tensor:
        arguments = [filled(value, operands) for value in call.arguments]
        result: Tensor = target(
            *arguments, **{key: filled(value, operands) for key, value in call.named.items()}
        )
        return result

    return function
