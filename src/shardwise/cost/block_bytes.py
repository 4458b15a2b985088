"""The least device memory of everything in a block."""

from __future__ import annotations

from typing import Any

import numpy as np

from shardwise.cost.blocks import Block, Lie
from shardwise.cost.keeping import ACTIVATIONS, BOTH, FULL, OPTIMIZER, SELECTIVE
from shardwise.cost.memory import BOUNDARY_BUFFERS
from shardwise.cost.problem import Problem
from shardwise.cost.sync import PREFETCHED_LAYERS, host_own_bytes
from shardwise.cost.totals import Layers, Totals
from shardwise.equations import memory
from shardwise.schedule import in_flight, waiting


def least_bytes(problem: Problem, block: Block, lie: Lie, totals: Totals) -> Any:
    """Device bytes that everything in a block takes at least on some rank; `totals` are of its grid.

    The rank is the first, the second, the last or the average one, each with its fewest layers; every layer
    counts as the smallest kind. Exact for a known split of a model whose layers are alike, but for ranks
    between the second and the last, losses in flight beside the one at work, and buffers of a whole step;
    where gradients are reduced by block for what is sent of them and a rank's own part of whole weights; and
    where they come as activations go.
    """
    states = States(problem, block, totals)
    single, is_v, split = lie.is_single, lie.is_v, block.split
    temporary, head_temporary = totals.temporary_bytes, totals.head_temporary_bytes
    first, end = 0 * block.pp, block.pp - 1
    kept = _Kept(block, totals)
    head_first = single | is_v
    on_first = states.layers(lie.on_first) + states.embedding + np.where(head_first, states.head, 0.0)
    on_last = states.layers(lie.on_last) + np.where(is_v, 0.0, states.head)
    ends_bytes = totals.embedding.kept_bytes + np.where(single, totals.head.kept_bytes, 0.0)
    least = on_first + kept.held(first, split.first, ends_bytes) + np.where(single, head_temporary, temporary)
    one = np.maximum(kept.near(split.first, ends_bytes) + head_temporary, least - head_temporary - on_first)
    least = np.where(is_at_once(problem, block), on_first + one, least)
    with_head = kept.held(np.where(is_v, 0, end), split.last, totals.head.kept_bytes) + head_temporary
    least = np.maximum(least, np.where(single, 0.0, np.where(is_v, on_first, on_last) + with_head))
    chunked = (block.vpp > 1) & ~single
    between = on_first + kept.held(first, lie.full_first, 0.0) + temporary
    least = np.maximum(least, np.where(chunked & ~is_v, between, 0.0))
    between = states.layers(lie.on_second) + kept.held(np.minimum(1, end), lie.full_second, 0.0) + temporary
    least = np.maximum(least, np.where(block.pp > 2, between, 0.0))
    between = on_last + kept.held(end, lie.full_last, 0.0) + temporary
    least = np.maximum(least, np.where(chunked, between, 0.0))
    average = (states.whole + kept.whole(end)) / block.pp + temporary
    return _device_bytes(problem, block, totals, np.maximum(least, average) + states.gathered)


def least_host_bytes(problem: Problem, block: Block, lie: Lie, totals: Totals) -> Any:
    """Bytes per device that everything in a block puts on the host of some rank at least: optimizer states
    and activations, of the same ranks as in `least_bytes`."""
    layer, kept = totals.layer, _Kept(block, totals)
    is_offloaded = (block.offload == OPTIMIZER) | (block.offload == BOTH)
    own = np.where(is_offloaded, host_own_bytes(problem), 0.0)
    dense, expert = own / block.optim_shard, None
    if problem.model.experts is not None:
        expert = own / np.gcd(block.optim_shard, totals.expert_replicas)

    def states(layers: Any) -> Any:
        dense_bytes = dense * layer.dense_weights.of(layers)
        return dense_bytes if expert is None else dense_bytes + expert * layer.expert_weights.of(layers)

    single, is_v, split = lie.is_single, lie.is_v, block.split
    first, end = 0 * block.pp, block.pp - 1
    head, embedding = totals.head.kept_bytes, totals.embedding.kept_bytes
    on_first = states(lie.on_first) + dense * totals.embedding.dense_weights
    on_last = states(lie.on_last) + np.where(single | is_v, 0.0, dense * totals.head.dense_weights)
    on_first = on_first + np.where(single | is_v, dense * totals.head.dense_weights, 0.0)
    least = on_first + kept.moved(first, split.first, embedding + np.where(single, head, 0.0))
    with_head = np.where(is_v, on_first, on_last) + kept.moved(np.where(is_v, 0, end), split.last, head)
    least = np.maximum(least, np.where(single, 0.0, with_head))
    chunked = (block.vpp > 1) & ~single
    between = on_first + kept.moved(first, lie.full_first, 0.0)
    least = np.maximum(least, np.where(chunked & ~is_v, between, 0.0))
    between = states(lie.on_second) + kept.moved(np.minimum(1, end), lie.full_second, 0.0)
    least = np.maximum(least, np.where(block.pp > 2, between, 0.0))
    least = np.maximum(least, np.where(chunked, on_last + kept.moved(end, lie.full_last, 0.0), 0.0))
    whole = dense * totals.whole.dense_weights + kept.moved_whole(end)
    if expert is not None:
        whole = whole + expert * totals.whole.expert_weights
    return np.maximum(least, whole / block.pp)


