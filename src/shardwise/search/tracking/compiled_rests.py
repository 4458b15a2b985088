"""Which labels some rest completes, as machine code: what `completions` does in numpy where numba is not
installed."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from shardwise.search.tracking.compiled import numba_compiled

Mask = npt.NDArray[np.bool_]
Indices = npt.NDArray[np.intp]
Values = npt.NDArray[np.float64]


@numba_compiled
def are_within(own: Values, at: Indices, completions: Values, places: Indices, cutoff: float) -> Mask:
    """Which rows (n, 3) of two times and a peak, all in seconds, come to less than `cutoff` with any of the
    rests from places[at] to places[at + 1]."""
    found = np.zeros(len(own), np.bool_)
    for row in range(len(own)):
        for rest in range(places[at[row]], places[at[row] + 1]):
            time_s = max(own[row, 0] + completions[rest, 0], own[row, 1] + completions[rest, 1])
            if time_s + max(own[row, 2], completions[rest, 2]) < cutoff:
                found[row] = True
                break
    return found


@numba_compiled
def are_within_both(
    own: Values, at: Indices, completions: Values, places: Indices, beyond: Indices, others: Values,
    other_starts: Indices,
    share: float, cutoff: float,
) -> Mask:  # fmt: skip
    """Which rows come to less than `cutoff` with any of the rests from places[at] to places[at + 1] and any
    of the others from ends[beyond] to ends[beyond + 1]; both by ascending sum of both times, of which the
    first has this share: no less than that is the larger of them."""
    found = np.zeros(len(own), np.bool_)
    for row in range(len(own)):
        first, last = other_starts[beyond[row]], other_starts[beyond[row] + 1]
        for rest in range(places[at[row]], places[at[row] + 1]):
            one, two = own[row, 0] + completions[rest, 0], own[row, 1] + completions[rest, 1]
            peak = max(own[row, 2], completions[rest, 2])
            mean = share * one + (1.0 - share) * two + peak
            for other in range(first, last):
                a, b = others[other, 0], others[other, 1]
                if mean + share * a + (1.0 - share) * b >= cutoff:
                    break
                if max(one + a, two + b) + max(peak, others[other, 2]) < cutoff:
                    found[row] = True
                    break
            if found[row]:
                break
    return found
