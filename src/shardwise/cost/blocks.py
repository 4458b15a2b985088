"""Blocks of strategies: what shares a grid and a schedule while stage splits, recomputed layers and sharding
degrees are open or known in part; and how its layers lie on stages and ranks at least."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from shardwise.cost.places import IS_SPLIT
from shardwise.cost.problem import Problem
from shardwise.strategy import IS_V, largest_stage


@dataclass(frozen=True, slots=True)
class Split:
    """Stage splits: the fewest layers on the first stage, on the last, and on all others together; the most
    on any one. Columns; a known split has its own numbers."""

    first: Any
    last: Any
    between: Any
    largest: Any


def known_split(layers: int, stages: Any, first: Any, last: Any) -> Split:
    """Splits whose ends are known."""
    between = np.where(stages > 2, layers - first - last, 0)
    return Split(first, last, between, largest_stage(layers, stages, first, last))


@dataclass(frozen=True, slots=True)
class Subproblem:
    """Blocks as columns that broadcast together.

    Where recomputation is full, `recompute_layers` is the least number and `recompute_most` the largest. Of
    the sharding degrees, which are the largest of the block, memory falls with each, and time with
    `optim_shard`; what `param_shard` and `grad_shard` cost in time is the `Traffic` beside the block. Where
    sharding is open (`is_open`), whole copies of sharded parameters count nothing: it may be that none are.
    """

    pp: Any
    vpp: Any
    schedule: Any
    microbatches: Any
    recompute: Any
    recompute_layers: Any
    recompute_most: Any
    offload: Any
    param_shard: Any
    grad_shard: Any
    optim_shard: Any
    split: Split
    is_open: bool = False

    @property
    def stages(self) -> Any:
        return self.pp * self.vpp


def most_sharded(subproblem: Subproblem, ranks: Any) -> Subproblem:
    """The block with any sharding over so many ranks, at the least bytes."""
    return replace(subproblem, param_shard=ranks, grad_shard=ranks, optim_shard=ranks, is_open=True)


def subproblem_of(problem: Problem, table: Any, split: Split, recompute_most: Any = None) -> Subproblem:
    """The block of every row of a table, apart from its split; the row's `recompute_layers` are the least, or
    (without `recompute_most`) the only ones."""
    return Subproblem(
        pp=table.pp,
        vpp=table.vpp,
        schedule=table.schedule,
        microbatches=problem.job.global_batch_size // (table.dp * table.micro_batch_size),
        recompute=table.recompute,
        recompute_layers=table.recompute_layers,
        recompute_most=table.recompute_layers if recompute_most is None else recompute_most,
        offload=table.offload,
        param_shard=table.param_shard,
        grad_shard=table.grad_shard,
        optim_shard=table.optim_shard,
        split=split,
    )


@dataclass(frozen=True, slots=True)
class LayerCounts:
    """Where the layers of a block lie at least.

    `least` layers on each stage between the ends. On the first rank, the second, the last but one and the
    last: all of the rank's layers (`on_*`), and those of its fullest stage between (`full_*`); 0 where there
    is none. `is_split` marks schedules that split backwards, `is_v` those shaped like a V.
    """

    is_single: Any
    is_split: Any
    is_v: Any
    least: Any
    on_first: Any
    on_second: Any
    on_third: Any
    on_last: Any
    full_first: Any
    full_second: Any
    full_third: Any
    full_last: Any


def layer_counts_of(subproblem: Subproblem) -> LayerCounts:
    """How the layers lie: the stages between share evenly, the later ones take the remainder.

    Every number grows with `split.between`, so fewest layers between give fewest anywhere.
    """
    pp, split, stages = subproblem.pp, subproblem.split, subproblem.stages
    is_v, is_single = IS_V[subproblem.schedule], pp == 1
    end, second, third = pp - 1, np.minimum(1, pp - 1), np.maximum(pp - 2, 0)
    each = split.between // np.maximum(stages - 2, 1)
    start = stages - 1 - (split.between - each * np.maximum(stages - 2, 1))

    def layers(stage: Any) -> Any:
        """Layers of a stage between the ends."""
        return each + ((stage >= start) & (stage < stages - 1))

    def chunks(rank: Any, chunk: Any) -> Any:
        """Layers on a rank's stages between the ends, from its chunk `chunk` on."""
        final = (stages - 2 - rank) // pp
        larger = np.maximum(-(-(start - rank) // pp), chunk)
        return np.maximum(final - chunk + 1, 0) * each + np.maximum(final - larger + 1, 0)

    def folded(rank: Any) -> Any:
        """Layers on the two stages of a V's rank."""
        return layers(rank) + layers(2 * pp - 1 - rank)

    chunked = subproblem.vpp > 1
    return LayerCounts(
        is_single=is_single,
        is_split=IS_SPLIT[subproblem.schedule],
        is_v=is_v,
        least=each,
        on_first=split.first + np.where(is_v, split.last, np.where(is_single, 0, chunks(0, 1))),
        on_second=np.where(is_v, folded(second), chunks(second, 0)),
        on_third=np.where(is_v, folded(third), chunks(third, 0)),
        on_last=np.where(is_v, folded(end), np.where(is_single, 0, chunks(end, 0) + split.last)),
        full_first=np.where(chunked & ~is_v, layers(stages - pp), 0),
        full_second=np.where(is_v, layers(2 * pp - 2), layers(stages - pp + 1)),
        full_third=np.where(is_v, layers(pp + 1), layers(stages - 2)),
        full_last=np.where(chunked, np.where(is_v, layers(pp), layers(stages - pp - 1)), 0),
    )
