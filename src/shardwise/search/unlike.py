"""Strategies on nodes that are not alike: a stage takes what it takes on the slowest of its nodes, a hop what
the slower of its ends needs, and what joins all pipelines as long as the slowest of them needs.

Every kind of node is priced as if all were of it; alike pipelines are evaluated once, by max-plus.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from shardwise.cost import Problem, distinct_rows
from shardwise.schedule import stage_ranks
from shardwise.search.evaluate import (
    StepFigures,
    microbatches_of,
    pipeline_figures,
    step_figures,
)
from shardwise.sim import Durations, makespan_s
from shardwise.strategy import Strategy, StrategyTable, node_slots

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


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


def pipelines_s(strategy: Strategy, durations: Durations, kinds: Ints, microbatches: Ints) -> Floats:
    """Seconds of pipelines of these kinds with so many microbatches."""
    return makespan_s(
        strategy.schedule,
        pp=strategy.pp,
        microbatches=microbatches,
        vpp=strategy.vpp,
        durations=durations.rows(kinds),
    )


def step_figures_over(problems: Sequence[Problem], table: StrategyTable, nodes: Sequence[int]) -> StepFigures:
    """The figures of every row of a table laid over `nodes` in the order of their ranks, each of the kind of
    node that it names by its place in `problems`: the same job on as many nodes, all of that kind.

    Bytes are those of the kind with least memory.
    """
    pipelines = [pipeline_figures(problem, table) for problem in problems]
    devices = problems[0].cluster.devices // len(nodes)
    microbatches = microbatches_of(problems[0], table)
    placed = [
        _placed_durations(table[row], [kind[row].durations for kind in pipelines], nodes, devices)
        for row in range(len(table))
    ]
    ends_s = [max(pipelines[kind][row].end_s for kind in set(nodes)) for row in range(len(table))]
    step_time_s = _slowest_pipelines_s(table, placed, microbatches) + np.array(ends_s)
    tightest = min(problems, key=lambda problem: problem.usable_bytes)
    return replace(step_figures(tightest, table), step_time_s=step_time_s)


def _placed_durations(
    strategy: Strategy, durations: Sequence[Durations], nodes: Sequence[int], devices_per_node: int
) -> Durations:
    """The durations of those pipelines of a strategy that are not alike."""
    placed = np.array(nodes, dtype=np.int64)[node_slots(strategy, devices_per_node)]
    rows = np.unique(placed.reshape(strategy.dp, -1), axis=0).reshape(-1, *placed.shape[1:])
    return worst_durations(strategy, durations, rows)


def _slowest_pipelines_s(table: StrategyTable, placed: Sequence[Durations], microbatches: Ints) -> Floats:
    """Seconds of the slowest pipeline of every row; rows with the same schedule are evaluated together."""
    pipeline_makespan_s = np.empty(len(table))
    firsts, member = distinct_rows([table.schedule, table.pp, table.vpp])
    for group, first in enumerate(firsts):
        rows = np.flatnonzero(member == group).tolist()
        pipelines = [placed[row].batch for row in rows]
        each_s = pipelines_s(
            table[int(first)],
            Durations.joined([placed[row] for row in rows]),
            np.arange(sum(pipelines)),
            np.repeat(microbatches[rows], pipelines),
        )
        pipeline_makespan_s[rows] = np.maximum.reduceat(each_s, np.cumsum([0, *pipelines[:-1]]))
    return pipeline_makespan_s