def family_least_bytes(problem: Problem, block: Block, totals: Totals, in_flight: Any) -> Any:
    """What everything with some schedules takes at least: those that have no fewer microbatches in flight.

    `in_flight`, of shape (pp, rows), counts them on each rank (of one depth `pp`), of its layers on average.
    """
    states = States(problem, block, totals)
    allocated = _spread_bytes(problem, block, totals, states, in_flight)
    allocated = allocated + totals.temporary_bytes
    return _device_bytes(problem, block, totals, allocated + states.gathered)


def _spread_bytes(problem: Problem, block: Block, totals: Totals, states: States, in_flight: Any) -> Any:
    """What the fullest rank holds of all layers at least, however they are spread: rank r takes c_r for each
    of its layers, so that k_r = x / c_r layers fill x, and all L do so at x = L / sum(1 / c_r).

    What is offloaded counts nothing. Where layers differ, the average rank with the fewest in flight.
    """
    layers, whole = problem.model.layers, totals.whole
    ends = (totals.embedding, totals.head)
    plain = np.where(block.recompute == SELECTIVE, whole.selective_bytes, whole.kept_bytes)
    one = np.where(block.recompute == FULL, whole.input_bytes, plain) - sum(end.kept_bytes for end in ends)
    kept = np.where(block.offload >= ACTIVATIONS, 0.0, one / layers)
    own = (states.whole - states.embedding - states.head) / layers
    if not totals.layer.are_alike:
        return (own + np.min(in_flight, axis=0) * kept) * layers / len(in_flight)
    return layers / (1.0 / (own + in_flight * kept)).sum(axis=0)


def spare_bytes(problem: Problem, block: Block, totals: Totals, states: States) -> Any:
    """What is left on a device for states and activations of layers and ends."""
    efficiency = problem.efficiency
    fixed = totals.communicators * efficiency.communicator_bytes + efficiency.context_bytes
    allocated = (problem.usable_bytes - fixed) / (1.0 + efficiency.fragmentation_ratio)
    buffers = np.where(block.pp > 1, BOUNDARY_BUFFERS, 0.0) * totals.hop_bytes
    return allocated - buffers - totals.temporary_bytes - states.gathered


def _device_bytes(problem: Problem, block: Block, totals: Totals, allocated: Any) -> Any:
    """Everything on the device, where so much is in tensors beside the pipeline's buffers."""
    efficiency = problem.efficiency
    allocated = allocated + np.where(block.pp > 1, BOUNDARY_BUFFERS, 0.0) * totals.hop_bytes
    return (
        memory.reserved_bytes(allocated, efficiency.fragmentation_ratio)
        + totals.communicators * efficiency.communicator_bytes
        + efficiency.context_bytes
    )


def is_at_once(problem: Problem, block: Block) -> Any:
    """Whether a step may have one backward pass, whose gradients come as activations go: where weights are
    whole, and the degree of the block is the largest of them."""
    moves = (block.optim_shard > 1) | (problem.recipe.master_bytes > 0)
    return problem.profile.reduces_by_block & moves & (block.microbatches == 1) & (block.pp == 1)


