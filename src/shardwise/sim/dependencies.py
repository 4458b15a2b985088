"""What every action of a schedule table waits for, and when it ends."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from shardwise.errors import ConfigError
from shardwise.schedule import KINDS, Table

Ints = NDArray[np.int64]


def dependencies(schedule: Table) -> tuple[Ints, Ints]:
    """Per action the action it waits for over a hop (-1 if none), and the hop's row in `Cases.parts`.

    F waits for F of the stage before, B and I for the B or I of the stage after. What an action waits for on
    its own stage (B and I for F, W for I) lies on its own rank, so that the order of the table takes care of
    it; it is checked here that it does. Raises ConfigError where it does not, or where an action is missing,
    twice there, or on a rank that does not hold its stage.
    """
    stage, kind, microbatch, offsets = schedule.columns
    stages, microbatches = schedule.stages, schedule.microbatches
    actions = len(stage)
    if actions and (stage.max() >= stages or microbatch.max() >= microbatches):
        raise ConfigError("an action names a stage or microbatch that does not exist", key="schedule")
    rank = np.repeat(np.arange(schedule.pp), np.diff(offsets))
    if (rank != schedule.rank_for(stage, microbatch)).any():
        raise ConfigError("an action is on a rank that does not hold its stage", key="schedule")
    # Rows: F, B or I, W. Two spare stages, -1 and `stages`, stand for "nothing".
    place = np.full((3, stages + 2, microbatches), -1)
    role = np.array([0, 1, 1, 2])[kind]
    place[role, stage + 1, microbatch] = np.arange(actions)
    if np.count_nonzero(place >= 0) != actions:
        raise ConfigError("an action is in the table twice", key="schedule")
    own = place[np.maximum(role - 1, 0), stage + 1, microbatch]
    forward = role == 0
    out_of_order = ~forward & ((own < 0) | (own >= np.arange(actions)))
    if out_of_order.any():
        raise ConfigError(
            f"{_named(schedule, int(np.argmax(out_of_order)))} runs before what it needs", key="schedule"
        )
    across = role < 2
    neighbour = np.where(forward, stage, stage + 2)
    source = np.where(across, place[np.minimum(role, 1), neighbour, microbatch], -1)
    expected = across & np.where(forward, stage > 0, stage < stages - 1)
    if (missing := expected & (source < 0)).any():
        raise ConfigError(
            f"{_named(schedule, int(np.argmax(missing)))} waits for what is not in the table", key="schedule"
        )
    hop = np.where(forward, stage - 1, stages - 1 + stage)
    return source, np.where(expected, hop, 2 * (stages - 1))


def action_finishes(
    schedule: Table, source: list[int], length: list[float], hop: list[float], earliest: list[float]
) -> list[float]:
    """When every action ends that takes `length`, starts no earlier than `earliest`, and gets what it waits
    for from `source` over `hop`. With unit lengths and nothing else these are the topological levels, from 1.

    Walks every rank as far as it gets, up and down the ranks in turn, the way forwards and backwards travel.
    Raises ConfigError where the actions wait for each other.
    """
    finish = [-1.0] * len(source)
    bounds = schedule.columns.offsets.tolist()
    reached, free = bounds[:-1], [0.0] * schedule.pp
    up = range(schedule.pp)
    left = len(source)
    while left:
        before = left
        for rank in (*up, *reversed(up)):
            action = first = reached[rank]
            now = free[rank]
            stop = bounds[rank + 1]
            while action < stop:
                needed = source[action]
                if needed >= 0:
                    arrival = finish[needed]
                    if arrival < 0.0:
                        break
                    arrival += hop[action]
                    if arrival > now:
                        now = arrival
                if earliest[action] > now:
                    now = earliest[action]
                now += length[action]
                finish[action] = now
                action += 1
            if action > first:
                reached[rank], free[rank] = action, now
                left -= action - first
        if left == before:
            deadlocked = next(action for action, end in enumerate(finish) if end < 0.0)
            raise ConfigError(
                f"the schedule waits for itself, first at {_named(schedule, deadlocked)}", key="schedule"
            )
    return finish


def _named(schedule: Table, action: int) -> str:
    stage, kind, microbatch, _ = schedule.columns
    return f"{stage[action]}{KINDS[kind[action]]}{microbatch[action]}"
