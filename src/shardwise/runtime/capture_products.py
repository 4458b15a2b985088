"""PyTorch's contractions, convolutions, attention and tables, as kinds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from shardwise.runtime.capture_build import (
    Attributes,
    Builder,
    IndexSpace,
    Names,
    Setting,
    View,
    names_with_unit_dims,
    producer_names,
    view_with_unit_dims,
)
from shardwise.runtime.capture_pointwise import uniform_setting
from shardwise.runtime.capture_sizes import Dim, Dims
from shardwise.runtime.capture_trace import TracedCall
from shardwise.runtime.capture_views import Handler, HandlerResult, argument, optional_tensor, tensor


def _contracted(
    builder: Builder,
    call: TracedCall,
    space: IndexSpace,
    operands: Sequence[tuple[View, Names]],
    output: Names,
    dims: Dims,
) -> View:
    """A product of operands: `linear` or `matmul` where it is one, else `einsum`."""
    (_, left), (two, right) = operands
    summed = {name for name in left if name in right and name is not None} - set(output)
    weights = [view for view, _ in operands if view.is_parameter]
    features = set(right) & set(output) - {None}
    kind = "einsum"
    if summed and weights == [two] and features and not features & set(left):
        kind = "linear"
    elif summed and not weights:
        kind = "matmul"
    return builder.emit(call, kind, space, operands, output, dims)


def _linear(builder: Builder, call: TracedCall, dims: Dims) -> HandlerResult:
    view, weight = builder.whole(call, tensor(builder, call, 0)), tensor(builder, call, 1, "weight")
    bias = optional_tensor(builder, call, 2, "bias")
    space = IndexSpace()
    names = space.names(view.dims)
    (made,) = space.names(weight.dims[:1])
    output = (*names[:-1], made)
    operands = [(view, names), (weight, (made, names[-1]))]
    if bias is not None and bias.is_parameter and made is not None and names[-1] is not None:
        return builder.emit(call, "linear", space, [*operands, (bias, (made,))], output, dims)
    return _with_bias(builder, call, _contracted(builder, call, space, operands, output, dims), bias, dims)


def _with_bias(builder: Builder, call: TracedCall, product: View, bias: View | None, dims: Dims) -> View:
    if bias is None:
        return product
    space = IndexSpace()
    output = space.names(dims)
    added = producer_names(bias, output[len(output) - len(bias.dims) :])
    name = f"{call.name}_bias"
    operands = [(product, output), (bias, added)]
    return builder.emit(
        call, "elementwise", space, operands, output, dims, name=name, attributes={"function": "add"}
    )


def _matmul(builder: Builder, call: TracedCall, dims: Dims) -> HandlerResult:
    return _product(builder, call, tensor(builder, call, 0), tensor(builder, call, 1, "mat2"), dims)


def _addmm(builder: Builder, call: TracedCall, dims: Dims) -> HandlerResult:
    one, two = tensor(builder, call, 1, "mat1"), tensor(builder, call, 2, "mat2")
    return _with_bias(builder, call, _product(builder, call, one, two, dims), tensor(builder, call, 0), dims)


def _product(builder: Builder, call: TracedCall, one: View, two: View, dims: Dims) -> View:
    """Batched matmul with broadcasting; a vector is a matrix of one row, or of one column."""
    if len(one.dims) == 1:
        one = replace(one, dims=(Dim(1), *one.dims), axes=(None, *one.axes))
    if len(two.dims) == 1:
        two = replace(two, dims=(*two.dims, Dim(1)), axes=(*two.axes, None))
    space = IndexSpace()
    batch = space.names(dims[: max(len(one.dims), len(two.dims)) - 2])
    left = (*batch[len(batch) - len(one.dims) + 2 :], *space.names(one.dims[-2:]))
    (made,) = space.names(two.dims[-1:])
    right = (*batch[len(batch) - len(two.dims) + 2 :], left[-1], made)
    operands = [(view, producer_names(view, names)) for view, names in ((one, left), (two, right))]
    return _contracted(builder, call, space, operands, (*batch, left[-2], made), dims)


def _einsum(builder: Builder, call: TracedCall, dims: Dims) -> HandlerResult:
    equation = "".join(str(call.arguments[0]).split())
    left, arrow, right = equation.partition("->")
    terms = left.split(",")
    if not arrow or "." in equation or any(len(set(term)) < len(term) for term in terms):
        raise builder.refused(call, f"has the equation {equation}", "letters, each once in a tensor, and ->")
    space = IndexSpace()
    indices: dict[str, str | None] = {}
    operands = []
    for term, ref in zip(terms, call.arguments[1], strict=True):
        view = builder.views[ref.name]
        if not isinstance(view, View):
            raise builder.refused(call, "reads several tensors as one", "tensors as operands")
        for letter, dim in zip(term, view.dims, strict=True):
            if indices.get(letter) is None:
                indices[letter] = None if dim.is_unit else space.fresh(dim)
        names = tuple(
            None if d.is_unit else indices[letter] for letter, d in zip(term, view.dims, strict=True)
        )
        operands.append((view, producer_names(view, names)))
    output = tuple(indices[letter] for letter in right)
    if len(operands) == 2:
        return _contracted(builder, call, space, operands, output, dims)
    return builder.emit(call, "einsum", space, operands, output, dims)


def _convolution(builder: Builder, call: TracedCall, dims: Dims) -> HandlerResult:
    """Channels, rows and kernel dims are spelled out where they are 1, too: places tell them apart."""
    weight, bias = tensor(builder, call, 1, "weight"), optional_tensor(builder, call, 2, "bias")
    if not all(view.is_parameter and view.is_plain for view in (weight, bias) if view is not None):
        raise builder.refused(call, "has filters that are computed", "parameters as filters and bias")
    spatial = len(weight.dims) - 2
    view = tensor(builder, call, 0)
    view = builder.with_unit_dims(call, view, range(len(view.dims) - spatial - 1, len(view.dims)))
    groups = argument(call, 6, "groups", 1)
    space = IndexSpace()
    names = names_with_unit_dims(view, space)
    read = names[-spatial - 1]
    kernel = tuple(map(space.fresh, weight.dims[-spatial:]))
    windows = tuple(map(space.fresh, dims[-spatial:]))
    is_depthwise = 1 < groups == view.dims[-spatial - 1].size == weight.dims[0].size
    if is_depthwise:
        made, filters = read, (read, *kernel)
    else:
        made = space.fresh(weight.dims[0])
        filters = (made, read if groups == 1 else space.fresh(weight.dims[1]), *kernel)
    own = View(
        producer=weight.producer,
        dims=tuple(space.dims[str(name)] for name in filters),
        axes=tuple(range(len(filters))),
        is_parameter=True,
    )
    operands = [(view, names), (own, filters), *([(bias, (made,))] if bias is not None else [])]
    output = (*names[: -spatial - 1], made, *windows)
    attributes = _windows(builder, call, weight.dims[-spatial:], 1 if is_depthwise else groups)
    has_units = any(dim.is_unit for dim in dims[-spatial - 1 :])
    name = f"{call.name}_spelled_out" if has_units else call.name
    found = builder.emit(call, "convolution", space, operands, output, dims, name=name, attributes=attributes)
    return (
        builder.without_unit_dims(call, view_with_unit_dims(found.producer, dims, output))
        if has_units
        else found
    )


def _windows(builder: Builder, call: TracedCall, kernel: Dims, groups: int) -> Attributes:
    """Stride, padding, dilation and groups, where they are not the customary ones."""
    stride = uniform_setting(builder, call, argument(call, 3, "stride", 1))
    dilation = uniform_setting(builder, call, argument(call, 5, "dilation", 1))
    padding = argument(call, 4, "padding", 0)
    if padding == "same":
        padding = [dilation * (dim.size - 1) // 2 for dim in kernel]
    padding = 0 if padding == "valid" else uniform_setting(builder, call, padding)
    found = {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups}
    return {name: value for name, value in found.items() if value != (0 if name == "padding" else 1)}


def _attention(builder: Builder, call: TracedCall, dims: Dims) -> HandlerResult:
    query, key, value = (
        builder.whole(call, tensor(builder, call, at, name))
        for at, name in enumerate(("query", "key", "value"))
    )
    mask = optional_tensor(builder, call, 3, "attn_mask")
    space = IndexSpace()
    lead, (queries, width) = space.names(query.dims[:-2]), space.names(query.dims[-2:])
    key_dims = [
        None if dim.is_unit else (own if dim == query_heads else space.fresh(dim))
        for dim, query_heads, own in zip(key.dims[:-2], query.dims[:-2], lead, strict=True)
    ]
    (keys, value_width) = space.names((key.dims[-2], value.dims[-1]))
    operands = [
        (query, (*lead, queries, width)),
        (key, (*key_dims, keys, width)),
        (value, (*key_dims, keys, value_width)),
    ]
    if mask is not None:
        rows = (*lead, queries, keys)
        seen = rows[len(rows) - len(mask.dims) :]
        units = tuple(None if dim.is_unit else name for dim, name in zip(mask.dims, seen, strict=True))
        operands.append((mask, producer_names(mask, units)))
    attributes: dict[str, Setting] = {}
    if argument(call, 5, "is_causal", False):
        attributes["causal"] = True
    query_heads = [
        name for name, other in zip(lead, key_dims, strict=True) if name is not None and name != other
    ]
    own = [name for name in key_dims if name is not None and name not in lead]
    if query_heads:
        attributes["heads"] = " ".join(query_heads)
    if own:
        attributes["kv_heads"] = " ".join(own)
    output = (*lead, queries, value_width)
    return builder.emit(call, "attention", space, operands, output, dims, attributes=attributes)


def _embedding(builder: Builder, call: TracedCall, dims: Dims) -> HandlerResult:
    table, indices = tensor(builder, call, 0, "weight"), tensor(builder, call, 1, "indices")
    if not table.is_parameter:
        raise builder.refused(call, "looks up in a tensor that is no parameter", "a table of parameters")
    space = IndexSpace()
    names, rows = space.names(indices.dims), space.names(table.dims)
    return builder.emit(call, "embedding", space, [(indices, names), (table, rows)], (*names, rows[1]), dims)


PRODUCTS: Mapping[str, Handler] = {
    "linear": _linear,
    **dict.fromkeys(("matmul", "mm", "bmm"), _matmul),
    **dict.fromkeys(("addmm", "baddbmm"), _addmm),
    "einsum": _einsum,
    **{f"conv{n}d": _convolution for n in (1, 2, 3)},
    "scaled_dot_product_attention": _attention,
    "embedding": _embedding,
}
"""By the name of the operator without `aten.` and its overload."""
