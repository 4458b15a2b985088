"""(c) A mixed cluster is never slower than any of its parts, apart from the gap that its answer states and
the cost of the gradient norm over idle devices of an uneven plan (`idle_norm_s`)."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

from tests.relations.clusters import ClusterData
from tests.relations.commands import Commands
from tests.relations.questions import Question
from tests.relations.relation import (
    REL_TOL,
    has_network,
    idle_norm_s,
    is_mixed,
    is_mixed_plan,
    is_plan,
    relation,
    require,
    require_not_slower,
)


def _require_not_slower_than(question: Question, shardwise: Commands, part: ClusterData, what: str) -> None:
    """The whole cluster is not slower than the part."""
    answer, alone = shardwise.answer(question.words()), shardwise.answer(question.on(part).words())
    require_not_slower(answer, alone, what=what, bound_s=idle_norm_s(question, answer))


@relation(is_mixed)
def not_slower_than_a_class_alone(question: Question, shardwise: Commands) -> None:
    """Not slower than all nodes of one device class."""
    for name in dict.fromkeys(run.device for run in question.cluster.nodes):
        alone = tuple(run for run in question.cluster.nodes if run.device == name)
        _require_not_slower_than(
            question, shardwise, replace(question.cluster, nodes=alone), f"slower than {name} alone"
        )


@relation(is_mixed)
def not_slower_than_a_pool(question: Question, shardwise: Commands) -> None:
    """Not slower than the nodes of one entry."""
    for run in question.cluster.nodes:
        _require_not_slower_than(
            question, shardwise, replace(question.cluster, nodes=(run,)), "slower than a pool"
        )


@relation(lambda question: is_plan(question) and has_network(question) and not question.cluster.tiers)
def not_slower_than_a_part(question: Question, shardwise: Commands) -> None:
    """Not slower than some of the nodes of each entry.

    A part may lack some of the explicit tiers, so such clusters are left out. The frontier of a graph is on
    all devices, or on whole pools, unless `--devices` says otherwise (docs/reference/formats.md).
    """
    rng = question.rng("a part")
    for _ in range(2):
        counts = tuple(rng.randint(0, run.count) for run in question.cluster.nodes)
        if any(counts):
            _require_not_slower_than(
                question, shardwise, question.cluster.of_counts(counts), "slower than a part"
            )


@relation(is_mixed_plan)
def figures_in_order(question: Question, shardwise: Commands) -> None:
    """The best plan is not slower than the best uniform strategy, and that is not slower than any class
    alone."""
    answer = shardwise.answer(question.words())
    if answer.fits:
        names = ("step_time_s", "uniform_step_time_s", "fastest_class_step_time_s")
        times = [answer.best[name] for name in names if answer.best[name] is not None]
        is_sorted = all(a <= b * (1.0 + REL_TOL) for a, b in pairwise(times))
        require(is_sorted, f"figures in order: {dict(zip(names, times, strict=False))}", answer)
