"""The recorded questions have the recorded answers."""

from __future__ import annotations

import pytest
from tests.recorded.__main__ import answers, questions
from tests.recorded.comparing import differences, settled
from tests.recorded.files import rounded
from tests.recorded.product import answer_to

QUESTIONS, ANSWERS = questions(), answers()


@pytest.mark.slow
@pytest.mark.parametrize("name", QUESTIONS)
def test_an_answer_equals_the_recorded_one(name: str) -> None:
    found = settled(rounded(answer_to(QUESTIONS[name])), ANSWERS[name])
    assert list(differences(found, ANSWERS[name])) == []


def test_the_questions_are_of_all_sorts() -> None:
    assert list(QUESTIONS) == list(ANSWERS)
    kinds = [name.partition(":")[0] for name in QUESTIONS]
    assert {kind: kinds.count(kind) for kind in set(kinds)} == {"uniform": 30, "mixed": 15, "graph": 15}
    of_strategies = [one for one in QUESTIONS.values() if "graph" not in one]
    assert {one["objective"] for one in of_strategies} == {"time", "memory", "devices", "cost"}
    assert {one["space"] for one in of_strategies} == {"core", "default"}
    assert {one["target"] for one in of_strategies} == {"any", "megatron-lm-0.19", "shardwise"}
    assert (
        len({one["dtype"] for one in of_strategies}) >= 4
        and len({one["optimizer"] for one in of_strategies}) >= 3
    )
    assert any(one["fixed"] for one in of_strategies) and any(one["axes"] for one in of_strategies)
    assert {one["use_all"] for one in of_strategies} == {True, False}
    assert sum("pipeline_s" in answer.get("best", {}) for answer in ANSWERS.values()) >= 5, "uneven plans"
    assert sum("infeasible" in answer for answer in ANSWERS.values()) >= 2
