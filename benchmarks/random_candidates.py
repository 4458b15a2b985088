"""Random candidates of a space, to compare with the result of a search."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from shardwise.cost import Problem, peaks_of
from shardwise.search.space import Space
from shardwise.search.step_times import step_times_s
from shardwise.strategy import RULES, StrategyTable, first_broken, largest_stage

BELOW_FACTOR = 1.0 - 1e-12
"""Relative tolerance of comparisons: a difference by rounding does not count as less."""


def sampled(
    space: Space, number: int, rng: np.random.Generator, center: StrategyTable | None = None
) -> StrategyTable:
    """A uniform random sample of `number` candidates of the space, or of those with the degrees of `center`
    (a table of one row)."""
    degrees = space.degrees()
    if center is not None:
        degrees = [(int(center.tp[0]), int(center.cp[0]), int(center.dp[0]), int(center.pp[0]))]
    grids = space.grids(degrees)
    below = space.count_below_grids(grids).astype(np.float64)
    grids = grids.take(rng.choice(len(grids), number, p=below / below.sum()))
    return StrategyTable.joined([_completed(space, grids.take(slice(i, i + 1)), rng) for i in range(number)])


def _completed(space: Space, grid: StrategyTable, rng: np.random.Generator) -> StrategyTable:
    """A random candidate of a grid."""
    pp, ranks = int(grid.pp[0]), int(grid.dp[0] * grid.cp[0])
    sizes = space.micro_batch_sizes(int(grid.dp[0]))["micro_batch_size"]
    variants = space.variants(pp)
    kinds = [int(kind) for kind in space.recomputes]
    counts = np.array(
        [[space.count_splits(pp * int(v), kind) for kind in kinds] for v in variants.vpp], dtype=float
    )
    place = rng.choice(counts.size, p=counts.ravel() / counts.sum())
    variant, kind = divmod(int(place), len(kinds))
    stages = pp * int(variants.vpp[variant])
    split = space.splits(stages)
    first, last = split["first_stage_layers"], split["last_stage_layers"]
    largest = largest_stage(space.layers, stages, first, last)
    layers = [space.recompute_layers(kinds[kind], int(most)) for most in largest]
    weights = np.array([len(each) for each in layers], dtype=float)
    chosen = int(rng.choice(len(first), p=weights / weights.sum()))
    shards = space.shards(ranks)
    shard = int(rng.integers(len(shards["param_shard"])))
    return grid.replaced(
        micro_batch_size=rng.choice(sizes), schedule=variants.schedule[variant], vpp=variants.vpp[variant],
        first_stage_layers=first[chosen], last_stage_layers=last[chosen],
        recompute=kinds[kind], recompute_layers=rng.choice(layers[chosen]),
        offload=rng.choice(space.offloads), **{name: column[shard] for name, column in shards.items()},
    )  # fmt: skip


def undominated_counts(
    problem: Problem, table: StrategyTable, points: Sequence[tuple[float, float]]
) -> tuple[int, int, int]:
    """Numbers of legal rows, of legal rows that fit, and of those that no point (seconds, device bytes)
    dominates or equals."""
    legal, times_s, device_bytes = fitting_costs(problem, table)
    is_matched = np.zeros(len(times_s), dtype=bool)
    for point_s, point_bytes in points:
        is_matched |= (times_s >= point_s * BELOW_FACTOR) & (device_bytes >= point_bytes * BELOW_FACTOR)
    return legal, len(times_s), int((~is_matched).sum())


def fitting_costs(
    problem: Problem, table: StrategyTable
) -> tuple[int, NDArray[np.float64], NDArray[np.float64]]:
    """The number of legal rows, and the seconds and device bytes of those that fit."""
    legal = table.take(first_broken(table, problem.limits, RULES) < 0)
    if not len(legal):
        return 0, np.zeros(0), np.zeros(0)
    peaks = peaks_of(problem, legal)
    fits = (peaks.device_bytes <= problem.usable_bytes) & (peaks.host_bytes <= problem.host_bytes_per_device)
    fitting = legal.take(fits)
    if not len(fitting):
        return len(legal), np.zeros(0), np.zeros(0)
    return len(legal), step_times_s(problem, fitting), np.asarray(peaks.device_bytes)[fits]
