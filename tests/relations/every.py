"""All relations by name, and the questions of each that every run of the tests asks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import islice

from tests.relations import agreeing, better, events, idle, mixed, retold, scaled
from tests.relations.questions import Question, question
from tests.relations.relation import RELATIONS, Relation

__all__ = ["AWAITED", "QUESTIONS", "RELATIONS", "holding", "questions_of"]

MODULES = (retold, better, mixed, idle, events, agreeing, scaled)
"""Each makes its relations as it is imported."""

QUESTIONS = 100
"""Seeds of the questions of every run."""

AWAITED: Mapping[str, str] = {
    "links_in_another_order": "links are priced as tiers in the order of the nodes, and called proven",
    "a_slower_node": "idle devices: all of alike devices are used, though a part is faster",
    "one_more_node": "the same",
    "not_slower_than_a_part": "the same; and a frontier on two pools leaves none idle",
    "not_slower_than_a_class_alone": "a frontier on two pools leaves none idle",
    "not_slower_than_a_pool": "the same",
    "an_event_that_changes_nothing": "replan leaves devices idle that plan uses",
    "an_event_taken_back": "the same",
    "a_link_as_it_is": "the same",
    "all_devices_are_not_faster": "the same: there is no --use-all yet",
    "idle_devices_are_counted": "the same: an answer does not say what is idle",
    "idle_devices_are_not_slower": "a threshold that is given rises in the search of parts",
    "not_slower_than_a_part_listed": "the same",
    "parts_beat_those_before": "the same",
    "check_accepts": "rounding decides between ranks that tie",
    "exhaustive_finds_the_same": "runners-up that tie come in another order",
}
"""Relations that fail for known faults, and which: the tests leave them out until these are mended."""


def holding() -> list[str]:
    """Names of the relations that the tests ask."""
    return [name for name in RELATIONS if name not in AWAITED]


def questions_of(relation: Relation, count: int, most: int = QUESTIONS) -> list[Question]:
    """`count` of the first `most` questions to which the relation applies, others for each relation."""
    first = 7 * list(RELATIONS).index(relation.name)

    def applicable() -> Iterator[Question]:
        for place in range(most):
            found = question((first + place) % most)
            if relation.applies(found):
                yield found

    return list(islice(applicable(), count))
