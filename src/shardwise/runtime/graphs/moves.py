"""Which steps bring a tensor from what ranks hold of it to what they are to hold: no tensors, only boxes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations
from typing import Literal

from shardwise.runtime.graphs.forms import (
    Box,
    Coordinates,
    Form,
    Held,
    box_of,
    elements,
    places,
    shared,
    within,
)

Kind = Literal["cut", "reduce_scatter", "exchange", "all_reduce", "all_gather", "pad", "first_only"]


@dataclass(frozen=True, slots=True)
class Move:
    """One step, among the ranks that differ along `axes`, after which ranks hold `then`.

    `cut`, `pad` (zeros around a part) and `first_only` (zeros on all ranks but the first of `axes`) are a
    rank's own doing. An `exchange` sends boxes from whoever has them to whoever needs them.
    """

    kind: Kind
    axes: tuple[int, ...]
    then: Form


_ORDER = ("cut", "reduce_scatter", "exchange", "all_reduce", "all_gather", "pad", "first_only")
"""What shrinks a tensor comes before what grows it (docs/tracking.md)."""


def _wanted(start: Held, end: Held, units_differ: bool) -> str:
    """What an axis has to do, in a word; none where ranks have what they need."""
    if start == "whole":
        return {"whole": "none", "partial": "first_only"}.get(str(end), "cut")
    if start == "partial":
        return {"whole": "all_reduce", "partial": "none"}.get(str(end), "reduce_scatter")
    if isinstance(end, int):
        return "exchange" if end != start or units_differ else "none"
    return "all_gather" if end == "whole" else "pad"


@lru_cache(maxsize=4096)
def moves_of(shape: tuple[int, ...], counts: tuple[int, ...], start: Form, end: Form) -> tuple[Move, ...]:
    """The steps from `start` to `end` of a tensor of `shape` on a mesh of `counts` ranks per axis.

    Axes that need the same do it as one group. Where a dim is split along several axes and an outer one of
    them changes, parts change as a whole: those are exchanged among all ranks that have some of them.
    """
    kinds = [
        "none" if count == 1 else _wanted(a, b, isinstance(a, int) and u != v)
        for a, b, u, v, count in zip(start.held, end.held, start.units, end.units, counts, strict=True)
    ]
    plan = _Plan(shape, counts, start)
    for kind in _ORDER:
        axes = tuple(axis for axis, own in enumerate(kinds) if own == kind)
        if axes:
            plan.add(kind, axes, end)
    if plan.boxes(plan.now) != plan.boxes(end):  # an outer axis took the units of an inner one along
        plan.exchange(_axes_of_parts(end), end)
    return tuple(plan.moves)


class _Plan:
    """Steps so far, and what ranks hold behind them."""

    def __init__(self, shape: tuple[int, ...], counts: tuple[int, ...], start: Form) -> None:
        self.shape, self.counts, self.now = shape, counts, start
        self.moves: list[Move] = []

    def boxes(self, form: Form) -> dict[Coordinates, Box]:
        return {at: box_of(self.shape, self.counts, form, at) for at in places(self.counts)}

    def step(self, kind: Kind, axes: tuple[int, ...], then: Form) -> None:
        self.moves.append(Move(kind, axes, then))
        self.now = then

    def add(self, kind: str, axes: tuple[int, ...], end: Form) -> None:
        then = self.now.with_held(axes, end)
        before, after = self.boxes(self.now), self.boxes(then)
        shrinks = all(within(after[at], before[at]) for at in before)
        grows = all(within(before[at], after[at]) for at in before)
        if kind == "exchange" and before == after:
            self.now = then  # in other units, and the same elements
        elif kind == "cut" and shrinks:
            self.step("cut", axes, then)
        elif kind == "reduce_scatter" and shrinks:
            self.step("reduce_scatter", axes, then)
        elif kind == "reduce_scatter":
            self.step("all_reduce", axes, self.now.with_word(axes, "whole"))
            self.add("cut", axes, end)
        elif kind == "all_reduce":
            self.step("all_reduce", axes, then)
        elif kind == "first_only":
            self.step("first_only", axes, then)
        elif kind == "all_gather" and grows and self._covered(axes, after):
            self.step("all_gather", axes, then)
        elif kind == "pad" and grows:
            self.step("pad", axes, then)
        elif kind == "pad":
            self.exchange(axes, self.now.with_word(axes, "whole"))
            self.step("first_only", axes, then)
        else:
            self.exchange(axes, then)

    def exchange(self, axes: tuple[int, ...], then: Form) -> None:
        """Among the fewest ranks that have all that each of them needs."""
        after = self.boxes(then)
        others = [axis for axis in _axes_of_parts(self.now) if axis not in axes]
        for count in range(len(others) + 1):
            for more in combinations(others, count):
                chosen = tuple(sorted({*axes, *more}))
                if self._covered(chosen, after):
                    self.step("exchange", chosen, then)
                    return

    def _covered(self, axes: Sequence[int], after: dict[Coordinates, Box]) -> bool:
        """Whether every rank finds what it needs with those that differ from it along `axes`."""
        before = self.boxes(self.now)
        return all(
            sum(elements(shared(before[other], box)) for other in before if gives(self.now, axes, other, at))
            == elements(box)
            for at, box in after.items()
        )


def gives(now: Form, axes: Sequence[int], giver: Coordinates, taker: Coordinates) -> bool:
    """Whether `taker` takes what it needs of `giver`'s part, where ranks along `axes` exchange: of ranks that
    have the same it asks the one beside it."""
    return all(
        giver[axis] == taker[axis] or (axis in axes and isinstance(word, int))
        for axis, word in enumerate(now.held)
    )


def _axes_of_parts(form: Form) -> tuple[int, ...]:
    return tuple(axis for axis, word in enumerate(form.held) if isinstance(word, int))
