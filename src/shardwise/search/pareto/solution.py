"""Solutions of a chain, and their costs as sums over the factors."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from shardwise.pareto import ADDITIVE, COLUMNS, Chain, FactorGraph

Values = npt.NDArray[np.float64]

Measure = tuple[float, float]
"""Seconds and bytes of a solution."""


@dataclass(frozen=True, slots=True)
class SegmentChoice:
    """Choice of one occurrence of a segment: its mode, and a choice of each variable of the mode's factor
    graph."""

    mode: int
    choices: tuple[int, ...]


Solution = tuple[SegmentChoice, ...]
"""A choice for each occurrence of a segment."""


def part_costs(part: FactorGraph, choices: tuple[int, ...]) -> Values:
    """The columns of a factor graph for choices of all its variables."""
    if not part.factors:
        return np.zeros(len(COLUMNS))
    costs = [factor.costs[tuple(choices[each] for each in factor.variables)] for factor in part.factors]
    every = np.array(costs)
    return np.concatenate([every[:, :ADDITIVE].sum(axis=0), every[:, ADDITIVE:].max(axis=0, initial=0.0)])


def occurrences(chain: Chain) -> Iterator[int]:
    """The index of the segment of each occurrence, in order."""
    return (place for place, segment in enumerate(chain) for _ in range(segment.repeat))


def folded(costs: Values) -> Values:
    """Columns of segments (..., 5) as hidden_s, exposed_s, resident_bytes and the peak (recomputed bytes plus
    temporary): (..., 4)."""
    return np.concatenate([costs[..., :3], costs[..., 3:4] + costs[..., 4:5]], axis=-1)


def joined(a: Values, b: Values) -> Values:
    """Folded columns (..., 4) of two parts of a chain together: sums, and the larger peak."""
    return np.concatenate([a[..., :3] + b[..., :3], np.maximum(a[..., 3:], b[..., 3:])], axis=-1)


def joined_all(parts_of_chain: Values) -> Values:
    """Folded columns (4) of all parts (n, 4) of a chain together."""
    return np.append(parts_of_chain[:, :3].sum(axis=0), parts_of_chain[:, 3].max(initial=0.0))


def measures(costs: Values) -> Values:
    """Seconds and bytes (..., 2) of whole chains with folded columns (..., 4)."""
    time_s = np.maximum(costs[..., 0], costs[..., 1])
    return np.stack([time_s, costs[..., 2] + costs[..., 3]], axis=-1)


def solution_costs(chain: Chain, solution: Solution) -> Values:
    """Folded columns of a solution."""
    total = np.zeros(4)
    for place, choice in zip(occurrences(chain), solution, strict=True):
        _, part = chain[place].modes[choice.mode]
        total = joined(total, folded(part_costs(part, choice.choices)))
    return total


def measure(chain: Chain, solution: Solution) -> Measure:
    """Seconds and bytes of a solution."""
    time_s, memory_bytes = measures(solution_costs(chain, solution))
    return float(time_s), float(memory_bytes)
