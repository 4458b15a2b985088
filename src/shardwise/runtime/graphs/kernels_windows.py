"""What a rank computes of convolutions and pooling: windows of its rows and of its neighbours'."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from shardwise.runtime.graphs.halo import with_neighbours
from shardwise.runtime.graphs.work import Dims, Kernel, ShardedOperator, without

_CONVOLUTIONS = (functional.conv1d, functional.conv2d, functional.conv3d)
_MAXIMA = (functional.max_pool1d, functional.max_pool2d, functional.max_pool3d)
_AVERAGES = (functional.avg_pool1d, functional.avg_pool2d, functional.avg_pool3d)


def _attribute(work: ShardedOperator, name: str, default: int) -> int:
    return int(work.op.attributes.get(name, default))


def _rows(value: Tensor, at: int, have: int, first: int, stop: int, fill: float) -> Tensor:
    """Rows `first` to before `stop` of dim `at`, of a tensor whose rows begin with row `have`; what it
    has not is `fill`."""
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
    """The rows under this rank's windows, whose taps are those from the first to before the second of each
    dim's; and what is still to be padded."""
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
    """Whether a rank has a part of a kernel's taps along a spatial dim."""
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
    """Filters on the channels of their group, of which ranks may have a part."""
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
    """Rows behind the padding, where the last window reaches beyond it (windows counted up)."""
    for place, count in enumerate(windows):
        at = value.dim() - len(windows) + place
        missing = (count - 1) * stride + kernel - value.shape[at] - 2 * left[place]
        if missing > 0:
            value = _rows(value, at, 0, 0, value.shape[at] + missing + left[place], fill)
    return value


def _adaptive(work: ShardedOperator, value: Tensor, spatial: int, *, is_maximum: bool) -> Tensor:
    """Windows that share the rows as evenly as they go: one dim after the other."""
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
"""By kind."""
