"""What a rank computes of attention: of its queries, heads or keys."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.nn import functional

from shardwise.runtime.graphs.work import Dims, Kernel, ShardedOperator, aligned, arranged, wide, without


def attention(work: ShardedOperator, inputs: Sequence[Tensor], parameters: Sequence[Tensor]) -> Tensor:
    op = work.op
    queries, keys, values = (operand.dims for operand in op.inputs[:3])
    heads = tuple(str(op.attributes.get("heads", "")).split())
    kv_heads = tuple(str(op.attributes.get("kv_heads", "")).split())
    (width,) = (dim for dim in queries if dim in keys and dim not in values)
    (value_width,) = (dim for dim in values if dim in op.output and dim not in keys)
    (at,) = without(queries, (*keys, *heads))
    (to,) = without(keys, (*queries, *kv_heads))
    rows = without(op.output, (at, value_width))
    query = arranged(inputs[0], queries, (*rows, at, width))
    is_split = bool(work.axes((to,)))
    key, value = (
        _for_queries(work, tensor, dims, rows, last, may_share=not is_split)
        for tensor, dims, last in ((inputs[1], keys, (to, width)), (inputs[2], values, (to, value_width)))
    )
    added = [
        aligned(tensor if tensor.dtype == torch.bool else tensor.to(query.dtype), dims, (*rows, at, to))
        for tensor, dims in zip(
            (*inputs[3:], *parameters),
            (*(operand.dims for operand in op.inputs[3:]), *(own.dims for own in op.parameters)),
            strict=True,
        )
    ]
    if is_split:
        result = _over_split_keys(work, query, key, value, added, at, to)
    else:
        result = _fused(work, query, key, value, added, at, to)
    return arranged(result, (*rows, at, value_width), op.output).contiguous()


def _for_queries(
    work: ShardedOperator, tensor: Tensor, dims: Dims, rows: Dims, last: Dims, *, may_share: bool
) -> Tensor:
    """Keys or values with a row for every head of the queries that this rank has; or, where equal groups of
    them share one and that `may_share` is said, for every group."""
    op = work.op
    kv_heads = tuple(dim for dim in dims if dim not in rows and dim not in last)
    present = [dim for dim in rows if dim in dims]
    sizes = {dim: work.length(dim) for dim in rows}
    if kv_heads:
        (own,) = kv_heads
        (head,) = without(rows, present)
        repeats, (first, stop) = op.dims[head] // op.dims[own], work.interval(own)
        if may_share and head == rows[-1] and work.interval(head) == (first * repeats, stop * repeats):
            sizes[head] = stop - first
        else:
            chosen = torch.arange(*work.interval(head), device=tensor.device) // repeats - first
            tensor = tensor.index_select(dims.index(own), chosen)
        dims = tuple(head if dim == own else dim for dim in dims)
    tensor = aligned(tensor, dims, (*rows, *last))
    return tensor.expand([*sizes.values(), *tensor.shape[-2:]])


def _visible(work: ShardedOperator, at: str, to: str, device: torch.device) -> Tensor | None:
    """Which keys each of this rank's queries meets; None where it meets all."""
    op = work.op
    if not op.attributes.get("causal") and "window" not in op.attributes:
        return None
    own, visible_keys = (torch.arange(*work.interval(dim), device=device) for dim in (at, to))
    distance = own.unsqueeze(-1) - visible_keys
    visible = torch.ones_like(distance, dtype=torch.bool)
    if op.attributes.get("causal"):
        visible &= distance >= 0
    if "window" in op.attributes:
        visible &= distance < int(op.attributes["window"])
    return visible


def _scale(work: ShardedOperator, query: Tensor) -> float:
    return float(work.settings.get("scale") or work.op.dims[_width(work)] ** -0.5)


def _width(work: ShardedOperator) -> str:
    queries, keys, values = (operand.dims for operand in work.op.inputs[:3])
    (width,) = (dim for dim in queries if dim in keys and dim not in values)
    return width


def _fused(
    work: ShardedOperator,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    added: Sequence[Tensor],
    at: str,
    to: str,
) -> Tensor:
    """PyTorch's own, of all keys."""
    lead = query.shape[:-2]
    flat = [_as_4d(each) for each in (query, key, value)]
    is_causal = bool(work.op.attributes.get("causal")) and "window" not in work.op.attributes
    is_causal = is_causal and not added and not work.is_divided(at)
    mask = None if is_causal else _visible(work, at, to, query.device)
    if added:
        own = [_as_number(each, query.dtype) for each in added]
        mask = _as_4d(_added(own, mask).expand(*lead, -1, -1))
    result = functional.scaled_dot_product_attention(
        flat[0], flat[1], flat[2], attn_mask=mask, is_causal=is_causal, scale=_scale(work, query),
        enable_gqa=flat[0].shape[1] != flat[1].shape[1],
    )  # fmt: skip
    return result.reshape(*lead, *result.shape[-2:])


def _as_4d(tensor: Tensor) -> Tensor:
    """With two dims in front of the last two, as PyTorch wants it, and no copy where there are two."""
    if tensor.dim() <= 4:
        return tensor[(None,) * (4 - tensor.dim())]
    return tensor.flatten(0, -4)


def _as_number(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """What is added to scores, where a mask says which keys are met."""
    if mask.dtype != torch.bool:
        return mask
    return torch.zeros((), dtype=dtype, device=mask.device).masked_fill(~mask, float("-inf"))


def _added(added: Sequence[Tensor], visible: Tensor | None) -> Tensor:
    total = sum(added[1:], start=added[0])
    return total if visible is None else total.masked_fill(~visible, float("-inf"))


def _over_split_keys(
    work: ShardedOperator,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    added: Sequence[Tensor],
    at: str,
    to: str,
) -> Tensor:
    """A partial sum of values, once ranks agree on the maximum and the sum of each row of scores."""
    scores = wide((query * _scale(work, query)) @ key.transpose(-1, -2))
    lowest = torch.finfo(scores.dtype).min
    for each in added:
        scores = scores.masked_fill(~each, lowest) if each.dtype == torch.bool else scores + each
    visible = _visible(work, at, to, scores.device)
    if visible is not None:
        scores = scores.masked_fill(~visible, lowest)
    less = scores - work.largest(scores.amax(-1, keepdim=True), (to,))
    total = work.summed(less.exp().sum(-1, keepdim=True), (to,), gradients="summed")
    return (less.exp() / total).to(value.dtype) @ value


ATTENTION: Mapping[str, Kernel] = {"attention": attention}
"""By kind."""
