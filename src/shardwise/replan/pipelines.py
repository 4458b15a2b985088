"""Durations of the pipelines of a strategy on nodes in several states, and how long these take."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from shardwise.replan.arrangement import Floats, Ints
from shardwise.schedule import stage_ranks
from shardwise.sim import Durations, makespan_s
from shardwise.strategy import Strategy


def worst_durations(strategy: Strategy, durations: Sequence[Durations], rows: Ints) -> Durations:
    """Durations of pipelines whose cells lie on nodes of these kinds (places in `durations`), rows of shape
    (pipelines, pp, slots)."""
    on_stage = rows[:, list(stage_ranks(strategy.schedule, strategy.pp, strategy.vpp)), :]
    stages = np.arange(on_stage.shape[1])

    def slowest(name: str) -> Floats:
        values = np.concatenate([getattr(one, name) for one in durations])
        picked: Floats = values[on_stage, stages[None, :, None]].max(axis=2)
        return picked

    def hops(name: str) -> Floats:
        values = np.concatenate([getattr(one, name) for one in durations])
        ends = np.concatenate([on_stage[:, :-1], on_stage[:, 1:]], axis=2)
        picked: Floats = values[ends, stages[None, :-1, None]].max(axis=2)
        return picked

    def joined(name: str) -> Floats:
        values = np.concatenate([getattr(one, name) for one in durations]).max(axis=0)
        return np.broadcast_to(values, (len(rows), len(values)))

    return Durations.of(
        stages=len(stages),
        batch=len(rows),
        forward_s=slowest("forward_s"),
        backward_s=slowest("backward_s"),
        backward_input_s=slowest("backward_input_s"),
        backward_weight_s=slowest("backward_weight_s"),
        gather_s=joined("gather_s"),
        reduce_s=joined("reduce_s"),
        hop_forward_s=hops("hop_forward_s"),
        hop_backward_s=hops("hop_backward_s"),
    )


def drained_s(strategy: Strategy, durations: Durations, kinds: Ints, microbatches: Ints) -> Floats:
    """Seconds of pipelines of these kinds with so many microbatches."""
    return makespan_s(
        strategy.schedule,
        pp=strategy.pp,
        microbatches=microbatches,
        vpp=strategy.vpp,
        durations=durations.rows(kinds),
    )
