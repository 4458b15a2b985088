"""Schedules with their virtual stages, and the families of schedules that are bounded together."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardwise.schedule import in_flight
from shardwise.strategy import SCHEDULES, Column

FAMILIES = np.array(
    [
        ("1f1b", "gpipe", "interleaved_1f1b", "zb_h", "v").index(name)
        for name in (
            {"zb_h1": "zb_h", "zb_h2": "zb_h", "zb_v": "v", "dualpipe_v": "v"}.get(name, name)
            for name in SCHEDULES
        )
    ]
)
"""Per schedule its family: schedules of the same shape."""

MANY_PER_RANK = 4
"""Microbatches per rank that are more than any schedule with a limit has in flight."""


@dataclass(frozen=True, slots=True)
class Variants:
    """Schedules with their virtual stages that a pipeline of `pp` ranks may have, as columns."""

    schedule: Column
    vpp: Column

    def __len__(self) -> int:
        return len(self.vpp)

    def take(self, rows: Any) -> Variants:
        """The variants at these rows."""
        return Variants(self.schedule[rows], self.vpp[rows])

    @property
    def families(self) -> dict[int, Variants]:
        """Schedules whose bounds have the same terms, together: by the index of their family."""
        each = FAMILIES[self.schedule]
        return {family: self.take(each == family) for family in np.unique(each).tolist()}

    def representative(self, pp: int) -> Variants:
        """One for a whole family in bounds of its time: no member has more microbatches in flight (what is
        done before a first backward is not left then), none has fewer virtual stages."""
        in_flight_count = in_flight(self.schedule, pp, MANY_PER_RANK * pp, self.vpp, 0)
        most = int(np.argmax(in_flight_count))
        return Variants(self.schedule[most : most + 1], self.vpp.min(keepdims=True))

    def fewest_in_flight(self, pp: int, microbatches: NDArray[np.int64]) -> NDArray[np.float64]:
        """Microbatches that each rank holds at least under any of the schedules, of its layers on average;
        shape (pp, rows)."""
        rank, schedule, m = np.arange(pp)[:, None, None], self.schedule[:, None], microbatches[None]
        in_flight_count = in_flight(schedule, pp, m, self.vpp[:, None], rank) / self.vpp[:, None]
        return np.asarray(in_flight_count.min(axis=1))
