"""Hours of training through a trace, under a policy: what runs when, and what it makes.

A change is paid in full when it is decided on, in seconds in which the new plan would have run; so an epoch
that is shorter than its change makes less than nothing. A plan that cannot run stands still, and starts again
from a checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from shardwise.errors import Infeasible
from shardwise.replan.decide import KEEP
from shardwise.replan.epochs import Epoch
from shardwise.replan.mixed import AnyArrangement, MixedPlanner

WAIT = "wait"

RECENT_EPOCHS = 8
"""Epochs of the past whose mean length is what the adaptive policy expects of the next."""


LONG_S = 1e9
"""A horizon over which no change counts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochChoice:
    """What runs in one epoch (None: nothing), its step time, and the seconds that the change to it took."""

    decision: str
    arrangement: AnyArrangement | None
    step_s: float | None
    change_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyRun:
    """A policy through a trace: its choice in every epoch, and the steps that each made."""

    name: str
    choices: tuple[EpochChoice, ...]
    steps: tuple[float, ...]
    goodput: float

    @property
    def total_steps(self) -> float:
        return sum(self.steps)

    @property
    def changes(self) -> int:
        """How often it patched or moved."""
        return sum(choice.decision not in (KEEP, WAIT) for choice in self.choices[1:])


def run_of(name: str, epochs: Sequence[Epoch], choices: Sequence[EpochChoice]) -> PolicyRun:
    """Steps and goodput (the share of time that is neither standing still nor changing)."""
    steps, useful_s = [], 0.0
    for epoch, choice in zip(epochs, choices, strict=True):
        working_s = 0.0 if choice.step_s is None else epoch.length_s - choice.change_s
        steps.append(0.0 if choice.step_s is None else working_s / choice.step_s)
        useful_s += working_s
    total_s = sum(epoch.length_s for epoch in epochs)
    return PolicyRun(
        name=name,
        choices=tuple(choices),
        steps=tuple(steps),
        goodput=max(useful_s, 0.0) / total_s if total_s else 0.0,
    )


def fixed(planner: MixedPlanner, epochs: Sequence[Epoch], arrangement: AnyArrangement) -> list[EpochChoice]:
    """One arrangement all the way: it runs where it can, and waits where it cannot."""
    found: list[EpochChoice] = []
    is_down, has_lost = False, False
    for epoch in epochs:
        step_s = planner.step_s(arrangement, epoch.situation)
        is_hit = bool(found) and not is_down and bool(epoch.lost & set(arrangement.nodes))
        has_lost |= is_hit and _loses(arrangement, epoch)
        if step_s is None:
            found.append(EpochChoice(decision=WAIT, arrangement=None, step_s=None, change_s=0.0))
            is_down = True
            continue
        change_s = 0.0
        if is_down or is_hit:
            change_s = planner.started(arrangement, epoch.situation).seconds
            change_s += planner.costs.rework_s if has_lost else 0.0
        found.append(EpochChoice(decision=KEEP, arrangement=arrangement, step_s=step_s, change_s=change_s))
        is_down, has_lost = False, False
    return found


def _loses(arrangement: AnyArrangement, epoch: Epoch) -> bool:
    """Whether a node of an arrangement goes at the start of an epoch, and had no notice."""
    return not (epoch.lost - epoch.saved).isdisjoint(arrangement.nodes)


def adaptive(
    planner: MixedPlanner,
    epochs: Sequence[Epoch],
    longest_s: float,
    considered: list[tuple[AnyArrangement, ...]],
    start: AnyArrangement | None = None,
) -> list[EpochChoice]:
    """Decides anew at every change, knowing what was and not what comes: it expects the next epoch to be as
    long as the last ones were on average, `longest_s` at most and at first. `start` runs at first (None:
    what it decides on, at no price). What it runs and the best that it weighs is added to `considered`, epoch
    by epoch."""
    found: list[EpochChoice] = []
    running = start
    has_lost = False
    recent_lengths_s: list[float] = []
    for place, epoch in enumerate(epochs):
        recent = recent_lengths_s[-RECENT_EPOCHS:]
        horizon_s = min(sum(recent) / len(recent), longest_s) if recent else longest_s
        try:
            decision = planner.replan(
                running,
                epoch.situation,
                horizon_s=max(horizon_s, 1.0),
                saved=epoch.saved,
                returned=epoch.returned,
            )
        except Infeasible:
            found.append(EpochChoice(decision=WAIT, arrangement=None, step_s=None, change_s=0.0))
            has_lost |= running is not None and place > 0 and _loses(running, epoch)
            running = None
            considered.append(())
        else:
            change_s = decision.transition.seconds if place or start is not None else 0.0
            change_s += planner.costs.rework_s if has_lost else 0.0
            has_lost = False
            found.append(
                EpochChoice(
                    decision=decision.decision,
                    arrangement=decision.arrangement,
                    step_s=decision.step_s,
                    change_s=change_s,
                )
            )
            running = decision.arrangement
            considered.append((running, *decision.alternatives))
        recent_lengths_s.append(epoch.length_s)
    return found


def best_at_first(planner: MixedPlanner, epochs: Sequence[Epoch]) -> AnyArrangement:
    """What is best in the first epoch in which anything can run. Raises Infeasible where there is none."""
    for epoch in epochs:
        try:
            return planner.replan(None, epoch.situation, horizon_s=LONG_S).arrangement
        except Infeasible:
            continue
    raise Infeasible("nothing fits at any time of the trace", reasons={})


def best_of(
    planner: MixedPlanner,
    epochs: Sequence[Epoch],
    arrangements: Sequence[AnyArrangement],
    score: Callable[[PolicyRun], tuple[float, ...]],
) -> AnyArrangement:
    """The fixed arrangement that is worth most; of equal ones the first."""
    return max(arrangements, key=lambda one: score(run_of("", epochs, fixed(planner, epochs, one))))


def expected_score(run: PolicyRun) -> tuple[float, ...]:
    """Steps over the whole trace."""
    return (run.total_steps,)


def robust_score(run: PolicyRun) -> tuple[float, ...]:
    """The slowest epoch first, and where that is alike, all of them."""
    rates = [0.0 if choice.step_s is None else 1.0 / choice.step_s for choice in run.choices]
    return min(rates), run.total_steps
