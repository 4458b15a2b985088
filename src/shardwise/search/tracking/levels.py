"""Lines raised by how large the largest peak is: a line weighs one block's peak, or a mean of several, and
lies far below all solutions where each block would have a larger one, did it decide.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from shardwise.frontier import Chain, Factor, Part
from shardwise.search.tracking.chained import solutions
from shardwise.search.tracking.lines import weighted
from shardwise.search.tracking.prune import Narrowed, narrowed
from shardwise.search.tracking.scalars import Scalars
from shardwise.search.tracking.state import State
from shardwise.search.tracking.steps import Order

Values = npt.NDArray[np.float64]
Indices = npt.NDArray[np.intp]

CUTS = 64
"""Times that cases are cut in two, at most."""

NARROW, NARROWEST = 0.3, 1e-3
"""A case is not cut further where it is so narrow, in what is matched of the least memory that it may have;
and, where all has to be matched, of that memory."""

CLOSE = 0.25
"""A line is high enough so close below what is found, in what is matched."""

TILT = 0.001
"""Of the peak's weight, what is shared by all links alike where the least of a case is weighed instead, so
that of equal solutions one of smaller peaks is found."""


@dataclass(frozen=True, slots=True, eq=False)
class _Case:
    """Solutions with a largest peak from `low` to `high`, all of them made of what is in `start`; none weighs
    less by any line than `least` (lines)."""

    start: Narrowed
    low: float
    high: float
    least: Values

    def cut(self) -> tuple[_Case, _Case]:
        """Both halves."""
        middle = (self.low + self.high) / 2.0
        return replace(self, high=middle), replace(self, low=middle)


def raise_by_levels(state: State, lines: Indices) -> None:
    """Raise lines to the least weighted sums that there are, as closely as solutions are matched; not higher
    than what is found, which is added to.

    A peak is what one link makes again and its largest temporary. In a case of solutions whose largest lies
    between two levels, choices with a larger one are left out in every link, and the lowest level counts in
    full, whatever link has it. Cases are cut in two, the one furthest below what is found first.
    """
    for line, least in zip(lines.tolist(), _least(state, lines).tolist(), strict=True):
        state.lines.rise(line, least)


def _least(state: State, lines: Indices) -> Values:
    """What no solution weighs less than by each of some lines."""
    wanted = weighted(state.lines.weights[lines], state.found.points).min(axis=0)
    wanted *= 1.0 - CLOSE * state.matched
    memory_bytes = float(state.found.points[-1, 1])
    width = max(NARROW * state.matched, NARROWEST)
    scale = np.zeros(len(lines))
    np.divide(1.0, wanted, out=scale, where=wanted > 0.0)
    waiting = [_Case(state.narrowed, 0.0, _largest(state.narrowed.chain), state.lines.drawn[lines])]
    for _ in range(CUTS):
        waiting = [case for case in waiting if (case.least < wanted).any()]
        if not waiting:
            break
        furthest = int(np.argmax([((wanted - case.least) * scale).max() for case in waiting]))
        case = waiting.pop(furthest)
        if case.high - case.low <= width * (memory_bytes + case.low):
            wanted = np.minimum(wanted, case.least)
            continue
        told = (_told(state, lines, half, wanted) for half in case.cut())
        waiting += [half for half in told if half is not None]
    return np.asarray(np.minimum.reduce([wanted, *(case.least for case in waiting)]))


def _largest(chain: Chain) -> float:
    """What no peak is larger than."""
    largest = 0.0
    for link in chain:
        for _, part in link.modes:
            every = [factor.costs[np.isfinite(factor.costs).all(axis=-1)] for factor in part.factors]
            again = sum(float(costs[:, 3].max(initial=0.0)) for costs in every)
            temporary = max((float(costs[:, 4].max(initial=0.0)) for costs in every), default=0.0)
            largest = max(largest, again + temporary)
    return largest


def _told(state: State, lines: Indices, case: _Case, wanted: Values) -> _Case | None:
    """A case with what weighted sums tell of it, by those lines by which it may hold less than is wanted;
    None where it holds nothing that is less by any. Solutions on them are taken in."""
    some = np.flatnonzero(case.least < wanted)
    own, aims = lines[some], wanted[some]
    start = replace(case.start, chain=_below(state, case.start, case.high))
    weights = np.tile(state.lines.weights[own], (2, 1))
    repeats = np.array([link.repeat for link in start.chain])
    even = np.full((len(own), len(repeats)), TILT) / (len(repeats) * repeats)
    peaks = np.concatenate([np.array(state.lines.peaks)[own], even])
    answer = state.weighed(start, weights, np.tile(state.lines.shares[own], 2), peaks)
    state.asked += len(weights)
    if not np.isfinite(answer.least).all():
        return None
    state.take(list(dict.fromkeys(start.originals(solutions(answer)))))
    # The largest peak is no less than a mean of peaks, nor than the least of the case.
    beside = np.repeat([0.0, (1.0 - TILT) * case.low], len(own)) * weights[:, 1]
    least = case.least.copy()
    least[some] = np.maximum(case.least[some], (answer.least + beside).reshape(2, -1).max(axis=0))
    is_below = least[some] < aims
    if not is_below.any():
        return None
    rows = np.tile(np.eye(len(own), dtype=bool)[is_below], 2)
    start = narrowed(start, answer, np.where(rows, np.tile(aims, 2) - beside, np.inf))
    return replace(case, start=start, least=least) if all(link.modes for link in start.chain) else None


def _below(state: State, start: Narrowed, level: float) -> Chain:
    """A chain without what makes a peak above a level, in any of its links."""
    links = []
    for link, orders in zip(start.chain, state.orders_in(start), strict=True):
        own = zip(link.modes, orders, strict=True)
        modes = tuple((name, _part_below(part, order, level)) for (name, part), order in own)
        links.append(replace(link, modes=modes))
    return tuple(links)


def _part_below(part: Part, order: Order, level: float) -> Part:
    """A part without temporaries that come above a level with the least that is made again beside them."""
    factors = []
    for factor, again in zip(part.factors, _made_again(part, order), strict=True):
        is_above = factor.costs[..., 4] + again > level
        costs = np.where(is_above[..., None], np.inf, factor.costs) if is_above.any() else factor.costs
        factors.append(Factor(factor.variables, costs))
    return replace(part, factors=tuple(factors))


def _made_again(part: Part, order: Order) -> list[Values]:
    """The least that is made again in a part with each cost of each factor."""
    again = [factor.costs[..., 3] for factor in part.factors]
    if not any(((own > 0.0) & np.isfinite(own)).any() for own in again):
        return [np.zeros(1)] * len(part.factors)
    scalars = Scalars.of(part, order, np.array([[0.0, 0.0, 0.0, 1.0, 0.0]]))
    scalars.spread(np.zeros_like(scalars.last))
    return [(scalars.tables[place] + scalars.outside[place])[..., 0] for place in range(len(part.factors))]
