"""Spaces of the primal heuristics, in which good incumbents are found early.

`RestrictedSpace` has few values per axis. `NeighbourhoodSpace` has the values of some strategies (`centers`)
and the values next to them. Nothing is proven in them: the search of the whole space follows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import permutations

import numpy as np
from numpy.typing import NDArray

from shardwise.cost import distinct_rows
from shardwise.search.space import FAMILIES, FULL, Degrees, Space, Variants, divisors
from shardwise.strategy import SCHEDULES, Column, StrategyTable

# Restricted space

FEW_SCHEDULES = tuple(SCHEDULES.index(name) for name in ("1f1b", "interleaved_1f1b", "zb_v"))
FEW_CHUNKS = (1, 2, 4, 8, 16)
FEW_MICRO_BATCHES = (1, 2, 4, 8)
FEW_SPLITS = 3


class RestrictedSpace(Space):
    """A space with few values per axis. It has the first axis order, sequence parallelism, etp of 1 or tp,
    small micro-batches, three schedules, splits that are even but for the last stage, nothing or everything
    sharded, and quarters of the layers recomputed.

    An axis that would have none of these values keeps all of its own.
    """

    def _restrict_shapes(self, columns: Mapping[str, Column]) -> Mapping[str, Column]:
        tp, etp = columns["tp"], columns["etp"]
        plain = ((tp == 1) | (columns["sequence_parallel"] == 1)) & ((etp == 1) | (etp == tp))
        columns = _subset_or_all(columns, plain)
        names = ("tp", "cp", "dp", "pp", "etp", "ep", "sequence_parallel")
        rows, _ = distinct_rows([columns[name] for name in names])
        return {name: column[np.sort(rows)] for name, column in columns.items()}

    def orders(self, tp: int, cp: int, dp: int, pp: int) -> dict[str, Column]:
        return {name: column[:1] for name, column in super().orders(tp, cp, dp, pp).items()}

    def micro_batch_sizes(self, dp: int) -> dict[str, Column]:
        sizes = super().micro_batch_sizes(dp)
        return _subset_or_all(sizes, np.isin(sizes["micro_batch_size"], FEW_MICRO_BATCHES))

    def variants(self, pp: int) -> Variants:
        variants = super().variants(pp)
        keep = np.isin(variants.schedule, FEW_SCHEDULES) & np.isin(variants.vpp, FEW_CHUNKS)
        return variants.take(keep) if keep.any() else variants

    def _split_options(self, stages: int) -> dict[str, Column]:
        options = super()._split_options(stages)
        first, last = options["first_stage_layers"], options["last_stage_layers"]
        if not len(first):
            return options
        keep = (first == first[0]) & (last > last[0] - FEW_SPLITS)
        return _subset_or_all(options, keep | (np.arange(len(first)) < FEW_SPLITS if stages == 2 else keep))

    def _shard_options(self, ranks: int) -> dict[str, Column]:
        options = super()._shard_options(ranks)
        keep = options["optim_shard"] == options["optim_shard"].max(initial=1)
        for name in ("param_shard", "grad_shard"):
            keep &= (options[name] == 1) | (options[name] == options[name].max(initial=1))
        return _subset_or_all(options, keep)

    def recompute_layers(self, recompute: int, largest: int) -> Column:
        layers = super().recompute_layers(recompute, largest)
        if recompute != FULL:
            return layers
        few = np.isin(layers, [1, largest // 4, largest // 2, largest])
        return layers[few] if few.any() else layers


def _subset_or_all(options: Mapping[str, Column], keep: NDArray[np.bool_]) -> dict[str, Column]:
    """The options under `keep`; all of them where it selects none."""
    return {name: column[keep] if keep.any() else column for name, column in options.items()}


def restricted_space(space: Space) -> RestrictedSpace:
    """The restricted space of a space."""
    return RestrictedSpace(**space.declared)


# Neighbourhood

NEIGHBOUR_LAYERS = 4
"""The ends of a split together differ from the even split by fewer layers than this."""

NONE = 0
"""The code of no recomputation, and of no offload."""


@dataclass(frozen=True, kw_only=True)
class NeighbourhoodSpace(Space):
    """Strategies whose values are those of the `centers` (one row each) or next to them.

    Degrees differ by one prime factor moved from one axis to another, expert degrees by a factor of two.
    Schedules are of the same families, with the known vpp and the least vpp for each number of layers per
    stage. Splits are nearly even. Micro-batch sizes and sharding degrees are all allowed.
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
    def recompute_options(self) -> dict[str, Column]:
        options = super().recompute_options
        is_known = options["recompute"] == NONE
        for center in zip(self.centers.recompute, self.centers.recompute_modules, strict=True):
            is_known |= (options["recompute"] == center[0]) & (options["recompute_modules"] == center[1])
        return {name: column[is_known] for name, column in options.items()}

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
    """The neighbourhood of some strategies in a space."""
    return NeighbourhoodSpace(**space.declared, centers=centers)


def _known(values: Column, known: NDArray[np.int64]) -> Column:
    """The values that occur in `known`, and 0."""
    keep: NDArray[np.bool_] = np.isin(values, known) | (values == NONE)
    return values[keep]


def _are_neighbours(pair: tuple[int, int], other: tuple[int, int]) -> bool:
    """Whether both numbers differ by a factor of two at most."""
    return all(a == b or a == 2 * b or b == 2 * a for a, b in zip(pair, other, strict=True))


def _neighbour_degrees(degrees: Degrees) -> list[Degrees]:
    """The degrees with one prime factor moved from one axis to another."""
    found = []
    for source, target in permutations(range(len(degrees)), 2):
        for prime in (d for d in divisors(degrees[source]) if len(divisors(d)) == 2):
            each = list(degrees)
            each[source], each[target] = each[source] // prime, each[target] * prime
            found.append((each[0], each[1], each[2], each[3]))
    return found
