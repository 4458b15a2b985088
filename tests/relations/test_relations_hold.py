"""Each relation holds of some questions, of more by `--full`, and of any number by
`python -m tests.relations`."""

from __future__ import annotations

import pytest
from tests.relations.broken import notices
from tests.relations.commands import Commands
from tests.relations.every import AWAITED, RELATIONS, holding, questions_of

ASKED, ASKED_IN_FULL = 2, 30
"""Questions of each relation."""

NAMED = [pytest.param(name, marks=pytest.mark.xdist_group(f"relation {name}")) for name in holding()]


@pytest.mark.parametrize("name", NAMED)
def test_relation_holds(name: str, shardwise: Commands, full: bool) -> None:
    relation = RELATIONS[name]
    asked = questions_of(relation, ASKED_IN_FULL if full else ASKED, 1000 if full else 100)
    for question in asked:
        relation.check(question, shardwise)
    assert asked


@pytest.mark.parametrize("name", NAMED)
def test_a_broken_planner_is_noticed(name: str, shardwise: Commands) -> None:
    relation = RELATIONS[name]
    assert any(notices(relation, question, shardwise) for question in questions_of(relation, 2 * ASKED))


def test_what_is_awaited_is_a_relation() -> None:
    assert set(AWAITED) <= set(RELATIONS)
