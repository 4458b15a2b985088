"""Factor graphs: variables with costs on one or two of them, the input of the Pareto search.

A segment of a chain is a factor graph, repeated some number of times. A solution picks one choice per
variable. A cost has the columns `COLUMNS`: four are sums, one is a maximum. The search does not know what
choices mean.
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

Step time is max(hidden_s, exposed_s), two sums: the first where computation hides the gradient
synchronisation, the second where computation ends before it. `resident_bytes` add over the whole chain.
`recomputed_bytes` add within one segment; `peak_bytes` is the largest temporary of any operator there. Memory
is the sum of resident_bytes plus the largest recomputed_bytes + peak_bytes of any segment.
"""

ADDITIVE = 4
"""Number of columns that add within a segment; the last one is a maximum."""

Costs = npt.NDArray[np.float64]
"""(..., 5): one cost per choice or pair of choices."""


@dataclass(frozen=True, slots=True, eq=False)
class Factor:
    """Costs on one variable, shape (choices, 5), or on two, shape (choices of the first, of the second, 5).

    Forbidden choices have infinite cost.
    """

    variables: tuple[int, ...]
    costs: Costs


@dataclass(frozen=True, eq=False)
class FactorGraph:
    """Variables and the factors on them.

    `sizes` are the numbers of choices per variable, `names` are their names. `entry` is the variable that
    this segment shares with the one before it, `exit` the one that it shares with the next. The costs on a
    border variable belong to the segment whose exit it is. `shared` are shared variables, each with its name
    in the chain: all segments that have the name make one choice.
    """

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    factors: tuple[Factor, ...]
    entry: int | None = None
    exit: int | None = None
    shared: tuple[tuple[str, int], ...] = ()

    @property
    def separator(self) -> tuple[int, ...]:
        """The variables that neighbours see (the separator), in ascending order."""
        separators = (end for end in (self.entry, self.exit) if end is not None)
        return tuple(sorted({*separators, *(variable for _, variable in self.shared)}))

    @cached_property
    def first_equal(self) -> tuple[int, ...]:
        """For each factor, the index of the first factor with equal costs."""
        return first_occurrences(
            (factor.costs.shape, blake2b(factor.costs.tobytes(), digest_size=16).digest())
            for factor in self.factors
        )

    def changed(
        self, sizes: tuple[int, ...], factors: tuple[Factor, ...], first_equal: tuple[int, ...]
    ) -> FactorGraph:
        """This graph with other choices and costs, whose `first_equal` is already known."""
        part = replace(self, sizes=sizes, factors=factors)
        part.__dict__["first_equal"] = first_equal  # the cache of the cached_property
        return part


def first_occurrences(kinds: Iterable[Hashable]) -> tuple[int, ...]:
    """For each item, the index of its first occurrence."""
    places: dict[Hashable, int] = {}
    return tuple(places.setdefault(kind, place) for place, kind in enumerate(kinds))


@dataclass(frozen=True, slots=True, eq=False)
class Segment:
    """`repeat` equal segments of a chain in a row. Each may be in any of the `modes` (activations saved,
    recomputed), which agree in the choices of their entries and of their exits."""

    name: str
    modes: tuple[tuple[str, FactorGraph], ...]
    repeat: int = 1


Chain = tuple[Segment, ...]
"""Segments in order: the exit of one is the entry of the next. The first has no entry, the last no exit.
All modes of a segment have the same shared variables."""


def shared_sizes(chain: Chain) -> dict[str, int]:
    """Number of choices of each shared variable of a chain, in order of first appearance."""
    parts = (part for link in chain for _, part in link.modes)
    return {name: part.sizes[variable] for part in parts for name, variable in part.shared}
