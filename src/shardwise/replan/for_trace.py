"""One plan for a whole trace: best now, in expectation, or in the worst case, and never changed.

Candidates are the best uniform strategies on sets of nodes, by the search on nodes as the cluster has them
and in the states in which each set is for longest; and where nodes are of several pools, uneven plans on
such sets. Each is priced in every situation of the trace. What none on these sets can make follows from the
proven step times: in no situation is one faster than the best of that situation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from shardwise.cluster import Conditions, EventTrace, NodeView
from shardwise.errors import Infeasible
from shardwise.plan import TRACE_POLICIES
from shardwise.replan.arrangement import Floats
from shardwise.replan.epochs import Epoch, epochs_of
from shardwise.replan.mixed import AnyArrangement, MixedPlanner
from shardwise.replan.node_sets import SituationTimes, sets_for_trace, situation_times
from shardwise.replan.policies import fixed, run_of
from shardwise.replan.situation import situation_of
from shardwise.replan.trace_searches import Candidate, NodeSetCandidates, TraceSearches
from shardwise.replan.uneven_searches import uneven_on_sets
from shardwise.replan.within import AllowedSpace

Score = tuple[float, float]
"""What a policy counts, in steps or steps/s, and what decides between equals."""

NONE: Score = (0.0, 0.0)

ORDERS_TRIED = 4
"""Arrangements on each set of nodes of which other orders of its nodes are tried."""

MAX_SWAPS = 100
"""Exchanges of two nodes that are tried of each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TracePick:
    """The arrangement that a policy picks: its step time in the first epoch and in the slowest (None: it
    stands still there), the steps that it makes over the trace, and the share by which what the policy counts
    is at most below what any plan on the sets of nodes makes, where that does not change."""

    policy: str
    arrangement: AnyArrangement
    now_step_s: float | None
    worst_step_s: float | None
    steps: float
    gap: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TracePicks:
    """The picks of the policies over `length_s`, of so many arrangements weighed in so many distinct
    situations. Policy `now` has none where nothing runs at first. `uniform` are the picks among uniform
    arrangements alone, where uneven ones were weighed too; `unreachable` are nodes that are there for some
    time and cannot be used."""

    picks: tuple[TracePick, ...]
    uniform: tuple[TracePick, ...]
    length_s: float
    situations: int
    considered: int
    unreachable: frozenset[str]

    def pick(self, policy: str) -> TracePick:
        """That of a policy. Raises Infeasible where it has none."""
        for one in self.picks:
            if one.policy == policy:
                return one
        raise Infeasible("nothing fits on the nodes that are there at first", reasons={})


def picks_for_trace(planner: MixedPlanner, trace: EventTrace, allowed_space: AllowedSpace) -> TracePicks:
    """What each policy picks. Raises Infeasible where nothing runs at any time."""
    prices, view = planner.prices, NodeView(planner.prices.cluster)
    epochs = epochs_of(trace, view, length_of(trace))
    situations = situation_times(epochs)
    searches = TraceSearches(planner.uniform.steps, allowed_space)
    sets = [searches.on(names, situations) for names in sets_for_trace(situations, prices)]
    found = [_picked(planner, epochs, situations, sets)]
    if allowed_space.has_uneven_in(prices.job.dtype) and len(prices.pools) > 1:
        everywhere = Conditions.at_start(EventTrace(nodes=len(prices.cluster.nodes), events=()))
        nominal = situation_of(view, everywhere)
        uneven = list(uneven_on_sets(planner.uneven, situations, nominal, allowed_space.stage_dp))
        if uneven:
            found.append(_picked(planner, epochs, situations, uneven))
            sets += uneven
    limits = _PolicyBest(planner, epochs, situations)
    bounds = {
        name: max((limits.upper_bound(name, each.limits)[0] for each in sets), default=0.0)
        for name in TRACE_POLICIES
    }
    picks = []
    for policy in TRACE_POLICIES:
        both = [one[policy] for one in found if policy in one]
        if both:
            picks.append(_pick(policy, max(both, key=lambda one: one.score(policy)), bounds[policy]))
    if not picks:
        reason = "" if allowed_space.target is None else f" that {allowed_space.target.command} runs"
        raise Infeasible(f"nothing fits at any time of the trace{reason}", reasons={})
    return TracePicks(
        picks=tuple(picks),
        uniform=tuple(_pick(policy, one, bounds[policy]) for policy, one in found[0].items())
        if len(found) > 1
        else (),
        length_s=epochs[-1].end_s,
        situations=len(situations),
        considered=sum(len(each.candidates) for each in sets),
        unreachable=frozenset(name for each, _ in situations for name in each.unreachable),
    )


def _picked(
    planner: MixedPlanner,
    epochs: Sequence[Epoch],
    situations: SituationTimes,
    sets: Sequence[NodeSetCandidates],
) -> dict[str, _EvaluatedPlan]:
    """The best candidate by each policy that has one."""
    best = _PolicyBest(planner, epochs, situations)
    candidates = [candidate for each in sets for candidate in each.candidates]
    for candidate in sorted(
        candidates, key=lambda one: best.upper_bound("expected", one.limits), reverse=True
    ):
        best.evaluate(candidate)
    picked = {}
    for policy in TRACE_POLICIES:
        found = best.pick(policy)
        if found is not None and (policy != "now" or found.rates[0] > 0.0):
            picked[policy] = found
    return picked


