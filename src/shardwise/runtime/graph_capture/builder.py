"""Builds graph operators from traced calls: dims and their growth, views, and names of dims (`Builder`).

Dims of size 1 that do not grow are left out of every tensor, so squeezing and broadcasting only change names.
A `View` is a tensor as its producer makes it, with dims permuted, added with size 1, or repeated. Readers
name its dims in the producer's order.

`dims_by_value` finds which sizes grow with the batch or the sequence length, by tracing with each doubled.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from shardwise.errors import ConfigError
from shardwise.graph import Operand, OpNode, Parameter, SizeGrowth, check_op
from shardwise.runtime.graph_capture.torch_export import ModuleTrace, Shape, TracedCall, refs_of, refusal

# Dims and their growth

CONSTANT = SizeGrowth()


@dataclass(frozen=True, slots=True)
class Dim:
    """The size of one dim of a tensor, and its growth."""

    size: int
    growth: SizeGrowth = CONSTANT

    @property
    def is_unit(self) -> bool:
        """Whether it is always 1: graphs leave such dims out."""
        return self.size == 1 and self.growth == CONSTANT


Dims = tuple[Dim, ...]


def dims_by_value(
    trace: ModuleTrace, doubled: Mapping[str, ModuleTrace], file: str
) -> dict[str, tuple[Dims, ...]]:
    """The dims of every parameter, of every value that depends on one, and of the data that these read.

    A tuple value has several. `doubled` are the traces with the batch (`batch`) or the sequence length
    (`seq_len`) doubled. ConfigError where the operators differ, or where a size grows in another way.
    """
    values = _values(trace)
    others = {what: _values(other) for what, other in doubled.items()}
    for what, other in others.items():
        _check_same_operators(values, other, what, file)
    found: dict[str, tuple[Dims, ...]] = {}
    for at, value in enumerate(values):
        found[value.name] = tuple(
            _dims(shape, {what: other[at].shapes[part] for what, other in others.items()}, value.where, file)
            for part, shape in enumerate(value.shapes)
        )
    return found


def varying_numbers(trace: ModuleTrace, doubled: Mapping[str, ModuleTrace]) -> frozenset[str]:
    """The calls of `trace` whose numbers change where the batch or the sequence length is doubled."""
    return frozenset(
        one.name
        for other in doubled.values()
        for one, two in zip(trace.trained, other.trained, strict=True)
        if _numbers(one) != _numbers(two)
    )


def _numbers(call: TracedCall) -> list[float]:
    values = (*call.arguments, *call.named.values())
    return [value for value in values if isinstance(value, int | float)]


@dataclass(frozen=True, slots=True)
class _Value:
    """A value, its producer, its source line and its shapes."""

    name: str
    producer: str
    where: str | None
    shapes: tuple[Shape, ...]


def _values(trace: ModuleTrace) -> list[_Value]:
    """Parameters, then each call that depends on one, after the data that it reads."""
    shapes = trace.shapes()
    values = [
        _Value(name, own, f"parameter {own}", (shape,)) for name, (own, shape) in trace.parameters.items()
    ]
    known = {*trace.parameters, *(call.name for call in trace.trained)}
    for call in trace.trained:
        data = (ref.name for ref in refs_of(call) if ref.name not in known)
        values += [_Value(name, "data", call.where, shapes[name]) for name in data]
        values.append(_Value(call.name, call.target, call.where, call.shapes))
    return values


def _check_same_operators(values: Sequence[_Value], others: Sequence[_Value], what: str, file: str) -> None:
    for one, two in zip(values, others, strict=False):
        is_same = one.producer == two.producer and [len(shape) for shape in one.shapes] == [
            len(shape) for shape in two.shapes
        ]
        if not is_same:
            raise _differs_error(what, one.where, file)
    if len(values) != len(others):
        raise _differs_error(what, None, file)


def _differs_error(what: str, where: str | None, file: str) -> ConfigError:
    return ConfigError(
        f"is a different network when the {what} doubles",
        file=file,
        key=where,
        allowed="the same operators at every batch and sequence length",
    )


def _dims(shape: Shape, doubled_shapes: Mapping[str, Shape], where: str | None, file: str) -> Dims:
    dims = []
    for at, size in enumerate(shape):
        powers = {what: _power(size, other[at], what, where, file) for what, other in doubled_shapes.items()}
        dims.append(Dim(size, SizeGrowth(**powers)))
    return tuple(dims)


def _power(size: int, doubled: int, what: str, where: str | None, file: str) -> int:
    """The power with which `size` grows to `doubled`."""
    for power in (0, 1, 2):
        if doubled == size * 2**power:
            return power
    raise ConfigError(
        f"has a size that is not a multiple of a power of the {what}",
        file=file,
        key=where,
        found=f"{size}, and {doubled} when the {what} doubles",
        allowed=f"constant sizes, or sizes that grow with the {what} or its square",
    )


# Views and operators

Setting = int | float | bool | str

Attributes = Mapping[str, Setting]

Names = tuple[str | None, ...]
"""One name per dim of a view; None for dims that are left out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """A name of the trace as its producer's tensor.

    `dims` are in PyTorch's order. `axes` has for each its position among the producer's dims, or None where
    the producer does not have it (size 1, or repeated).
    """

    producer: str
    dims: Dims
    axes: tuple[int | None, ...]
    is_parameter: bool = False
    is_data: bool = False

    @property
    def is_plain(self) -> bool:
        """Whether it has the producer's dims in the producer's order, not counting those of size 1."""
        return not self.is_expanded and [axis for axis in self.axes if axis is not None] == sorted(
            axis for axis in self.axes if axis is not None
        )

    @property
    def is_expanded(self) -> bool:
        """Whether it has dims that its producer does not have."""
        return any(axis is None and not dim.is_unit for dim, axis in zip(self.dims, self.axes, strict=True))


