"""The band of peak memory and the probability that it fits, from the errors that the profile states.

The logarithm of measured over predicted peak memory is normal (docs/concepts/cost-model.md, section 15).
"""

from __future__ import annotations

from collections.abc import Iterator
from math import exp, log
from statistics import NormalDist

from shardwise_verify.checks import Check, number_check
from shardwise_verify.records import PeakErrorsRecord, PlanRecord

CENTRAL = 0.8
"""Share of measured peaks that a band covers."""


def band_checks(plan: PlanRecord) -> Iterator[Check]:
    """The stated band and probability; a file of before they were known has neither them nor the errors."""
    peak, errors = plan.best.peak_memory_bytes, plan.job.profile.peak_errors
    band, stated = plan.best.memory_band_bytes, plan.best.fits_probability
    if errors is None or band is None or stated is None:
        if [errors, band, stated].count(None) < 3:
            expected = "job.profile.peak_errors, best.memory_band_bytes and best.fits_probability, or none"
            yield Check(name="memory band", ok=False, found="some of these keys", expected=expected)
        return
    for name, found, share in (
        ("memory band low", band[0], (1.0 - CENTRAL) / 2.0),
        ("memory band high", band[1], (1.0 + CENTRAL) / 2.0),
    ):
        yield number_check(name, found, peak.device * exp(_quantile(errors, share)))
    own = fits_probability(errors, peak.device, peak.capacity)
    yield number_check("fits probability", stated, own, scale=1.0)


def fits_probability(errors: PeakErrorsRecord, predicted: float, capacity: float) -> float:
    """The probability that the measured peak is at most `capacity` bytes where `predicted` are predicted."""
    if not predicted or not capacity:
        return 0.0 if predicted else 1.0
    distance = log(capacity / predicted)
    if not errors.spread:
        return float(distance >= errors.bias)
    return NormalDist(errors.bias, errors.spread).cdf(distance)


def _quantile(errors: PeakErrorsRecord, share: float) -> float:
    return NormalDist(errors.bias, errors.spread).inv_cdf(share) if errors.spread else errors.bias
