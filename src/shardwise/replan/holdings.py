"""Which node holds which part of a model's weights and optimizer states under an arrangement.

All parameters are laid on a plane: units (embedding, layers, head) by shares of each from 0 to 1. A tensor
rank holds its slice of the shares, and where states are sharded, each rank of the group its part of that
slice. A *piece* is a rectangle with the nodes that hold it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import numpy as np

from shardwise.model import Model
from shardwise.operators import Operator
from shardwise.replan.arrangement import NO_NODE, Arrangement, with_dp
from shardwise.schedule import stage_ranks
from shardwise.strategy import Strategy, layer_counts, rank_grid


@dataclass(frozen=True, slots=True)
class StateShard:
    """Units `first` to `last` (exclusive), shares `low` to `high` of each, on these nodes."""

    first: int
    last: int
    low: float
    high: float
    nodes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Holdings:
    """Weights and optimizer states of an arrangement, by pieces; those of one stage follow each other by
    their shares."""

    weights: tuple[tuple[StateShard, ...], ...]
    states: tuple[tuple[StateShard, ...], ...]


def unit_elements(model: Model) -> tuple[float, ...]:
    """Elements below each unit, from none to all: the embedding, every layer, the head."""
    kinds = [_elements(kind.operators) for kind in model.kinds]
    units = [_elements(model.embedding), *(kinds[kind] for kind in model.pattern), _elements(model.head)]
    return tuple(accumulate(units, initial=0.0))


def _elements(operators: Iterable[Operator]) -> float:
    return float(sum(weight.parameters for operator in operators for weight in operator.weights))


def holdings_of(arrangement: Arrangement, layers: int, devices_per_node: int) -> Holdings:
    """What lies where."""
    strategy = arrangement.strategy
    slots = rank_grid(strategy) // devices_per_node
    units = _units(strategy, layers)
    places = stage_ranks(strategy.schedule, strategy.pp, strategy.vpp)
    # Replicas of a stage that is gone hold nothing; what is sharded is so over those that are left.
    gone = np.array([name == NO_NODE for name in arrangement.slots])
    on = [slots[:, place][~gone[slots[:, place]].any(axis=(1, 2))] for place in places]
    widths = [with_dp(strategy, len(replicas)) for replicas in on]
    return Holdings(
        weights=tuple(
            _state_shards(strategy, on[stage], unit, widths[stage].param_shard, arrangement.slots)
            for stage, unit in enumerate(units)
        ),
        states=tuple(
            _state_shards(strategy, on[stage], unit, widths[stage].optim_shard, arrangement.slots)
            for stage, unit in enumerate(units)
        ),
    )


def sharded_holdings_of(arrangement: Arrangement, layers: int, devices_per_node: int) -> Holdings:
    """What lies where between steps, where weights are divided like the states that renew them (as
    PyTorch's `fully_shard` does): also those that are gathered through a step."""
    found = holdings_of(arrangement, layers, devices_per_node)
    return replace(found, weights=found.states)


def _units(strategy: Strategy, layers: int) -> list[tuple[int, int]]:
    """Units of every stage: the embedding lies on the first, the head on the last."""
    counts = layer_counts(
        layers, strategy.pp * strategy.vpp, strategy.first_stage_layers, strategy.last_stage_layers
    )
    ends = [1 + end for end in accumulate(counts)]
    ends[-1] += 1
    return list(zip([0, *ends[:-1]], ends, strict=True))


def _state_shards(
    strategy: Strategy, slots: np.ndarray, unit: tuple[int, int], shards: int, names: Sequence[str]
) -> tuple[StateShard, ...]:
    """Pieces of one stage; `slots` of its ranks have shape (dp, cp, tp). Neighbours on the same nodes are
    one."""
    replicas = slots.reshape(-1, strategy.tp)
    found: list[StateShard] = []
    for tp in range(strategy.tp):
        for shard in range(shards):
            on = tuple(names[slot] for slot in sorted(set(replicas[shard::shards, tp].tolist())))
            low = (tp + shard / shards) / strategy.tp
            high = (tp + (shard + 1) / shards) / strategy.tp
            if found and found[-1].nodes == on:
                found[-1] = StateShard(*unit, found[-1].low, high, on)
            else:
                found.append(StateShard(*unit, low, high, on))
    return tuple(found)


def overlapping(
    stages: Sequence[Sequence[StateShard]], lows: Sequence[Sequence[float]], state_shard: StateShard
) -> Iterable[StateShard]:
    """The parts of `state_shard` that lie in one piece of `stages` each, with its nodes; `lows` are where
    those of each stage begin."""
    for row, starts in zip(stages, lows, strict=True):
        first, last = max(row[0].first, state_shard.first), min(row[0].last, state_shard.last)
        if first >= last:
            continue
        place = max(bisect_right(starts, state_shard.low) - 1, 0)
        while place < len(row) and row[place].low < state_shard.high:
            low, high = max(row[place].low, state_shard.low), min(row[place].high, state_shard.high)
            if high > low:
                yield StateShard(first, last, low, high, row[place].nodes)
            place += 1
