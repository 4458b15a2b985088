"""Hops between the stages of a pipeline, by where its stages lie.

The stages that a pipeline has on one pool lie in *groups*, each in one node: counted from the pipeline's end,
as many as a node holds, or fewer where they are spread, if that is a power of two, and of what is left in
front the largest power of two again and again. Groups of any pipelines fill nodes without gaps. Hops inside a
group stay in the node; over those that leave it the node's other groups hand over at once, as if all were as
large.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

from shardwise.cost import NodeSlot, StageKinds, hop_s

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class StageHops:
    """Hops of the stages of one pool, of shape (kinds, stages + 1, stages + 1): by how many of them the
    pipeline has, and which it is, counted from the pipeline's end (1). Seconds from that stage to the next of
    the same pool where nothing is between them (`near_s`), and to or from a stage of another pool as far as
    this end needs (`far_s`).

    `node_slots`, of the same shape behind an axis that tells whether all of the pipeline's stages are on this
    pool (1), has the seat of each: a place among `node_slots_of_pool`."""

    near_s: Floats
    far_s: Floats
    node_slots: Ints

    def total_s(self) -> Floats:
        """Of shape (kinds, stages + 1): what the hops behind all of the pool's stages but the last take at
        least, wherever the others lie."""
        least = np.minimum(self.near_s, self.far_s)
        least[:, :, :2] = 0.0
        return np.stack([least[:, n, : n + 1].sum(axis=1) for n in range(least.shape[1])], axis=1)

    def least_far_s(self) -> Floats:
        """Of shape (kinds, stages + 1): what a hop to or from another pool takes this end at least."""
        numbers = range(1, self.far_s.shape[1])
        found = [self.far_s[:, n, 1 : n + 1].min(axis=1) for n in numbers]
        return np.stack([found[0], *found], axis=1)


@cache
def group_sizes(stages: int, most: int) -> tuple[int, ...]:
    """Sizes of the groups of so many stages from the pipeline's end on; `most` lie together in a node, a
    power of two."""
    found = []
    while stages:
        found.append(min(most, 1 << (stages.bit_length() - 1)))
        stages -= found[-1]
    return tuple(found)


def max_stages_per_node(devices: int, stage: int) -> int:
    """Stages of so many devices, a power of two of them, that divide a node of `devices`."""
    most = 1
    while devices % (2 * most * stage) == 0:
        most *= 2
    return most


def node_slots_of_pool(
    devices: int, sizes: Sequence[int], stages: int, is_tied: bool
) -> tuple[NodeSlot, ...]:
    """Where stages of these sizes may lie in nodes of so many `devices`, in pipelines of up to so many
    `stages`: with 1, 2, 4, ... together; and then those whose pipeline has no others, which matters where
    both ends of the model have the same weights (`is_tied`)."""
    most = min(max_stages_per_node(devices, min(sizes)), 1 << (stages.bit_length() - 1))
    powers = [1 << exponent for exponent in range(most.bit_length())]
    whole = [NodeSlot(stages_per_node, devices, True) for stages_per_node in powers[1:] if is_tied]
    return (*(NodeSlot(stages_per_node, devices) for stages_per_node in powers), *whole)


def hops_of_pool(
    own: StageKinds,
    across: StageKinds,
    sizes: Sequence[int],
    kinds: Sequence[tuple[int, int]],
    devices: int,
    stages: int,
    node_slots: Sequence[NodeSlot],
) -> StageHops:
    """Hops of pipelines with up to so many `stages` on a pool of nodes of `devices`, which lie on these
    `node_slots`. `own` has the tiers of the pool, `across` those over which it reaches others, both for
    stages of these `sizes`; of each kind `kinds` has which of the sizes it has, and how many lie together."""
    inner = max((i for i, tier in enumerate(own.problem.tiers) if tier.span <= devices), default=-1)
    near_s = np.zeros((len(kinds), stages + 1, stages + 1))
    far_s = np.zeros_like(near_s)
    taken = np.zeros((2, *near_s.shape), dtype=np.int64)
    within = _seconds(own, inner, sizes)
    powers = {node_slot.stages_per_node for node_slot in node_slots}
    all_leave, all_across = (
        {many: _seconds(one, -1, [devices // many] * len(sizes)) for many in powers} for one in (own, across)
    )
    for kind, (of, stages_per_node) in enumerate(kinds):
        leaves, crossing = (
            {many: float(values[of]) for many, values in some.items()} for some in (all_leave, all_across)
        )
        for number in range(1, stages + 1):
            placed_stages = [
                (g, many) for g, many in enumerate(group_sizes(number, stages_per_node)) for _ in range(many)
            ]
            for stage, (group, many) in enumerate(placed_stages, start=1):
                far_s[kind, number, stage] = crossing[many]
                node_slot, whole = NodeSlot(many, devices), NodeSlot(many, devices, True)
                is_whole = many == number and whole in node_slots
                taken[0, kind, number, stage] = node_slots.index(node_slot)
                taken[1, kind, number, stage] = node_slots.index(whole if is_whole else node_slot)
                if stage > 1:
                    next_group, fewer = placed_stages[stage - 2]
                    is_inside = group == next_group
                    near_s[kind, number, stage] = (
                        within[of] if is_inside else max(leaves[many], leaves[fewer])
                    )
    return StageHops(near_s, far_s, taken)


def _seconds(kinds: StageKinds, tier: int, senders: Sequence[int]) -> Floats:
    """Of a hop over the tier by kind, where so many devices of what the tier joins send at once."""
    return np.asarray(hop_s(kinds, tier, np.array(senders)), dtype=np.float64)


def hops_s(hops: Sequence[StageHops], kinds: Sequence[int], pools: Ints) -> Floats:
    """Seconds behind all stages but the last of layouts, of shape (layouts, stages - 1); `pools` has the pool
    of each stage."""
    stages = np.arange(pools.shape[1])
    left, number = np.zeros_like(pools), np.zeros_like(pools)
    near, far = np.zeros(pools.shape), np.zeros(pools.shape)
    for pool, kind in enumerate(kinds):
        mine = pools == pool
        before = np.cumsum(mine, axis=1)
        number = before[:, -1:] + 0 * stages
        left = number - before + 1
        near[mine] = hops[pool].near_s[kind, number[mine], left[mine]]
        far[mine] = hops[pool].far_s[kind, number[mine], left[mine]]
    is_same = pools[:, 1:] == pools[:, :-1]
    return np.where(is_same, near[:, :-1], np.maximum(far[:, :-1], far[:, 1:]))


def node_slots_of(hops: Sequence[StageHops], kinds: Sequence[int], pools: Ints) -> Ints:
    """The seat of every stage of layouts, of shape (layouts, stages)."""
    found = np.zeros_like(pools)
    for pool, kind in enumerate(kinds):
        mine = pools == pool
        before = np.cumsum(mine, axis=1)
        number = before[:, -1:] + 0 * before
        is_only = (number == pools.shape[1]).astype(np.int64)
        found[mine] = hops[pool].node_slots[is_only[mine], kind, number[mine], (number - before + 1)[mine]]
    return found