def view_of(producer: str, dims: Dims, *, is_parameter: bool = False, is_data: bool = False) -> View:
    """A tensor as its producer makes it."""
    places = iter(range(len(dims)))
    axes = tuple(None if dim.is_unit else next(places) for dim in dims)
    return View(producer=producer, dims=dims, axes=axes, is_parameter=is_parameter, is_data=is_data)


def view_with_unit_dims(producer: str, dims: Dims, names: Names) -> View:
    """A tensor as its producer makes it, with all dims that have a name."""
    places = iter(range(len(dims)))
    return View(
        producer=producer, dims=dims, axes=tuple(None if name is None else next(places) for name in names)
    )


class IndexSpace:
    """The names of one operator's dims; the same for dims of equal size and growth in all operators."""

    def __init__(self) -> None:
        self.dims: dict[str, Dim] = {}

    def fresh(self, dim: Dim) -> str:
        """A new name for this dim."""
        powers = dim.growth
        stem = "b" * powers.batch + "s" * powers.seq_len or f"d{dim.size}"
        name, count = stem, 1
        while name in self.dims:
            count += 1
            name = f"{stem}_{count}"
        self.dims[name] = dim
        return name

    def names(self, dims: Sequence[Dim]) -> Names:
        """New names; None for dims that are left out."""
        return tuple(None if dim.is_unit else self.fresh(dim) for dim in dims)


