"""Which sizes follow the batch and the sequence length: the same module traced at two of each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from shardwise.errors import ConfigError
from shardwise.graph import Growth
from shardwise.runtime.capture_trace import Call, Shape, Trace

CONSTANT = Growth()


@dataclass(frozen=True, slots=True)
class Dim:
    """The size of one dim of a tensor, and what it grows with."""

    size: int
    growth: Growth = CONSTANT

    @property
    def is_unit(self) -> bool:
        """Whether it is always 1: such dims are left out of graphs."""
        return self.size == 1 and self.growth == CONSTANT


Dims = tuple[Dim, ...]


def dims_by_value(trace: Trace, doubled: Mapping[str, Trace], file: str) -> dict[str, tuple[Dims, ...]]:
    """The dims of every value of `trace` (several where it is a tuple), from the traces with the batch
    (`batch`) or the sequence length (`seq_len`) doubled."""
    for name, other in doubled.items():
        _check_alike(trace, other, name, file)
    values = [list(_values(item)) for item in (trace, *doubled.values())]
    found: dict[str, tuple[Dims, ...]] = {}
    for first, *others in zip(*values, strict=True):
        name, where, shapes = first
        found[name] = tuple(
            _dims(shape, dict(zip(doubled, (other[2][at] for other in others), strict=True)), where, file)
            for at, shape in enumerate(shapes)
        )
    return found


def _values(trace: Trace) -> Iterator[tuple[str, str, tuple[Shape, ...]]]:
    yield from ((name, f"input {name}", (shape,)) for name, shape in trace.data.items())
    yield from ((name, f"parameter {own}", (shape,)) for name, (own, shape) in trace.parameters.items())
    yield from ((call.name, call.where, call.shapes) for call in trace.calls)


def _check_alike(trace: Trace, other: Trace, what: str, file: str) -> None:
    def outline(calls: Sequence[Call]) -> list[tuple[str, str]]:
        return [(call.name, call.target) for call in calls]

    for one, two in zip(outline(trace.calls), outline(other.calls), strict=False):
        if one != two:
            raise _unlike(what, next(c.where for c in trace.calls if c.name == one[0]), file)
    if len(trace.calls) != len(other.calls) or trace.parameters.keys() != other.parameters.keys():
        raise _unlike(what, None, file)


def _unlike(what: str, where: str | None, file: str) -> ConfigError:
    return ConfigError(
        f"is another network when the {what} doubles",
        file=file,
        key=where,
        allowed="the same operators at every batch and sequence length",
    )


def _dims(shape: Shape, grown: Mapping[str, Shape], where: str, file: str) -> Dims:
    dims = []
    for at, size in enumerate(shape):
        powers = {what: _power(size, other[at], what, where, file) for what, other in grown.items()}
        dims.append(Dim(size, Growth(**powers)))
    return tuple(dims)


def _power(size: int, doubled: int, what: str, where: str, file: str) -> int:
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
