"""All relations by name, and the questions of each that every run of the tests asks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import islice

from tests.relations import agreeing, better, events, exports, idle, mixed, restated, scaled
from tests.relations.questions import MOST_DEVICES, Question, question
from tests.relations.relation import RELATIONS, Relation

__all__ = ["KNOWN_FAILURES", "QUESTIONS", "RELATIONS", "expected_to_pass", "questions_of"]

MODULES = (restated, better, mixed, idle, events, agreeing, scaled, exports)
"""Each makes its relations as it is imported."""

QUESTIONS = 100
"""Seeds of the questions of every run."""

KNOWN_FAILURES: Mapping[str, str] = {
    "unchanged_strategy_on_mixed_pools": "plan takes the worst of each figure, replan the worst sum of each "
    "stage, and the exposed reduction of the fastest pool with the work of the slowest",
    "loss_equals_plan_on_remaining_nodes": "shapes are searched for in 48 parts of the space "
    "(docs/concepts/replanning.md)",
    "loss_of_any_equal_node": "after a loss, shapes are searched for in 48 parts of the space",
}
"""Relations that do not hold, and why: the tests leave them out, the runner asks them."""


def expected_to_pass() -> list[str]:
    """Names of the relations that the tests ask."""
    return [name for name in RELATIONS if name not in KNOWN_FAILURES]


def questions_of(relation: Relation, count: int, most: int = QUESTIONS) -> list[Question]:
    """`count` of the first `most` questions to which the relation applies, others for each relation; larger
    clusters are left to `--full`."""
    first = 7 * list(RELATIONS).index(relation.name)

    def applicable() -> Iterator[Question]:
        for place in range(most):
            found = question((first + place) % most)
            is_eligible = found.cluster.devices <= MOST_DEVICES or most > QUESTIONS
            if is_eligible and relation.applies(found):
                yield found

    return list(islice(applicable(), count))
