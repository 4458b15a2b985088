"""Lower bounds of the device memory and host memory of a subproblem."""

from __future__ import annotations

from typing import Any

import numpy as np

from shardwise.cost.activations import ACTIVATIONS, BOTH, FULL, OPTIMIZER, SELECTIVE
from shardwise.cost.bounds.subproblem import CheapestLayers, LayerCounts, Subproblem, Totals
from shardwise.cost.problem import Problem
from shardwise.cost.sharding import PREFETCHED_LAYERS, host_own_bytes
from shardwise.cost.stage_formulas import allocated_within, boundary_bytes, device_bytes
from shardwise.cost.stages import Sums
from shardwise.equations import memory
from shardwise.schedule import full_moment


def lower_bound_bytes(
    problem: Problem, subproblem: Subproblem, layer_counts: LayerCounts, totals: Totals
) -> Any:
    """Device bytes that everything in a subproblem needs at least on some rank; `totals` are of its grid.

    The rank is the first, the second, the last or the average one, each with its fewest layers. Every layer
    counts as the smallest kind.

    The bound is exact for a known split of a model with one kind of layer, with these exceptions: ranks
    between the second and the last; stages of a rank with unequally many layers; other moments than that
    with most in flight; losses of further micro-batches in flight; buffers for a whole step; reduction
    buffers and a rank's own weights where gradients are reduced by block; and single backward passes.
    """
    states = StateBytes(problem, subproblem, totals)
    single, is_v, split = layer_counts.is_single, layer_counts.is_v, subproblem.split
    temporary, head_temporary = totals.temporary_bytes, totals.head_temporary_bytes
    first, end = 0 * subproblem.pp, subproblem.pp - 1
    saved = _SavedActivations(subproblem, totals)
    head_first = single | is_v
    on_first = (
        states.layers(layer_counts.on_first) + states.embedding + np.where(head_first, states.head, 0.0)
    )
    on_last = states.layers(layer_counts.on_last) + np.where(is_v, 0.0, states.head)
    embedding, head = totals.embedding.saved_bytes, totals.head.saved_bytes
    ends_bytes = embedding + np.where(head_first, head, 0.0)
    activations = saved.outstanding(first, layer_counts.on_first, layer_counts.least_first, ends_bytes)
    work = np.where(head_first, head_temporary, temporary)
    least = on_first + activations + work
    one = np.maximum(saved.on_device(split.first, ends_bytes) + head_temporary, activations)
    least = np.where(is_single_backward(problem, subproblem), on_first + one, least)
    activations = saved.outstanding(
        end, layer_counts.on_last, layer_counts.least_last, np.where(is_v, 0.0, head)
    )
    with_last = on_last + activations + np.where(is_v, temporary, head_temporary)
    least = np.maximum(least, np.where(single, 0.0, with_last))
    second = np.minimum(1, end)
    activations = saved.outstanding(second, layer_counts.on_second, layer_counts.least, 0.0)
    between = states.layers(layer_counts.on_second) + activations + temporary
    least = np.maximum(least, np.where(subproblem.pp > 2, between, 0.0))
    average = (states.whole + saved.whole(layer_counts)) / subproblem.pp + temporary
    return _device_bytes(problem, subproblem, totals, np.maximum(least, average) + states.gathered)


