"""Where a schedule turns round: what a rank does before its first backward and after its last forward.

Read from the table of the schedule itself (docs/concepts/cost-model.md, section 13). From 4 pp microbatches
on, both ends of a row stay as they are; only the middle grows."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from shardwise.check.rows import NO_ROWS, Column, Family
from shardwise.check.schedules import in_flight, pending_weights, table_of


@dataclass(frozen=True, slots=True)
class WarmupCooldown:
    """Of one schedule: counts of actions per stage, shape (stages,), and places per rank, shape (pp,).

    `warmup_forwards`: forwards of a stage before the first backward of its rank; `cooldown_backwards`,
    `cooldown_inputs`, `cooldown_weights`: B, I and W after the last forward. `first_backward_stage` and
    `last_forward_stage` are the stages of these two actions, the one of the first microbatch, the other of
    the last; `has_steady_state`: the one comes before the other."""

    warmup_forwards: Column
    cooldown_backwards: Column
    cooldown_inputs: Column
    cooldown_weights: Column
    first_backward_stage: Column
    last_forward_stage: Column
    has_steady_state: Column


@lru_cache(maxsize=4096)
def warmup_cooldown_of(schedule: str, pp: int, vpp: int, microbatches: int) -> WarmupCooldown:
    """The turns of a legal combination."""
    if schedule == "gpipe":
        ranks = np.arange(pp)
        all_of = np.full(pp, microbatches)
        none = np.zeros(pp, dtype=np.int64)
        return WarmupCooldown(all_of, all_of, none, none, ranks, ranks, np.zeros(pp, dtype=bool))
    family = empty_family(schedule, pp, vpp, min(microbatches, 4 * pp))
    counts = {name: np.zeros(pp * vpp, dtype=np.int64) for name in ("before", "B", "I", "W")}
    places = []
    for row in table_of(family):
        first = next(place for place, action in enumerate(row) if action[1] in "BI")
        last = max(place for place, action in enumerate(row) if action[1] == "F")
        for stage, kind, _ in row[:first]:
            counts["before"][stage] += kind == "F"
        for stage, kind, _ in row[last + 1 :]:
            counts[kind][stage] += 1
        places.append((row[first][0], row[last][0], first < last))
    first_backward_stage, last_forward_stage, has_steady_state = map(np.array, zip(*places, strict=True))
    return WarmupCooldown(
        counts["before"],
        counts["B"],
        counts["I"],
        counts["W"],
        first_backward_stage,
        last_forward_stage,
        has_steady_state,
    )


@lru_cache(maxsize=4096)
def in_flight_of(schedule: str, pp: int, vpp: int, microbatches: int) -> tuple[int, ...]:
    """What each rank holds in flight."""
    family = empty_family(schedule, pp, vpp, microbatches)
    return tuple(in_flight(family, rank) for rank in range(pp))


@lru_cache(maxsize=4096)
def pending_weights_of(schedule: str, pp: int, vpp: int, microbatches: int) -> tuple[int, ...]:
    """What waits on each rank for the weights' half of its backward."""
    family = empty_family(schedule, pp, vpp, microbatches)
    return tuple(pending_weights(family, rank) for rank in range(pp))


def empty_family(schedule: str, pp: int, vpp: int, microbatches: int) -> Family:
    """A family that has a table, and no rows."""
    return Family(schedule=schedule, pp=pp, vpp=vpp, microbatches=microbatches, rows=NO_ROWS)
