"""Where a frontier of two objectives bends most."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt


def knee(points: npt.NDArray[Any]) -> int | None:
    """The place of the knee among `points` (n, 2), or None where there is none.

    The points are non-dominated, all positive, in ascending order of the first objective. Both objectives are
    taken as logarithms, scaled so that the first point lies at (0, 1) and the last at (1, 0): no unit and no
    factor changes the answer. The knee is the point farthest below the chord between these two, of equals
    the first; a frontier that nowhere lies below its chord (or that has fewer than three points) has none.
    """
    if len(points) < 3:
        return None
    logs = np.log(np.asarray(points, dtype=np.float64))
    lowest, spread = logs.min(axis=0), np.ptp(logs, axis=0)
    below = 1.0 - ((logs - lowest) / spread).sum(axis=1)
    place = int(np.argmax(below))
    return place if below[place] > 1e-12 and 0 < place < len(points) - 1 else None
