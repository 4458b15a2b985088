"""Costs of choices as arrays of the five columns of a chain (frontier/network.py)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from shardwise.cost.layouts.ground import CostContext
from shardwise.frontier import COLUMNS, Costs


@dataclass(slots=True)
class CostColumns:
    """Sums in the making: arrays that broadcast together.

    Of each micro-batch: `forward_s` of its forward pass; of its backward pass `blocked_s` that nothing can
    hide, `computed_s` of computation, beside which gradients are summed, and `busy_s` for which it hides
    something else already; and `saved_bytes` from one to the other. Of the step: `once_s`, and `summed_s` of
    gradient synchronisation, `late_s` of which cannot hide.
    """

    resident_bytes: Any = 0.0
    saved_bytes: Any = 0.0
    recomputed_bytes: Any = 0.0
    peak_bytes: Any = 0.0
    forward_s: Any = 0.0
    blocked_s: Any = 0.0
    computed_s: Any = 0.0
    busy_s: Any = 0.0
    once_s: Any = 0.0
    summed_s: Any = 0.0
    late_s: Any = 0.0

    def forward(self, seconds: Any) -> None:
        """Add seconds of each forward pass."""
        self.forward_s = self.forward_s + seconds

    def blocked(self, seconds: Any) -> None:
        """Add seconds of each backward pass during which nothing else runs."""
        self.blocked_s = self.blocked_s + seconds

    def once(self, seconds: Any) -> None:
        """Add seconds of each step."""
        self.once_s = self.once_s + seconds

    def computed_backward(self, seconds: Any) -> None:
        """Add computation beside which gradients can be summed."""
        self.computed_s = self.computed_s + seconds

    def hidden_backward(self, exposed_s: Any, hidden_s: Any) -> None:
        """Add communication that runs beside backward computation for `hidden_s`, and adds `exposed_s`: that
        computation hides nothing else."""
        self.blocked_s = self.blocked_s + exposed_s
        self.busy_s = self.busy_s + hidden_s

    def summed_gradients(self, seconds: Any, overlap: Any) -> None:
        """Add gradient synchronisation of which the share `overlap` can hide."""
        self.summed_s = self.summed_s + seconds
        self.late_s = self.late_s + (1.0 - overlap) * seconds

    def costs(self, context: CostContext, shape: tuple[int, ...]) -> Costs:
        """The columns as costs; allocators hold more bytes than they give out.

        The last micro-batch's backward computation hides gradients: a second of it adds to the step where it
        hides all of them, else not, for there the gradients' own seconds count.
        """
        counts = context.counts
        others = counts.microbatches - counts.steps
        costs = np.empty((*shape, len(COLUMNS)))
        forwards = counts.microbatches + counts.extra_forwards
        common_s = (
            forwards * self.forward_s + counts.microbatches * self.blocked_s + counts.steps * self.once_s
        )
        costs[..., 0] = common_s + counts.microbatches * self.computed_s + counts.steps * self.late_s
        costs[..., 1] = common_s + others * self.computed_s + counts.steps * (self.busy_s + self.summed_s)
        reserved = 1.0 + context.machine.efficiency.fragmentation_ratio
        all_resident = self.resident_bytes + counts.in_flight * self.saved_bytes
        for column, nbytes in enumerate((all_resident, self.recomputed_bytes, self.peak_bytes), 2):
            costs[..., column] = reserved * np.asarray(nbytes)
        return costs
