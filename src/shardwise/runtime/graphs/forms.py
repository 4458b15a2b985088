"""What each rank of a mesh holds of a tensor: its part of every dim, all of it, or a partial sum."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import Literal

from shardwise.graph import PARTIAL, STATES_SPLIT, WHOLE, WHOLE_SUMMED, Placement

Held = int | Literal["whole", "partial"]
"""Along one mesh axis: a part of the dim of this number, the whole tensor, or a partial sum of it."""

Box = tuple[tuple[int, int], ...]
"""The first element and the one behind the last, along every dim."""

Coordinates = tuple[int, ...]
"""A rank by its place along every axis."""


@dataclass(frozen=True, slots=True)
class Form:
    """What ranks hold, one word per mesh axis, the outermost first; `units` are the elements that stay
    together along the dim that an axis splits."""

    held: tuple[Held, ...]
    units: tuple[int, ...]

    def with_held(self, axes: Sequence[int], other: Form) -> Form:
        """The same, but along `axes` as `other` has it."""
        return Form(
            tuple(other.held[at] if at in axes else word for at, word in enumerate(self.held)),
            tuple(other.units[at] if at in axes else unit for at, unit in enumerate(self.units)),
        )

    def with_word(self, axes: Sequence[int], word: Held) -> Form:
        """The same, but `word` along `axes`."""
        return Form(tuple(word if at in axes else own for at, own in enumerate(self.held)), self.units)


_VALUES: dict[int, Held] = {WHOLE: "whole", WHOLE_SUMMED: "whole", STATES_SPLIT: "whole", PARTIAL: "partial"}
_GRADIENTS: dict[int, Held] = {WHOLE: "whole", WHOLE_SUMMED: "partial", PARTIAL: "whole"}


def value_form(placements: Sequence[Placement], units: Sequence[int] | None = None) -> Form:
    """What ranks hold of a tensor that lies so."""
    return _form(tuple(_VALUES.get(each, int(each)) for each in placements), units)


def gradient_form(placements: Sequence[Placement], units: Sequence[int] | None = None) -> Form:
    """What ranks hold of the gradient of a tensor that lies so."""
    return _form(tuple(_GRADIENTS.get(each, int(each)) for each in placements), units)


def _form(held: tuple[Held, ...], units: Sequence[int] | None) -> Form:
    own = units or (1,) * len(held)
    return Form(held, tuple(u if isinstance(word, int) else 1 for word, u in zip(held, own, strict=True)))


def whole_form(axes: int) -> Form:
    """Every rank of a mesh of so many axes has everything."""
    everything: Held = "whole"
    return Form((everything,) * axes, (1,) * axes)


def part(start: int, stop: int, count: int, index: int, unit: int) -> tuple[int, int]:
    """The part with number `index` of `count` parts of a run of elements, in whole units, the first parts one
    unit longer where they do not go evenly; element by element where another axis has cut units apart."""
    unit = unit if (stop - start) % unit == 0 else 1
    each, longer = divmod((stop - start) // unit, count)
    first = start + (each * index + min(index, longer)) * unit
    return first, first + (each + (index < longer)) * unit


def box_of(shape: Sequence[int], counts: Sequence[int], form: Form, at: Coordinates) -> Box:
    """What the rank at `at` of a mesh of `counts` ranks per axis has of a tensor of `shape`."""
    box = [(0, size) for size in shape]
    for axis, word in enumerate(form.held):
        if isinstance(word, int):
            box[word] = part(*box[word], counts[axis], at[axis], form.units[axis])
    return tuple(box)


def places(counts: Sequence[int]) -> Iterator[Coordinates]:
    """Every rank of a mesh, in order: the last axis is the fastest."""
    return product(*map(range, counts))


def shared(one: Box, other: Box) -> Box | None:
    """What two boxes have in common; None where that is nothing."""
    common = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(one, other, strict=True))
    return common if all(first < stop for first, stop in common) else None


def within(inner: Box, outer: Box) -> bool:
    """Whether `outer` has all of `inner`."""
    return all(c <= a and b <= d for (a, b), (c, d) in zip(inner, outer, strict=True))


def elements(box: Box | None) -> int:
    """How many elements a box has."""
    return 0 if box is None else prod(stop - first for first, stop in box)


def extents(box: Box) -> tuple[int, ...]:
    """The shape of a box."""
    return tuple(stop - first for first, stop in box)


def slices(inner: Box, outer: Box) -> tuple[slice, ...]:
    """Where `inner` lies in a tensor that is `outer`."""
    return tuple(slice(a - c, b - c) for (a, b), (c, _) in zip(inner, outer, strict=True))


def boxes_of_run(sizes: Sequence[int], first: int, stop: int) -> Iterator[Box]:
    """The boxes that make up the elements `first` to before `stop` of a tensor of `sizes`, counted row by
    row: in their order, and each of elements that follow one another."""
    if first >= stop:
        return
    if not sizes:
        yield ()
        return
    inner = sizes[1:]
    (row, before), (last, behind) = (divmod(at, prod(inner)) for at in (first, stop))
    if row == last:
        yield from (((row, row + 1), *box) for box in boxes_of_run(inner, before, behind))
        return
    if before:
        yield from (((row, row + 1), *box) for box in boxes_of_run(inner, before, prod(inner)))
        row += 1
    if row < last:
        yield ((row, last), *((0, size) for size in inner))
    yield from (((last, last + 1), *box) for box in boxes_of_run(inner, 0, behind))