def host_lower_bound_bytes(
    problem: Problem, subproblem: Subproblem, layer_counts: LayerCounts, totals: Totals
) -> Any:
    """Host bytes per device that everything in a subproblem needs at least on some rank.

    It counts optimizer states and activations, on the same ranks as `lower_bound_bytes`.
    """
    layer, saved = totals.layer, _SavedActivations(subproblem, totals)
    is_offloaded = (subproblem.offload == OPTIMIZER) | (subproblem.offload == BOTH)
    own = np.where(is_offloaded, host_own_bytes(problem), 0.0)
    dense, expert = own / subproblem.optim_shard, None
    if problem.model.experts is not None:
        expert = own / np.gcd(subproblem.optim_shard, totals.expert_replicas)

    def states(layers: Any) -> Any:
        dense_bytes = dense * layer.trained_dense.of(layers)
        return dense_bytes if expert is None else dense_bytes + expert * layer.trained_expert.of(layers)

    single, is_v = layer_counts.is_single, layer_counts.is_v
    head_first, first, end = single | is_v, 0 * subproblem.pp, subproblem.pp - 1
    head, embedding = totals.head.saved_bytes, totals.embedding.saved_bytes
    on_first = states(layer_counts.on_first) + dense * totals.embedding.trained_dense
    on_last = states(layer_counts.on_last) + np.where(head_first, 0.0, dense * totals.head.trained_dense)
    on_first = on_first + np.where(head_first, dense * totals.head.trained_dense, 0.0)
    ends_bytes = embedding + np.where(head_first, head, 0.0)
    least = on_first + saved.offloaded(first, layer_counts.on_first, layer_counts.least_first, ends_bytes)
    ends_bytes = np.where(is_v, 0.0, head)
    with_last = on_last + saved.offloaded(end, layer_counts.on_last, layer_counts.least_last, ends_bytes)
    least = np.maximum(least, np.where(single, 0.0, with_last))
    second = np.minimum(1, end)
    between = states(layer_counts.on_second) + saved.offloaded(
        second, layer_counts.on_second, layer_counts.least, 0.0
    )
    least = np.maximum(least, np.where(subproblem.pp > 2, between, 0.0))
    whole = dense * totals.whole.trained_dense + saved.offloaded_whole(layer_counts)
    if expert is not None:
        whole = whole + expert * totals.whole.trained_expert
    return np.maximum(least, whole / subproblem.pp)


def schedules_lower_bound_bytes(
    problem: Problem, subproblem: Subproblem, totals: Totals, in_flight: Any
) -> Any:
    """Lower bound of device bytes for all schedules with at least these micro-batches in flight.

    `in_flight`, of shape (pp, rows), counts them on every stage of each rank (all rows have `pp` ranks) at
    one moment.
    """
    states = StateBytes(problem, subproblem, totals)
    allocated = _spread_bytes(problem, subproblem, totals, states, in_flight)
    allocated = allocated + totals.temporary_bytes
    return _device_bytes(problem, subproblem, totals, allocated + states.gathered)


def _spread_bytes(
    problem: Problem, subproblem: Subproblem, totals: Totals, states: StateBytes, in_flight: Any
) -> Any:
    """Least bytes of all layers on the fullest rank, for any stage split.

    Rank r needs c_r bytes for each of its layers. So k_r = x / c_r layers fill x bytes, and all L layers fit
    at x = L / sum(1 / c_r). Offloaded activations do not count. Where kinds of layers differ, the average
    rank with the fewest micro-batches in flight counts.
    """
    layers, whole = problem.model.layers, totals.whole
    ends = (totals.embedding, totals.head)
    plain = np.where(subproblem.recompute == SELECTIVE, whole.selective_bytes, whole.saved_bytes)
    one = np.where(subproblem.recompute == FULL, whole.input_bytes, plain) - sum(
        end.saved_bytes for end in ends
    )
    saved = np.where(subproblem.offload >= ACTIVATIONS, 0.0, one / layers)
    own = (states.whole - states.embedding - states.head) / layers
    if not totals.layer.are_alike:
        return (own + np.min(in_flight, axis=0) * saved) * layers / len(in_flight)
    return layers / (1.0 / (own + in_flight * saved)).sum(axis=0)


def free_bytes(problem: Problem, subproblem: Subproblem, totals: Totals, states: StateBytes) -> Any:
    """Bytes on a device that are free for states and activations of layers and ends."""
    allocated = allocated_within(problem.efficiency, problem.usable_bytes, totals.communicators)
    buffers = boundary_bytes(subproblem.pp > 1, totals.hop_bytes)
    return allocated - buffers - totals.temporary_bytes - states.gathered


def _device_bytes(problem: Problem, subproblem: Subproblem, totals: Totals, allocated: Any) -> Any:
    """All bytes on the device, given those in tensors without the pipeline's buffers."""
    allocated = allocated + boundary_bytes(subproblem.pp > 1, totals.hop_bytes)
    return device_bytes(problem.efficiency, allocated, totals.communicators)


def is_single_backward(problem: Problem, subproblem: Subproblem) -> Any:
    """Whether a step may have a single backward pass, where gradients replace activations.

    That needs unsharded weights; the degrees of the subproblem are the largest, so they may be 1 in it.
    """
    moves = (subproblem.optim_shard > 1) | (problem.recipe.master_bytes > 0)
    return problem.profile.reduces_by_block & moves & (subproblem.microbatches == 1) & (subproblem.pp == 1)


