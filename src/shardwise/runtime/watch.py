"""Notices when steps take another time than they should. Pure: it is told the seconds and reads no clock."""

from __future__ import annotations

from collections import deque
from statistics import median

RECENT = 3
"""Steps whose median counts: one that is slow by itself is no change."""

DEVIATION = 1.25
"""Factor by which the median is off, either way, before it is looked into."""


class StepTimeMonitor:
    """Holds steps against what is expected of them; the first step of a plan, which sets things up, does not
    count."""

    def __init__(self, expected_s: float) -> None:
        self._expected_s: float | None = expected_s
        self._recent: deque[float] = deque(maxlen=RECENT)
        self._is_first = True

    def deviates(self, step_s: float) -> bool:
        """Whether steps are off, now that another one took so long."""
        if self._is_first:
            self._is_first = False
            return False
        self._recent.append(step_s)
        if len(self._recent) < RECENT:
            return False
        typical_s = median(self._recent)
        if self._expected_s is None:
            self._expected_s = typical_s
        return not 1.0 / DEVIATION <= typical_s / self._expected_s <= DEVIATION

    @property
    def typical_s(self) -> float:
        """The median of the last steps; what is expected where there are none."""
        return median(self._recent) if self._recent else self._expected_s or 0.0

    def rebaseline(self) -> None:
        """It was looked into and stays: what the next steps take is what is expected from then on."""
        self._expected_s = None
        self._recent.clear()

    def restart(self, expected_s: float) -> None:
        """Another plan runs from now on."""
        self._expected_s = expected_s
        self._recent.clear()
        self._is_first = True
