"""The kernel of each operator kind: computes a rank's part of the output from its shards of the inputs.

`KERNELS` maps operator kinds to kernels. This module has products (einsum, linear, embedding), attention,
recurrent layers and cells, convolution and pooling. `kernels_elementwise` has elementwise functions, norms,
softmax and losses. Where no dim inside the operator is sharded, PyTorch's own operator is used.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from shardwise.runtime.graphs.kernels_elementwise import LOSSES, NORMALIZATIONS, POINTWISE
from shardwise.runtime.graphs.sharded_operator import (
    Dims,
    Kernel,
    ShardedOperator,
    aligned,
    all_gather_dim,
    arranged,
    local_part,
    wide,
    with_neighbours,
    without,
)

# Products and tables


def contracted(operands: Sequence[tuple[Tensor, Dims]], output: Dims) -> Tensor:
    """The product of all operands (einsum), summed over the dims that `output` does not have."""
    letters: dict[str, str] = {}
    for dims in (*(dims for _, dims in operands), output):
        for dim in dims:
            letters.setdefault(dim, chr(ord("a") + len(letters)))
    terms = ",".join("".join(letters[dim] for dim in dims) for _, dims in operands)
    equation = f"{terms}->{''.join(letters[dim] for dim in output)}"
    return torch.einsum(equation, *(tensor for tensor, _ in operands))


def einsum(work: ShardedOperator, inputs: Sequence[Tensor], parameters: Sequence[Tensor]) -> Tensor:
    return contracted(_operands(work, inputs, parameters), work.op.output)


def linear(work: ShardedOperator, inputs: Sequence[Tensor], parameters: Sequence[Tensor]) -> Tensor:
    """A product with a weight, by PyTorch's own linear where the order of dims allows it."""
    op = work.op
    (read,), weight = op.inputs, op.parameters[0].dims
    is_plain = len(weight) == 2 and read.dims[-1] == weight[1] and op.output == (*read.dims[:-1], weight[0])
    if is_plain:
        return functional.linear(inputs[0], *parameters)
    product = contracted(_operands(work, inputs, parameters[:1]), op.output)
    for bias, parameter in zip(parameters[1:], op.parameters[1:], strict=True):
        product = product + aligned(bias, parameter.dims, op.output)
    return product


def _operands(
    work: ShardedOperator, inputs: Sequence[Tensor], parameters: Sequence[Tensor]
) -> list[tuple[Tensor, Dims]]:
    op = work.op
    read = [(tensor, operand.dims) for tensor, operand in zip(inputs, op.inputs, strict=True)]
    return [*read, *((tensor, own.dims) for tensor, own in zip(parameters, op.parameters, strict=False))]


def embedding(work: ShardedOperator, inputs: Sequence[Tensor], parameters: Sequence[Tensor]) -> Tensor:
    """Rows of a table by index. A rank returns zeros for rows of other ranks: the result is a partial sum."""
    op = work.op
    indices, table = op.inputs[0].dims, op.parameters[0].dims
    (rows,) = without(table, (*indices, *op.output))
    tables = tuple(dim for dim in table if dim in indices)
    width = without(table, (rows, *tables))
    order = (*tables, *without(indices, tables))
    first, stop = work.interval(rows)
    index = arranged(inputs[0], indices, order).long() - first
    values = arranged(parameters[0], table, (*tables, rows, *width))
    outside = (index < 0) | (index >= stop - first) if work.is_divided(rows) else None
    if outside is not None:
        index = index.masked_fill(outside, 0)
    for at, dim in enumerate(tables):
        step = torch.arange(work.length(dim), device=index.device) * (stop - first)
        for later in tables[at + 1 :]:
            step = step * work.length(later)
        index = index + step.view(-1, *(1 for _ in order[at + 1 :]))
    flat = values.reshape(-1, *values.shape[len(tables) + 1 :])
    found = functional.embedding(index, flat.flatten(1)).unflatten(-1, flat.shape[1:] or (1,))
    if not width:
        found = found.squeeze(-1)
    if outside is not None:
        found = found.masked_fill(outside.view(*outside.shape, *(1 for _ in width)), 0.0)
    made = (*order, *width)
    summed = [made.index(dim) for dim in made if dim not in op.output]
    if summed:
        found = found.sum(summed)
    return arranged(found, [dim for dim in made if dim in op.output], op.output).contiguous()


PRODUCTS: Mapping[str, Kernel] = {
    "einsum": einsum,
    "matmul": einsum,
    "linear": linear,
    "embedding": embedding,
}
"""Kernels of products and tables by operator kind."""


