"""The decision with most training steps over a horizon: keep, patch or migrate (`Planner`).

A decision is a function of the running plan, the situation and the costs; it reads no clock and no files.
`LinkAwarePlanner` decides while a plan runs on all nodes of its cluster, from measured link bandwidths.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

from shardwise.cluster import Cluster, Conditions, NodeView
from shardwise.errors import Infeasible, InternalError
from shardwise.plans import Answer, Plan
from shardwise.replanning.allowed_space import ANY_SPACE, AllowedSpace, allowed_space_of
from shardwise.replanning.arrangement import Arrangement, pipelines_of, shape_of
from shardwise.replanning.candidates import ShapeSearch, all_choices, sizes_below, with_layers_shifted
from shardwise.replanning.pipeline_costs import Prices
from shardwise.replanning.rerouting import without_gone
from shardwise.replanning.situation import Situation, situation_of
from shardwise.replanning.step_times import StepTimes
from shardwise.replanning.transition import (
    NO_TRANSITION,
    Costs,
    Holdings,
    Transition,
    Transitions,
    sharded_holdings_of,
)
from shardwise.search import Question
from shardwise.search import plan as search_plan
from shardwise.strategy import Strategy, Target, strategy_record
from shardwise.ties import is_less, least_first

KEEP, PATCH, MIGRATE = "keep", "patch", "move"

RESTARTS = 10
"""Least horizon in restarts, if the running plan cannot continue."""

ALTERNATIVES = 3
"""Number of shapes whose fastest arrangements a decision lists."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecisionOutcome:
    """A decision and its effect.

    `step_s` is its step time and `keep_step_s` that of keeping the plan, None if it cannot run. From
    `pays_after_s` on, training is ahead of keeping (None: never). It makes `steps` over the horizon, compared
    with `keep_steps`. `considered` is the number of evaluated options.
    """

    decision: str
    step_s: float
    keep_step_s: float | None
    transition: Transition
    horizon_s: float
    considered: int

    @property
    def gain_s_per_step(self) -> float | None:
        """Seconds saved per step compared with keeping; None if the plan cannot be kept."""
        return None if self.keep_step_s is None else self.keep_step_s - self.step_s

    @property
    def steps(self) -> float:
        """Steps over the horizon, with the transition included."""
        return max(self.horizon_s - self.transition.seconds, 0.0) / self.step_s

    @property
    def keep_steps(self) -> float:
        """Steps over the horizon if the plan is kept."""
        return 0.0 if self.keep_step_s is None else self.horizon_s / self.keep_step_s

    @property
    def pays_after_s(self) -> float | None:
        """The solution t of (t - transition seconds) / step_s = t / keep_step_s."""
        if self.keep_step_s is None:
            return self.transition.seconds
        if self.decision == KEEP:
            return 0.0
        ahead = 1.0 / self.step_s - 1.0 / self.keep_step_s
        return self.transition.seconds / self.step_s / ahead if ahead > 0.0 else None


