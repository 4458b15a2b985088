"""What a fit found, as a file: every number with its value, the bands, and how well they hold."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from shardwise.accuracy.case import cases_of, fault_of
from shardwise.accuracy.fit import Fit, Numbers, fitted
from shardwise.accuracy.leave_out import Spread, is_warm, linear_errors, sources_of, spread_of
from shardwise.accuracy.measured import measured_of
from shardwise.accuracy.rows import Fault, Row
from shardwise.errors import ConfigError
from shardwise.numbers import numbers_record

SCHEMA, VERSION = "shardwise.fit", 1

DIGITS = 4
"""Significant digits of a fitted number in a file."""

LEAST_RUNS = 20
"""Runs with a measured time that a fit needs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FitResult:
    """A fit and the rows that it did not use."""

    fit: Fit
    faults: tuple[Fault, ...]


def fit_rows(rows: Sequence[Row], *, rounds: int = 2, steps: int = 10) -> FitResult:
    """The fit of all usable rows, from scratch. ConfigError where too few have a measured time."""
    cases, faults = cases_of(rows)
    used, times_s = [], []
    for case in cases:
        if case.mixed is not None:
            faults.append(
                Fault(
                    line=case.row.line, id=case.row.id, reason="is of unequal devices, which are not fitted"
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
    fit = fitted(used, times_s, start, rounds=rounds, steps=steps)
    return FitResult(fit=replace(fit, numbers=rounded(fit.numbers)), faults=tuple(faults))


def rounded(numbers: Numbers) -> Numbers:
    """Fitted numbers as files hold them."""
    return numbers.with_values(
        {name: float(f"{value:.{DIGITS}g}") for name, value in numbers.fitted().items()}
    )


def bands_of(fit: Fit) -> dict[str, tuple[float, float]]:
    """Factors of the predicted time between which 80 % of the runs of an unseen source lie: `warm` where its
    device and software were fitted, `cold` where one of them was not. From every source left out in turn."""
    found: dict[bool, dict[str, Any]] = {True: {}, False: {}}
    names = sources_of(fit.runs)
    for source in dict.fromkeys(names.tolist()):
        errors, warm = linear_errors(fit, {source}), is_warm(fit.runs, {source})
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
    """The band around a prediction: errors are predicted over measured, bands measured over predicted."""
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
