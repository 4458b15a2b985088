"""How far measured peaks of memory lie from predicted ones, by kind of software.

`PeakErrors` is the distribution of the logarithm of measured over predicted peak memory, for runs of a source
that nothing was fitted to: normal, with a measured bias and spread. It gives the band of a predicted peak and
the probability that the peak fits. `python -m benchmarks.memory --write` makes
`data/peak_errors.json` from sources that are left out one by one.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from math import erfc, exp, log, sqrt
from pathlib import Path
from typing import Any

LIKELY = 0.9
"""Probability from which a plan is called likely to fit."""

_QUANTILE = 1.2815515655446004
"""The quantile of LIKELY of the standard normal distribution."""

ALL_SOFTWARE = "all"
"""Name of the errors of all software together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeakErrors:
    """The normal distribution of log(measured / predicted) of the peak memory of an unseen source.

    `kind` is the kind of software whose runs determine it, or ALL_SOFTWARE; `sources` and `rows` count these
    runs. `bias` is above 0 where predictions are too small.
    """

    kind: str
    bias: float
    spread: float
    sources: int
    rows: int

    @property
    def is_shared(self) -> bool:
        """Whether runs of all software determine it, since too few of the software's own are known."""
        return self.kind == ALL_SOFTWARE

    def band_bytes(self, predicted: float) -> tuple[float, float]:
        """The central 80 % of the peaks that are measured where `predicted` bytes are predicted."""
        return predicted * self._factor(-_QUANTILE), predicted * self._factor(_QUANTILE)

    def fits_probability(self, predicted: float, capacity: float) -> float:
        """The probability, 0 to 1, that the measured peak is at most `capacity` bytes."""
        if predicted <= 0.0 or capacity <= 0.0:
            return 1.0 if predicted <= 0.0 else 0.0
        distance = log(capacity / predicted) - self.bias
        if not self.spread:
            return 1.0 if distance >= 0.0 else 0.0
        return 0.5 * erfc(-distance / (self.spread * sqrt(2.0)))

    def likely_bytes(self, capacity: float) -> float:
        """The largest predicted peak that fits into `capacity` bytes with the probability LIKELY: its band
        ends at the capacity."""
        return capacity / self._factor(_QUANTILE)

    def _factor(self, quantile: float) -> float:
        """Measured over predicted at a quantile of the standard normal distribution."""
        return exp(self.bias + self.spread * quantile)


@cache
def _data() -> dict[str, Any]:
    text = Path(__file__).with_name("data").joinpath("peak_errors.json").read_text("utf-8")
    data: dict[str, Any] = json.loads(text)
    return data


def kind_of_software(lineage: Sequence[str]) -> str:
    """The kind of software, such as `megatron`: that of the most specific name of `lineage` (most general
    first) which has one."""
    kinds = _data()["software"]
    return next((str(kinds[name]) for name in reversed(lineage) if name in kinds), ALL_SOFTWARE)


@cache
def _errors_of(kind: str) -> PeakErrors:
    found = _data()["kinds"].get(kind)
    if found is None:
        return _errors_of(ALL_SOFTWARE)
    figures = {name: found[name] for name in ("bias", "spread", "sources", "rows")}
    return PeakErrors(kind=kind, **figures)


def peak_errors_of(lineage: Sequence[str]) -> PeakErrors:
    """The errors of the software at the end of `lineage`; those of all software where too few sources of its
    kind are known."""
    return _errors_of(kind_of_software(lineage))
