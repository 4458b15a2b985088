"""Each relation holds for some questions, for more with `--full`, and for any number with `python -m
tests.relations`."""

from __future__ import annotations

import pytest
from tests.relations.commands import Commands
from tests.relations.mutants import catches_mutants
from tests.relations.registry import KNOWN_FAILURES, RELATIONS, expected_to_pass, questions_of

QUESTIONS_PER_RELATION, QUESTIONS_IN_FULL, QUESTIONS_OF_MUTANTS = 1, 30, 4
"""Questions of each relation, and the most that a mutated planner is asked."""

PARAMETERS = [
    pytest.param(name, marks=pytest.mark.xdist_group(f"relation {name}")) for name in expected_to_pass()
]


@pytest.mark.slow
@pytest.mark.parametrize("name", PARAMETERS)
def test_relation_holds(name: str, shardwise: Commands, full: bool) -> None:
    relation = RELATIONS[name]
    chosen_questions = questions_of(
        relation, QUESTIONS_IN_FULL if full else QUESTIONS_PER_RELATION, 1000 if full else 100
    )
    for question in chosen_questions:
        relation.check(question, shardwise)
    assert chosen_questions


@pytest.mark.parametrize("name", PARAMETERS)
def test_a_mutated_planner_is_caught(name: str, shardwise: Commands) -> None:
    relation = RELATIONS[name]
    assert any(
        catches_mutants(relation, question, shardwise)
        for question in questions_of(relation, QUESTIONS_OF_MUTANTS)
    )


def test_known_failures_are_relations() -> None:
    assert set(KNOWN_FAILURES) <= set(RELATIONS)
