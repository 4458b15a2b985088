"""One plan for a whole trace, never changed: best now, in expectation or in the worst case
(`picks_for_trace`).

Candidates are the best uniform strategies on sets of nodes. They are searched on nominal nodes, and in the
states in which each set is for longest. If nodes are of several pools, uneven plans on such sets are
candidates too. Every candidate is evaluated in every situation of the trace. Proven step times give an upper
bound of the score: in no situation is a plan on these sets faster than the best of that situation.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from shardwise.cluster import Conditions, EventTrace, NodeState, NodeView, uniform_cluster
from shardwise.errors import Infeasible
from shardwise.plans import TRACE_POLICIES
from shardwise.replanning.allowed_space import NO_STRATEGIES, AllowedSpace, BestStrategies
from shardwise.replanning.arrangement import Arrangement, Floats
from shardwise.replanning.candidates import in_groups, node_sets, slot_orders
from shardwise.replanning.mixed_planner import AnyArrangement, MixedPlanner
from shardwise.replanning.pipeline_costs import Prices
from shardwise.replanning.situation import Epoch, Situation, StateRuns, epochs_of, situation_of
from shardwise.replanning.step_times import StepTimes
from shardwise.replanning.trace_replay import fixed, run_of
from shardwise.replanning.uneven import PlansBySize, UnevenArrangement, UnevenStepTimes
from shardwise.search import BranchAndBound, Fastest, Question
from shardwise.strategy import Strategy
from shardwise.ties import first_best

# Sets of nodes

ALL_SIZES = 12
"""Largest number of nodes for which sets of every size are considered."""

SIZES = 8
"""For more nodes: how many sizes are considered by their node-seconds, in addition to powers of two."""

SITUATIONS = 4
"""Number of longest situations, in addition to the first, whose own sets of nodes are considered."""

SituationTimes = Sequence[tuple[Situation, float]]
"""Distinct situations in the order of their first occurrence, each with its total seconds."""


def situation_times(epochs: Sequence[Epoch]) -> SituationTimes:
    """The distinct situations of a trace."""
    found: dict[object, tuple[Situation, float]] = {}
    for epoch in epochs:
        first, seconds = found.get(epoch.situation.key, (epoch.situation, 0.0))
        found[epoch.situation.key] = first, seconds + epoch.length_s
    return list(found.values())


def sets_for_trace(situations: SituationTimes, prices: Prices) -> list[tuple[str, ...]]:
    """The nodes that serve best over the trace, for several numbers of nodes of one size and of one pool; and
    the sets that a decision in the first and in the longest situations considers."""
    service, pools = _service(situations), _pools(situations)
    groups: dict[tuple[object, ...], list[str]] = {}
    for name in service:
        groups.setdefault((prices.devices_of(name),), []).append(name)
        groups.setdefault((prices.devices_of(name), pools[name]), []).append(name)
    found: dict[frozenset[str], tuple[str, ...]] = {}

    def add(names: Sequence[str]) -> None:
        ordered = in_groups(
            names, situations[0][0], lambda name: (pools[name], -service[name], int(name[1:]))
        )
        found.setdefault(frozenset(ordered), ordered)

    longest = sorted(situations[1:], key=lambda one: -one[1])[:SITUATIONS]
    for situation, _ in (situations[0], *longest):
        for own in node_sets(situation, prices):
            add(own)
    for names in groups.values():
        best_first = sorted(names, key=lambda name: (-service[name], int(name[1:])))
        for size in _sizes(best_first, situations):
            add(best_first[:size])
    return list(found.values())


def uneven_sets_for_trace(situations: SituationTimes) -> list[tuple[str, ...]]:
    """Sets of nodes of several pools, in the order of the cluster: all present nodes at first and in the
    longest situations, the nominal ones of them, and those that serve best over the trace."""
    longest = sorted(situations[1:], key=lambda one: -one[1])[:SITUATIONS]
    chosen: list[list[str]] = []
    for situation, _ in (situations[0], *longest):
        states = situation.states
        chosen.append(list(states))
        chosen.append([name for name, state in states.items() if state == NodeState(pool=state.pool)])
    service = _service(situations)
    thresholds = sorted(set(service.values()))
    for place in range(SITUATIONS + 1):
        least = thresholds[place * (len(thresholds) - 1) // SITUATIONS] if thresholds else 0.0
        chosen.append([name for name, served in service.items() if served >= least])
    pools = _pools(situations)
    return list(
        dict.fromkeys(
            tuple(sorted(names, key=lambda name: int(name[1:])))
            for names in chosen
            if len({pools[name] for name in names}) > 1
        )
    )


def _service(situations: SituationTimes) -> dict[str, float]:
    """Seconds that each node serves, weighted by its speed and bandwidth."""
    service: dict[str, float] = {}
    for situation, seconds in situations:
        for name, state in situation.states.items():
            service[name] = service.get(name, 0.0) + seconds * min(state.speed, 1.0) * state.network
    return service


def _pools(situations: SituationTimes) -> dict[str, int]:
    return {name: state.pool for situation, _ in situations for name, state in situation.states.items()}


def _sizes(best_first: Sequence[str], situations: SituationTimes) -> Iterator[int]:
    """Numbers of nodes: every number if there are few. Otherwise those with most node-seconds in which all
    are present, powers of two, and the number that are always present."""
    count = len(best_first)
    if count <= ALL_SIZES:
        yield from range(1, count + 1)
        return
    place = {name: index for index, name in enumerate(best_first)}
    available_s = [0.0] * (count + 1)
    always = count
    for situation, seconds in situations:
        there = {place[name] for name in situation.states if name in place}
        first_gone = next((index for index in range(count) if index not in there), count)
        available_s[first_gone] += seconds
        always = min(always, first_gone)
    for size in range(count - 1, -1, -1):
        available_s[size] += available_s[size + 1]
    yield from sorted(range(1, count + 1), key=lambda size: -size * available_s[size])[:SIZES]
    yield from (1 << power for power in range(count.bit_length()) if 1 << power <= count)
    yield count
    if always:
        yield always


# Uniform strategies on a set

STRATEGIES_PER_SEARCH = 16
"""Number of best strategies of each search, which differ in a degree, the schedule or recomputation."""

STATES = 3
"""Number of longest states of a set of nodes that are searched, in addition to the nominal one."""

States = tuple[NodeState, ...]
"""The best state of a node of each pool of a set."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """An arrangement, and an upper bound of its steps/s in each situation."""

    arrangement: AnyArrangement
    limits: Floats


@dataclass(frozen=True, slots=True)
class NodeSetCandidates:
    """The candidates on a set of nodes, and an upper bound of the steps/s of every such plan in each
    situation."""

    candidates: tuple[Candidate, ...]
    limits: Floats


def _best(question: Question) -> BestStrategies:
    found = (
        BranchAndBound(question.problem(), question.candidates(), Fastest(STRATEGIES_PER_SEARCH)).run().found
    )
    if not found:
        return NO_STRATEGIES
    return BestStrategies(least_s=found[0].time_s, strategies=tuple(each.table[0] for each in found))


class TraceSearches:
    """Searches on equal nodes in one state, each done once. A strategy on nodes in several states is no
    faster than on equal nodes in the best of them, pool by pool, since every stage takes as long as on its
    slowest node."""

    def __init__(self, steps: StepTimes, allowed_space: AllowedSpace) -> None:
        self._steps, self._allowed_space = steps, allowed_space
        view = NodeView(steps.prices.cluster)
        self._pool_of, self._groups = view.pool_of, view.groups
        self._found: dict[tuple[int, NodeState], BestStrategies] = {}

    def on(self, names: tuple[str, ...], situations: SituationTimes) -> NodeSetCandidates:
        """The candidates on all of these nodes; none if nothing fits."""
        size = len(names)
        each = [self._states(names, situation) for situation, _ in situations]
        seconds: dict[NodeState, float] = {}
        for states, (_, duration_s) in zip(each, situations, strict=True):
            for state in states or ():
                seconds[state] = seconds.get(state, 0.0) + duration_s
        nominal = tuple(NodeState(pool=pool) for pool in sorted({self._pool_of[name] for name in names}))
        longest = sorted(seconds, key=lambda state: -seconds[state])[:STATES]
        searched = {state: self._search(size, state) for state in dict.fromkeys((*nominal, *longest))}
        best = {state: found.least_s for state, found in searched.items()}

        def rate(states: States | None) -> float:
            if states is None:
                return 0.0
            return 1.0 / max(best.get(state, best[NodeState(pool=state.pool)]) for state in states)

        strategies = dict.fromkeys(strategy for found in searched.values() for strategy in found.strategies)
        there = np.array([states is not None for states in each], dtype=np.float64)
        return NodeSetCandidates(
            tuple(self._candidates(strategies, names, there)), np.array([rate(states) for states in each])
        )

    def _states(self, names: tuple[str, ...], situation: Situation) -> States | None:
        """The best state of each pool's nodes; None if a node is gone."""
        runs = situation.states_of(names, self._steps.prices.node_bytes_per_s)
        if runs is None:
            return None
        best: dict[int, NodeState] = {}
        for state, _ in runs:
            other = best.get(state.pool, state)
            best[state.pool] = NodeState(
                pool=state.pool,
                speed=max(state.speed, other.speed),
                network=max(state.network, other.network),
                inside=max(state.inside, other.inside),
                latency_s=min(state.latency_s, other.latency_s),
                inter_site_share=max(state.inter_site_share, other.inter_site_share),
                inter_site_latency_s=min(state.inter_site_latency_s, other.inter_site_latency_s),
                site_tiers=max(state.site_tiers, other.site_tiers),
            )
        return tuple(best[pool] for pool in sorted(best))

    def _search(self, size: int, state: NodeState) -> BestStrategies:
        key = size, state
        if key not in self._found:
            prices = self._steps.prices
            cluster = uniform_cluster(prices.cluster, prices.pools[state.pool], size, state)
            self._found[key] = self._allowed_space.best_on(prices.model, cluster, prices.job, _best)
        return self._found[key]

    def _candidates(
        self, strategies: Iterable[Strategy], names: tuple[str, ...], there: Floats
    ) -> Iterable[Candidate]:
        """Candidates with equal shares for all pipelines, which is what a plan file can hold."""
        prices = self._steps.prices
        pools = {self._pool_of[name] for name in names}
        for strategy in strategies:
            least_s = self._steps.nominal_s(strategy, pools)
            if least_s is None:
                continue
            shares = (prices.microbatches(strategy) // strategy.dp,) * strategy.dp
            for slots in slot_orders(strategy, names, prices.devices_of(names[0]), self._groups):
                arrangement = Arrangement(strategy=strategy, slots=slots, microbatches=shares)
                yield Candidate(arrangement, there / least_s)


# Uneven plans on a set


def uneven_on_sets(
    steps: UnevenStepTimes, situations: SituationTimes, nominal: Situation, rows: int
) -> Iterator[NodeSetCandidates]:
    """The candidates on each set of nodes of several pools. In the situation `nominal` all nodes are nominal,
    so no plan is slower there than elsewhere. Stages have up to `rows` replicas."""
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
    """1 for each situation that has all nodes of the plan, else 0."""
    return np.array([1.0 * set(one.nodes).issubset(situation.states) for situation, _ in situations])


def _adapted(
    steps: UnevenStepTimes, arrangement: UnevenArrangement, situations: SituationTimes
) -> Iterator[UnevenArrangement]:
    """The same pipelines with the best layers and shares for the states in which their nodes are for
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


# Picks of the policies

Score = tuple[float, float]
"""What a policy maximises, in steps or steps/s, and a value that breaks ties."""

NONE: Score = (0.0, 0.0)

ORDERS_TRIED = 4
"""Number of arrangements on each set of nodes for which other orders of the nodes are tried."""

MAX_SWAPS = 100
"""Largest number of swaps of two nodes that are tried for each of these."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TracePick:
    """The arrangement that a policy picks: its step time in the first epoch and in the slowest (None: it does
    not run there), its steps over the trace, and `gap`, how much its score is at most below that of any
    unchanged plan on the sets of nodes, as a share."""

    policy: str
    arrangement: AnyArrangement
    now_step_s: float | None
    worst_step_s: float | None
    steps: float
    gap: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TracePicks:
    """The picks of the policies over `length_s`, among `considered` arrangements in `situations` distinct
    situations. Policy `now` has no pick if nothing runs at first. `uniform` are the picks among uniform
    arrangements only, if uneven ones were considered too. `unreachable` are nodes that are present at some
    time but not usable."""

    picks: tuple[TracePick, ...]
    uniform: tuple[TracePick, ...]
    length_s: float
    situations: int
    considered: int
    unreachable: frozenset[str]

    def pick(self, policy: str) -> TracePick:
        """The pick of a policy. Raises Infeasible if it has none."""
        for one in self.picks:
            if one.policy == policy:
                return one
        raise Infeasible("nothing fits on the nodes that are present at first", reasons={})


def picks_for_trace(planner: MixedPlanner, trace: EventTrace, allowed_space: AllowedSpace) -> TracePicks:
    """The picks of all policies. Raises Infeasible if nothing runs at any time."""
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
            picks.append(_pick(policy, _best_plan(policy, both), bounds[policy]))
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
    """The best candidate for each policy that has one."""
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
    """Planned seconds of a trace: to its last event, plus the mean length of the epochs before it; one second
    if all events are at the start."""
    instants = {0.0, *(event.time_s for event in trace.events)}
    return trace.end_s + trace.end_s / max(len(instants) - 1, 1) or 1.0


def _time_s(rate: float) -> float | None:
    return 1.0 / float(rate) if rate > 0.0 else None


@dataclass(frozen=True, slots=True)
class _EvaluatedPlan:
    """An arrangement with its steps/s in each situation, and its steps over the trace, which include the time
    to read checkpoints after its nodes were lost."""

    arrangement: AnyArrangement
    rates: Floats
    steps: float

    def score(self, policy: str) -> Score:
        """The score under a policy."""
        return _score(policy, self.rates, self.steps)


def _best_plan(policy: str, plans: Sequence[_EvaluatedPlan]) -> _EvaluatedPlan:
    """The best of these plans under a policy, of equal ones the first."""
    return first_best(plans, lambda one: one.score(policy))


def _score(policy: str, rates: Floats, steps: float) -> Score:
    if policy == "expected":
        return steps, float(rates[0])
    return float(rates[0] if policy == "now" else rates.min()), steps


class _PolicyBest:
    """The best few evaluated candidates by policy and set of nodes."""

    def __init__(self, planner: MixedPlanner, epochs: Sequence[Epoch], situations: SituationTimes) -> None:
        self._planner, self._epochs, self._situations = planner, epochs, situations
        self._lengths_s = np.array([seconds for _, seconds in situations])
        self._most = dict.fromkeys(TRACE_POLICIES, NONE)
        self._few: dict[tuple[str, frozenset[str]], list[tuple[_EvaluatedPlan, Candidate]]] = {}

    def upper_bound(self, policy: str, rates: Floats) -> Score:
        """Upper bound of the score of a plan with these steps/s in each situation, if it never reads a
        checkpoint."""
        return _score(policy, rates, float(rates @ self._lengths_s))

    def evaluate(self, candidate: Candidate) -> None:
        """Evaluates the candidate in every situation, unless its upper bound does not exceed the best score
        of any policy."""
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
        """The best candidate of a policy, with its nodes in the best order found; None if no candidate ever
        runs."""
        best: _EvaluatedPlan | None = None
        for (name, _), few in self._few.items():
            for evaluated, candidate in few if name == policy else ():
                if best is None or self.upper_bound(policy, candidate.limits) > best.score(policy):
                    ordered = self._ordered(policy, evaluated)
                    best = ordered if best is None else _best_plan(policy, (best, ordered))
        return best if best is not None and max(best.score(policy)) > 0.0 else None

    def _evaluated(self, arrangement: AnyArrangement) -> _EvaluatedPlan:
        times = [self._planner.step_s(arrangement, situation) for situation, _ in self._situations]
        rates = np.array([0.0 if time_s is None else 1.0 / time_s for time_s in times])
        choices = fixed(self._planner, self._epochs, arrangement)
        return _EvaluatedPlan(arrangement, rates, run_of("", self._epochs, choices).total_steps)

    def _ordered(self, policy: str, evaluated: _EvaluatedPlan) -> _EvaluatedPlan:
        """Swaps nodes as long as that improves the score. The order matters if the states of nodes differ."""
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
                if _best_plan(policy, (best, found)) is found:
                    best, is_better = found, True
        return best
