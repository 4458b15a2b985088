"""One decoder layer as operators: attention and MLP blocks, the norms around them, dropout and residuals.

The statistics that norms keep (4 or 8 bytes per token) and the seeds of fused attention dropout are left out.
"""

from __future__ import annotations

from shardwise.model.attention import attention_operators
from shardwise.model.mlp import mlp_operators
from shardwise.model.model import DROPOUT, Experts, Layer
from shardwise.model.shape import GroupedQueryAttentionShape, LayerShape, Norm, RoutedMlp
from shardwise.operators import Dtype, Extent, Operator, Pointwise, Saved, Weight


def layer_from_shape(shape: LayerShape, *, prefix: str = "") -> Layer:
    """The layer whose operators have names that start with `prefix`."""
    routed = shape.mlp if isinstance(shape.mlp, RoutedMlp) else None
    is_parallel = shape.norm_placement.startswith("parallel")
    operators = _parallel(shape, prefix) if is_parallel else _sequential(shape, prefix)
    mlp_syncs = not is_parallel and (routed is None or routed.shared is not None)
    if routed is None:
        return Layer(name=_name(shape), operators=operators, tensor_syncs=1 + mlp_syncs)
    experts = Experts(
        experts=routed.experts,
        top_k=routed.top_k,
        groups=routed.groups,
        groups_per_token=routed.groups_per_token,
        capacity_factor=routed.capacity_factor,
    )
    return Layer(name=_name(shape), operators=operators, experts=experts, tensor_syncs=1 + mlp_syncs)


def norm_operator(
    name: str, norm: Norm, hidden: int, saved: tuple[Saved, ...], *, selective: bool = False
) -> Pointwise:
    """A norm of the residual stream: forward moves two tensors, backward three (input and two gradients)."""
    tensors = {"rms": ("weight",), "layer": ("weight", "bias"), "plain": ()}[norm]
    return Pointwise(
        name=name,
        rows="sequence",
        forward=(Extent(2 * hidden),),
        backward=(Extent(3 * hidden),),
        weights=tuple(Weight(name=f"{name}.{tensor}", shape=(Extent(hidden),)) for tensor in tensors),
        saved=saved,
        selective=selective,
    )


def dropout_operator(name: str, hidden: int) -> Pointwise:
    """Dropout of what is called `name`, which keeps its mask, one byte an element."""
    mask = Saved(name=f"{name}.{DROPOUT}.mask", width=Extent(hidden), rows="sequence", dtype="mask")
    traffic = (Extent(2 * hidden),)
    return Pointwise(
        name=f"{name}.{DROPOUT}", rows="sequence", forward=traffic, backward=traffic, saved=(mask,)
    )


def saved_residual(name: str, hidden: int, *, selective: bool = False, dtype: Dtype = "compute") -> Saved:
    """A tensor of the residual stream's width on the (sharded) sequence."""
    return Saved(name=name, width=Extent(hidden), rows="sequence", selective=selective, dtype=dtype)


def _name(shape: LayerShape) -> str:
    kind = "moe" if isinstance(shape.mlp, RoutedMlp) else "dense"
    window = shape.attention.window if isinstance(shape.attention, GroupedQueryAttentionShape) else None
    return kind if window is None else f"{kind}-window-{window}"


def _sequential(shape: LayerShape, prefix: str) -> tuple[Operator, ...]:
    hidden = shape.hidden
    attention_input = (saved_residual(f"{prefix}layer.input", hidden),)
    if shape.norm_placement == "post":
        # Each norm stands after a residual; its output is the next block's input and the next residual.
        mlp_input = (saved_residual(f"{prefix}attention.norm.output", hidden, selective=True),)
        return (
            *attention_operators(shape.attention, hidden, attention_input, prefix),
            *_residual(shape, f"{prefix}attention"),
            _norm(shape, f"{prefix}attention.norm", selective=True),
            *mlp_operators(shape.mlp, hidden, mlp_input, prefix),
            *_residual(shape, f"{prefix}mlp"),
            _norm(shape, f"{prefix}mlp.norm"),
        )
    return (
        norm_operator(f"{prefix}attention.norm", shape.norm, hidden, attention_input, selective=True),
        *attention_operators(shape.attention, hidden, _normed(f"{prefix}attention.norm", hidden), prefix),
        *_residual(shape, f"{prefix}attention"),
        _norm(shape, f"{prefix}mlp.norm", selective=True),
        *mlp_operators(shape.mlp, hidden, _normed(f"{prefix}mlp.norm", hidden), prefix),
        *_residual(shape, f"{prefix}mlp"),
    )


def _parallel(shape: LayerShape, prefix: str) -> tuple[Operator, ...]:
    """Attention and MLP on the same input, with a norm each or one for both; one sum of three at the end."""
    hidden = shape.hidden
    own_norm = shape.norm_placement == "parallel"
    first = f"{prefix}attention.norm"
    operators: list[Operator] = [
        norm_operator(
            first, shape.norm, hidden, (saved_residual(f"{prefix}layer.input", hidden),), selective=True
        )
    ]
    if own_norm:
        operators.append(norm_operator(f"{prefix}mlp.norm", shape.norm, hidden, (), selective=True))
    operators += attention_operators(shape.attention, hidden, _normed(first, hidden), prefix)
    mlp_input = _normed(f"{prefix}mlp.norm", hidden) if own_norm else ()
    operators += mlp_operators(shape.mlp, hidden, mlp_input, prefix)
    if shape.dropout:
        operators += [dropout_operator(f"{prefix}{block}", hidden) for block in ("attention", "mlp")]
    traffic = (Extent(4 * hidden),)
    operators.append(
        Pointwise(name=f"{prefix}layer.residual", rows="sequence", forward=traffic, backward=traffic)
    )
    return tuple(operators)


def _residual(shape: LayerShape, at: str) -> tuple[Operator, ...]:
    """How a block's output goes back to the residual stream: second norm, dropout, addition."""
    hidden = shape.hidden
    after: list[Operator] = []
    if shape.norm_placement == "sandwich":
        saved = (saved_residual(f"{at}.post_norm.input", hidden),)
        after.append(norm_operator(f"{at}.post_norm", shape.norm, hidden, saved))
    if shape.dropout:
        after.append(dropout_operator(at, hidden))
    shared = isinstance(shape.mlp, RoutedMlp) and shape.mlp.shared is not None and at.endswith("mlp")
    traffic = (Extent((4 if shared else 3) * hidden),)
    after.append(Pointwise(name=f"{at}.residual", rows="sequence", forward=traffic, backward=traffic))
    return tuple(after)


def _norm(shape: LayerShape, name: str, *, selective: bool = False) -> Pointwise:
    saved = (saved_residual(f"{name}.input", shape.hidden),)
    return norm_operator(name, shape.norm, shape.hidden, saved, selective=selective)


def _normed(name: str, hidden: int) -> tuple[Saved, ...]:
    return (saved_residual(f"{name}.output", hidden, selective=True, dtype="operand"),)
