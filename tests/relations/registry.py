"""All relations by name, the known failures, and the questions that the tests ask for each relation."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import islice

from tests.relations import consistent, equivalent, events, exports, idle_devices, mixed, monotone, scaled
from tests.relations.questions import MOST_DEVICES, Question, question
from tests.relations.relation import RELATIONS, Relation

__all__ = ["KNOWN_FAILURES", "QUESTIONS", "RELATIONS", "expected_to_pass", "questions_of"]

MODULES = (equivalent, monotone, mixed, idle_devices, events, consistent, scaled, exports)
"""Each module registers its relations when it is imported."""

QUESTIONS = 100
"""Number of seeds from which the tests take questions."""

KNOWN_FAILURES: Mapping[str, str] = {
    "unchanged_strategy_on_several_devices": "plan takes the worst of each figure over the classes: one "
    "machine for all candidates and their bounds. replan takes the slowest node of each stage",
}
"""Relations that do not hold yet, with the reason: the tests skip them, `python -m tests.relations` runs
them."""


def expected_to_pass() -> list[str]:
    """Names of the relations that the tests check."""
    return [name for name in RELATIONS if name not in KNOWN_FAILURES]


def questions_of(relation: Relation, count: int, most: int = QUESTIONS) -> list[Question]:
    """`count` of the first `most` questions to which the relation applies, different ones for each relation.
    Larger clusters run with `--full` only."""
    first = 7 * list(RELATIONS).index(relation.name)

    def applicable() -> Iterator[Question]:
        for place in range(most):
            found = question((first + place) % most)
            is_eligible = found.cluster.devices <= MOST_DEVICES or most > QUESTIONS
            if is_eligible and relation.applies(found):
                yield found

    return list(islice(applicable(), count))
