"""Uneven plans on sets of nodes that one plan for a whole trace may be, and what none on them exceeds."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from shardwise.replan.arrangement import Floats
from shardwise.replan.node_sets import SituationTimes, uneven_sets_for_trace
from shardwise.replan.situation import Situation, StateRuns
from shardwise.replan.trace_searches import STATES, Candidate, NodeSetCandidates
from shardwise.replan.uneven import UnevenArrangement, UnevenStepTimes
from shardwise.replan.uneven_plans import PlansBySize


def uneven_on_sets(
    steps: UnevenStepTimes, situations: SituationTimes, nominal: Situation, rows: int
) -> Iterator[NodeSetCandidates]:
    """What may run on each set of nodes of several pools. `nominal` has all nodes as the cluster has them,
    where no plan is slower than elsewhere; stages have up to `rows` replicas."""
    plans = PlansBySize(steps)
    for names in uneven_sets_for_trace(situations):
        found = plans.found(names, rows)
        if found.result is None:
            continue
        arrangement = steps.without_idle_nodes(UnevenArrangement(result=found.result, nodes=names))
        there = np.array([1.0 * set(names).issubset(one.states) for one, _ in situations])
        candidates = tuple(
            Candidate(one, _availability(one, situations) / nominal_s)
            for one in dict.fromkeys((arrangement, *_adapted(steps, arrangement, situations)))
            if (nominal_s := steps.step_s(one, nominal)) is not None
        )
        yield NodeSetCandidates(candidates, there / found.lower_bound_s)


def _availability(one: UnevenArrangement, situations: SituationTimes) -> Floats:
    """1 for each situation that has all of its nodes."""
    return np.array([1.0 * set(one.nodes).issubset(situation.states) for situation, _ in situations])


def _adapted(
    steps: UnevenStepTimes, arrangement: UnevenArrangement, situations: SituationTimes
) -> Iterator[UnevenArrangement]:
    """The same pipelines with the layers and shares that suit those of their nodes' states that last
    longest."""
    seconds: dict[StateRuns, float] = {}
    first: dict[StateRuns, Situation] = {}
    for situation, duration_s in situations:
        runs = situation.states_of(arrangement.nodes, steps.prices.node_bytes_per_s)
        if runs is not None:
            seconds[runs] = seconds.get(runs, 0.0) + duration_s
            first.setdefault(runs, situation)
    for longest in sorted(seconds, key=lambda one: -seconds[one])[:STATES]:
        found = steps.with_best_layers(arrangement, first[longest])
        if found is not None:
            yield found
