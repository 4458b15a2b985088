"""Stacked problems of one shape: every row costs the same as alone, and shapes distinguish problems that need
other formulas.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from typing import Any

import numpy as np
import pytest
from tests.unit.cost.hand_made import (
    IDEAL,
    SOFTWARE,
    brick,
    brick_model,
    cluster,
    device,
    problem,
    table,
    with_efficiency,
)

from shardwise.cluster.device import CollectiveCurve
from shardwise.cost import Problem, ProblemShapes
from shardwise.cost.stacking import UNUSED_FIELDS
from shardwise.model import load_model
from shardwise.operators import Extent
from shardwise.search import StepFigures, step_figures_of
from shardwise.search.step_times import step_figures
from shardwise.strategy import StrategyTable

WIDTH = Extent(10)
MIXED = (1, 0, 0, 0, 1, 0, 0, 0)
LONGER = (0, 1, 0, 0, 0, 1, 0, 0, 1, 0)

SLOW_STARTS = with_efficiency(
    launch_s=0.25, overlap_slowdown=1.5, scale_out=CollectiveCurve(fraction=0.5, startup_s=0.5, crowding=0.1)
)
QUICK = replace(SOFTWARE, dispatch_s=0.5, data_overlap=0.5, pipeline_overlap=0.25, pointwise_passes=1.5)

PROBLEMS = (
    (problem(brick_model(MIXED)), ("dp=8", "pp=4,tp=2,zero_stage=1")),
    (problem(brick_model(LONGER), cluster(3)), ("dp=4,pp=3,zero_stage=3",)),
    (problem(brick_model(MIXED), cluster(2, of=SLOW_STARTS)), ("dp=2,tp=4,recompute=full", "pp=8")),
    (problem(brick_model(MIXED), seq_len=7, batch=16), ("dp=4,pp=2,vpp=2", "dp=2,tp=2,cp=2")),
    (problem(brick_model(LONGER), profile=QUICK), ("dp=4,pp=2,tp=1,micro_batch_size=2",)),
)
"""Problems of one shape, and strategies of each."""


def assert_same(found: StepFigures, expected: StepFigures) -> None:
    for each in fields(StepFigures):
        assert getattr(found, each.name) == pytest.approx(getattr(expected, each.name), rel=1e-13), each.name


def test_every_row_costs_the_same_as_alone() -> None:
    problems = [cases for cases, _ in PROBLEMS]
    shapes = ProblemShapes()
    assert len({shapes.of(cases) for cases in problems}) == 1
    tables = [table(cases, *texts) for cases, texts in PROBLEMS]
    for cases, rows, found in zip(problems, tables, step_figures_of(problems, tables), strict=True):
        assert_same(found, step_figures(cases, rows))


def test_problems_with_columns_can_be_stacked() -> None:
    problems = [cases for cases, _ in PROBLEMS]
    tables = [table(cases, *texts) for cases, texts in PROBLEMS]
    shapes = ProblemShapes()
    both = shapes.stacked(problems[:3], [len(rows) for rows in tables[:3]])
    joined = StrategyTable.joined(tables[:3])
    expected = [step_figures(cases, rows) for cases, rows in zip(problems, tables, strict=True)]
    first, second = step_figures_of([both, problems[3]], [joined, tables[3]])
    alone = np.concatenate([one.step_time_s for one in expected[:3]])
    assert first.step_time_s == pytest.approx(alone, rel=1e-13)
    assert_same(second, expected[3])


def test_problems_may_share_a_record_with_columns() -> None:
    """Each problem has its own values, one for each of its rows."""
    starts = np.array([0.0, 0.5])
    shared = [with_efficiency(launch_s=starts), *(with_efficiency(launch_s=float(one)) for one in starts)]
    many, *each = ([replace(cases, device=of) for cases, _ in PROBLEMS[:2]] for of in shared)
    tables = [table(cases, text, text) for cases, (text, *_) in PROBLEMS[:2]]
    found = step_figures_of([replace(cases, is_columnar=True) for cases in many], tables)
    for place, (figures, rows) in enumerate(zip(found, tables, strict=True)):
        alone = [step_figures(on[place], rows.take(slice(0, 1))).step_time_s[0] for on in each]
        assert figures.step_time_s == pytest.approx(alone, rel=1e-13)
        assert figures.step_time_s[0] < figures.step_time_s[1]


def test_numbers_in_common_stay_numbers() -> None:
    """A column has a different type, and is not the same record."""
    one, other = problem(brick_model(MIXED)), problem(brick_model(MIXED), seq_len=7)
    both = ProblemShapes().stacked([one, other], [2, 1])
    assert both.job.seq_len.tolist() == [5, 5, 7]  # type: ignore[attr-defined]
    assert both.job.global_batch_size == 8 and both.efficiency is IDEAL
    assert both.model.hidden == 10


CHANGED: dict[str, Callable[[], Problem]] = {
    "an operator more": lambda: problem(
        brick_model(kinds=(replace(brick(), operators=brick().operators * 2),))
    ),
    "a kind of layer more": lambda: problem(brick_model(MIXED)),
    "a tied embedding": lambda: problem(brick_model(tied=True)),
    "one tier": lambda: problem(on=cluster(1)),
    "reduction in the switch": lambda: problem(on=cluster(in_switch=True)),
    "a kernel less": lambda: problem(on=cluster(of=with_efficiency(attention={}))),
    "a dtype": lambda: problem(dtype="fp8"),
    "an optimizer": lambda: problem(optimizer="muon"),
    "what the software does": lambda: problem(profile=replace(SOFTWARE, reduces_by_block=True)),
    "direct links": lambda: problem(on=_linked()),
    "a weight for each expert": lambda: problem(_with_operator(0, weights=(_expert_weight(),))),
    "a width read in the other pass": lambda: problem(_with_operator(1, forward=2 * (WIDTH,), backward=())),
}


def _linked() -> Any:
    on = cluster()
    return replace(on, tiers=(replace(on.tiers[0], part_shares=((2, 0.5),)), on.tiers[1]))


def _expert_weight() -> Any:
    return replace(brick().operators[0].weights[0], experts=4)


def _with_operator(place: int, **changes: Any) -> Any:
    """Bricks with one changed operator."""
    operators: list[Any] = list(brick().operators)
    operators[place] = replace(operators[place], **changes)
    return brick_model(kinds=(replace(brick(), operators=tuple(operators)),))


@pytest.mark.parametrize("change", CHANGED)
def test_problems_with_different_formulas_have_different_shapes(change: str) -> None:
    shapes = ProblemShapes()
    assert shapes.of(CHANGED[change]()) != shapes.of(problem())


def test_sizes_and_names_have_the_same_shape() -> None:
    shapes = ProblemShapes()
    other = problem(brick_model((0,) * 6, hidden=20, name="other"), cluster(5, of=device(name="other")))
    assert shapes.of(other) == shapes.of(problem())


def without_unused_fields(record: Any) -> Any:
    """The record without the fields that no cost may read."""
    if isinstance(record, tuple):
        return tuple(without_unused_fields(each) for each in record)
    if not is_dataclass(record):
        return record
    values = {each.name: getattr(record, each.name) for each in fields(record) if each.init}
    changed = {
        name: None if name in UNUSED_FIELDS else without_unused_fields(each) for name, each in values.items()
    }
    return replace(record, **changed)  # type: ignore[type-var]


@pytest.mark.parametrize("model", [brick_model(MIXED), load_model("mixtral-8x7b")], ids=["bricks", "experts"])
def test_no_estimate_reads_unused_fields(model: Any) -> None:
    cases = problem(model, batch=16)
    bare = replace(
        cases,
        model=without_unused_fields(cases.model),
        device=replace(cases.device, efficiency=without_unused_fields(cases.efficiency)),
        cluster=replace(cases.cluster, tiers=without_unused_fields(cases.tiers)),
        job=replace(cases.job, profile=without_unused_fields(cases.profile)),
    )
    rows = table(cases, "dp=8", "dp=2,tp=2,pp=2,zero_stage=1,recompute=selective")
    assert_same(step_figures(bare, rows), step_figures(cases, rows))
