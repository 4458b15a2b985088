"""Peak memory of strategies, exactly, and what lies outside of their schedules."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from shardwise.cost.memory import host_bytes, peak_bytes
from shardwise.cost.price import Price, price_peaks
from shardwise.cost.problem import Problem
from shardwise.cost.times import ends_of_step, step_end

FIRST = slice(0, 1)
"""The first place of `price_peaks`: the first stage."""


@dataclass(frozen=True, slots=True)
class Peaks:
    """Per row: bytes on its tightest rank, and on the host per device."""

    device_bytes: Any
    host_bytes: Any


def peaks_of(problem: Problem, table: Any, price: Price | None = None) -> Peaks:
    """Peak memory of every row of a StrategyTable of legal strategies; `price` is that of `price_peaks`."""
    price = price_peaks(problem, table) if price is None else price
    return Peaks(peak_bytes(problem, table, price), host_bytes(table, price))


def around_s(problem: Problem, table: Any, price: Price | None = None) -> Any:
    """Seconds of every row outside of its drained schedule, at least: gathering before the first stage's
    first forward, reduction after its last backward where that ends the schedule, and the end of the step."""
    price = price_peaks(problem, table) if price is None else price
    return _outside_s(problem, price) + step_end(problem, table, price).total_s


def _outside_s(problem: Problem, price: Price) -> Any:
    """Gathering before the first stage's first forward, and reduction after its last backward where that ends
    every path."""
    keep, shards = price.keeping, price.shards
    of_keeping, of_shards = price.of_keeping, price.of_shards
    forward_s = keep.forward_s[0][of_keeping] + shards.forward_gather_s[0][of_shards]
    input_s = keep.input_s[0][of_keeping] + shards.backward_gather_s[0][of_shards]
    weight_s = keep.weight_s[0][of_keeping] + shards.scatter_s[0][of_shards]
    before_s, after_s = ends_of_step(problem, price, forward_s[None], input_s[None], weight_s[None], FIRST)
    return before_s[0] + np.where(price.node.is_split[price.of_node], 0.0, after_s[0])
