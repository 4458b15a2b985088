"""The oracle: the most that any sequence of considered arrangements makes of a trace that is known ahead.

Dynamic programming over epochs and what was considered in any of them: an arrangement may be chosen in the
epochs near one in which it was weighed or ran (`WINDOW`), and what ran for longest in all. A change costs the
least that it can: nothing where an arrangement goes on, else a regrouping or a restart, and the work since
the last checkpoint where a node that is lost had states that no other had. Bytes are left out, so that this
is a bound from above: no policy that chooses from these arrangements makes more.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass

from shardwise.replan.decide import KEEP, MIGRATE, PATCH
from shardwise.replan.epochs import Epoch
from shardwise.replan.mixed import AnyArrangement, MixedPlanner
from shardwise.replan.policies import WAIT, EpochChoice
from shardwise.replan.transition import Costs

WINDOW = 8
"""Epochs before and after one in which an arrangement was considered, in which the oracle may choose it."""


@dataclass(frozen=True, slots=True)
class _Label:
    """The most steps by the end of an epoch with an arrangement (None: waiting), and how: what ran before,
    and the seconds of the change."""

    steps: float
    before: AnyArrangement | None
    change_s: float


_Labels = dict[AnyArrangement | None, _Label]
_Shapes = dict[AnyArrangement, Hashable]


def oracle(
    epochs: Sequence[Epoch],
    considered: Sequence[Sequence[AnyArrangement]],
    always: Sequence[AnyArrangement],
    planner: MixedPlanner,
) -> list[EpochChoice]:
    """The best choice in every epoch, knowing all of them. `considered` are arrangements epoch by epoch, and
    `always` those for all epochs."""
    every = dict.fromkeys([*always, *(one for some in considered for one in some)])
    shapes: _Shapes = {one: one.shape for one in every}
    sharded = {one for one in every if one.has_unreplicated_states}
    labels: list[_Labels] = []
    for place, epoch in enumerate(epochs):
        near = considered[max(place - WINDOW, 0) : place + WINDOW + 1]
        rates = _rates(dict.fromkeys([*always, *(one for some in near for one in some)]), epoch, planner)
        labels.append(
            _first(rates, epoch)
            if not labels
            else _next(labels[-1], rates, epoch, shapes=shapes, sharded=sharded, costs=planner.costs)
        )
    return _traced(epochs, labels, planner, shapes)


def _rates(
    arrangements: Iterable[AnyArrangement], epoch: Epoch, planner: MixedPlanner
) -> dict[AnyArrangement, float]:
    """Steps per second of those that run."""
    found = {}
    for one in arrangements:
        step_s = planner.step_s(one, epoch.situation)
        if step_s is not None:
            found[one] = 1.0 / step_s
    return found


def _first(rates: dict[AnyArrangement, float], epoch: Epoch) -> _Labels:
    labels: _Labels = {one: _Label(rate * epoch.length_s, None, 0.0) for one, rate in rates.items()}
    labels[None] = _Label(0.0, None, 0.0)
    return labels


def _next(
    before: _Labels,
    rates: dict[AnyArrangement, float],
    epoch: Epoch,
    *,
    shapes: _Shapes,
    sharded: set[AnyArrangement],
    costs: Costs,
) -> _Labels:
    """The labels after one more epoch. Of all that may run before, only the best of each shape, with and
    without lost work, can be best to change from."""
    hit = epoch.lost - epoch.saved
    sources: dict[tuple[Hashable, bool], tuple[float, AnyArrangement | None]] = {}
    for one, label in before.items():
        has_lost = one in sharded and not hit.isdisjoint(one.nodes) if one is not None else False
        key = (None if one is None else shapes[one], has_lost)
        if key not in sources or label.steps > sources[key][0]:
            sources[key] = label.steps, one
    overall: dict[bool, tuple[float, AnyArrangement | None]] = {}
    for (_, has_lost), source in sources.items():
        if has_lost not in overall or source[0] > overall[has_lost][0]:
            overall[has_lost] = source
    rework_s = costs.checkpoint_interval_s / 2.0
    labels: _Labels = {None: _waiting(before)}
    for one, rate in rates.items():
        options: list[_Label] = []
        if one in before and epoch.lost.isdisjoint(one.nodes):
            options.append(_Label(before[one].steps + rate * epoch.length_s, one, 0.0))
        for has_lost, lost_s in ((False, 0.0), (True, rework_s)):
            alike = sources.get((shapes[one], has_lost))
            for origin, least_s in ((alike, costs.regroup_s), (overall.get(has_lost), costs.restart_s)):
                if origin is not None:
                    change_s = least_s + lost_s
                    made = origin[0] + rate * (epoch.length_s - change_s)
                    options.append(_Label(made, origin[1], change_s))
        labels[one] = max(options, key=lambda label: label.steps)
    return labels


def _waiting(before: _Labels) -> _Label:
    best = max(before, key=lambda one: before[one].steps)
    return _Label(before[best].steps, best, 0.0)


def _traced(
    epochs: Sequence[Epoch],
    labels: Sequence[_Labels],
    planner: MixedPlanner,
    shapes: _Shapes,
) -> list[EpochChoice]:
    last = labels[-1]
    one = max(last, key=lambda each: last[each].steps)
    found: list[EpochChoice] = []
    for place in reversed(range(len(epochs))):
        label = labels[place][one]
        found.append(
            EpochChoice(
                decision=_decision(label.before if place else one, one, shapes),
                arrangement=one,
                step_s=None if one is None else planner.step_s(one, epochs[place].situation),
                change_s=label.change_s,
            )
        )
        one = label.before
    return found[::-1]


def _decision(before: AnyArrangement | None, one: AnyArrangement | None, shapes: _Shapes) -> str:
    if one is None:
        return WAIT
    if one == before:
        return KEEP
    return PATCH if before is not None and shapes[before] == shapes[one] else MIGRATE
