"""What errors of many predictions come to: plain numbers in, plain numbers out."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True, kw_only=True)
class Errors:
    """Of errors (predicted over measured, minus 1): how many there are, mean and median of their sizes, their
    mean with signs (the bias), and the largest size."""

    n: int
    mape: float
    median: float
    bias: float
    worst: float


def errors_of(errors: Sequence[float]) -> Errors | None:
    """The summary of some errors; None of none."""
    if not errors:
        return None
    sizes = [abs(error) for error in errors]
    return Errors(
        n=len(errors),
        mape=mean(sizes),
        median=float(np.median(sizes)),
        bias=mean(errors),
        worst=max(sizes),
    )


def mean(values: Sequence[float]) -> float:
    """The mean of one value or more, summed exactly."""
    return math.fsum(values) / len(values)


def kendall_tau(measured: Sequence[float], predicted: Sequence[float]) -> float | None:
    """Kendall's tau-b: (concordant - discordant) / sqrt(pairs not tied in one * pairs not tied in the other).

    1 for the same order, -1 for the reverse; 0 where all predictions are equal; None where all measured
    values are, or there are fewer than two.
    """
    a, x = np.asarray(measured, np.float64), np.asarray(predicted, np.float64)
    agreement = untied_measured = untied_predicted = 0
    for i in range(1, len(a)):
        of_a, of_x = np.sign(a[i] - a[:i]), np.sign(x[i] - x[:i])
        agreement += int(of_a @ of_x)
        untied_measured += int(np.count_nonzero(of_a))
        untied_predicted += int(np.count_nonzero(of_x))
    if untied_measured == 0:
        return None
    if untied_predicted == 0:
        return 0.0
    return agreement / math.sqrt(untied_measured * untied_predicted)


def regret(measured: Sequence[float], predicted: Sequence[float]) -> float:
    """Measured value of the one predicted least over the least measured, minus 1; of several that are
    predicted least (equal to a part in 1e9), the one measured worst."""
    least = min(predicted)
    chosen = [a for a, x in zip(measured, predicted, strict=True) if x <= least * (1.0 + 1e-9)]
    return max(chosen) / min(measured) - 1.0


def share(flags: Sequence[bool]) -> float | None:
    """The share of flags that are set; None of none."""
    return sum(flags) / len(flags) if flags else None
