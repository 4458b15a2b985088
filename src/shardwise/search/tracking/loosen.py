"""What becomes of a chain at which looks are too much."""

from __future__ import annotations

from shardwise.search.tracking.look import Losses
from shardwise.search.tracking.state import State

LOOSER, LOOSEST = 8.0, 0.1
"""How much more may be lost from a look on that would be too much; not where that is more than so much."""

LOOSE = 0.015
"""How much is enough to lose then."""


def loosened(state: State, losses: Losses) -> Losses:
    """What may be lost from now on, since a look was too much; as before where that is much already."""
    state.is_hard = True
    if not 0.0 < state.matched <= LOOSEST / LOOSER:
        return losses
    factor = min(LOOSER, LOOSE / state.matched)
    state.matched *= factor
    return losses.times(factor)