class StateBytes:
    """Bytes of parameters, gradients and optimizer states on the device.

    `layers` and `layer_costs` are lower bounds for any layers, `embedding`, `head` and `whole` those of the
    ends and of the model. `gathered` are copies of sharded parameters of layers; copies of software that
    gathers further ahead do not count.
    """

    def __init__(self, problem: Problem, subproblem: Subproblem, totals: Totals) -> None:
        recipe = problem.recipe
        degrees = (subproblem.param_shard, subproblem.grad_shard, subproblem.optim_shard)
        own = recipe.master_bytes + problem.optimizer.state_bytes
        is_offloaded = (subproblem.offload == OPTIMIZER) | (subproblem.offload == BOTH)
        # In a single backward pass there may be no gradients yet at the peak.
        gradient_bytes = np.where(is_single_backward(problem, subproblem), 0.0, recipe.gradient_bytes)
        if problem.profile.offloads_gradients:
            gradient_bytes = np.where(is_offloaded, 0.0, gradient_bytes)
        per_state = (recipe.weight_bytes, gradient_bytes, np.where(is_offloaded, 0.0, own))
        dense = sum(nbytes / degree for nbytes, degree in zip(per_state, degrees, strict=True))
        layer, whole = totals.layer, totals.whole
        self.gathered: Any = 0.0
        counts_layers = not (subproblem.is_open or problem.profile.gathered_elements)
        if counts_layers:
            self.gathered = memory.gathered_bytes(
                totals.most.dense_weights, recipe.weight_bytes, subproblem.param_shard, PREFETCHED_LAYERS
            )
        # Per family of weights: bytes of an element, and its elements in a layer and anywhere else.
        self._families = [(dense, "trained_dense")]
        if problem.model.experts is not None:
            shared = [np.gcd(degree, totals.expert_replicas) for degree in degrees]
            expert = sum(nbytes / degree for nbytes, degree in zip(per_state, shared, strict=True))
            self._families.append((expert, "trained_expert"))
            if counts_layers:
                self.gathered = self.gathered + memory.gathered_bytes(
                    totals.most.expert_weights, recipe.weight_bytes, shared[0], PREFETCHED_LAYERS
                )
        self._layer = layer
        self._frozen: list[tuple[Any, str]] = []
        if problem.model.is_partly_frozen:
            self._frozen = [(recipe.weight_bytes / degrees[0], "dense")]
            if problem.model.experts is not None:
                self._frozen.append((recipe.weight_bytes / shared[0], "expert"))
        self.whole, self.embedding, self.head = map(self._of, (whole, totals.embedding, totals.head))

    def _of(self, sums: Sums) -> Any:
        """Bytes of the weights of some blocks together."""
        (first, name), *others = self._families
        total = first * getattr(sums, name)
        for each, name in others:
            total = total + each * getattr(sums, name)
        for each, family in self._frozen:
            total = total + each * (getattr(sums, f"{family}_weights") - getattr(sums, f"trained_{family}"))
        return total

    @property
    def _of_layers(self) -> list[tuple[Any, CheapestLayers]]:
        """Bytes of an element, and elements of the cheapest layers, of each family of weights."""
        frozen = [(each, f"frozen_{family}") for each, family in self._frozen]
        return [(each, getattr(self._layer, name)) for each, name in (*self._families, *frozen)]

    @property
    def layer_costs(self) -> list[CheapestLayers]:
        """Bytes per layer, as costs that add up."""
        return [layers.scaled(each) for each, layers in self._of_layers]

    def layers(self, count: Any) -> Any:
        """Bytes of this number of layers, at least."""
        (first, layers), *others = self._of_layers
        total = first * layers.of(count)
        for each, layers in others:
            total = total + each * layers.of(count)
        return total


