"""Leave-one-source-out cross-validation of a fit, prediction bands, and the file of a fit.

`linear_errors` fits without a source and predicts it, to first order. `bands_of` derives the warm and the
cold prediction band from the errors of left-out sources. `fit_rows` runs a fit, and `fit_document` writes its
numbers, bands and errors (docs/reference/formats.md).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardwise.accuracy.case import cases_of, fault_of
from shardwise.accuracy.fit import (
    Fit,
    Linear,
    MeasuredRun,
    Numbers,
    fitted,
    gauss_newton_step,
    source_weights,
)
from shardwise.accuracy.measured import measured_of
from shardwise.accuracy.rows import Fault, Row
from shardwise.cluster import numbers_of_device
from shardwise.errors import ConfigError
from shardwise.numbers import numbers_record

Floats = NDArray[np.float64]
Mask = NDArray[np.bool_]


# Left-out sources
def sources_of(runs: Sequence[MeasuredRun]) -> NDArray[Any]:
    """The source of each run."""
    return np.array([run.case.row.group for run in runs])


def is_warm(runs: Sequence[MeasuredRun], excluded: Collection[str]) -> Mask:
    """Shape (runs,): whether runs of sources that are not excluded have the run's device and its software.

    Devices whose matmuls are not fitted are cold, as in plans (`is_calibrated`)."""
    known: dict[Hashable, tuple[str, str]] = {}
    kinds = []
    for run in runs:
        key = id(run.case.problem.device), run.case.problem.profile.name
        kinds.append(known.get(key) or known.setdefault(key, _platform_of(run)))
    remaining = [kind for run, kind in zip(runs, kinds, strict=True) if run.case.row.group not in excluded]
    devices, software = {device for device, _ in remaining}, {profile for _, profile in remaining}
    fitted_devices = devices & {number.name for number in Numbers.shipped().devices if number.is_fitted}
    return np.array([device in fitted_devices and profile in software for device, profile in kinds])


def _platform_of(run: MeasuredRun) -> tuple[str, str]:
    """The platform of a run: the name of its device's matmul number, and the name of its profile."""
    problem = run.case.problem
    numbers = numbers_of_device(problem.device, Numbers.shipped().devices)
    peak = next(number for number in numbers if number.field == "matmul.peak_fraction")
    return peak.name, problem.profile.name


def _targets(runs: Sequence[MeasuredRun]) -> Floats:
    return np.log([run.measured_s for run in runs])


def linear_errors(fit: Fit, excluded: Collection[str]) -> Floats:
    """Logarithms of predicted over measured time of all runs, by numbers fitted without the `excluded`
    sources.

    The new numbers come from one Gauss-Newton step without a trust region, on the derivatives of the whole
    fit. So nothing of the excluded sources stays in the numbers, to first order.
    """
    remaining = ~np.isin(sources_of(fit.runs), list(excluded))
    linear = Linear(fit.linear.names, fit.linear.log_s[remaining], fit.linear.slopes[remaining])
    runs = [run for run, stays in zip(fit.runs, remaining, strict=True) if stays]
    log_changes = gauss_newton_step(linear, _targets(runs), source_weights(runs), fit.numbers, largest=np.inf)
    return fit.linear.log_s + fit.linear.slopes @ log_changes - _targets(fit.runs)


@dataclass(frozen=True, slots=True)
class Spread:
    """The distribution of logarithmic errors of unseen sources: the median, and half the width of the central
    80 %."""

    middle: float
    half: float


CENTRAL = 0.8
"""Share of runs that a band covers."""


def spread_of(errors: Mapping[str, Floats]) -> Spread:
    """The spread of the error of a run of an unseen source, from the errors of several left-out sources.

    These are the quantiles of a mixture in which every source has the same weight. So the variance between
    sources counts, and not the number of rows of a source.
    """
    values = np.concatenate(list(errors.values()))
    weights = np.concatenate([np.full(len(part), 1.0 / len(part)) for part in errors.values()])
    middle = _quantile(values, weights, 0.5)
    return Spread(middle, _quantile(np.abs(values - middle), weights, CENTRAL))


def _quantile(values: Floats, weights: Floats, share: float) -> float:
    order = np.argsort(values)
    reached = np.cumsum(weights[order]) / weights.sum()
    return float(values[order][np.searchsorted(reached, share)])


# Fits of rows, and their file
SCHEMA, VERSION = "shardwise.fit", 1

DIGITS = 4
"""Significant digits of a fitted number in a file."""

