"""(c) A mixed cluster is never slower than any of its parts, beyond the gap that its answer states."""

from __future__ import annotations

from dataclasses import replace

from tests.relations.commands import Commands
from tests.relations.questions import Question
from tests.relations.relation import is_mixed, relation, require_not_slower


@relation(is_mixed)
def not_slower_than_a_class_alone(question: Question, shardwise: Commands) -> None:
    """Than all nodes of one device class."""
    for name in dict.fromkeys(run.device for run in question.cluster.nodes):
        alone = tuple(run for run in question.cluster.nodes if run.device == name)
        part = question.on(replace(question.cluster, nodes=alone))
        require_not_slower(
            shardwise.answer(question.words()),
            shardwise.answer(part.words()),
            what=f"slower than {name} alone",
        )


@relation(is_mixed)
def not_slower_than_a_pool(question: Question, shardwise: Commands) -> None:
    """Than the nodes of one entry."""
    for run in question.cluster.nodes:
        part = question.on(replace(question.cluster, nodes=(run,)))
        require_not_slower(
            shardwise.answer(question.words()), shardwise.answer(part.words()), what="slower than a pool"
        )


@relation(lambda question: question.cluster.node_count > 1 and not question.cluster.tiers)
def not_slower_than_a_part(question: Question, shardwise: Commands) -> None:
    """Than some of the nodes of each entry. Of given tiers a part has not all, so that they are left out."""
    rng = question.rng("a part")
    for _ in range(2):
        counts = tuple(rng.randint(0, run.count) for run in question.cluster.nodes)
        if any(counts):
            part = question.on(question.cluster.of_counts(counts))
            require_not_slower(
                shardwise.answer(question.words()), shardwise.answer(part.words()), what="slower than a part"
            )
