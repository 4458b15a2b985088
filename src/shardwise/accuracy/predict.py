"""Predictions of the cost model for the cases of measured rows."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from shardwise.accuracy.case import Case, MixedDevices
from shardwise.cost import Problem
from shardwise.search import StepFigures, peaks_of_rank, step_figures_of, step_figures_over
from shardwise.strategy import Strategy, StrategyTable


@dataclass(frozen=True, slots=True)
class Prediction:
    """The prediction for one case: the chosen strategy, seconds per step, and peak bytes on the rank with the
    least free memory, or on the pipeline rank that the row states."""

    case: Case
    strategy: Strategy
    step_time_s: float
    allocated_bytes: float
    reserved_bytes: float
    device_bytes: float


Known = dict[Hashable, Prediction]
"""Predictions by the objects of their cases, which they keep alive."""


def predictions_of(cases: Sequence[Case], known: Known | None = None) -> list[Prediction]:
    """The predictions of all cases, in their order. Cases that share a problem are evaluated in one table,
    and cases that share their strategies too only once; those in `known` not again, and it gets the new
    ones."""
    known = {} if known is None else known
    keys = [(id(case.problem), id(case.strategies), id(case.mixed), case.row.peak_rank) for case in cases]
    new = {key: case for key, case in zip(keys, cases, strict=True) if key not in known}
    known.update(zip(new, _distinct_predictions(list(new.values())), strict=True))
    return [replace(known[key], case=case) for key, case in zip(keys, cases, strict=True)]


def _distinct_predictions(cases: Sequence[Case]) -> list[Prediction]:
    by_problem: dict[int, list[int]] = {}
    mixed_groups: dict[Hashable, tuple[MixedDevices, list[int]]] = {}
    for index, case in enumerate(cases):
        if case.mixed is None:
            by_problem.setdefault(id(case.problem), []).append(index)
        else:
            kinds = tuple(id(problem) for problem in case.mixed.problems)
            mixed_groups.setdefault((kinds, case.mixed.nodes), (case.mixed, []))[1].append(index)
    groups = [[cases[index] for index in members] for members in by_problem.values()]
    tables = [StrategyTable.joined([case.strategies for case in group]) for group in groups]
    figures = step_figures_of([group[0].problem for group in groups], tables)
    found: dict[int, Prediction] = {}
    for members, group, table, of_group in zip(by_problem.values(), groups, tables, figures, strict=True):
        found |= zip(members, _predictions(group, table, of_group), strict=True)
    for mixed, members in mixed_groups.values():
        found |= zip(members, _mixed_predictions(mixed, [cases[index] for index in members]), strict=True)
    return [found[index] for index in range(len(cases))]


def predicted(case: Case, problem: Problem | None = None) -> Prediction:
    """The prediction of one case. `problem`, where it is given, replaces the problem of the case."""
    return predictions_of([case if problem is None else replace(case, problem=problem)])[0]


def _predictions(group: Sequence[Case], table: StrategyTable, figures: StepFigures) -> list[Prediction]:
    stops = np.cumsum([len(case.strategies) for case in group])
    return [
        _prediction(
            case, figures, chosen_row(_tightest(case), figures, slice(end - len(case.strategies), end)), table
        )
        for case, end in zip(group, stops.tolist(), strict=True)
    ]


def _mixed_predictions(mixed: MixedDevices, group: Sequence[Case]) -> list[Prediction]:
    """The predictions of cases with the same problems and the same order of nodes."""
    table = StrategyTable.joined([case.strategies for case in group])
    return _predictions(group, table, step_figures_over(mixed.problems, table, mixed.nodes))


def _tightest(case: Case) -> Problem:
    """The problem of a case; for unequal devices, that of the devices with the least memory."""
    problems = (case.problem,) if case.mixed is None else case.mixed.problems
    return min(problems, key=lambda problem: problem.usable_bytes)


def chosen_row(problem: Problem, figures: StepFigures, rows: slice) -> int:
    """The index of the fastest of these rows that fits in usable memory, as `plan` would choose; the row with
    the least memory where none fits."""
    needed: Any = figures.device_bytes[rows]
    fits = needed <= problem.usable_bytes
    order = np.where(fits, figures.step_time_s[rows], np.inf) if fits.any() else needed
    return int(rows.start + np.argmin(order))


def _prediction(case: Case, figures: StepFigures, row: int, table: StrategyTable) -> Prediction:
    strategy = table[row]
    peaks: tuple[Any, ...] = (
        figures.allocated_bytes[row],
        figures.reserved_bytes[row],
        figures.device_bytes[row],
    )
    stated = case.row.peak_rank.casefold()
    if stated in ("first", "last"):
        peaks = peaks_of_rank(_tightest(case), strategy, 0 if stated == "first" else strategy.pp - 1)
    return Prediction(case, strategy, float(figures.step_time_s[row]), *(float(peak) for peak in peaks))
