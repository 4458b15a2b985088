"""Costs of choices as arrays of the five columns of a chain (frontier/network.py)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from shardwise.cost.layouts.ground import Ground
from shardwise.frontier import COLUMNS, Costs


@dataclass(slots=True)
class Columns:
    """Sums in the making: arrays that broadcast together, in the order of COLUMNS.

    A second that nothing can hide adds to both times; a second of backward computation, beside which
    gradients are summed, adds where it hides all of them, else not: the gradients' own seconds count.
    """

    hidden_s: Any = 0.0
    exposed_s: Any = 0.0
    held_bytes: Any = 0.0
    recomputed_bytes: Any = 0.0
    peak_bytes: Any = 0.0

    def blocked(self, seconds: Any) -> None:
        """Add seconds during which nothing else runs."""
        self.hidden_s = self.hidden_s + seconds
        self.exposed_s = self.exposed_s + seconds

    def computed_backward(self, seconds: Any) -> None:
        """Add computation beside which gradients can be summed."""
        self.hidden_s = self.hidden_s + seconds

    def hidden_backward(self, exposed_s: Any, hidden_s: Any) -> None:
        """Add communication that runs beside backward computation for `hidden_s`, and adds `exposed_s`: that
        computation hides nothing else."""
        self.hidden_s = self.hidden_s + exposed_s
        self.exposed_s = self.exposed_s + exposed_s + hidden_s

    def summed_gradients(self, seconds: Any, overlap: Any) -> None:
        """Add gradient synchronisation of which the share `overlap` can hide."""
        self.hidden_s = self.hidden_s + (1.0 - overlap) * seconds
        self.exposed_s = self.exposed_s + seconds

    def costs(self, ground: Ground, shape: tuple[int, ...]) -> Costs:
        """The columns as costs; allocators hold more bytes than they give out."""
        costs = np.empty((*shape, len(COLUMNS)))
        costs[..., 0], costs[..., 1] = self.hidden_s, self.exposed_s
        held = 1.0 + ground.machine.efficiency.fragmentation_ratio
        for column, nbytes in enumerate((self.held_bytes, self.recomputed_bytes, self.peak_bytes), 2):
            costs[..., column] = held * np.asarray(nbytes)
        return costs