L = TypeVar("L", covariant=True)
"""The arrangements that a decision chooses from: uniform only, or uneven ones too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision(DecisionOutcome, Generic[L]):
    """A decision with its arrangement.

    `alternatives` are the fastest evaluated arrangements, one of each shape. `rerouted` is the option that
    re-routes the micro-batches of lost nodes to their peers, None if that is not possible.
    """

    arrangement: L
    alternatives: tuple[L, ...] = ()
    rerouted: Decision[Arrangement] | None = None


def _allow_all(arrangement: Arrangement) -> bool:
    return True


class Planner:
    """Decides for one model, cluster and job, and caches estimates and searches.

    It changes only to arrangements that `allowed_space` allows and `can_run` accepts.
    """

    def __init__(
        self,
        steps: StepTimes,
        shapes: ShapeSearch,
        transitions: Transitions,
        allowed_space: AllowedSpace = ANY_SPACE,
        can_run: Callable[[Arrangement], bool] = _allow_all,
    ) -> None:
        self.steps, self.shapes, self.transitions = steps, shapes, transitions
        self.allowed_space, self._can_run = allowed_space, can_run
        self._allowed: dict[Strategy, bool] = {}

    # What `MixedPlanner` needs to know of a uniform arrangement.

    def step_s(self, one: Arrangement, situation: Situation) -> float | None:
        """Seconds per step; None if a node is gone or the arrangement does not fit any more."""
        return self.steps.step_s(one, situation)

    def holdings(self, one: Arrangement) -> Holdings:
        """The state shards."""
        return self.transitions.holdings_of(one)

    def swapped(self, one: Arrangement, first: str, second: str) -> Arrangement:
        """The arrangement with two of its nodes swapped."""
        changed = {first: second, second: first}
        return replace(one, slots=tuple(changed.get(name, name) for name in one.slots))

    def without_idle_nodes(self, one: Arrangement) -> Arrangement:
        """The arrangement itself, which uses all of its nodes."""
        return one

    def fills_nodes(self, one: Arrangement) -> bool:
        """True: a strategy uses all devices of its nodes."""
        return True

    def in_place(
        self, one: Arrangement, situation: Situation, *, has_all: bool
    ) -> Iterator[tuple[str, Arrangement]]:
        """Nothing: `replan` considers keep and all patches of a uniform arrangement."""
        return iter(())

    def as_uniform(self, one: Arrangement) -> Arrangement | None:
        """The arrangement from which `replan` starts."""
        return one

    def answer_on(self, one: Arrangement, cluster: Cluster, space: str) -> Answer:
        """The strategy alone, estimated on the nodes of the arrangement without events, as the answer to a
        question in `space`."""
        prices = self.steps.prices
        return search_plan(
            Question(
                model=prices.model, cluster=cluster, job=prices.job, space=space,
                fixed=strategy_record(one.strategy), use_all=True, top=0,
                has_empty_ends=one.strategy.pp * one.strategy.vpp > prices.model.layers,
            )
        )  # fmt: skip

    # Decisions

    def replan(
        self,
        running: Arrangement | None,
        situation: Situation,
        *,
        horizon_s: float,
        saved: frozenset[str] = frozenset(),
        returned: frozenset[str] = frozenset(),
    ) -> Decision[Arrangement]:
        """The best decision over the horizon, which is at least `RESTARTS` restarts if the running plan
        cannot continue. Nodes in `saved` had notice before they left; nodes in `returned` left and joined
        again. Raises Infeasible if nothing can run."""
        builder = self._builder(running, situation, horizon_s, saved, returned)
        if running is not None:
            builder.evaluate_rerouting(running)
            builder.evaluate([pipelines_of(running.strategy)])
            builder.evaluate_layer_changes()
        for sizes in (sizes_below, _every_size):
            for shapes in self._shapes_of(situation, sizes):
                builder.evaluate(shapes)
            if builder.best is not None:
                return builder.decision()
        raise Infeasible(f"nothing fits on the {len(situation.states)} nodes that remain", reasons={})

    def patch(
        self,
        running: Arrangement,
        situation: Situation,
        *,
        horizon_s: float,
        saved: frozenset[str] = frozenset(),
        returned: frozenset[str] = frozenset(),
    ) -> Decision[Arrangement]:
        """The best of keep and patch, without other shapes. Raises Infeasible if neither runs."""
        builder = self._builder(running, situation, horizon_s, saved, returned)
        builder.evaluate_rerouting(running)
        builder.evaluate([pipelines_of(running.strategy)])
        builder.evaluate_layer_changes()
        if builder.best is None:
            raise Infeasible("the plan's pipeline shape does not fit on the nodes that remain", reasons={})
        return builder.decision()

    def _builder(
        self,
        running: Arrangement | None,
        situation: Situation,
        horizon_s: float,
        saved: frozenset[str],
        returned: frozenset[str],
    ) -> _DecisionBuilder:
        def change(new: Arrangement) -> Transition:
            return self.transitions.between(running, new, situation, saved, returned)

        has_all = running is None or returned.isdisjoint(running.slots)
        costs = self.transitions.costs

        def is_allowed(new: Arrangement) -> bool:
            strategy, space = new.strategy, self.allowed_space
            if strategy not in self._allowed:
                self._allowed[strategy] = space.allows_strategy(strategy)
            return self._allowed[strategy] and space.allows(new, situation) and self._can_run(new)

        return _DecisionBuilder(self.steps, change, costs, is_allowed, running, situation, horizon_s, has_all)

    def _shapes_of(
        self, situation: Situation, sizes: Callable[[int], Iterable[int]]
    ) -> Iterator[list[Strategy]]:
        """Best shapes of every pool, on some numbers of the nodes with equally many devices."""
        devices = [pool.node.devices for pool in self.steps.prices.pools]
        pools = [state.pool for state in situation.states.values()]
        for pool in sorted(set(pools)):
            alike = sum(devices[other] == devices[pool] for other in pools)
            yield self.shapes.of_sizes(pool, sizes(alike))


class _DecisionBuilder:
    """One decision in progress: the best option so far, and the fastest arrangement of each shape."""

    def __init__(
        self,
        steps: StepTimes,
        change: Callable[[Arrangement], Transition],
        costs: Costs,
        is_allowed: Callable[[Arrangement], bool],
        running: Arrangement | None,
        situation: Situation,
        horizon_s: float,
        has_all: bool,
    ) -> None:
        """`change` returns the transition to an arrangement; `has_all` says whether the running nodes that
        are present still have their state."""
        self._steps, self._change, self._costs, self._is_allowed = steps, change, costs, is_allowed
        self._running, self._situation = running, situation
        self._shape = None if running is None else running.shape
        same_step_s = None if running is None else steps.step_s(running, situation)
        self._keep_s = same_step_s if has_all else None
        self._horizon_s = horizon_s
        self._considered = 0
        self._fastest: dict[Strategy | None, tuple[float, Arrangement]] = {}
        self.best: Decision[Arrangement] | None = None
        self._rerouted: Decision[Arrangement] | None = None
        if running is not None and self._keep_s is not None:
            self.best = self._decision(KEEP, running, self._keep_s, NO_TRANSITION)
        else:
            self._horizon_s = max(horizon_s, RESTARTS * costs.restart_s)
        if running is not None and same_step_s is not None and not has_all:
            self.best = self._decision(PATCH, running, same_step_s, change(running))

    def evaluate(self, shapes: Iterable[Strategy]) -> None:
        """Evaluates all arrangements of these shapes."""
        for arrangement in all_choices(
            shapes, self._situation, self._steps, self._running, self._may_improve
        ):
            self._evaluate(arrangement)

    def evaluate_layer_changes(self) -> None:
        """Evaluates other layers of the running arrangement, and of the fastest one of its shape."""
        bases: list[Arrangement] = []
        if self._running is not None and self._keep_s is not None:
            bases.append(self._running)
        if self._shape in self._fastest:
            bases.append(self._fastest[self._shape][1])
        for base in dict.fromkeys(bases):
            for arrangement in with_layers_shifted(base, self._situation, self._steps):
                self._evaluate(arrangement)

    def _evaluate(self, arrangement: Arrangement) -> None:
        if not self._is_allowed(arrangement):
            return
        self._considered += 1
        step_s = self._steps.step_s(arrangement, self._situation)
        if step_s is None:
            return
        shape = arrangement.shape
        if shape not in self._fastest or is_less(step_s, self._fastest[shape][0]):
            self._fastest[shape] = step_s, arrangement
        if self._may_improve(arrangement.strategy, step_s):
            change = self._change(arrangement)
            found = self._decision(PATCH if shape == self._shape else MIGRATE, arrangement, step_s, change)
            if self.best is None or is_less(self.best.steps, found.steps):
                self.best = found

    def evaluate_rerouting(self, running: Arrangement) -> None:
        """Evaluates running without the lost nodes, whose micro-batches are re-routed to peers."""
        arrangement = without_gone(running, self._situation, self._steps.prices)
        if arrangement is None:
            return
        self._considered += 1
        step_s = self._steps.step_s(arrangement, self._situation)
        if step_s is not None:
            change = self._change(arrangement)
            self._rerouted = self._decision(PATCH, arrangement, step_s, change)
            is_better = self.best is None or is_less(self.best.steps, self._rerouted.steps)
            if is_better and self._is_allowed(arrangement):
                self.best = self._rerouted

    def decision(self) -> Decision[Arrangement]:
        """The best option, with the alternatives."""
        if self.best is None:
            raise InternalError("a decision needs something that runs")
        fastest = list(self._fastest.values())
        ordered = least_first([step_s for step_s, _ in fastest])
        alternatives = tuple(fastest[place][1] for place in ordered[:ALTERNATIVES])
        return replace(
            self.best, considered=self._considered, alternatives=alternatives, rerouted=self._rerouted
        )

    def _may_improve(self, strategy: Strategy, least_s: float) -> bool:
        is_patch = shape_of(strategy) == self._shape
        left_s = self._horizon_s - self._costs.least_s(is_patch=is_patch)
        return self.best is None or is_less(self.best.steps, left_s / least_s)

    def _decision(
        self, decision: str, arrangement: Arrangement, step_s: float, change: Transition
    ) -> Decision[Arrangement]:
        return Decision(
            decision=decision,
            arrangement=arrangement,
            step_s=step_s,
            keep_step_s=self._keep_s,
            transition=change,
            horizon_s=self._horizon_s,
            considered=0,
        )


def _every_size(nodes: int) -> tuple[int, ...]:
    return tuple(range(1, nodes + 1))


def planner_of(
    prices: Prices,
    costs: Costs,
    *,
    can_run: Callable[[Arrangement], bool] = _allow_all,
    allowed_space: AllowedSpace = ANY_SPACE,
) -> Planner:
    """A planner with empty caches. It changes only to arrangements that `can_run` accepts and `allowed_space`
    allows."""
    shapes = ShapeSearch(prices, allowed_space=allowed_space)
    return Planner(StepTimes(prices), shapes, Transitions(prices, costs), allowed_space, can_run)


# Decisions during a run


class LinkAwarePlanner:
    """Decides for the model, cluster and job of one plan. Shapes are searched with the present bandwidths of
    links.

    It changes to strategies that `target` runs on the same ranks: all nodes in order, with equal shares of
    micro-batches. State is transferred between steps, when weights are sharded like optimizer states.
    """

    def __init__(self, plan: Plan, target: Target) -> None:
        self._prices = Prices(plan.model, plan.cluster, plan.job)
        self._steps = StepTimes(self._prices)
        self._view = NodeView(plan.cluster)
        self._allowed_space = replace(
            allowed_space_of(plan), target=target.for_job(plan.model, plan.job), use_all=True
        )
        self._nodes = tuple(f"n{index}" for index in range(len(plan.cluster.nodes)))

    def decide(
        self, running: Strategy, rates: Mapping[str, float], *, costs: Costs, horizon_s: float
    ) -> Decision[Arrangement]:
        """The best decision over the horizon. `rates` are the links whose bandwidth (bytes/s) differs from
        the cluster file."""
        situation = self._situation(rates)
        allowed_space = self._allowed_space.with_offload_of(running)
        shapes = ShapeSearch(self._prices, present=situation.common, allowed_space=allowed_space)
        planner = Planner(self._steps, shapes, self._transitions(costs), allowed_space, self._is_in_order)
        return planner.replan(self._arranged(running), situation, horizon_s=horizon_s)

    def transition(
        self, running: Strategy, other: Strategy, rates: Mapping[str, float], costs: Costs
    ) -> Transition:
        """The transition from one strategy to another."""
        ends = self._arranged(running), self._arranged(other)
        return self._transitions(costs).between(*ends, self._situation(rates))

    def _situation(self, rates: Mapping[str, float]) -> Situation:
        return situation_of(self._view, Conditions(present=frozenset(self._nodes), rates=rates))

    def _transitions(self, costs: Costs) -> Transitions:
        return Transitions(self._prices, costs, sharded_holdings_of)

    def _arranged(self, strategy: Strategy) -> Arrangement:
        each = self._prices.microbatches(strategy) // strategy.dp
        return Arrangement(strategy=strategy, slots=self._nodes, microbatches=(each,) * strategy.dp)

    def _is_in_order(self, arrangement: Arrangement) -> bool:
        return arrangement.slots == self._nodes
