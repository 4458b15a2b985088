"""The decision: keep, patch or move, whichever trains most over a horizon.

Pure: a plan that runs, a situation and prices in, a decision out; no clock and no files.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

from shardwise.errors import Infeasible, InternalError
from shardwise.replan.arrangement import Arrangement
from shardwise.replan.choices import all_choices
from shardwise.replan.prices import Prices
from shardwise.replan.rerouting import without_gone
from shardwise.replan.shapes import Shapes, sizes_below
from shardwise.replan.situation import Situation
from shardwise.replan.steps import Steps
from shardwise.replan.transition import NOTHING, Costs, Transition, Transitions
from shardwise.strategy import Strategy

KEEP, PATCH, MOVE = "keep", "patch", "move"

ENOUGH = 1e-9
"""A share of steps by which a change must be better than what costs less."""


RESTARTS = 10
"""Restarts that the horizon has at least, where what runs cannot go on."""

ALTERNATIVES = 3
"""Shapes whose fastest arrangements a decision names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What to do, what runs then, and what it brings.

    `keep_step_s` is the step time of going on as it is, None where that cannot run; `gain_s_per_step` is the
    difference, None then. Training is ahead of keeping from `pays_after_s` on (None: never), and makes
    `steps` over the horizon, keeping `keep_steps`. `considered` counts the arrangements that were weighed,
    `alternatives` are the fastest of them, one of each shape; `rerouted` is what patching by re-routing the
    microbatches of nodes that are gone to their peers would bring, None where that cannot be.
    """

    decision: str
    arrangement: Arrangement
    step_s: float
    keep_step_s: float | None
    transition: Transition
    horizon_s: float
    considered: int
    alternatives: tuple[Arrangement, ...] = ()
    rerouted: Decision | None = None

    @property
    def gain_s_per_step(self) -> float | None:
        return None if self.keep_step_s is None else self.keep_step_s - self.step_s

    @property
    def steps(self) -> float:
        return max(self.horizon_s - self.transition.seconds, 0.0) / self.step_s

    @property
    def keep_steps(self) -> float:
        return 0.0 if self.keep_step_s is None else self.horizon_s / self.keep_step_s

    @property
    def pays_after_s(self) -> float | None:
        """(t - seconds) / step = t / keep step, solved for t."""
        if self.keep_step_s is None:
            return self.transition.seconds
        if self.decision == KEEP:
            return 0.0
        ahead = 1.0 / self.step_s - 1.0 / self.keep_step_s
        return self.transition.seconds / self.step_s / ahead if ahead > 0.0 else None


def _any(arrangement: Arrangement) -> bool:
    return True


class Planner:
    """Decides for one model, cluster and job; what it has priced and searched it knows from then on.

    It changes to arrangements only that `can_run` says can be run.
    """

    def __init__(
        self,
        steps: Steps,
        shapes: Shapes,
        transitions: Transitions,
        can_run: Callable[[Arrangement], bool] = _any,
    ) -> None:
        self.steps, self.shapes, self.transitions = steps, shapes, transitions
        self._can_run = can_run

    def replan(
        self,
        running: Arrangement | None,
        situation: Situation,
        *,
        horizon_s: float,
        saved: frozenset[str] = frozenset(),
    ) -> Decision:
        """What is best over the horizon from here; what cannot go on is planned for `RESTARTS` restarts at
        least. Raises Infeasible where nothing can run."""
        weighing = self._weighing(running, situation, horizon_s, saved)
        if running is not None:
            weighing.weigh_rerouted(running)
            weighing.weigh([running.shape])
        for sizes in (sizes_below, _every_size):
            for shapes in self._shapes_of(situation, sizes):
                weighing.weigh(shapes)
            if weighing.best is not None:
                return weighing.decision()
        raise Infeasible(f"nothing fits on the {len(situation.states)} nodes that are left", reasons={})

    def patch(
        self,
        running: Arrangement,
        situation: Situation,
        *,
        horizon_s: float,
        saved: frozenset[str] = frozenset(),
    ) -> Decision:
        """What is best without looking for other shapes: keep, or patch. Raises Infeasible where neither
        runs."""
        weighing = self._weighing(running, situation, horizon_s, saved)
        weighing.weigh_rerouted(running)
        weighing.weigh([running.shape])
        if weighing.best is None:
            raise Infeasible("the plan's shape fits on no nodes that are left", reasons={})
        return weighing.decision()

    def _weighing(
        self,
        running: Arrangement | None,
        situation: Situation,
        horizon_s: float,
        saved: frozenset[str],
    ) -> _Weighing:
        return _Weighing(self.steps, self.transitions, self._can_run, running, situation, horizon_s, saved)

    def _shapes_of(
        self, situation: Situation, sizes: Callable[[int], Iterable[int]]
    ) -> Iterator[list[Strategy]]:
        """Shapes of every pool that are best on some numbers of the nodes that have as many devices."""
        devices = [pool.node.devices for pool in self.steps.prices.pools]
        pools = [state.pool for state in situation.states.values()]
        for pool in sorted(set(pools)):
            alike = sum(devices[other] == devices[pool] for other in pools)
            yield self.shapes.of_sizes(pool, sizes(alike))


class _Weighing:
    """One decision in the making: the best so far, and the fastest of each shape."""

    def __init__(
        self,
        steps: Steps,
        transitions: Transitions,
        can_run: Callable[[Arrangement], bool],
        running: Arrangement | None,
        situation: Situation,
        horizon_s: float,
        saved: frozenset[str],
    ) -> None:
        self._steps, self._transitions, self._can_run = steps, transitions, can_run
        self._running, self._situation, self._saved = running, situation, saved
        self._shape = None if running is None else running.shape
        self._keep_s = None if running is None else steps.step_s(running, situation)
        self._horizon_s = horizon_s
        self._considered = 0
        self._fastest: dict[Strategy, tuple[float, Arrangement]] = {}
        self.best: Decision | None = None
        self._rerouted: Decision | None = None
        if running is not None and self._keep_s is not None:
            self.best = self._decision(KEEP, running, self._keep_s, NOTHING)
        else:
            self._horizon_s = max(horizon_s, RESTARTS * transitions.costs.restart_s)

    def weigh(self, shapes: Iterable[Strategy]) -> None:
        """Weighs all arrangements of these shapes."""
        for arrangement in all_choices(shapes, self._situation, self._steps, self._running, self._is_worth):
            if not self._can_run(arrangement):
                continue
            self._considered += 1
            step_s = self._steps.step_s(arrangement, self._situation)
            if step_s is None:
                continue
            shape = arrangement.shape
            if shape not in self._fastest or step_s < self._fastest[shape][0]:
                self._fastest[shape] = step_s, arrangement
            if self._is_worth(shape, step_s):
                change = self._transitions.between(self._running, arrangement, self._situation, self._saved)
                found = self._decision(PATCH if shape == self._shape else MOVE, arrangement, step_s, change)
                if self.best is None or found.steps > self.best.steps * (1.0 + ENOUGH):
                    self.best = found

    def weigh_rerouted(self, running: Arrangement) -> None:
        """Weighs to go on without the nodes that are gone, their microbatches re-routed to peers."""
        arrangement = without_gone(running, self._situation, self._steps.prices)
        if arrangement is None:
            return
        self._considered += 1
        step_s = self._steps.step_s(arrangement, self._situation)
        if step_s is not None:
            change = self._transitions.between(running, arrangement, self._situation, self._saved)
            self._rerouted = self._decision(PATCH, arrangement, step_s, change)
            if self.best is None or self._rerouted.steps > self.best.steps * (1.0 + ENOUGH):
                self.best = self._rerouted

    def decision(self) -> Decision:
        """The best, with what was weighed."""
        if self.best is None:
            raise InternalError("a decision needs something that runs")
        ordered = sorted(self._fastest.values(), key=lambda one: one[0])
        alternatives = tuple(arrangement for _, arrangement in ordered[:ALTERNATIVES])
        return replace(
            self.best, considered=self._considered, alternatives=alternatives, rerouted=self._rerouted
        )

    def _is_worth(self, shape: Strategy, least_s: float) -> bool:
        left_s = self._horizon_s - self._transitions.least_s(is_patch=shape == self._shape)
        return self.best is None or left_s / least_s > self.best.steps * (1.0 + ENOUGH)

    def _decision(
        self, decision: str, arrangement: Arrangement, step_s: float, change: Transition
    ) -> Decision:
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


def planner_of(prices: Prices, costs: Costs) -> Planner:
    """A planner with nothing known yet."""
    return Planner(Steps(prices), Shapes(prices), Transitions(prices, costs))
