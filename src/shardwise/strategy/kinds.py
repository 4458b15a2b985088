"""Kinds of strategies: alternatives of one kind differ only in small choices."""

from __future__ import annotations

from collections.abc import Sequence

from shardwise.strategy.strategy import Strategy


def zero_stage_of(strategy: Strategy) -> int:
    """What is sharded: 3 parameters, 2 gradients, 1 optimizer states, 0 nothing; over all ranks or some."""
    degrees = (strategy.optim_shard, strategy.grad_shard, strategy.param_shard)
    return sum(degree > 1 for degree in degrees)


def kind_of(strategy: Strategy) -> tuple[object, ...]:
    """The large choices of a strategy: how the model is divided (tp, pp, ep, etp), whether sequences are
    (cp), the schedule, the ZeRO stage, recomputation (none, selective, full), and whether it offloads.

    All else is small: how the other ranks are divided between dp and cp, the micro-batch size, virtual
    stages, which layers are recomputed, the ends of the pipeline, the order of the axes, and so on.
    """
    return (
        strategy.tp,
        strategy.pp,
        strategy.ep,
        strategy.etp,
        strategy.cp > 1,
        strategy.schedule,
        zero_stage_of(strategy),
        strategy.recompute,
        strategy.offload != "none",
    )


def groups_of(best: Strategy, others: Sequence[Strategy]) -> tuple[int, ...]:
    """The number of the kind of each of `others`: 0 is that of `best`, others count from 1 in the order in
    which they come."""
    numbers = {kind_of(best): 0}
    return tuple(numbers.setdefault(kind_of(other), len(numbers)) for other in others)