@dataclass(slots=True)
class Builder:
    """The operators found so far, the calls that they come from, and the view of each name in the trace.

    `varying` are the calls whose numbers change with the batch or the sequence length. `zeros` is data that
    is zero, `shapes` are those of parameters. Parts of parameters in `lookup_tables` are read by embedding
    lookups; `rows` has their rows by the name of the indices.
    """

    file: str
    views: dict[str, View | tuple[View | None, ...]] = field(default_factory=dict)
    nodes: list[OpNode] = field(default_factory=list)
    inputs: dict[str, tuple[int, ...]] = field(default_factory=dict)
    growth: dict[str, SizeGrowth] = field(default_factory=dict)
    taken: set[str] = field(default_factory=set)
    calls: dict[str, TracedCall] = field(default_factory=dict)
    varying: frozenset[str] = frozenset()
    zeros: frozenset[str] = frozenset()
    shapes: Mapping[str, Shape] = field(default_factory=dict)
    lookup_tables: frozenset[str] = frozenset()
    rows: dict[str, range] = field(default_factory=dict)

    def emit(
        self,
        call: TracedCall,
        kind: str,
        space: IndexSpace,
        operands: Sequence[tuple[View, Names]],
        output: Names,
        dims: Dims,
        *,
        name: str | None = None,
        attributes: Attributes | None = None,
    ) -> View:
        """Add an operator whose output has `dims` with the names `output`; returns its view.

        ConfigError where it reads parameters only, or where the operator is not valid.
        """
        inputs = [self._operand(view, names) for view, names in operands if not view.is_parameter]
        parameters = [
            Parameter(view.producer, _in_producer_order(view, names))
            for view, names in operands
            if view.is_parameter
        ]
        if not inputs:
            raise self.refused(
                call, "reads parameters only", "parameters that operators read together with data"
            )
        node = OpNode(
            name=self.unique(name or call.name),
            kind=kind,
            dims={dim: found.size for dim, found in space.dims.items()},
            inputs=tuple(inputs),
            parameters=tuple(parameters),
            output=tuple(dim for dim in output if dim is not None),
            attributes=attributes or {},
        )
        try:
            check_op(node)
        except ConfigError as error:
            problem = f"makes an invalid operator: {error.message}"
            raise self.refused(call, problem, error.allowed or "another way") from None
        self.nodes.append(node)
        self.calls[node.name] = call
        growing = {dim: found.growth for dim, found in space.dims.items() if found.growth != CONSTANT}
        self.growth.update(growing)
        return view_of(node.name, dims)

    def refused(self, call: TracedCall, problem: str, allowed: str) -> ConfigError:
        """The error for a call that cannot be captured, with its name and the user's source line."""
        return refusal(self.file, call, problem, allowed)

    def plain(self, call: TracedCall, view: View) -> View:
        """`view` in its own dim order; a transpose is added if necessary."""
        view = self.whole(call, view)
        if view.is_plain:
            return view
        space = IndexSpace()
        names = space.names(view.dims)
        own = f"{call.name}_transpose"
        return self.emit(
            call, "transpose", space, [(view, names)], names, view.dims, name=own, attributes={"copies": True}
        )

    def whole(self, call: TracedCall, view: View) -> View:
        """`view` with all its dims made by a producer; repetition is added if necessary."""
        if not view.is_expanded:
            return view
        if view.is_parameter:
            return self._embedding_lookup(call, view)
        space = IndexSpace()
        names = space.names(view.dims)
        seen = producer_names(view, names)
        own = f"{call.name}_repeat"
        settings = {"function": "identity"}
        return self.emit(
            call, "elementwise", space, [(view, seen)], names, view.dims, name=own, attributes=settings
        )

    def _embedding_lookup(self, call: TracedCall, view: View) -> View:
        """A repeated parameter as a lookup in a table with one row."""
        space = IndexSpace()
        names = space.names(view.dims)
        row = space.fresh(Dim(1))
        seen = producer_names(view, names)
        repeated = [
            (dim, name)
            for dim, name, axis in zip(view.dims, names, view.axes, strict=True)
            if axis is None and name is not None
        ]
        places = view_of(self.unique(f"{call.name}_row"), tuple(dim for dim, _ in repeated), is_data=True)
        axes = (0, *(None if axis is None else axis + 1 for axis in view.axes))
        table = View(producer=view.producer, dims=(Dim(1), *view.dims), axes=axes, is_parameter=True)
        operands = [(places, tuple(name for _, name in repeated)), (table, (row, *seen))]
        return self.emit(call, "embedding", space, operands, names, view.dims, name=f"{call.name}_repeat")

    def with_unit_dims(self, call: TracedCall, view: View, places: Collection[int]) -> View:
        """`view` whose producer has the dims at `places` even where they are 1, for operators that identify
        dims by position."""
        view = self.plain(call, view)
        if all(view.axes[at] is not None for at in places):
            return view
        space = IndexSpace()
        names = tuple(
            space.fresh(dim) if at in places or not dim.is_unit else None for at, dim in enumerate(view.dims)
        )
        if view.is_data:  # another input with the same data
            return replace(view_with_unit_dims(f"{view.producer}_spelled", view.dims, names), is_data=True)
        seen, own = producer_names(view, names), f"{call.name}_spelled"
        made = self.emit(call, "reshape", space, [(view, seen)], names, view.dims, name=own)
        return view_with_unit_dims(made.producer, view.dims, names)

    def without_unit_dims(self, call: TracedCall, view: View) -> View:
        """`view` whose producer has no dims of size 1."""
        if not any(dim.is_unit and axis is not None for dim, axis in zip(view.dims, view.axes, strict=True)):
            return view
        space = IndexSpace()
        names = names_with_unit_dims(view, space)
        output = tuple(None if dim.is_unit else name for dim, name in zip(view.dims, names, strict=True))
        return self.emit(call, "reshape", space, [(view, names)], output, view.dims)

    def _operand(self, view: View, names: Names) -> Operand:
        if view.is_data and view.producer not in self.inputs:
            placed = zip(view.axes, view.dims, strict=True)
            own = sorted((axis, dim.size) for axis, dim in placed if axis is not None)
            self.inputs[view.producer] = tuple(size for _, size in own)
            self.taken.add(view.producer)
        return Operand(view.producer, _in_producer_order(view, names))

    def unique(self, name: str) -> str:
        """A name that no operator and no input has."""
        own, count = name, 1
        while own in self.taken:
            count += 1
            own = f"{name}_{count}"
        self.taken.add(own)
        return own


def names_with_unit_dims(view: View, space: IndexSpace) -> Names:
    """New names for all dims that the producer has."""
    pairs = zip(view.dims, view.axes, strict=True)
    return tuple(None if axis is None else space.fresh(dim) for dim, axis in pairs)


def producer_names(view: View, names: Names) -> Names:
    """`names`, with None for dims that the producer does not have."""
    return tuple(None if axis is None else name for name, axis in zip(names, view.axes, strict=True))


def _in_producer_order(view: View, names: Names) -> tuple[str, ...]:
    """The names of the producer's dims, in its order."""
    placed = sorted(
        (axis, name)
        for axis, name in zip(view.axes, names, strict=True)
        if axis is not None and name is not None
    )
    return tuple(name for _, name in placed)


def permuted(view: View, order: Sequence[int]) -> View:
    """The view with its dims permuted."""
    return replace(view, dims=tuple(view.dims[at] for at in order), axes=tuple(view.axes[at] for at in order))
