"""Which sizes follow the batch and the sequence length: the same module traced at two of each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shardwise.errors import ConfigError
from shardwise.graph import SizeGrowth
from shardwise.runtime.capture_trace import ModuleTrace, Shape, TracedCall, refs_of

CONSTANT = SizeGrowth()


@dataclass(frozen=True, slots=True)
class Dim:
    """The size of one dim of a tensor, and what it grows with."""

    size: int
    growth: SizeGrowth = CONSTANT

    @property
    def is_unit(self) -> bool:
        """Whether it is always 1: such dims are left out of graphs."""
        return self.size == 1 and self.growth == CONSTANT


Dims = tuple[Dim, ...]


def dims_by_value(
    trace: ModuleTrace, doubled: Mapping[str, ModuleTrace], file: str
) -> dict[str, tuple[Dims, ...]]:
    """The dims of every parameter, of what depends on one, and of the data that this reads (several where a
    value is a tuple), from the traces with the batch (`batch`) or the sequence length (`seq_len`) doubled."""
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
    """The calls of `trace` that are called with other numbers where the batch or the sequence is doubled."""
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
    """A value, what makes it, where, and its shapes."""

    name: str
    producer: str
    where: str | None
    shapes: tuple[Shape, ...]


def _values(trace: ModuleTrace) -> list[_Value]:
    """Parameters, then each call that depends on one, behind the data that it reads."""
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
        f"is another network when the {what} doubles",
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
    """The power of what was doubled that makes `doubled` of `size`."""
    for power in (0, 1, 2):
        if doubled == size * 2**power:
            return power
    raise ConfigError(
        f"has a size that follows the {what} otherwise than by a product",
        file=file,
        key=where,
        found=f"{size}, and {doubled} when the {what} doubles",
        allowed=f"sizes that stay, or grow as the {what} or its square",
    )
