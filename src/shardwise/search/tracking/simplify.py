"""Leaving out columns that decide nothing: the fewer objectives differ, the smaller the frontiers."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt

from shardwise.frontier import COLUMNS, Chain, Factor, FactorGraph

Values = npt.NDArray[np.float64]


def without_idle_columns(chain: Chain) -> Chain:
    """The same solutions with the same measures, where a column that cannot be the larger one is nothing.

    Where computation hides every gradient synchronisation, whatever is chosen, the time is hidden_s alone;
    and a part whose temporaries stay below what some other part needs in any case does not decide the peak.
    """
    return _without_small_peaks(_without_idle_time(chain))


def _every(part: FactorGraph) -> Values:
    """The costs of all factors of a part, one after the other, (cells, 5); infinite in every column where
    one is."""
    costs = [factor.costs.reshape(-1, len(COLUMNS)) for factor in part.factors]
    every = np.concatenate(costs) if costs else np.empty((0, len(COLUMNS)))
    every[~np.isfinite(every).all(axis=1)] = np.inf
    return every


def _with_costs(part: FactorGraph, every: Values) -> FactorGraph:
    """A part with these costs, alike where the part's own are."""
    factors, start = [], 0
    for factor in part.factors:
        stop = start + factor.costs.size // len(COLUMNS)
        factors.append(Factor(factor.variables, every[start:stop].reshape(factor.costs.shape)))
        start = stop
    return part.changed(part.sizes, tuple(factors), part.first_equal)


def _by_factor(part: FactorGraph, values: Values, extreme: np.ufunc) -> Values:
    """The least, or the largest, of values of all cells of each factor."""
    sizes = [factor.costs.size // len(COLUMNS) for factor in part.factors]
    if not sizes:
        return np.empty(0)
    return np.asarray(extreme.reduceat(values, np.cumsum([0, *sizes[:-1]])))


def _differences(part: FactorGraph) -> tuple[float, float]:
    """The least and the largest that hidden_s - exposed_s can add up to in a part."""
    every = _every(part)
    is_finite = np.isfinite(every[:, 0])
    difference = np.where(is_finite, every[:, 0], 0.0) - np.where(is_finite, every[:, 1], 0.0)
    least = _by_factor(part, np.where(is_finite, difference, np.inf), np.minimum)
    largest = _by_factor(part, np.where(is_finite, difference, -np.inf), np.maximum)
    return float(least[np.isfinite(least)].sum()), float(largest[np.isfinite(largest)].sum())


def _without_idle_time(chain: Chain) -> Chain:
    bounds = [
        (segment.repeat, [_differences(part) for _, part in segment.modes])
        for segment in chain
        if segment.modes
    ]
    least = sum(repeat * min(low for low, _ in modes) for repeat, modes in bounds)
    largest = sum(repeat * max(high for _, high in modes) for repeat, modes in bounds)
    if least >= 0.0:
        return without_columns(chain, 1)
    return without_columns(chain, 0) if largest <= 0.0 else chain


def without_columns(chain: Chain, *columns: int) -> Chain:
    """The chain with nothing in some of its columns."""

    def of(part: FactorGraph) -> FactorGraph:
        every = _every(part)
        for column in columns:
            every[:, column] = np.where(np.isfinite(every[:, column]), 0.0, np.inf)
        return _with_costs(part, every)

    return tuple(
        replace(segment, modes=tuple((name, of(part)) for name, part in segment.modes)) for segment in chain
    )


def memory_dualised(chain: Chain, rate: float) -> Chain:
    """The chain with held bytes paid in seconds, so many a byte, in both times: the larger time and `rate`
    times the memory of a solution come to as much as before, with a column less."""

    def of(part: FactorGraph) -> FactorGraph:
        every = _every(part)
        every[:, :2] += rate * every[:, 2:3]
        every[:, 2] = np.where(np.isfinite(every[:, 2]), 0.0, np.inf)
        return _with_costs(part, every)

    return tuple(
        replace(segment, modes=tuple((name, of(part)) for name, part in segment.modes)) for segment in chain
    )


def _without_small_peaks(chain: Chain) -> Chain:
    threshold = max(
        (min(_least_peak(part) for _, part in segment.modes) for segment in chain if segment.modes),
        default=0.0,
    )
    return tuple(
        replace(segment, modes=tuple((name, _above(part, threshold)) for name, part in segment.modes))
        for segment in chain
    )


def _least_peak(part: FactorGraph) -> float:
    """The least temporary that any choice leaves in a part."""
    least = _by_factor(part, _every(part)[:, 4], np.minimum)
    return float(least[np.isfinite(least)].max(initial=0.0))


def _above(part: FactorGraph, threshold: float) -> FactorGraph:
    """The part without temporaries that stay below `threshold`, recomputed bytes included; those that reach
    it stay, so that the peak is what it was."""
    every = _every(part)
    is_finite = np.isfinite(every[:, 0])
    most = _by_factor(part, np.where(is_finite, every[:, 3], -np.inf), np.maximum)
    recomputed = float(most[np.isfinite(most)].sum())
    highest = float(every[is_finite, 4].max(initial=0.0))
    every[is_finite & (every[:, 4] + recomputed < threshold), 4] = 0.0
    if recomputed + highest < threshold:
        every[is_finite, 3] = 0.0
    return _with_costs(part, every)
