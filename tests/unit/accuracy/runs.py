"""Numbers and runs for tests of fits: a few numbers by hand, and published rows as runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache

import numpy as np
from numpy.typing import NDArray

from shardwise.accuracy import SHIPPED, Validation, read_rows, validate
from shardwise.accuracy.case import Case, cases_of
from shardwise.accuracy.fit import MeasuredRun, Numbers, chosen_strategy, predicted_log_s
from shardwise.accuracy.measured import measured_of
from shardwise.accuracy.rows import Row
from shardwise.numbers import Number

Floats = NDArray[np.float64]


def numbers_by_hand(**values: float) -> Numbers:
    """Fitted numbers, named `OF__FIELD` with `_of_` for a dot: `ampere__matmul_of_peak_fraction=0.5`. Those
    of `software_...` are of software; `all` is every platform.
    """

    def number(name: str, value: float) -> Number:
        of, _, field = name.removeprefix("software_").partition("__")
        return Number(
            of=("*" if of == "all" else of,), field=field.replace("_of_", "."), value=value, source="fitted"
        )

    made = {name: number(name, value) for name, value in values.items()}
    return Numbers(
        tuple(one for name, one in made.items() if not name.startswith("software_")),
        tuple(one for name, one in made.items() if name.startswith("software_")),
    )


@cache
def published(*groups: str) -> tuple[Case, ...]:
    """The cases of the published rows of these sources."""
    rows, _ = read_rows(str(SHIPPED))
    return tuple(cases_of([row for row in rows if row.group in groups])[0])


@cache
def validated() -> Validation:
    """The validation of all published rows."""
    return validate(str(SHIPPED))


def some(count: int, *groups: str, where: Callable[[Row], bool] = lambda row: True) -> list[Case]:
    """About `count` cases whose row meets `where`, evenly spaced in their order."""
    cases = [case for case in published(*groups) if where(case.row)]
    return [cases[place] for place in np.linspace(0, len(cases) - 1, count).astype(int)]


def measured_runs(cases: Sequence[Case], numbers: Numbers) -> tuple[MeasuredRun, ...]:
    """Cases as runs with their measured times."""
    return tuple(
        MeasuredRun(
            case=case,
            strategy=chosen_strategy(case, numbers),
            measured_s=measured_of(case.row, case.problem).step_time_s or np.nan,
        )
        for case in cases
    )


def times_under(cases: Sequence[Case], numbers: Numbers) -> Floats:
    """Predicted times of cases under these numbers."""
    runs = [MeasuredRun(case=case, strategy=chosen_strategy(case, numbers), measured_s=1.0) for case in cases]
    return np.exp(predicted_log_s(runs, numbers))
