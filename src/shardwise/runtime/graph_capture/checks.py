"""Checks that a graph computes what its module computes, and advice for operators that graphs do not have.

`ADVICE` says what to write instead of an ATen operator. The checks refuse, with the source line, what a trace
does not show: aliased in-place writes, regions without gradients, detached tensors, partly trained
parameters.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import torch

from shardwise.errors import ConfigError
from shardwise.graph import OpNode
from shardwise.runtime.graph_capture.builder import Builder
from shardwise.runtime.graph_capture.torch_export import ModuleTrace, Shape, TracedCall, refs_of, refusal

# Advice

_FAMILIES: Sequence[tuple[tuple[str, ...], str]] = (
    (
        ("topk", "sort", "argsort", "argmax", "argmin", "kthvalue", "msort", "multinomial", "bernoulli"),
        "weights over all elements, such as a softmax: graphs select nothing by value",
    ),
    (
        (
            "gather", "index", "index_select", "take", "take_along_dim", "masked_select", "nonzero",
            "scatter", "scatter_add", "scatter_reduce", "index_add", "index_copy", "embedding_bag",
        ),
        "a lookup in a table of parameters (nn.Embedding), F.cross_entropy for likelihoods of classes, or an "
        "einsum with weights of 0 and 1 that are an input",
    ),
    (
        ("copy", "fill", "zero", "index_put", "slice_scatter", "select_scatter", "masked_scatter"),
        "new tensors, or torch.cat of the parts, instead of assignments to a part",
    ),
    (
        ("roll", "flip", "rot90"),
        "torch.cat of the parts in the new order",
    ),
    (("pad", "constant_pad_nd"), "torch.cat with zeros, or padding= of the convolution or pooling"),
    (
        ("repeat", "tile", "repeat_interleave"),
        "unsqueeze and expand, then reshape",
    ),
    (
        ("gt", "lt", "ge", "le", "eq", "ne", "isnan", "isinf", "logical_and", "logical_or", "logical_not"),
        "relu, clamp, maximum or minimum, or a mask computed from inputs only: graphs compare nothing "
        "that depends on a parameter",
    ),
    (
        ("conv_transpose1d", "conv_transpose2d", "conv_transpose3d"),
        "nn.Linear to the pixels of a window and a reshape, where the stride equals the kernel",
    ),
    (
        (
            "upsample_nearest1d", "upsample_nearest2d", "upsample_nearest3d", "upsample_linear1d",
            "upsample_bilinear2d", "upsample_bicubic2d", "upsample_trilinear3d", "grid_sampler",
        ),
        "expand and reshape for the nearest pixel, otherwise an einsum with a matrix of weights as an input",
    ),
    (("cumsum", "cumprod", "logcumsumexp"), "a product with a triangular matrix of ones as an input"),
    (
        (
            "zeros_like", "ones_like", "full_like", "new_zeros", "new_ones", "new_full", "rand_like",
            "randn_like",
        ),
        "torch.zeros or similar with a shape: x.shape of an input",
    ),
    (("_weight_norm", "_weight_norm_interface"), "a weight that is a parameter, without weight_norm"),
)  # fmt: skip

ADVICE: Mapping[str, str] = {name: advice for names, advice in _FAMILIES for name in names}
"""By the name of the ATen operator without `aten.` and its overload."""

OTHERWISE = "operators that graphs have, such as einsum (docs/reference/operators.md)"


# Checks

REGIONS: Mapping[str, tuple[str, str]] = {
    "wrap_with_set_grad_enabled": (
        "torch.no_grad",
        "gradients for everything that the loss depends on; compute parts without gradients outside of "
        "the module, or from inputs only",
    ),
    "wrap_with_autocast": (
        "torch.autocast",
        "a module without it: the dtype of a step is the command's (--dtype)",
    ),
}
"""Regions of a module that torch.export exports as one call: what users write, and what to write instead."""

ZEROS: Mapping[str, int | None] = {
    "zeros": None, "zeros_like": None, "new_zeros": None, "full": 1, "full_like": 1, "new_full": 2,
}  # fmt: skip
"""Operators that make zeros; the number is the position of the fill value, which has to be 0."""

KEEP_ZEROS = frozenset({
    "view", "reshape", "flatten", "squeeze", "unsqueeze", "expand", "expand_as", "transpose", "t", "permute",
    "contiguous", "clone", "detach", "alias", "to", "_to_copy", "type_as", "slice", "narrow", "select", "cat",
    "stack", "repeat", "chunk", "split", "unbind", "getitem",
})  # fmt: skip
"""Operators whose result is zero if all their inputs are."""

_PART = re.compile(r"(.+)\[((?::, )*)(\d+):(\d+)\]")


def check_trace(trace: ModuleTrace, file: str) -> None:
    """ConfigError where a region that depends on a parameter is one call, or a write in place is aliased."""
    trained = {call.name for call in trace.trained}
    for call in trace.trained:
        if call.is_region:
            written, allowed = REGIONS.get(call.target, (call.target, "the same written without it"))
            problem = "covers a part of the module that depends on parameters"
            raise refusal(file, replace(call, target=written), problem, allowed)
    for call in aliased_writes(trace):
        if call.name in trained:
            raise aliased_write_error(file, call)


def check_data(trace: ModuleTrace, file: str) -> None:
    """ConfigError where data is computed with an aliased write, which the trace loses."""
    for call in aliased_writes(trace):
        raise aliased_write_error(file, call)


def aliased_write_error(file: str, call: TracedCall) -> ConfigError:
    """The error for an aliased write."""
    return refusal(
        file,
        call,
        "changes in place a tensor that is read later through another tensor, its base or a view",
        "new tensors: h = h + x, torch.cat of the parts; in place only if the returned tensor is read",
    )


def aliased_writes(trace: ModuleTrace) -> Iterator[TracedCall]:
    """The calls that change in place a value that is read later by an older name.

    A changed value has a new name. Older names (the tensor of a slice, an earlier view) give the value before
    the change.
    """
    aliases: dict[int, list[str]] = {}
    stale: dict[str, TracedCall] = {}

    def record_alias(name: str) -> None:
        for number in trace.memory.get(name, ()):
            aliases.setdefault(number, []).append(name)

    for name in (*trace.data, *trace.parameters):
        record_alias(name)
    for call in trace.calls:
        yield from (stale[ref.name] for ref in refs_of(call) if ref.name in stale)
        for number in _memory_of(trace, call.writes):
            stale.update(dict.fromkeys(aliases.get(number, ()), call))
        record_alias(call.name)
    yield from (stale[name] for name in trace.results if name in stale)


def _memory_of(trace: ModuleTrace, names: Sequence[str]) -> frozenset[int]:
    return frozenset(number for name in names for number in trace.memory.get(name, ()))


def zeros_of(trace: ModuleTrace) -> frozenset[str]:
    """The values that are zero for all inputs of the module."""
    written = _memory_of(trace, [name for call in trace.calls for name in call.writes])
    zeros: set[str] = set()
    for call in trace.calls:
        name = call.target.removeprefix("aten.").partition(".")[0]
        if name in ZEROS:
            at = ZEROS[name]
            is_zero = at is None or (len(call.arguments) > at and call.arguments[at] == 0)
        else:
            refs = refs_of(call)
            is_zero = name in KEEP_ZEROS and bool(refs) and all(ref.name in zeros for ref in refs)
        if is_zero and not _memory_of(trace, [call.name]) & written:
            zeros.add(call.name)
    return frozenset(zeros)


def check_detached(trace: ModuleTrace, losses: Sequence[str], file: str) -> None:
    """ConfigError where a tensor on the way to one of the results `losses` is detached."""
    required = set(losses)
    for call in reversed(trace.trained):
        if call.name not in required:
            continue
        required.update(ref.name for ref in refs_of(call))
        if call.target.split(".")[1:2] in (["detach"], ["detach_"]):
            raise refusal(
                file,
                call,
                "stops the gradient, and graphs train everything that the loss depends on",
                "the tensor as it is, or computed outside of the module",
            )


def partly_read_parameters(nodes: Sequence[OpNode], sizes: Mapping[str, Shape]) -> frozenset[str]:
    """The parameters whose parts that are read do not tile them: with gaps, overlaps, or next to the
    whole."""
    parts: dict[str, set[tuple[int, int, int]]] = {}
    whole: set[str] = set()
    for name in {parameter.name for node in nodes for parameter in node.parameters}:
        part = _PART.fullmatch(name)
        if part is None:
            whole.add(name)
        else:
            at = len(part[2]) // len(":, ")
            parts.setdefault(part[1], set()).add((at, int(part[3]), int(part[4])))
    return frozenset(name for name, found in parts.items() if name in whole or not _tile(found, sizes[name]))


def _tile(parts: set[tuple[int, int, int]], shape: Shape) -> bool:
    position = 0
    for _, start, stop in sorted(parts):
        if start != position:
            return False
        position = stop
    (at, *others) = {dim for dim, _, _ in parts}
    return not others and position == shape[at]


def check_parameters(
    builder: Builder, nodes: Sequence[OpNode], module: torch.nn.Module, trained: frozenset[str]
) -> None:
    """ConfigError where operators do not train the same parameters as the module, each whole.

    `trained` are those that PyTorch gives a gradient.
    """
    own = dict(module.named_parameters())
    elements: dict[str, int] = {}
    for node in nodes:
        for parameter in node.parameters:
            if parameter.name.partition("[")[0] not in trained:
                raise _untrained(builder, builder.calls[node.name], parameter.name.partition("[")[0], own)
            elements[parameter.name] = node.elements(parameter.dims)
    found: dict[str, int] = {}
    for name, count in elements.items():
        base = name.partition("[")[0]
        found[base] = found.get(base, 0) + count
    for name in sorted(trained):
        if found.get(name) != own[name].numel():
            raise ConfigError(
                "is trained by the module, but the graph has only a part of it",
                file=builder.file,
                key=f"parameter {name}",
                found=f"{found.get(name, 0):,} of {own[name].numel():,} elements",
                allowed="a forward pass of PyTorch operators only, without changes in place",
            )


def _untrained(
    builder: Builder, call: TracedCall, name: str, own: Mapping[str, torch.nn.Parameter]
) -> ConfigError:
    if name in own and not own[name].requires_grad:
        problem = f"reads {name}, which is frozen (requires_grad=False), and graphs train every parameter"
        return builder.refused(
            call, problem, "trained parameters; buffers (register_buffer) for tables that are not trained"
        )
    problem = f"reads {name}, which gets no gradient from the loss, and graphs train every parameter"
    return builder.refused(call, problem, "a path to the loss without detach(), .data or torch.no_grad()")
