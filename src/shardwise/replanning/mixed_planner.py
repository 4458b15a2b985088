"""Decisions among uniform arrangements and uneven plans: keep, patch or migrate (`MixedPlanner`).

A patch of an uneven plan leaves pipelines on their nodes. It keeps all complete pipelines with the best
shares, or with the best layers and shares; the latter may include pipelines that lost some of their stages. A
migration goes to the best uneven plan on the present nodes, or to the best uniform arrangement. Decisions
have no side effects.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from shardwise.errors import Infeasible
from shardwise.replanning.arrangement import Arrangement
from shardwise.replanning.candidates import ANY, AllowedSpace
from shardwise.replanning.pipeline_costs import Prices
from shardwise.replanning.planner import (
    ALTERNATIVES,
    KEEP,
    MIGRATE,
    PATCH,
    RESTARTS,
    Decision,
    Planner,
)
from shardwise.replanning.situation import Situation
from shardwise.replanning.transition import NO_TRANSITION, Costs, Holdings, Transition
from shardwise.replanning.uneven import (
    PlansPerDecision,
    UnevenArrangement,
    UnevenPlanSource,
    UnevenStepTimes,
    is_nominal,
)
from shardwise.ties import is_less, least_first

AnyArrangement = Arrangement | UnevenArrangement


@dataclass(frozen=True, slots=True)
class _Option:
    """An option with its step time and its transition."""

    decision: str
    arrangement: AnyArrangement
    step_s: float
    transition: Transition


class MixedPlanner:
    """Decides for one model, cluster and job, and caches estimates and searches.

    It considers uneven plans if the cluster has several pools, or if an uneven plan is running.
    """

    def __init__(self, uniform: Planner, uneven: UnevenStepTimes, plans: UnevenPlanSource | None) -> None:
        """If `plans` is None, no uneven plan is searched."""
        self.uniform, self.uneven, self._plans = uniform, uneven, plans

    @property
    def prices(self) -> Prices:
        """Costs of uniform strategies, with the model, cluster and job."""
        return self.uniform.steps.prices

    @property
    def costs(self) -> Costs:
        """Fixed costs of transitions, in addition to transfers."""
        return self.uniform.transitions.costs

    def step_s(self, one: AnyArrangement, situation: Situation) -> float | None:
        """Seconds per step; None if a node is gone or the arrangement does not fit any more."""
        if isinstance(one, Arrangement):
            return self.uniform.steps.step_s(one, situation)
        return self.uneven.step_s(one, situation)

    def started(self, one: AnyArrangement, situation: Situation) -> Transition:
        """The transition that starts it from a checkpoint."""
        if isinstance(one, Arrangement):
            return self.uniform.transitions.between(None, one, situation)
        return self._changed(None, one, situation, frozenset(), frozenset(), is_patch=False)

    def swapped(self, one: AnyArrangement, first: str, second: str) -> AnyArrangement | None:
        """The arrangement with two of its nodes swapped; None for an uneven plan if they are of different
        pools."""
        changed = {first: second, second: first}
        if isinstance(one, Arrangement):
            return replace(one, slots=tuple(changed.get(name, name) for name in one.slots))
        if self.uneven.pool_of(first) != self.uneven.pool_of(second):
            return None
        return self.uneven.without_idle_nodes(
            replace(one, nodes=tuple(changed.get(name, name) for name in one.nodes))
        )

    def keep(
        self, running: AnyArrangement, situation: Situation, *, horizon_s: float
    ) -> Decision[AnyArrangement] | None:
        """The decision to keep the running plan, without alternatives; None if it cannot run."""
        step_s = self.step_s(running, situation)
        if step_s is None:
            return None
        return _best_decision([_Option(KEEP, running, step_s, NO_TRANSITION)], step_s, horizon_s)

    def replan(
        self,
        running: AnyArrangement | None,
        situation: Situation,
        *,
        horizon_s: float,
        saved: frozenset[str] = frozenset(),
        returned: frozenset[str] = frozenset(),
    ) -> Decision[AnyArrangement]:
        """The best decision over the horizon, as in `Planner.replan`. Raises Infeasible if nothing can
        run."""
        if isinstance(running, UnevenArrangement):
            return self._from_uneven(
                self.uneven.without_idle_nodes(running),
                situation,
                horizon_s=horizon_s,
                saved=saved,
                returned=returned,
            )
        return self._from_uniform(running, situation, horizon_s=horizon_s, saved=saved, returned=returned)

    def _from_uniform(
        self,
        running: Arrangement | None,
        situation: Situation,
        *,
        horizon_s: float,
        saved: frozenset[str],
        returned: frozenset[str],
    ) -> Decision[AnyArrangement]:
        found: Decision[AnyArrangement] | None = None
        try:
            found = self.uniform.replan(
                running, situation, horizon_s=horizon_s, saved=saved, returned=returned
            )
        except Infeasible:
            if len(self.prices.pools) == 1:
                raise
        if len(self.prices.pools) == 1 and found is not None:
            return found

        def changed(one: UnevenArrangement) -> Transition:
            left = situation.connected_to(one.nodes) - returned
            return self._changed(running, one, situation, left, saved, is_patch=False)

        cutoff_s = float("inf") if found is None else found.step_s
        choices = list(self._migrations(situation, 1, cutoff_s, changed))
        if found is None:
            if not choices:
                raise Infeasible(_nothing(situation), reasons={})
            return _best_decision(choices, None, max(horizon_s, RESTARTS * self.costs.restart_s))
        base = _Option(found.decision, found.arrangement, found.step_s, found.transition)
        chosen = _best_decision([base, *choices], found.keep_step_s, found.horizon_s)
        return replace(
            chosen,
            considered=found.considered + len(choices),
            alternatives=(*found.alternatives, *(one.arrangement for one in choices)),
            rerouted=found.rerouted,
        )

    def _from_uneven(
        self,
        running: UnevenArrangement,
        situation: Situation,
        *,
        horizon_s: float,
        saved: frozenset[str],
        returned: frozenset[str],
    ) -> Decision[AnyArrangement]:
        if not situation.states:
            raise Infeasible("no node is left", reasons={})

        def changed(one: AnyArrangement, *, is_patch: bool = False) -> Transition:
            left = situation.connected_to(one.nodes) - returned
            return self._changed(running, one, situation, left, saved, is_patch=is_patch)

        choices: list[_Option] = []
        keep = self.uneven.predicted(running, situation) if returned.isdisjoint(running.nodes) else None
        if keep is not None:
            choices.append(_Option(KEEP, keep, keep.result.step_time_s, NO_TRANSITION))
        for patched in patches(self.uneven, running, situation):
            change = changed(patched, is_patch=True)
            choices.append(_Option(PATCH, patched, patched.result.step_time_s, change))
        try:
            uniform = self.uniform.replan(None, situation, horizon_s=horizon_s)
        except Infeasible:
            pass
        else:
            arrangement = uniform.arrangement
            choices.append(_Option(MIGRATE, arrangement, uniform.step_s, changed(arrangement)))
        rows = max(stage.dp for pipeline in running.result.layout.pipelines for stage in pipeline.stages)
        cutoff_s = min((one.step_s for one in choices), default=float("inf"))
        choices += self._migrations(situation, rows, cutoff_s, changed)
        if not choices:
            raise Infeasible(_nothing(situation), reasons={})
        if keep is None:
            horizon_s = max(horizon_s, RESTARTS * self.costs.restart_s)
        return _best_decision(choices, None if keep is None else keep.result.step_time_s, horizon_s)

    def _migrations(
        self,
        situation: Situation,
        rows: int,
        cutoff_s: float,
        changed: Callable[[UnevenArrangement], Transition],
    ) -> Iterator[_Option]:
        """Migrations to uneven plans, predicted on the nodes that they use."""
        for found in self._plans.on(situation, rows, cutoff_s) if self._plans is not None else ():
            predicted = self.uneven.predicted(found, situation)
            if predicted is not None:
                yield _Option(MIGRATE, predicted, predicted.result.step_time_s, changed(predicted))

    def _changed(
        self,
        before: AnyArrangement | None,
        after: AnyArrangement,
        situation: Situation,
        left: frozenset[str],
        saved: frozenset[str],
        *,
        is_patch: bool,
    ) -> Transition:
        if before == after and left.issuperset(after.nodes):
            return NO_TRANSITION
        ends = (None if before is None else self._holdings(before)), self._holdings(after)
        return self.uniform.transitions.between_holdings(*ends, situation, left, saved, is_patch=is_patch)

    def _holdings(self, one: AnyArrangement) -> Holdings:
        if isinstance(one, Arrangement):
            return self.uniform.transitions.holdings_of(one)
        return self.uneven.holdings(one)


def mixed_planner_of(
    uniform: Planner,
    plans: Callable[[UnevenStepTimes], UnevenPlanSource] = PlansPerDecision,
    *,
    allowed_space: AllowedSpace = ANY,
) -> MixedPlanner:
    """A planner for uniform arrangements and uneven plans. `plans` creates the source of uneven plans, which
    is not used if `allowed_space` excludes them."""
    steps = UnevenStepTimes(uniform.steps.prices)
    has_uneven = allowed_space.has_uneven_in(uniform.steps.prices.job.dtype)
    return MixedPlanner(uniform, steps, plans(steps) if has_uneven else None)


def patches(
    steps: UnevenStepTimes, running: UnevenArrangement, situation: Situation
) -> Iterator[UnevenArrangement]:
    """Patches of an uneven plan. First the complete pipelines, and those on nominal nodes only, with the best
    shares. Then the complete pipelines with the best layers and shares, if that is faster or the others do
    not fit; and the same with pipelines that lost stages, whose layers the remaining stages take."""
    there = frozenset(situation.states)
    whole, sound, broken = [], [], []
    for place, names in enumerate(steps.stage_nodes(running)):
        if there.issuperset(names):
            whole.append(place)
            sound += [place] if all(is_nominal(situation.states[name]) for name in names) else []
        elif not there.isdisjoint(names):
            broken.append(place)
    least_s = float("inf")
    for places in (whole, sound) if len(sound) < len(whole) else (whole,):
        with_best_shares = (
            steps.with_best_shares(steps.part(running, places, there), situation) if places else None
        )
        if with_best_shares is not None and is_less(with_best_shares.result.step_time_s, least_s):
            least_s = with_best_shares.result.step_time_s
            yield with_best_shares
    for places in (whole, sorted(whole + broken)) if broken else (whole,):
        found = steps.with_best_layers(steps.part(running, places, there), situation) if places else None
        if found is not None and is_less(found.result.step_time_s, least_s):
            least_s = found.result.step_time_s
            yield found


def _best_decision(
    choices: list[_Option], keep_step_s: float | None, horizon_s: float
) -> Decision[AnyArrangement]:
    """The option with most steps over the horizon; of equal ones the first."""
    every: list[Decision[AnyArrangement]] = [
        Decision(
            decision=one.decision,
            arrangement=one.arrangement,
            step_s=one.step_s,
            keep_step_s=keep_step_s,
            transition=one.transition,
            horizon_s=horizon_s,
            considered=len(choices),
        )
        for one in choices
    ]
    best = every[0]
    for decision in every[1:]:
        if is_less(best.steps, decision.steps):
            best = decision
    fastest = least_first([one.step_s for one in choices])[:ALTERNATIVES]
    return replace(best, alternatives=tuple(choices[place].arrangement for place in fastest))


def _nothing(situation: Situation) -> str:
    return f"nothing fits on the {len(situation.states)} nodes that remain"
