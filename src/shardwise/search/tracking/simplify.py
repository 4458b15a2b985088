"""Leaving out columns that decide nothing: the fewer objectives differ, the smaller the frontiers."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt

from shardwise.frontier import Chain, Factor, Part

Values = npt.NDArray[np.float64]


def simplified(chain: Chain) -> Chain:
    """The same solutions with the same measures, where a column that cannot be the larger one is nothing.

    Where computation hides every gradient synchronisation, whatever is chosen, the time is hidden_s alone;
    and a part whose temporaries stay below what some other part needs in any case does not decide the peak.
    """
    return _without_small_peaks(_without_idle_time(chain))


def _differences(part: Part) -> tuple[float, float]:
    """The least and the largest that hidden_s - exposed_s can add up to in a part."""
    least = largest = 0.0
    for factor in part.factors:
        costs = _finite(factor)
        if len(costs):
            difference = costs[:, 0] - costs[:, 1]
            least += float(difference.min())
            largest += float(difference.max())
    return least, largest


def _finite(factor: Factor) -> Values:
    costs = factor.costs.reshape(-1, factor.costs.shape[-1])
    return np.asarray(costs[np.isfinite(costs).all(axis=1)])


def _without_idle_time(chain: Chain) -> Chain:
    bounds = [(link.repeat, [_differences(part) for _, part in link.modes]) for link in chain if link.modes]
    least = sum(repeat * min(low for low, _ in modes) for repeat, modes in bounds)
    largest = sum(repeat * max(high for _, high in modes) for repeat, modes in bounds)
    if least >= 0.0:
        return without(chain, 1)
    return without(chain, 0) if largest <= 0.0 else chain


def without(chain: Chain, *columns: int) -> Chain:
    """The chain with nothing in some of its columns."""

    def of(factor: Factor) -> Factor:
        costs = factor.costs.copy()
        for column in columns:
            costs[..., column] = np.where(np.isfinite(costs[..., column]), 0.0, np.inf)
        return Factor(factor.variables, costs)

    return tuple(
        replace(
            link,
            modes=tuple(
                (name, replace(part, factors=tuple(of(factor) for factor in part.factors)))
                for name, part in link.modes
            ),
        )
        for link in chain
    )


def _without_small_peaks(chain: Chain) -> Chain:
    floor = max(
        (min(_least_peak(part) for _, part in link.modes) for link in chain if link.modes), default=0.0
    )
    return tuple(
        replace(link, modes=tuple((name, _above(part, floor)) for name, part in link.modes)) for link in chain
    )


def _least_peak(part: Part) -> float:
    """The least temporary that any choice leaves in a part."""
    return max(
        (float(costs[:, 4].min()) for factor in part.factors if len(costs := _finite(factor))), default=0.0
    )


def _above(part: Part, floor: float) -> Part:
    """The part without temporaries that stay below `floor`, recomputed bytes included; those that reach it
    stay, so that the peak is what it was."""
    again = sum(float(costs[:, 3].max()) for factor in part.factors if len(costs := _finite(factor)))
    highest = max(
        (float(costs[:, 4].max()) for factor in part.factors if len(costs := _finite(factor))), default=0.0
    )

    def of(factor: Factor) -> Factor:
        costs = factor.costs.copy()
        is_finite = np.isfinite(costs).all(axis=-1)
        is_small = is_finite & (costs[..., 4] + again < floor)
        costs[..., 4] = np.where(is_small, 0.0, costs[..., 4])
        if again + highest < floor:
            costs[..., 3] = np.where(is_finite, 0.0, costs[..., 3])
        return Factor(factor.variables, costs)

    return replace(part, factors=tuple(of(factor) for factor in part.factors))
