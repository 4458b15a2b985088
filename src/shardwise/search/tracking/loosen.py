"""What becomes of a chain at which looks are too much."""

from __future__ import annotations

from shardwise.search.tracking.look import Tolerances
from shardwise.search.tracking.state import State

RELAX_FACTOR, LEAST_RELAX_FACTOR = 8.0, 1.5
"""How many times as much may be lost from a look on that would be too much, at most; no more where that is
hardly more."""

RELAXED_EPSILON = 0.015
"""How much is enough to lose then."""

RELAXED_EPSILON_IF_WIDE = 0.0075
"""How much is enough for wide chains, at which no look has been tried yet."""


def relaxed_tolerances(state: State, tolerances: Tolerances, enough: float = RELAXED_EPSILON) -> Tolerances:
    """What may be lost from now on, since a look was too much; as before where that is about enough."""
    state.is_hard = True
    after = min(RELAX_FACTOR * state.working_epsilon, enough)
    if after < LEAST_RELAX_FACTOR * state.working_epsilon or not state.working_epsilon:
        return tolerances
    factor, state.working_epsilon = after / state.working_epsilon, after
    return tolerances.times(factor)
