"""What becomes of a chain at which looks are too much."""

from __future__ import annotations

from shardwise.search.tracking.look import Losses
from shardwise.search.tracking.state import State

LOOSER, HARDLY = 8.0, 1.5
"""How many times as much may be lost from a look on that would be too much, at most; no more where that is
hardly more."""

LOOSE = 0.015
"""How much is enough to lose then."""

LOOSE_IF_WIDE = 0.0075
"""How much is enough for wide chains, at which no look has been tried yet."""


def loosened(state: State, losses: Losses, enough: float = LOOSE) -> Losses:
    """What may be lost from now on, since a look was too much; as before where that is about enough."""
    state.is_hard = True
    after = min(LOOSER * state.matched, enough)
    if after < HARDLY * state.matched or not state.matched:
        return losses
    factor, state.matched = after / state.matched, after
    return losses.times(factor)
