"""Sharded weights: all-gathers and reduce-scatters of each micro-batch and each step
(docs/concepts/cost-model.md, section 11)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np

from shardwise_verify.collectives import (
    Fabric,
    Groups,
    Sizes,
    all_gather_s,
    all_reduce_s,
    inner,
    outer,
    reduce_scatter_s,
)
from shardwise_verify.layers import PHASES, Amounts
from shardwise_verify.problem import Figures
from shardwise_verify.strategy_rows import Column


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharding:
    """Sharding degrees and groups of one family of weights, dense or expert."""

    param: Column
    grad: Column
    optim: Column
    param_group: Sizes
    grad_group: Sizes
    scatter_group: Sizes
    replica_group: Sizes
    regather_group: Sizes

    @property
    def reduced(self) -> Column:
        """Number of ranks over which gradients are reduce-scattered at the end of the step."""
        return np.where(self.grad > 1, self.grad, self.optim)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shardings:
    """Both families; `has_experts` says whether there are expert weights, `once` whether sharded parameters
    are gathered and gradients reduced once in a step (whole stages) and not in each micro-batch."""

    dense: Sharding
    expert: Sharding
    has_experts: bool
    once: Column | bool


def shardings_of(
    degrees: Sequence[Column], groups: Groups, *, has_experts: bool, by_instance: bool, once: Column | bool
) -> Shardings:
    """Shardings of dense and expert weights; `degrees` of parameters, gradients and optimizer states.

    With `by_instance` the optimizer has instances, each with all states: dense weights have one replica of
    the states in each of (replicas / degree) instances, and so have experts."""
    of_experts = tuple(np.gcd(degree, groups.expert_replicas) for degree in degrees)
    if by_instance:
        param, grad, optim = degrees
        instances = prod(groups.data) // optim
        share = np.gcd(of_experts[2], np.maximum(groups.expert_replicas // instances, 1))
        of_experts = (*of_experts[:2], np.where((param == 1) & (grad == 1), share, of_experts[2]))
    return Shardings(
        dense=_sharding(groups.data, *degrees),
        expert=_sharding(groups.expert_data, *of_experts),
        has_experts=has_experts,
        once=once,
    )


def _sharding(group: Sizes, param: Column, grad: Column, optim: Column) -> Sharding:
    states = inner(group, optim)
    scatter = inner(group, np.where(grad > 1, grad, optim))
    params = inner(states, param)
    return Sharding(
        param=param,
        grad=grad,
        optim=optim,
        param_group=params,
        grad_group=inner(group, grad),
        scatter_group=scatter,
        replica_group=outer(group, scatter),
        regather_group=outer(states, params),
    )


def traffic_amounts(
    figures: Figures, fabric: Fabric, shardings: Shardings, block: Amounts
) -> dict[str, Column]:
    """Exposed seconds that sharding adds to each phase of a block, per micro-batch: `forward_traffic_s`,
    `input_traffic_s`, `weight_traffic_s`."""
    dense, expert = shardings.dense, shardings.expert
    recipe = figures.recipe
    gather = all_gather_s(fabric, block["dense"] * recipe.weight_bytes, dense.param_group)
    scatter = reduce_scatter_s(
        fabric, figures.backend, block["trained_dense"] * recipe.reduced_bytes, dense.grad_group
    )
    scatter = np.where(block["trained_dense"] > 0, scatter, 0.0)
    if shardings.has_experts:
        more = all_gather_s(fabric, block["expert"] * recipe.weight_bytes, expert.param_group)
        gather = gather + np.where(block["expert"] > 0, more, 0.0)
        more = reduce_scatter_s(
            fabric, figures.backend, block["trained_expert"] * recipe.reduced_bytes, expert.grad_group
        )
        scatter = scatter + np.where(block["trained_expert"] > 0, more, 0.0)
    return {
        f"{phase}_traffic_s": figures.exposed_s(
            np.where(shardings.once, 0.0, scatter if phase == "weight" else gather),
            block[f"{phase}_computation_s"],
            figures.profile.shard_overlap,
        )
        for phase in PHASES
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Reduced:
    """Dense and expert elements of a stage on a rank, and the number of collectives that reduce each."""

    dense: Column
    expert: Column
    dense_parts: Column | int
    expert_parts: Column | int

    @staticmethod
    def of(
        figures: Figures, dense: Column, expert: Column, dense_blocks: Column, expert_blocks: Column
    ) -> Reduced:
        """From elements and blocks: one collective per block where the software reduces by block, else one
        per stage."""
        if not figures.profile.reduces_by_block:
            return Reduced(dense=dense, expert=expert, dense_parts=1, expert_parts=1)
        parts = np.maximum(dense_blocks, 1), np.maximum(expert_blocks, 1)
        return Reduced(dense=dense, expert=expert, dense_parts=parts[0], expert_parts=parts[1])


def reduced_and_gathered(
    figures: Figures,
    everything: Sequence[Column],
    trained: Sequence[Column],
) -> tuple[Reduced, Reduced]:
    """What a stage reduces and what it gathers in a step, from `everything`: dense and expert elements and
    blocks of each; and the `trained` part: dense and expert elements, and blocks with such weights.

    Frozen weights have no gradients. They change in no update, so they are gathered only by software that
    has each block in shards."""
    dense, expert, blocks = trained
    reduced = Reduced.of(figures, dense, expert, blocks, everything[3])
    return reduced, Reduced.of(figures, *everything) if figures.profile.reduces_by_block else reduced


def reduction_s(figures: Figures, fabric: Fabric, shardings: Shardings, stage: Reduced) -> Column:
    """Seconds of a stage's gradient reduction at the end of the step."""

    def of(family: Sharding, elements: Column) -> Column:
        nbytes = elements * figures.recipe.reduced_bytes
        whole = reduce_scatter_s(fabric, figures.backend, nbytes, family.scatter_group)
        scatter = np.where((family.grad == 1) | shardings.once, whole, 0.0)
        return scatter + all_reduce_s(fabric, nbytes / family.reduced, family.replica_group)

    return _of_both(shardings, stage, of)


def gathering_s(figures: Figures, fabric: Fabric, shardings: Shardings, stage: Reduced) -> Column:
    """Seconds of a stage's parameter all-gather at the start of the step."""

    def of(family: Sharding, elements: Column) -> Column:
        nbytes = elements * figures.recipe.weight_bytes
        updated = all_gather_s(fabric, nbytes / family.param, family.regather_group)
        return updated + np.where(shardings.once, all_gather_s(fabric, nbytes, family.param_group), 0.0)

    return _of_both(shardings, stage, of)


def _of_both(shardings: Shardings, stage: Reduced, of: Callable[[Sharding, Column], Column]) -> Column:
    """The sum over both families, each in equal parts; each counts only where there are any weights of it."""
    seconds = stage.dense_parts * of(shardings.dense, stage.dense / stage.dense_parts)
    seconds = np.where(np.asarray(stage.dense) > 0, seconds, 0.0)
    if not shardings.has_experts:
        return seconds
    more = stage.expert_parts * of(shardings.expert, stage.expert / stage.expert_parts)
    return seconds + np.where(stage.expert > 0, more, 0.0)