# Attention


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
    """Keys or values with one entry for each query head of this rank.

    Grouped-query attention: one entry per group where `may_share` is set and the groups are equal.
    """
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
    """Mask of the keys that each of this rank's queries attends to; None where each attends to all."""
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
    """PyTorch's fused attention over all keys."""
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
    """`tensor` with four dims, as PyTorch's fused attention needs it; no copy up to four dims."""
    if tensor.dim() <= 4:
        return tensor[(None,) * (4 - tensor.dim())]
    return tensor.flatten(0, -4)


def _as_number(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """A boolean mask as numbers to add to the scores."""
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
    """Attention over this rank's keys: a partial sum of values. Ranks all-reduce the maximum and the sum of
    each row of scores first."""
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
"""Kernels of attention by operator kind."""


# Recurrent layers and cells

Gates = Sequence[Tensor]


def recurrent(work: ShardedOperator, inputs: Sequence[Tensor], parameters: Sequence[Tensor]) -> Tensor:
    """A recurrent layer over time; PyTorch's own where none of its inner dims is sharded."""
    op = work.op
    gates, units, width = op.parameters[0].dims
    state = op.parameters[1].dims[2]
    time = str(op.attributes["time"]).split()[0]
    dims = op.inputs[0].dims
    batch = without(dims, (width, time))
    if not work.axes((units, width, state)):
        return _whole_layer(work, inputs[0], parameters, (time, *batch), width)
    arguments = contracted(
        [(inputs[0], dims), (parameters[0], op.parameters[0].dims)], (time, *batch, gates, units)
    )
    arguments = work.summed(arguments, (width,), gradients="whole")
    advance = _lstm_step if op.kind == "lstm" else _gru_step
    before: Tensor | None = None
    cell: Tensor | None = None
    made = []
    for own in arguments.unbind():
        carried = None if before is None else _carried(work, before, parameters[1], units, state)
        before, cell = advance(own, carried, parameters[2:], before, cell)
        made.append(before)
    return arranged(torch.stack(made), (time, *batch, units), op.output).contiguous()


def _whole_layer(
    work: ShardedOperator, value: Tensor, parameters: Sequence[Tensor], rows: Dims, width: str
) -> Tensor:
    op = work.op
    is_lstm = op.kind == "lstm"
    units = op.parameters[0].dims[1]
    value = arranged(value, op.inputs[0].dims, (*rows, width))
    lead = value.shape[:-1]
    flat = value.reshape(lead[0], -1, value.shape[-1])
    weights = [weight.flatten(0, 1) for weight in parameters]
    if len(weights) == 3:
        weights.append(torch.zeros_like(weights[2]))
    start = flat.new_zeros(1, flat.shape[1], work.length(units))
    settings = (weights, len(weights) == 4, 1, 0.0, True, False, False)
    result = (
        torch.lstm(flat, (start, start), *settings)[0] if is_lstm else torch.gru(flat, start, *settings)[0]
    )
    return arranged(result.reshape(*lead, -1), (*rows, units), op.output).contiguous()


def _carried(work: ShardedOperator, before: Tensor, weight: Tensor, units: str, state: str) -> Tensor:
    """The recurrent weight times the whole state of the previous time step."""
    whole = all_gather_dim(work, before, before.dim() - 1, units)
    whole = local_part(work, whole, whole.dim() - 1, state)
    product = (whole @ weight.flatten(0, 1).T).unflatten(-1, weight.shape[:2])
    return work.summed(product, (state,), gradients="whole")


def cell(work: ShardedOperator, inputs: Sequence[Tensor], parameters: Sequence[Tensor]) -> Tensor:
    """One time step. The state is whole on every rank; a rank that computes some units slices their part of
    it."""
    op = work.op
    gates, units, width = op.parameters[0].dims
    dims = op.inputs[0].dims
    batch = without(dims, (width,))
    arguments = contracted(
        [(inputs[0], dims), (parameters[0], op.parameters[0].dims)], (*batch, gates, units)
    )
    arguments = work.summed(arguments, (width,), gradients="whole")
    is_lstm = op.kind == "lstm_cell"
    states = list(inputs[1].unbind()) if is_lstm else [inputs[1]]
    carried = (states[0] @ parameters[1].flatten(0, 1).T).unflatten(-1, parameters[1].shape[:2])
    first, stop = work.interval(units)
    own = [each.narrow(-1, first, stop - first) for each in states]
    if not is_lstm:
        return _gru_step(arguments, carried, parameters[2:], own[0], None)[0]
    made = _lstm_step(arguments, carried, parameters[2:], own[0], own[1])
    return torch.stack([each for each in made if each is not None])


def _lstm_step(
    own: Tensor, carried: Tensor | None, biases: Gates, before: Tensor | None, cell: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """LSTM gates in PyTorch's order: input, forget, cell, output."""
    total = own if carried is None else own + carried
    for bias in biases:
        total = total + bias
    enter, forget, fresh, leave = total.unbind(-2)
    cell_now = enter.sigmoid() * fresh.tanh()
    if cell is not None:
        cell_now = cell_now + forget.sigmoid() * cell
    return leave.sigmoid() * cell_now.tanh(), cell_now


def _gru_step(
    own: Tensor, carried: Tensor | None, biases: Gates, before: Tensor | None, cell: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """GRU gates in PyTorch's order: reset, update, candidate. The first bias belongs to the input; the second
    to the state, and the reset gate scales it."""
    of_input = own + biases[0] if biases else own
    of_state = torch.zeros_like(own) if carried is None else carried
    if len(biases) > 1:
        of_state = of_state + biases[1]
    reset, update, fresh = of_input.unbind(-2)
    reset_state, update_state, fresh_state = of_state.unbind(-2)
    update = (update + update_state).sigmoid()
    candidate = (fresh + (reset + reset_state).sigmoid() * fresh_state).tanh()
    made = (1.0 - update) * candidate
    return (made if before is None else made + update * before), None


RECURRENT: Mapping[str, Kernel] = {"lstm": recurrent, "gru": recurrent, "lstm_cell": cell, "gru_cell": cell}
"""Kernels of recurrent layers and cells by operator kind."""


# Convolution and pooling

_CONVOLUTIONS = (functional.conv1d, functional.conv2d, functional.conv3d)
_MAXIMA = (functional.max_pool1d, functional.max_pool2d, functional.max_pool3d)
_AVERAGES = (functional.avg_pool1d, functional.avg_pool2d, functional.avg_pool3d)


def _attribute(work: ShardedOperator, name: str, default: int) -> int:
    return int(work.op.attributes.get(name, default))


def _rows(value: Tensor, at: int, have: int, first: int, stop: int, fill: float) -> Tensor:
    """Rows `first` to before `stop` of dim `at` of a tensor whose first row is number `have`; missing rows
    are filled with `fill`."""
    size = value.shape[at]
    low, high = max(first - have, 0), min(stop - have, size)
    value = value.narrow(at, low, max(high - low, 0))
    before, after = max(have - first, 0), max(stop - have - size, 0)
    if not before and not after:
        return value
    widths = [0] * (2 * (value.dim() - 1 - at)) + [before, after]
    return functional.pad(value, widths, value=fill)


def _windowed(
    work: ShardedOperator, value: Tensor, spatial: int, taps: Sequence[tuple[int, int]], stride: int,
    dilation: int,
    padding: int, fill: float,
) -> tuple[Tensor, list[int]]:  # fmt: skip
    """The rows under this rank's windows, with halo rows of its neighbours, and the padding left to do per
    dim.

    `taps` are the first kernel row of this rank in each spatial dim, and the one after its last.
    """
    op = work.op
    left = [padding] * spatial
    for place, (low, high) in enumerate(taps):
        read, made = op.inputs[0].dims[place - spatial], op.output[place - spatial]
        full = low == 0 and not work.is_divided(made) and not _is_part(work, place, high)
        if full:
            continue
        at = value.dim() - spatial + place
        value, have = with_neighbours(work, value, at, read, made)
        value = _rows(value, at, have, max(have, 0), min(have + value.shape[at], op.dims[read]), fill)
        have = max(have, 0)
        start, stop = work.interval(made)
        first = start * stride - padding + low * dilation
        last = (stop - 1) * stride - padding + (high - 1) * dilation + 1
        value = _rows(value, at, have, first, last, fill)
        left[place] = 0
    return value, left


def _is_part(work: ShardedOperator, place: int, high: int) -> bool:
    """Whether a rank has only some of the kernel's taps along a spatial dim."""
    kernel = _kernel_dims(work) if work.op.parameters else ()
    return bool(kernel) and high < work.op.dims[kernel[place]]


def _kernel_dims(work: ShardedOperator) -> Dims:
    op = work.op
    own = without(op.parameters[0].dims, (*op.inputs[0].dims, *op.output))
    return own[1:] if _attribute(work, "groups", 1) > 1 else own


def convolution(work: ShardedOperator, inputs: Sequence[Tensor], parameters: Sequence[Tensor]) -> Tensor:
    op = work.op
    kernel = _kernel_dims(work)
    spatial = len(kernel)
    taps = [work.interval(dim) for dim in kernel]
    stride, dilation = _attribute(work, "stride", 1), _attribute(work, "dilation", 1)
    lead = inputs[0].shape[: -spatial - 1]
    value = inputs[0].reshape(-1, *inputs[0].shape[-spatial - 1 :])
    value, padding = _windowed(
        work, value, spatial, taps, stride, dilation, _attribute(work, "padding", 0), 0.0
    )
    settings: dict[str, Any] = {"stride": stride, "dilation": dilation, "padding": padding}
    made = op.output[-spatial - 1]
    weight, bias = [*parameters, None][:2]
    if made == op.inputs[0].dims[-spatial - 1]:  # depthwise
        settings["groups"] = len(weight)
        result = _CONVOLUTIONS[spatial - 1](value, weight.unsqueeze(1), bias, **settings)
    elif _attribute(work, "groups", 1) == 1:
        result = _CONVOLUTIONS[spatial - 1](value, weight, bias, **settings)
    else:
        result = _grouped(work, value, weight, made, op.inputs[0].dims[-spatial - 1], spatial, settings)
        result = result if bias is None else result + bias.view(-1, *(1 for _ in kernel))
    return result.reshape(*lead, *result.shape[1:])


def _grouped(
    work: ShardedOperator,
    value: Tensor,
    weight: Tensor,
    made: str,
    read: str,
    spatial: int,
    settings: dict[str, Any],
) -> Tensor:
    """A grouped convolution: filters on the channels of their group, of which a rank may have only some."""
    groups = _attribute(work, "groups", 1)
    convolve = _CONVOLUTIONS[spatial - 1]
    each, within = work.op.dims[made] // groups, work.op.dims[read] // groups
    (first, stop), have = work.interval(made), work.interval(read)[0]
    parts = []
    for group in range(first // each, -(-stop // each)):
        filters = weight[max(group * each, first) - first : min((group + 1) * each, stop) - first]
        channels = value.narrow(1, group * within - have, within)
        parts.append(convolve(channels, filters, **settings))
    return torch.cat(parts, dim=1)


def pool(work: ShardedOperator, inputs: Sequence[Tensor], parameters: Sequence[Tensor]) -> Tensor:
    op = work.op
    spatial = _attribute(work, "spatial", 2)
    is_maximum = op.attributes["function"] == "maximum"
    lead = inputs[0].shape[:-spatial]
    value = inputs[0].reshape(-1, 1, *inputs[0].shape[-spatial:])
    if "kernel" not in op.attributes:
        result = _adaptive(work, value, spatial, is_maximum=is_maximum)
    else:
        kernel = _attribute(work, "kernel", 1)
        stride, padding = _attribute(work, "stride", kernel), _attribute(work, "padding", 0)
        fill = float("-inf") if is_maximum else 0.0
        value, left = _windowed(work, value, spatial, [(0, kernel)] * spatial, stride, 1, padding, fill)
        own = [work.length(dim) for dim in op.output[-spatial:]]
        value = _to_last_window(value, own, left, kernel, stride, fill)
        if is_maximum:
            result = _MAXIMA[spatial - 1](value, kernel, stride, left)
        else:
            result = _AVERAGES[spatial - 1](value, kernel, stride, left)
    return result.reshape(*lead, *result.shape[2:])


def _to_last_window(
    value: Tensor, windows: Sequence[int], left: Sequence[int], kernel: int, stride: int, fill: float
) -> Tensor:
    """Add rows after the padding where the last window extends past it (ceil_mode)."""
    for place, count in enumerate(windows):
        at = value.dim() - len(windows) + place
        missing = (count - 1) * stride + kernel - value.shape[at] - 2 * left[place]
        if missing > 0:
            value = _rows(value, at, 0, 0, value.shape[at] + missing + left[place], fill)
    return value


def _adaptive(work: ShardedOperator, value: Tensor, spatial: int, *, is_maximum: bool) -> Tensor:
    """Adaptive pooling, one dim after the other: windows divide the rows as evenly as possible."""
    op = work.op
    for place in range(spatial):
        at = value.dim() - spatial + place
        read, made = op.inputs[0].dims[place - spatial], op.output[place - spatial]
        rows, windows = op.dims[read], op.dims[made]
        value, have = with_neighbours(work, value, at, read, made)
        each = []
        for window in range(*work.interval(made)):
            first, stop = window * rows // windows, -(-(window + 1) * rows // windows)
            own = value.narrow(at, first - have, stop - first)
            each.append(own.amax(at) if is_maximum else own.mean(at))
        value = torch.stack(each, dim=at)
    return value


WINDOWS: Mapping[str, Kernel] = {"convolution": convolution, "pool": pool}
"""Kernels of convolution and pooling by operator kind."""


# All kernels

KERNELS: Mapping[str, Kernel] = {
    **PRODUCTS,
    **WINDOWS,
    **RECURRENT,
    **POINTWISE,
    **NORMALIZATIONS,
    **ATTENTION,
    **LOSSES,
}
"""All kernels by operator kind."""
