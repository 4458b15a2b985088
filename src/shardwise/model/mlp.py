"""The operators of an MLP, plain or gated, dense or routed, from its sizes."""

from __future__ import annotations

from shardwise.model.attention import linear_weights
from shardwise.model.shape import Mlp, RoutedMlp
from shardwise.operators import Extent, GroupedMatmul, Matmul, Operator, Pointwise, Role, Rows, Saved, Weight


def mlp_operators(
    shape: Mlp | RoutedMlp, hidden: int, input_saved: tuple[Saved, ...], prefix: str
) -> tuple[Operator, ...]:
    """From the block's input (kept as `input_saved`) to its output, `hidden` wide on both ends."""
    if isinstance(shape, RoutedMlp):
        return _routed(shape, hidden, input_saved, prefix)
    return _dense(shape, hidden, input_saved, f"{prefix}mlp")


def _dense(shape: Mlp, hidden: int, input_saved: tuple[Saved, ...], at: str) -> tuple[Operator, ...]:
    whole, ffn = Extent(hidden), Extent(shape.ffn, "ffn")
    return (
        Matmul(
            name=f"{at}.up",
            k=whole,
            n=_up_extent(shape, "ffn"),
            weights=_up_weights(at, shape, whole, ffn),
            saved=input_saved,
        ),
        _activation(at, shape, "tokens", "ffn"),
        Matmul(
            name=f"{at}.down",
            k=ffn,
            n=whole,
            weights=linear_weights(f"{at}.down", ffn, whole, bias=shape.bias),
            saved=(_activated(at, shape, "tokens", "ffn"),),
        ),
    )


def _routed(
    shape: RoutedMlp, hidden: int, input_saved: tuple[Saved, ...], prefix: str
) -> tuple[Operator, ...]:
    """Router, dispatch, experts, combine, and the shared experts beside them.

    The router works on the sharded sequence. Its probabilities multiply the experts' activations before the
    down projection, so that combining needs no saved expert outputs.
    """
    whole = Extent(hidden)
    shared = _dense(shape.shared, hidden, (), f"{prefix}shared") if shape.shared else ()
    return (*_router(shape, whole, input_saved, prefix), *_experts(shape, whole, prefix), *shared)


def _router(
    shape: RoutedMlp, whole: Extent, input_saved: tuple[Saved, ...], prefix: str
) -> tuple[Operator, ...]:
    at, experts = f"{prefix}router", Extent(shape.experts)
    return (
        Matmul(
            name=f"{at}.logits",
            rows="sequence",
            k=whole,
            n=experts,
            weights=linear_weights(at, whole, experts, bias=shape.router_bias),
            saved=input_saved,
        ),
        Pointwise(  # softmax (read, write), then top-k (read) of fp32 scores, counted in elements
            name=f"{at}.top_k",
            rows="sequence",
            forward=(Extent(3 * shape.experts + 2 * shape.top_k),),
            backward=(Extent(3 * shape.experts + 2 * shape.top_k),),
            saved=(Saved(name=f"{at}.probabilities", width=experts, rows="sequence", dtype="fp32"),),
        ),
    )


def _experts(shape: RoutedMlp, whole: Extent, prefix: str) -> tuple[Operator, ...]:
    at, mlp = f"{prefix}experts", shape.expert
    ffn = Extent(mlp.ffn, "expert_ffn")
    traffic = (Extent(2 * whole.size),)
    return (
        Pointwise(name=f"{at}.dispatch", rows="routed", forward=traffic, backward=traffic),
        GroupedMatmul(
            name=f"{at}.up",
            experts=shape.experts,
            k=whole,
            n=_up_extent(mlp, "expert_ffn"),
            weights=_up_weights(at, mlp, whole, ffn, experts=shape.experts),
            saved=(Saved(name=f"{at}.input", width=whole, rows="routed", dtype="operand"),),
        ),
        _activation(at, mlp, "routed", "expert_ffn"),
        GroupedMatmul(
            name=f"{at}.down",
            experts=shape.experts,
            k=ffn,
            n=whole,
            weights=linear_weights(f"{at}.down", ffn, whole, bias=mlp.bias, experts=shape.experts),
            saved=(_activated(at, mlp, "routed", "expert_ffn"),),
        ),
        Pointwise(name=f"{at}.combine", rows="routed", forward=traffic, backward=traffic),
    )


def _up_extent(shape: Mlp, role: Role) -> Extent:
    """Gate and up projection are one matmul."""
    return Extent(shape.ffn * (2 if shape.gated else 1), role)


def _up_weights(at: str, shape: Mlp, whole: Extent, ffn: Extent, experts: int = 0) -> tuple[Weight, ...]:
    up = linear_weights(f"{at}.up", whole, ffn, bias=shape.bias, experts=experts)
    if not shape.gated:
        return up
    return linear_weights(f"{at}.gate", whole, ffn, bias=shape.bias, experts=experts) + up


def _activation(at: str, shape: Mlp, rows: Rows, role: Role) -> Pointwise:
    """Forward reads gate and up and writes their product; backward reads both and a gradient, writes two."""
    inputs = 2 if shape.gated else 1
    return Pointwise(
        name=f"{at}.activation",
        rows=rows,
        forward=(Extent((inputs + 1) * shape.ffn, role),),
        backward=(Extent((2 * inputs + 1) * shape.ffn, role),),
        saved=(Saved(name=f"{at}.up.output", width=Extent(inputs * shape.ffn, role), rows=rows),),
        selective=True,
    )


def _activated(at: str, shape: Mlp, rows: Rows, role: Role) -> Saved:
    return Saved(
        name=f"{at}.activation.output",
        width=Extent(shape.ffn, role),
        rows=rows,
        selective=True,
        dtype="operand",
    )
