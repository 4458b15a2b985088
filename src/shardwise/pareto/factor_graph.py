"""Choices that cost: what frontier tracking works on, whatever the choices stand for.

A link of a chain is a set of variables with costs on one or two of them; a solution picks one choice per
variable. The cost columns are `COLUMNS`: four that add and one of which the largest counts.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from hashlib import blake2b

import numpy as np
import numpy.typing as npt

COLUMNS = ("hidden_s", "exposed_s", "resident_bytes", "recomputed_bytes", "peak_bytes")
"""Columns of a cost.

The step takes max(hidden_s, exposed_s): two sums of which the time is the larger, the first where computation
hides the gradient synchronisation, the second where it ends before it. `held_bytes` add over all.
`recomputed_bytes` add within one link of a chain, `peak_bytes` are the largest temporary of any operator
there; memory is the sum of held_bytes plus the largest recomputed_bytes + peak_bytes of any link.
"""

ADDITIVE = 4
"""Number of columns that add within a link; the last one is a maximum."""

Costs = npt.NDArray[np.float64]
"""(..., 5): one cost per choice or pair of choices."""


@dataclass(frozen=True, slots=True, eq=False)
class Factor:
    """Costs on one variable, shape (choices, 5), or on two, shape (choices of the first, of the second, 5).

    What cannot be has infinite cost.
    """

    variables: tuple[int, ...]
    costs: Costs


@dataclass(frozen=True, eq=False)
class FactorGraph:
    """Variables and the costs on them.

    `sizes` are the choices per variable, `names` say what each is. `entry` is the variable that the part
    shares with the one before it, `exit` that with the one after it; their own costs belong to the part of
    which they are the exit. `shared` are variables that any parts of a chain may share, each with the name
    that it has there: all parts that have it make one choice."""

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    factors: tuple[Factor, ...]
    entry: int | None = None
    exit: int | None = None
    shared: tuple[tuple[str, int], ...] = ()

    @property
    def separator(self) -> tuple[int, ...]:
        """The variables that others see, in the order of their numbers."""
        separators = (end for end in (self.entry, self.exit) if end is not None)
        return tuple(sorted({*separators, *(variable for _, variable in self.shared)}))

    @cached_property
    def first_equal(self) -> tuple[int, ...]:
        """Of each factor the first one that has equal costs."""
        return first_occurrences(
            (factor.costs.shape, blake2b(factor.costs.tobytes(), digest_size=16).digest())
            for factor in self.factors
        )

    def changed(
        self, sizes: tuple[int, ...], factors: tuple[Factor, ...], first_equal: tuple[int, ...]
    ) -> FactorGraph:
        """The part with other choices and costs, of which is known which are equal."""
        part = replace(self, sizes=sizes, factors=factors)
        part.__dict__["first_equal"] = first_equal  # where a cached property is kept
        return part


def first_occurrences(kinds: Iterable[Hashable]) -> tuple[int, ...]:
    """The first place of what is at each."""
    places: dict[Hashable, int] = {}
    return tuple(places.setdefault(kind, place) for place, kind in enumerate(kinds))


@dataclass(frozen=True, slots=True, eq=False)
class Segment:
    """`repeat` like links of a chain in a row, each of which may be any one of `modes` (kept, recomputed),
    that agree in the choices of their entries and of their exits."""

    name: str
    modes: tuple[tuple[str, FactorGraph], ...]
    repeat: int = 1


Chain = tuple[Segment, ...]
"""Links in order: the exit of one is the entry of the next. The first has no entry, the last no exit. What a
link has of hubs all of its modes have."""


def shared_sizes(chain: Chain) -> dict[str, int]:
    """The choices of each hub of a chain, in the order in which links have them."""
    parts = (part for link in chain for _, part in link.modes)
    return {name: part.sizes[variable] for part in parts for name, variable in part.shared}
