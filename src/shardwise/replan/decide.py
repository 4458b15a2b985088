"""The decision: keep, patch or move, whichever trains most over a horizon.

Pure: a plan that runs, a situation and prices in, a decision out; no clock and no files.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from shardwise.errors import Infeasible
from shardwise.replan.arrangement import Arrangement
from shardwise.replan.choices import all_choices, node_sets
from shardwise.replan.prices import Prices
from shardwise.replan.shapes import Shapes, sizes_below
from shardwise.replan.situation import Situation
from shardwise.replan.steps import Steps
from shardwise.replan.transition import NOTHING, Costs, Transition, Transitions

KEEP, PATCH, MOVE = "keep", "patch", "move"

ENOUGH = 1e-9
"""A share of steps by which a change must be better than what costs less."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What to do, what runs then, and what it brings.

    `keep_step_s` is the step time of going on as it is, None where that cannot run; `gain_s_per_step` is the
    difference, None then. Training is ahead of keeping from `pays_after_s` on (None: never), and makes
    `steps` over the horizon, keeping `keep_steps`. `considered` counts the arrangements that were weighed.
    """

    decision: str
    arrangement: Arrangement
    step_s: float
    keep_step_s: float | None
    transition: Transition
    horizon_s: float
    considered: int

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


class Planner:
    """Decides for one model, cluster and job; what it has priced and searched it knows from then on."""

    def __init__(self, steps: Steps, shapes: Shapes, transitions: Transitions) -> None:
        self.steps, self.shapes, self.transitions = steps, shapes, transitions

    def replan(
        self,
        running: Arrangement | None,
        situation: Situation,
        *,
        horizon_s: float,
        saved: frozenset[str] = frozenset(),
    ) -> Decision:
        """What is best over the horizon from here. Moves are weighed where patches leave devices unused, or
        what changed is more than lost nodes. Raises Infeasible where nothing can run."""
        keep_s = None if running is None else self.steps.step_s(running, situation)
        best: Decision | None = None
        considered = 0
        if running is not None and keep_s is not None:
            best = self._decision(KEEP, running, keep_s, keep_s, NOTHING, horizon_s)
        for arrangement in self._considered(running, situation):
            considered += 1
            step_s = self.steps.step_s(arrangement, situation)
            if step_s is None or (best is not None and horizon_s / step_s <= best.steps * (1.0 + ENOUGH)):
                continue
            transition = self.transitions.between(running, arrangement, situation, saved)
            is_patch = running is not None and arrangement.shape == running.shape
            found = self._decision(
                PATCH if is_patch else MOVE, arrangement, step_s, keep_s, transition, horizon_s
            )
            if best is None or found.steps > best.steps * (1.0 + ENOUGH):
                best = found
        if best is None:
            raise Infeasible(f"nothing fits on the {len(situation.states)} nodes that are left", reasons={})
        return Decision(
            decision=best.decision, arrangement=best.arrangement, step_s=best.step_s,
            keep_step_s=best.keep_step_s, transition=best.transition, horizon_s=horizon_s,
            considered=considered,
        )  # fmt: skip

    def _considered(self, running: Arrangement | None, situation: Situation) -> Iterable[Arrangement]:
        if running is not None:
            yield from all_choices([running.shape], situation, self.steps, running)
        yield from self.moves(situation, running)

    def moves(self, situation: Situation, running: Arrangement | None) -> Iterable[Arrangement]:
        """Other shapes: the best ones on the sizes below what there is; where none of them runs, on every
        size."""
        is_found = False
        for sizes in (sizes_below, _every_size):
            for names in node_sets(situation, self.steps.prices)[:1]:
                pools = sorted({situation.states[name].pool for name in names})
                for pool in pools:
                    shapes = self.shapes.of_sizes(pool, sizes(len(names)))
                    for arrangement in all_choices(shapes, situation, self.steps, running):
                        is_found = True
                        yield arrangement
            if is_found:
                return

    @staticmethod
    def _decision(
        decision: str,
        arrangement: Arrangement,
        step_s: float,
        keep_s: float | None,
        transition: Transition,
        horizon_s: float,
    ) -> Decision:
        return Decision(
            decision=decision, arrangement=arrangement, step_s=step_s, keep_step_s=keep_s,
            transition=transition, horizon_s=horizon_s, considered=0,
        )  # fmt: skip


def _every_size(nodes: int) -> tuple[int, ...]:
    return tuple(range(1, nodes + 1))


def planner_of(prices: Prices, costs: Costs) -> Planner:
    """A planner with nothing known yet."""
    return Planner(Steps(prices), Shapes(prices), Transitions(prices, costs))
