"""PyTorch's ways to see a tensor otherwise: most are only names, some make a reshape or a slice."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from shardwise.runtime.capture_build import Builder, IndexSpace, View, permuted, view_of
from shardwise.runtime.capture_sizes import CONSTANT, Dims
from shardwise.runtime.capture_trace import Ref, TracedCall

HandlerResult = View | tuple[View | None, ...]
TupleHandler = Callable[[Builder, TracedCall, tuple[Dims, ...]], HandlerResult]

UNSUPPORTED_RESULT: HandlerResult = ()
"""A result that operators of graphs do not have, such as the last state of a recurrent layer."""

Handler = Callable[[Builder, TracedCall, Dims], HandlerResult]


def argument(call: TracedCall, place: int, name: str, default: Any = None) -> Any:
    """An argument of a call by its place or its name."""
    return call.arguments[place] if place < len(call.arguments) else call.named.get(name, default)


def tensor(builder: Builder, call: TracedCall, place: int, name: str = "input") -> View:
    """The view that is an argument of a call."""
    found = optional_tensor(builder, call, place, name)
    if found is None:
        raise builder.refused(call, f"has no tensor {name}", "tensors as operands")
    return found


def optional_tensor(builder: Builder, call: TracedCall, place: int, name: str) -> View | None:
    """The view that is an argument of a call, None where there is none."""
    found = argument(call, place, name)
    view = builder.views[found.name] if isinstance(found, Ref) else None
    if view == UNSUPPORTED_RESULT:
        raise builder.refused(call, "reads a result that graphs do not have", "first results alone")
    return view if isinstance(view, View) else None


def same(builder: Builder, call: TracedCall, dims: Dims) -> HandlerResult:
    """The tensor as it is: casts, copies, detached."""
    return tensor(builder, call, 0)


def _reshape(builder: Builder, call: TracedCall, dims: Dims) -> HandlerResult:
    """A reshape where more than dims of size 1 come or go."""
    view = tensor(builder, call, 0)
    if [dim for dim in view.dims if not dim.is_unit] == [dim for dim in dims if not dim.is_unit]:
        places = iter(axis for dim, axis in zip(view.dims, view.axes, strict=True) if not dim.is_unit)
        return replace(view, dims=dims, axes=tuple(None if dim.is_unit else next(places) for dim in dims))
    view = builder.plain(call, view)
    space = IndexSpace()
    operand = space.names(view.dims)
    alike = 0
    while alike < min(len(dims), len(view.dims)) and dims[alike] == view.dims[alike]:
        alike += 1
    output = (*operand[:alike], *space.names(dims[alike:]))
    return builder.emit(call, "reshape", space, [(view, operand)], output, dims)


def _expand(builder: Builder, call: TracedCall, dims: Dims) -> HandlerResult:
    """Dims in front, and dims of size 1 that are read again and again."""
    return _expanded(tensor(builder, call, 0), dims)


def _expanded(view: View, dims: Dims) -> View:
    axes = (*(None for _ in range(len(dims) - len(view.dims))), *view.axes)
    return replace(view, dims=dims, axes=axes)


def broadcast_together(builder: Builder, call: TracedCall, results: tuple[Dims, ...]) -> HandlerResult:
    """Each tensor with the dims of all."""
    views = (builder.views[ref.name] for ref in call.arguments[0])
    pairs = zip(views, results, strict=True)
    return tuple(_expanded(view, dims) for view, dims in pairs if isinstance(view, View))


def _transpose(builder: Builder, call: TracedCall, dims: Dims) -> HandlerResult:
    view = tensor(builder, call, 0)
    order = list(range(len(view.dims)))
    if len(order) > 1:
        one, two = (0, 1) if len(call.arguments) < 3 else call.arguments[1:3]
        order[one], order[two] = order[two], order[one]
    return permuted(view, order)


def _permute(builder: Builder, call: TracedCall, dims: Dims) -> HandlerResult:
    view = tensor(builder, call, 0)
    return permuted(view, [at % len(view.dims) for at in argument(call, 1, "dims")])


def sliced(
    builder: Builder, call: TracedCall, view: View, at: int, start: int, dims: Dims, *, drops_dim: bool
) -> View:
    """A run of elements along dim `at` from `start` on; one element, and the dim `drops_dim`."""
    if view.dims[at].is_unit or (not drops_dim and view.dims[at] == dims[at]):
        keep = [place for place in range(len(view.dims)) if not (drops_dim and place == at)]
        return permuted(view, keep)
    if view.axes[at] is None:  # repeated along it: a part is as the whole
        keep = [place for place in range(len(view.dims)) if not (drops_dim and place == at)]
        return replace(permuted(view, keep), dims=dims)
    if view.is_parameter:
        rows = range(start, start + (1 if drops_dim else dims[at].size))
        return _part_of_parameter(builder, call, view, at, rows, dims, drops_dim=drops_dim)
    view = builder.whole(call, view)
    space = IndexSpace()
    operand = space.names(view.dims)
    remaining = tuple(name for place, name in enumerate(operand) if place != at)
    if drops_dim:
        return builder.emit(
            call, "slice", space, [(view, operand)], remaining, dims, attributes={"start": start}
        )
    made = None if dims[at].is_unit else space.fresh(dims[at])
    output = (*operand[:at], made, *operand[at + 1 :])
    return builder.emit(call, "slice", space, [(view, operand)], output, dims, attributes={"start": start})


def _part_of_parameter(
    builder: Builder, call: TracedCall, view: View, at: int, rows: range, dims: Dims, *, drops_dim: bool
) -> View:
    """Rows of a parameter are a parameter of their own, `in_proj.weight[0:64]`; where such parts would not
    make the whole, or their number grows, they are looked up in it as in a table."""
    if view.is_expanded or "[" in view.producer:
        raise builder.refused(call, "cuts a parameter seen otherwise", "parts of parameters as they are")
    is_growing = not drops_dim and dims[at].growth != CONSTANT
    if is_growing or rows.step > 1 or not view.is_plain or view.producer in builder.lookup_tables:
        return _embedding_lookup(builder, call, view, at, rows, dims, drops_dim=drops_dim)
    own = [place for place, size in enumerate(builder.shapes[view.producer]) if size != 1]
    front = ":, " * own[view.axes[at] or 0]
    return view_of(f"{view.producer}[{front}{rows.start}:{rows.stop}]", dims, is_parameter=True)


def _embedding_lookup(
    builder: Builder, call: TracedCall, view: View, at: int, rows: range, dims: Dims, *, drops_dim: bool
) -> View:
    """`rows` of a parameter, which stays whole, by indices that are data."""
    space = IndexSpace()
    table = space.names(view.dims)
    made = None if drops_dim or dims[at].is_unit else space.fresh(dims[at])
    output = (*table[:at], *(() if drops_dim else (made,)), *table[at + 1 :])
    own = builder.unique(f"{call.name}_rows")
    builder.rows[own] = rows
    indices = view_of(own, () if drops_dim else (dims[at],), is_data=True)
    operands = [(indices, () if drops_dim else (made,)), (view, table)]
    return builder.emit(call, "embedding", space, operands, output, dims, name=f"{call.name}_lookup")


def _slice(builder: Builder, call: TracedCall, dims: Dims) -> HandlerResult:
    """With a step, as many elements of activations from the first on; of parameters the rows themselves."""
    view = tensor(builder, call, 0)
    at = argument(call, 1, "dim", 0) % len(view.dims)
    start, step = argument(call, 2, "start", 0) or 0, argument(call, 4, "step", 1)
    first = max(start + view.dims[at].size, 0) if start < 0 else start
    if step > 1 and view.is_parameter and view.axes[at] is not None:
        rows = range(first, first + step * dims[at].size, step)
        return _part_of_parameter(builder, call, view, at, rows, dims, drops_dim=False)
    return sliced(builder, call, view, at, 0 if step > 1 else first, dims, drops_dim=False)


def _narrow(builder: Builder, call: TracedCall, dims: Dims) -> HandlerResult:
    view = tensor(builder, call, 0)
    return sliced(
        builder, call, view, call.arguments[1] % len(view.dims), call.arguments[2], dims, drops_dim=False
    )


def _select(builder: Builder, call: TracedCall, dims: Dims) -> HandlerResult:
    view = tensor(builder, call, 0)
    at = call.arguments[1] % len(view.dims)
    return sliced(builder, call, view, at, call.arguments[2] % view.dims[at].size, dims, drops_dim=True)


def parts(builder: Builder, call: TracedCall, results: tuple[Dims, ...]) -> HandlerResult:
    """Chunks and splits along a dim: a slice each; `unbind` is without the dim."""
    view = tensor(builder, call, 0)
    drops_dim = call.target.startswith("aten.unbind")
    at = argument(call, 1 if drops_dim else 2, "dim", 0) % len(view.dims)
    made, start = [], 0
    for place, dims in enumerate(results):
        one = replace(call, name=f"{call.name}_{place}")
        made.append(sliced(builder, one, view, at, start, dims, drops_dim=drops_dim))
        start += 1 if drops_dim else dims[at].size
    return tuple(made)


def _concat(builder: Builder, call: TracedCall, dims: Dims) -> HandlerResult:
    every = [view for ref in call.arguments[0] if isinstance(view := builder.views[ref.name], View)]
    # Caches begin with tensors without elements, of one dim even, which PyTorch leaves out.
    views = [view for view in every if all(dim.size for dim in view.dims)]
    at = argument(call, 1, "dim", 0) % len(dims)
    return views[0] if len(views) == 1 else concatenated(builder, call, views, at, dims)


def concatenated(builder: Builder, call: TracedCall, views: Sequence[View], at: int, dims: Dims) -> View:
    """Tensors one behind the other along the dim at `at`."""
    views = [builder.with_unit_dims(call, view, (at,)) for view in views]
    space = IndexSpace()
    output = space.names(dims)
    operands = [(view, (*output[:at], space.fresh(view.dims[at]), *output[at + 1 :])) for view in views]
    return builder.emit(call, "concat", space, operands, output, dims, attributes={"over": str(output[at])})


VIEWS: Mapping[str, Handler] = {
    **dict.fromkeys(
        ("view", "reshape", "_unsafe_view", "flatten", "unflatten", "squeeze", "unsqueeze", "view_as"),
        _reshape,
    ),
    **dict.fromkeys(("expand", "expand_as"), _expand),
    **dict.fromkeys(("transpose", "t", "swapaxes"), _transpose),
    **dict.fromkeys(
        (
            "contiguous", "clone", "detach", "alias", "to", "_to_copy", "type_as", "float", "half",
            "bfloat16", "lift_fresh_copy",
        ),
        same,
    ),
    "permute": _permute,
    "slice": _slice,
    "narrow": _narrow,
    "select": _select,
    "cat": _concat,
    "concat": _concat,
}  # fmt: skip
"""By the name of the operator without `aten.` and its overload."""

TUPLES: Mapping[str, TupleHandler] = {
    **dict.fromkeys(("chunk", "split", "split_with_sizes", "tensor_split", "unbind"), parts),
    "broadcast_tensors": broadcast_together,
}
"""Operators with several results."""