MAX_FOLDS = 50
"""Most parts of the sources that are left out in turn; each takes about a second of fitting."""

LEAST_RUNS = 20
"""Fewest runs with a measured time that a fit accepts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FitResult:
    """A fit and the rows that it did not use."""

    fit: Fit
    faults: tuple[Fault, ...]


def fit_rows(
    rows: Sequence[Row],
    *,
    rounds: int = 2,
    steps: int = 10,
    has_time: Callable[[], bool] = lambda: True,
    progress: Callable[[str], None] | None = None,
) -> FitResult:
    """Fits all usable rows from scratch; `has_time` and `progress` as in `fitted`. ConfigError where fewer
    than LEAST_RUNS have a measured time."""
    cases, faults = cases_of(rows)
    used, times_s = [], []
    for case in cases:
        if case.mixed is not None:
            faults.append(
                Fault(
                    line=case.row.line, id=case.row.id, reason="ran on unequal devices, which are not fitted"
                )
            )
            continue
        try:
            measured = measured_of(case.row, case.problem)
        except ConfigError as error:
            faults.append(fault_of(case.row, error))
            continue
        if measured.step_time_s is None:
            faults.append(Fault(line=case.row.line, id=case.row.id, reason="gives no step time"))
            continue
        used.append(case)
        times_s.append(measured.step_time_s)
    if len(used) < LEAST_RUNS:
        raise ConfigError(
            "has too few runs to fit", found=f"{len(used)} with a measured time that can be predicted",
            allowed=f"{LEAST_RUNS} or more",
        )  # fmt: skip
    start = Numbers.shipped().from_scratch()
    fit = fitted(used, times_s, start, rounds=rounds, steps=steps, has_time=has_time, progress=progress)
    return FitResult(fit=replace(fit, numbers=rounded(fit.numbers)), faults=tuple(faults))


def rounded(numbers: Numbers) -> Numbers:
    """The fitted numbers, rounded as in files (DIGITS)."""
    return numbers.with_values(
        {name: float(f"{value:.{DIGITS}g}") for name, value in numbers.fitted().items()}
    )


def bands_of(fit: Fit) -> dict[str, tuple[float, float]]:
    """The `warm` and `cold` band, as factors of the predicted time, that contain 80 % of the runs of an
    unseen source.

    `warm` is for sources whose device and software were fitted, `cold` for the others. Each source is left
    out in turn; of more than MAX_FOLDS sources, the n-th with all that follow it by MAX_FOLDS."""
    found: dict[bool, dict[str, Any]] = {True: {}, False: {}}
    names = sources_of(fit.runs)
    sources = list(dict.fromkeys(names.tolist()))
    for first in range(min(len(sources), MAX_FOLDS)):
        left_out = sources[first::MAX_FOLDS]
        errors, warm = linear_errors(fit, left_out), is_warm(fit.runs, set(left_out))
        for source in left_out:
            for kind in (True, False):
                rows = (names == source) & (warm == kind)
                if rows.any():
                    found[kind][source] = errors[rows]
    every = {**found[False], **found[True]}
    return {
        "warm": factors(spread_of(found[True] or every)),
        "cold": factors(spread_of(found[False] or every)),
    }


def factors(spread: Spread) -> tuple[float, float]:
    """The band of a spread: a spread is of predicted over measured time, a band of measured over
    predicted."""
    low, high = np.exp([-spread.middle - spread.half, -spread.middle + spread.half])
    return float(f"{low:.3g}"), float(f"{high:.3g}")


def fit_document(found: FitResult) -> dict[str, object]:
    """The file of a fit (docs/reference/formats.md)."""
    fit = found.fit
    errors = fit.linear.log_s - np.log([run.measured_s for run in fit.runs])
    names = sources_of(fit.runs)
    sources: dict[str, Mapping[str, float]] = {}
    for source in dict.fromkeys(names.tolist()):
        own = np.expm1(errors[names == source])
        sources[source] = {"runs": len(own), "mape": float(np.abs(own).mean()), "bias": float(own.mean())}
    bands = bands_of(fit)
    return {
        "schema": SCHEMA,
        "version": VERSION,
        "runs": len(fit.runs),
        "free_numbers": len(fit.numbers.all) + sum(map(len, bands.values())),
        "fitted_numbers": len(fit.numbers.fitted()),
        "sources": sources,
        "bands": {name: list(band) for name, band in bands.items()},
        "devices": numbers_record(fit.numbers.devices),
        "software": numbers_record(fit.numbers.software),
    }
