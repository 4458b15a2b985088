"""Layers moved between the stages of what runs, where its nodes are not alike any more.

A strategy says how many layers its first and its last stage have, and those between share the rest evenly.
Both ends are changed by a few layers at a time while that makes steps shorter; as a slow stage in the middle
can only be relieved with all of the middle, it may also change places with the first or the last one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from shardwise.replan.arrangement import Arrangement
from shardwise.replan.situation import Situation
from shardwise.replan.steps import StepTimes
from shardwise.strategy import Strategy, layer_counts, node_slots

STRIDES = (4, 2, 1)
"""Layers by which an end is changed: the largest that helps first."""


def with_layers_shifted(base: Arrangement, situation: Situation, steps: StepTimes) -> Iterator[Arrangement]:
    """Every arrangement on the way to the fastest layers that is faster than those before it, `base` as it
    lies and with its slowest stage at either end. None where all of its nodes are alike, where it has one
    stage, or several chunks on a rank."""
    strategy = base.strategy
    if strategy.pp == 1 or strategy.vpp > 1 or base.is_rerouted:
        return
    states = [situation.states.get(name) for name in base.slots]
    if len(set(states)) == 1 or None in states:
        return
    for start in (base, *_with_ends_swapped(base, situation, steps)):
        yield from _hill_climb(start, situation, steps)


def _hill_climb(start: Arrangement, situation: Situation, steps: StepTimes) -> Iterator[Arrangement]:
    best, best_s = start, steps.step_s(start, situation)
    if best_s is None:
        return
    yield start
    layers = steps.prices.model.layers
    while True:
        for stride in STRIDES:
            tried = [
                (step_s, found)
                for strategy in _near(best.strategy, layers, stride)
                if (found := steps.balanced(strategy, best.slots, situation)) is not None
                and (step_s := steps.step_s(found, situation)) is not None
            ]
            step_s, found = min(tried, key=lambda one: one[0], default=(best_s, best))
            if step_s < best_s:
                best, best_s = found, step_s
                yield best
                break
        else:
            return


def _near(strategy: Strategy, layers: int, stride: int) -> Iterator[Strategy]:
    """The strategy with `stride` layers more or less on one of its ends."""
    counts = layer_counts(layers, strategy.pp, strategy.first_stage_layers, strategy.last_stage_layers)
    between_ends = ((1, -1), (-1, 1))
    for first, last in between_ends if strategy.pp == 2 else ((1, 0), (-1, 0), (0, 1), (0, -1)):
        ends = counts[0] + first * stride, counts[-1] + last * stride
        middle = layers - sum(ends)
        if min(ends) >= 1 and (middle >= strategy.pp - 2):
            yield replace(strategy, first_stage_layers=ends[0], last_stage_layers=ends[1])


def _with_ends_swapped(base: Arrangement, situation: Situation, steps: StepTimes) -> Iterator[Arrangement]:
    """With the stage that has the slowest node in the place of the first stage, and of the last."""
    strategy = base.strategy
    devices = steps.prices.devices_of(base.slots[0])
    stage_slots = node_slots(strategy, devices)
    if len(np.unique(stage_slots)) != stage_slots.size:
        return  # stages that share nodes
    speeds = [situation.states[name].speed for name in base.slots]
    slowest = int(np.argmin(np.array(speeds)[stage_slots].min(axis=(0, 2))))
    for end in (0, strategy.pp - 1):
        if slowest != end:
            slots = list(base.slots)
            for one, other in zip(stage_slots[:, slowest].ravel(), stage_slots[:, end].ravel(), strict=True):
                slots[one], slots[other] = slots[other], slots[one]
            found = steps.balanced(strategy, tuple(slots), situation)
            if found is not None:
                yield found
