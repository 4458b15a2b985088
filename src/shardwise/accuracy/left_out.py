"""Errors on runs that were left out of the fit of the shipped numbers, as the package ships them.

`python -m benchmarks.left_out --write` computes them: each source, each kind of software and each device is
left out in turn, and the numbers are fitted anew to all other runs."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final

LEFT_OUT: Final = Path(__file__).parent / "data" / "left_out.json"
"""File of the shipped figures."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftOutGroup:
    """A group of runs that was left out: `kind` is source, software or device.

    Errors are means of absolute values of predicted over measured time, minus 1: `fitted` with numbers that
    are fitted to all runs, `error` without the group, `with_constant` without it but with one factor for all
    of its runs. `bias` is the mean error. `warm` is the share of its runs whose device and software stay in
    the fit by other groups. `tau` is the mean of Kendall's tau-b over `workloads` with at least five plans,
    `mean_regret` and `worst_regret` the time lost by the plan that is predicted fastest; None without such
    workloads."""

    kind: str
    name: str
    rows: int
    warm: float
    fitted: float
    error: float
    bias: float
    with_constant: float
    workloads: int
    tau: float | None
    mean_regret: float | None
    worst_regret: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class CurvePoint:
    """Mean error over left-out sources, `before` and `after` a number of measured `steps` of the same
    machine. `kind` says whether the measured model is predicted, or other models."""

    kind: str
    steps: int
    sources: int
    before: float
    after: float


@dataclass(frozen=True, slots=True)
class LeftOutErrors:
    """All shipped figures."""

    groups: tuple[LeftOutGroup, ...]
    curve: tuple[CurvePoint, ...]


@cache
def left_out_errors() -> LeftOutErrors:
    """The shipped figures."""
    record = json.loads(LEFT_OUT.read_text("utf-8"))
    return LeftOutErrors(
        tuple(LeftOutGroup(**one) for one in record["groups"]),
        tuple(CurvePoint(**one) for one in record["curve"]),
    )