def _pick(policy: str, found: _EvaluatedPlan, bound: float) -> TracePick:
    return TracePick(
        policy=policy,
        arrangement=found.arrangement,
        now_step_s=_time_s(found.rates[0]),
        worst_step_s=_time_s(found.rates.min()),
        steps=found.steps,
        gap=max(1.0 - found.score(policy)[0] / bound, 0.0) if bound > 0.0 else 0.0,
    )


def length_of(trace: EventTrace) -> float:
    """Seconds for which a trace is planned: to its last event, and what holds from then on for as long as the
    epochs before it on average; a second where all is at the start."""
    instants = {0.0, *(event.time_s for event in trace.events)}
    return trace.end_s + trace.end_s / max(len(instants) - 1, 1) or 1.0


def _time_s(rate: float) -> float | None:
    return 1.0 / float(rate) if rate > 0.0 else None


@dataclass(frozen=True, slots=True)
class _EvaluatedPlan:
    """An arrangement with its steps/s in each situation, and its steps over the trace, in which reading
    checkpoints after its nodes were gone takes time too."""

    arrangement: AnyArrangement
    rates: Floats
    steps: float

    def score(self, policy: str) -> Score:
        """What a policy counts."""
        return _score(policy, self.rates, self.steps)


def _score(policy: str, rates: Floats, steps: float) -> Score:
    if policy == "expected":
        return steps, float(rates[0])
    return float(rates[0] if policy == "now" else rates.min()), steps


class _PolicyBest:
    """What was weighed: by policy and set of nodes, the best few and what they make at most."""

    def __init__(self, planner: MixedPlanner, epochs: Sequence[Epoch], situations: SituationTimes) -> None:
        self._planner, self._epochs, self._situations = planner, epochs, situations
        self._lengths_s = np.array([seconds for _, seconds in situations])
        self._most = dict.fromkeys(TRACE_POLICIES, NONE)
        self._few: dict[tuple[str, frozenset[str]], list[tuple[_EvaluatedPlan, Candidate]]] = {}

    def upper_bound(self, policy: str, rates: Floats) -> Score:
        """What a policy counts where a plan never reads a checkpoint and makes so many steps/s in each
        situation."""
        return _score(policy, rates, float(rates @ self._lengths_s))

    def evaluate(self, candidate: Candidate) -> None:
        """Prices it in every situation, unless no order of its nodes can be preferred by any policy."""
        improving = [
            name for name in TRACE_POLICIES if self.upper_bound(name, candidate.limits) > self._most[name]
        ]
        if not improving:
            return
        evaluated = self._evaluated(candidate.arrangement)
        for policy in improving:
            few = self._few.setdefault((policy, frozenset(candidate.arrangement.nodes)), [])
            few.append((evaluated, candidate))
            few.sort(key=lambda one: one[0].score(policy), reverse=True)
            del few[ORDERS_TRIED:]
            self._most[policy] = max(evaluated.score(policy), self._most[policy])

    def pick(self, policy: str) -> _EvaluatedPlan | None:
        """The best by a policy, its nodes in the best order found; None where all stand still."""
        best: _EvaluatedPlan | None = None
        for (name, _), few in self._few.items():
            for evaluated, candidate in few if name == policy else ():
                if best is None or self.upper_bound(policy, candidate.limits) > best.score(policy):
                    ordered = self._ordered(policy, evaluated)
                    if best is None or ordered.score(policy) > best.score(policy):
                        best = ordered
        return best if best is not None and max(best.score(policy)) > 0.0 else None

    def _evaluated(self, arrangement: AnyArrangement) -> _EvaluatedPlan:
        times = [self._planner.step_s(arrangement, situation) for situation, _ in self._situations]
        rates = np.array([0.0 if time_s is None else 1.0 / time_s for time_s in times])
        choices = fixed(self._planner, self._epochs, arrangement)
        return _EvaluatedPlan(arrangement, rates, run_of("", self._epochs, choices).total_steps)

    def _ordered(self, policy: str, evaluated: _EvaluatedPlan) -> _EvaluatedPlan:
        """Nodes exchanged as long as that is better: which node holds which part counts where their states
        differ."""
        nodes = evaluated.arrangement.nodes
        past = {name: tuple(one.states.get(name) for one, _ in self._situations) for name in nodes}
        best = evaluated
        tried, is_better = 0, True
        while is_better:
            is_better = False
            for first, second in combinations(range(len(nodes)), 2):
                one, other = (best.arrangement.nodes[place] for place in (first, second))
                swapped = self._planner.swapped(best.arrangement, one, other)
                if past[one] == past[other] or swapped is None or tried == MAX_SWAPS:
                    continue
                tried += 1
                found = self._evaluated(swapped)
                if found.score(policy) > best.score(policy):
                    best, is_better = found, True
        return best