class States:
    """Bytes of parameters, gradients and optimizer states on the device: of any layer at least, of the ends,
    of the whole model; and the whole copies that sharded parameters need."""

    def __init__(self, problem: Problem, block: Block, totals: Totals) -> None:
        recipe = problem.recipe
        degrees = (block.param_shard, block.grad_shard, block.optim_shard)
        own = recipe.master_bytes + problem.optimizer.state_bytes
        is_offloaded = (block.offload == OPTIMIZER) | (block.offload == BOTH)
        # Where gradients come as activations go, there may be none yet.
        gradient_bytes = np.where(is_at_once(problem, block), 0.0, recipe.gradient_bytes)
        per_state = (recipe.weight_bytes, gradient_bytes, np.where(is_offloaded, 0.0, own))
        dense = sum(nbytes / degree for nbytes, degree in zip(per_state, degrees, strict=True))
        layer, whole, head = totals.layer, totals.whole, totals.head.dense_weights
        self.gathered: Any = 0.0
        if not block.is_open:
            self.gathered = memory.gathered_bytes(
                totals.most.dense_weights, recipe.weight_bytes, block.param_shard, PREFETCHED_LAYERS
            )
        self._dense, self._expert, self._layer = dense, None, layer
        self.whole = dense * whole.dense_weights
        if problem.model.experts is not None:
            shared = [np.gcd(degree, totals.expert_replicas) for degree in degrees]
            expert = sum(nbytes / degree for nbytes, degree in zip(per_state, shared, strict=True))
            self._expert = expert
            self.whole = self.whole + expert * whole.expert_weights
            if not block.is_open:
                self.gathered = self.gathered + memory.gathered_bytes(
                    totals.most.expert_weights, recipe.weight_bytes, shared[0], PREFETCHED_LAYERS
                )
            self.embedding = dense * totals.embedding.dense_weights + expert * totals.embedding.expert_weights
            self.head = dense * head + expert * totals.head.expert_weights
        else:
            self.embedding, self.head = dense * totals.embedding.dense_weights, dense * head

    @property
    def layer_costs(self) -> list[Layers]:
        """Of each layer, as costs that add up."""
        dense = self._layer.dense_weights.scaled(self._dense)
        if self._expert is None:
            return [dense]
        return [dense, self._layer.expert_weights.scaled(self._expert)]

    def layers(self, count: Any) -> Any:
        """Of so many layers, at least."""
        dense_bytes = self._dense * self._layer.dense_weights.of(count)
        if self._expert is None:
            return dense_bytes
        return dense_bytes + self._expert * self._layer.expert_weights.of(count)


class _Kept:
    """Bytes of activations on the device."""

    def __init__(self, block: Block, totals: Totals) -> None:
        self._block, self._totals = block, totals
        self._is_full = block.recompute == FULL
        self._is_selective = block.recompute == SELECTIVE
        self._moves = block.offload >= ACTIVATIONS
        most = totals.most
        pair = np.where(self._is_selective, most.selective_bytes, most.kept_bytes)
        self._two_layers = 2.0 * np.where(self._is_full, most.input_bytes, pair)
        self._again = np.where(self._is_full, most.kept_bytes - most.input_bytes, 0.0)

    def one(self, layers: Any, ends_bytes: Any) -> Any:
        """One microbatch on a stage of so many layers."""
        layer = self._totals.layer
        again = np.where(self._is_full, np.minimum(self._block.recompute_layers, layers), 0)
        plain = layer.kept_bytes.of(layers - again)
        if np.any(self._is_selective):
            plain = np.where(self._is_selective, layer.selective_bytes.of(layers), plain)
        return plain + layer.input_bytes.of(again) + ends_bytes

    def near(self, layers: Any, ends_bytes: Any) -> Any:
        """What of that is on the device at the end of the forward pass."""
        one = self.one(layers, ends_bytes)
        return np.where(self._moves, np.minimum(one, self._two_layers), one)

    def _one_whole(self, whole: Any) -> Any:
        """One microbatch on all stages, as little as may be kept of it."""
        plain = np.where(self._is_selective, whole.selective_bytes, whole.kept_bytes)
        return np.where(self._is_full, whole.input_bytes, plain)

    def held(self, rank: Any, layers: Any, ends_bytes: Any) -> Any:
        """All that `rank` has in flight, on a stage of so many layers."""
        block, totals = self._block, self._totals
        one = self.one(layers, ends_bytes)
        many = in_flight(block.schedule, block.pp, block.microbatches, block.vpp, rank)
        held = np.where(self._moves, np.minimum(one, self._two_layers), many * one)
        held = held + self._again
        waits = waiting(block.schedule, block.microbatches, rank)
        # Where layers differ, or what is kept is moved, more may be held with more of it made again.
        if totals.layer.are_alike and np.any(self._is_full | self._is_selective):
            whole = totals.layer.kept_bytes.of(layers) + ends_bytes
            again = (many - waits) * one + waits * whole
            held = np.where(self._moves, held, np.maximum(held, again))
        return held + waits * totals.layer.output_bytes.of(layers)

    def moved(self, rank: Any, layers: Any, ends_bytes: Any) -> Any:
        """All that `rank` has moved to the host, on a stage of so many layers."""
        if not np.any(self._moves):
            return 0.0
        block = self._block
        held = in_flight(block.schedule, block.pp, block.microbatches, block.vpp, rank)
        return np.where(self._moves, held * self.one(layers, ends_bytes), 0.0)

    def moved_whole(self, end: Any) -> Any:
        """All ranks together, each with as few in flight as the last."""
        block, whole = self._block, self._totals.whole
        held = in_flight(block.schedule, block.pp, block.microbatches, block.vpp, end)
        return np.where(self._moves, held * self._one_whole(whole) / block.vpp, 0.0)

    def whole(self, end: Any) -> Any:
        """All ranks together, each with as few in flight as the last. What is moved counts nothing."""
        block, whole = self._block, self._totals.whole
        held = in_flight(block.schedule, block.pp, block.microbatches, block.vpp, end)
        return np.where(self._moves, 0.0, held) * self._one_whole(whole) / block.vpp
