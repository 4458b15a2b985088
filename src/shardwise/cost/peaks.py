"""Peak memory of strategies, exactly, and what lies outside of their schedules."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from shardwise.cost.memory import host_bytes, peak_bytes
from shardwise.cost.price import TableCosts, costs_of_peak_stages
from shardwise.cost.problem import Problem
from shardwise.cost.times import ends_of_step, step_end

FIRST = slice(0, 1)
"""The first place of `costs_of_peak_stages`: the first stage."""


@dataclass(frozen=True, slots=True)
class PeakBytes:
    """Per row: bytes on its tightest rank, and on the host per device."""

    device_bytes: Any
    host_bytes: Any


def peaks_of(problem: Problem, table: Any, costs: TableCosts | None = None) -> PeakBytes:
    """Peak memory of every row of a StrategyTable of legal strategies; `costs` is that of
    `costs_of_peak_stages`."""
    costs = costs_of_peak_stages(problem, table) if costs is None else costs
    return PeakBytes(peak_bytes(problem, table, costs), host_bytes(table, costs))


def outside_schedule_s(problem: Problem, table: Any, costs: TableCosts | None = None) -> Any:
    """Seconds of every row outside of its drained schedule, at least: gathering before the first stage's
    first forward, reduction after its last backward where that ends the schedule, and the end of the step."""
    costs = costs_of_peak_stages(problem, table) if costs is None else costs
    return _outside_s(problem, costs) + step_end(problem, table, costs).total_s


def _outside_s(problem: Problem, costs: TableCosts) -> Any:
    """Gathering before the first stage's first forward, and reduction after its last backward where that ends
    every path."""
    activation_costs, shards = costs.activation_costs, costs.shards
    of_activations, of_shards = costs.of_activations, costs.of_shards
    forward_s = activation_costs.forward_s[0][of_activations] + shards.forward_gather_s[0][of_shards]
    input_s = activation_costs.input_s[0][of_activations] + shards.backward_gather_s[0][of_shards]
    weight_s = activation_costs.weight_s[0][of_activations] + shards.reduce_scatter_s[0][of_shards]
    before_s, after_s = ends_of_step(problem, costs, forward_s[None], input_s[None], weight_s[None], FIRST)
    return before_s[0] + np.where(costs.partition.is_split[costs.of_partition], 0.0, after_s[0])
