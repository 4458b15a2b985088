"""Every plan of the planner passes the checker, whatever the question."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.property.search_instances import instance

from shardwise import search
from shardwise.errors import Infeasible
from shardwise.plans import PlanQuestion, plan_of, write_plan
from shardwise_verify import check_file

INSTANCES, ALL_INSTANCES = 10, 1_000

FITS_BY_ROUNDING = 401
"""A question with a strategy that takes all memory of its host: one evaluator is a digit above it, the other
a digit below.
"""


@pytest.mark.slow
def test_plans_of_random_questions_hold(tmp_path: Path, full: bool) -> None:
    path = str(tmp_path / "plan.yaml")
    checked = 0
    for seed in (*range(ALL_INSTANCES if full else INSTANCES), FITS_BY_ROUNDING):
        question = instance(seed).question
        try:
            answer = search.plan(question)
        except Infeasible:
            continue
        used = answer.cluster or question.cluster
        stated = PlanQuestion(
            objective=answer.objective, space=question.space, fixed=question.fixed, axes=question.axes
        )
        plan = plan_of(answer, model=question.model, cluster=used, job=question.job, question=stated)
        write_plan(path, plan)
        wrong = [check for check in check_file(path).checks if not check.ok]
        assert wrong == [], seed
        checked += 1
    assert checked >= INSTANCES * 2 // 3
