"""The surroundings of known strategies: a part of a space in which better ones are soon found.

Nothing is proven on a close-up; whatever it leaves out is searched afterwards.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import permutations

import numpy as np
from numpy.typing import NDArray

from shardwise.cost import distinct_rows
from shardwise.search.space import Degrees, Space, divisors
from shardwise.search.variants import FAMILIES, Variants
from shardwise.strategy import Column, StrategyTable

NEIGHBOUR_LAYERS = 4
"""Layers by which the ends of a split may differ from the even one, less one."""

NONE = 0
"""The code of no recomputation, and of no offload."""


@dataclass(frozen=True, kw_only=True)
class NeighbourhoodSpace(Space):
    """Strategies whose choices are those of known ones (`centers`, one row each) or next to them.

    Degrees that differ by one prime factor moved from one axis to another, expert degrees by a factor of two;
    schedules of the same families, of their virtual stages the known ones and the fewest for each number of
    layers on a stage; splits that are about even; every micro-batch size and sharding.
    """

    centers: StrategyTable

    def degrees(self) -> list[Degrees]:
        neighbours: dict[Degrees, None] = {}
        known = zip(*(getattr(self.centers, name).tolist() for name in ("tp", "cp", "dp", "pp")), strict=True)
        for degrees in known:
            neighbours.update(dict.fromkeys([degrees, *_neighbour_degrees(degrees)]))
        return [degrees for degrees in super().degrees() if degrees in neighbours]

    def _expert_grids(self, tp: int, cp: int, dp: int) -> list[tuple[int, int]]:
        each = super()._expert_grids(tp, cp, dp)
        known = set(zip(self.centers.etp.tolist(), self.centers.ep.tolist(), strict=True))
        return [pair for pair in each if any(_are_neighbours(pair, other) for other in known)]

    def variants(self, pp: int) -> Variants:
        variants, families = super().variants(pp), FAMILIES[self.centers.schedule]
        variants = variants.take(np.isin(FAMILIES[variants.schedule], families))
        keep: NDArray[np.bool_] = np.isin(variants.vpp, self.centers.vpp)
        first, _ = distinct_rows([variants.schedule, self.layers // (pp * variants.vpp)])
        keep[first] = True
        return variants.take(keep)

    @cached_property
    def recomputes(self) -> Column:
        return _known(super().recomputes, self.centers.recompute)

    @cached_property
    def offloads(self) -> Column:
        return _known(super().offloads, self.centers.offload)

    def _split_options(self, stages: int) -> dict[str, Column]:
        options = super()._split_options(stages)
        first, last = options["first_stage_layers"], options["last_stage_layers"]
        if not len(first):
            return options
        neighbours = np.abs(first - first[0]) + np.abs(last - last[0]) < NEIGHBOUR_LAYERS * (
            2 if stages == 2 else 1
        )
        return {name: column[neighbours] for name, column in options.items()}


def neighbourhood_space(space: Space, centers: StrategyTable) -> NeighbourhoodSpace:
    """The surroundings of some strategies in a space."""
    return NeighbourhoodSpace(**space.declared, centers=centers)


def _known(values: Column, known: NDArray[np.int64]) -> Column:
    """The values that are known, and none."""
    keep: NDArray[np.bool_] = np.isin(values, known) | (values == NONE)
    return values[keep]


def _are_neighbours(pair: tuple[int, int], other: tuple[int, int]) -> bool:
    """Whether both numbers differ by a factor of two at most."""
    return all(a == b or a == 2 * b or b == 2 * a for a, b in zip(pair, other, strict=True))


def _neighbour_degrees(degrees: Degrees) -> list[Degrees]:
    """The degrees with a prime factor of one moved to another."""
    found = []
    for source, target in permutations(range(len(degrees)), 2):
        for prime in (d for d in divisors(degrees[source]) if len(divisors(d)) == 2):
            each = list(degrees)
            each[source], each[target] = each[source] // prime, each[target] * prime
            found.append((each[0], each[1], each[2], each[3]))
    return found