class _SavedActivations:
    """Bytes of saved activations on the device."""

    def __init__(self, subproblem: Subproblem, totals: Totals) -> None:
        self._subproblem, self._totals = subproblem, totals
        self._is_full = subproblem.recompute == FULL
        self._is_selective = subproblem.recompute == SELECTIVE
        self._offloads_activations = subproblem.offload >= ACTIVATIONS
        most = totals.most
        pair = np.where(self._is_selective, most.selective_bytes, most.saved_bytes)
        self._two_layers = 2.0 * np.where(self._is_full, most.input_bytes, pair)
        recomputed = np.where(self._is_selective, totals.recomputed_bytes, 0.0)
        self._recomputed_bytes = np.where(self._is_full, most.saved_bytes - most.input_bytes, recomputed)

    def one(self, layers: Any, ends_bytes: Any, stages: Any = 1) -> Any:
        """Bytes of one micro-batch on a number of stages with this number of layers together."""
        layer = self._totals.layer
        most = self._subproblem.recompute_layers * stages
        recomputed = np.where(self._is_full, np.minimum(most, layers), 0)
        plain = layer.saved_bytes.of(layers - recomputed)
        if np.any(self._is_selective):
            plain = np.where(self._is_selective, layer.selective_bytes.of(layers), plain)
        return plain + layer.input_bytes.of(recomputed) + ends_bytes

    def on_device(self, layers: Any, ends_bytes: Any) -> Any:
        """The part of it that is on the device at the end of the forward pass."""
        one = self.one(layers, ends_bytes)
        return np.where(self._offloads_activations, np.minimum(one, self._two_layers), one)

    def _one_whole(self, whole: Any) -> Any:
        """Bytes of one micro-batch on all stages, with as many layers recomputed as possible."""
        plain = np.where(self._is_selective, whole.selective_bytes, whole.saved_bytes)
        return np.where(self._is_full, whole.input_bytes, plain)

    def _full_moment(self, rank: Any) -> Any:
        subproblem = self._subproblem
        return full_moment(subproblem.schedule, subproblem.pp, subproblem.microbatches, subproblem.vpp, rank)

    def _in_flight(self, rank: Any, layers: Any, least: Any, ends_bytes: Any) -> Any:
        """Bytes of all micro-batches that `rank` has in flight, with these `layers` on all its stages, and at
        least `least` on each; `ends_bytes` are those of the ends of the model on it."""
        subproblem, moment = self._subproblem, self._full_moment(rank)
        more = moment.flying - subproblem.vpp * moment.each
        return moment.each * self.one(layers, ends_bytes, subproblem.vpp) + more * self.one(least, 0.0)

    def outstanding(self, rank: Any, layers: Any, least: Any, ends_bytes: Any) -> Any:
        """Bytes of activations on `rank`: in flight, recomputed, and waiting for weight gradients."""
        in_flight = np.where(
            self._offloads_activations,
            self.on_device(least, 0.0),
            self._in_flight(rank, layers, least, ends_bytes),
        )
        # Only schedules with one stage on each rank have pairs that wait at that moment.
        waiting = self._full_moment(rank).waiting * self._totals.layer.waiting_bytes.of(layers)
        return in_flight + self._recomputed_bytes + waiting

    def offloaded(self, rank: Any, layers: Any, least: Any, ends_bytes: Any) -> Any:
        """Bytes that `rank` has offloaded to the host."""
        if not np.any(self._offloads_activations):
            return 0.0
        in_flight = self._in_flight(rank, layers, least, ends_bytes)
        return np.where(self._offloads_activations, in_flight, 0.0)

    def _whole(self, layer_counts: LayerCounts) -> Any:
        """Bytes of all micro-batches in flight on all ranks together, each rank with as few as the last: at
        least one on each of its stages, and the others on stages with the fewest layers."""
        subproblem, whole = self._subproblem, self._one_whole(self._totals.whole)
        flying = self._full_moment(subproblem.pp - 1).flying
        least = np.minimum(np.minimum(layer_counts.least_first, layer_counts.least_last), layer_counts.least)
        more = subproblem.pp * (flying - subproblem.vpp) * self.one(least, 0.0)
        return np.where(subproblem.vpp == 1, flying * whole, whole + more)

    def offloaded_whole(self, layer_counts: LayerCounts) -> Any:
        """Offloaded bytes of all ranks together, at least."""
        return np.where(self._offloads_activations, self._whole(layer_counts), 0.0)

    def whole(self, layer_counts: LayerCounts) -> Any:
        """Device bytes of all ranks together, at least; offloaded activations do not count."""
        return np.where(self._offloads_activations, 0.0, self._whole(layer_counts))
