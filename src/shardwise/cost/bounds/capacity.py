"""Capacity relaxation: the layers that fit on the ranks of a pipeline within a time and their memory.

Each rank takes whole layers, as many as its time and its memory allow. If the ranks together cannot take all
layers, no strategy of the subproblem is that fast. Bounds on sums do not see that layers are indivisible and
that the ends of a model are on single ranks. Entries: `capacity_of` (time and memory) and `memory_capacity`
(memory only).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from shardwise.cost.activations import ACTIVATIONS, FULL, SELECTIVE
from shardwise.cost.bounds.memory import StateBytes, free_bytes
from shardwise.cost.bounds.subproblem import CheapestLayers, Subproblem, Totals, Traffic, major_kind
from shardwise.cost.bounds.time import CriticalPaths, end_s, micro_batch_work_s
from shardwise.cost.problem import Problem
from shardwise.equations import compute
from shardwise.ties import ROUNDING


@dataclass(frozen=True, slots=True)
class EndCosts:
    """Work of one micro-batch on the ends of a model, without layers, in seconds."""

    embedding_s: Any
    head_s: Any


@dataclass(frozen=True, slots=True)
class LayerCapacity:
    """Whether all layers fit: in the memory of all ranks (`fits`), and within the time as well
    (`is_enough`).
    """

    fits: Any
    is_enough: Any


def capacity_of(
    problem: Problem,
    subproblem: Subproblem,
    smallest: Subproblem,
    totals: Totals,
    traffic: Traffic,
    limit_s: Any,
    in_flight: Any,
    paths: CriticalPaths | None = None,
) -> LayerCapacity:
    """Layer capacity within `limit_s` of subproblems with one number of ranks.

    `in_flight`, of shape (pp, ...), counts the fewest micro-batches in flight on every stage of each rank.
    `smallest` are the same subproblems with the most recomputation. Without `paths` every rank may work
    during the whole step; with `paths`, where schedules are known, ramps leave it less time. V-shaped
    schedules have most in flight on every stage of the last rank, so without `paths` they count from there.
    """
    if paths is not None:
        return _capacity(
            problem, subproblem, smallest, totals, traffic, limit_s, in_flight, paths, paths.is_v
        )
    straight = _capacity(problem, subproblem, smallest, totals, traffic, limit_s, in_flight, None, False)
    if len(in_flight) == 1:
        return straight
    folded = _capacity(problem, subproblem, smallest, totals, traffic, limit_s, in_flight[::-1], None, True)
    return LayerCapacity(straight.fits | folded.fits, straight.is_enough | folded.is_enough)


def _capacity(
    problem: Problem,
    subproblem: Subproblem,
    smallest: Subproblem,
    totals: Totals,
    traffic: Traffic,
    limit_s: Any,
    in_flight: Any,
    paths: CriticalPaths | None,
    is_v: Any,
) -> LayerCapacity:
    """The same with the head on the first rank (`is_v`) or the last: for all layers, and for those of the
    major kind.
    """

    def capacity(totals: Totals, layers: int) -> LayerCapacity:
        return _capacity_for(
            problem, subproblem, smallest, totals, layers, traffic, limit_s, in_flight, paths, is_v
        )

    every = capacity(totals, problem.model.layers)
    if totals.major is None:
        return every
    major = capacity(*_only_major(problem, totals))
    return LayerCapacity(every.fits & major.fits, every.is_enough & major.is_enough)


def _only_major(problem: Problem, totals: Totals) -> tuple[Totals, int]:
    """(Totals as if all layers were of the major kind, number of layers of that kind)."""
    kind = major_kind(problem)
    if kind is None or totals.major is None:
        return totals, problem.model.layers
    return replace(totals, layer=totals.major), problem.model.pattern.count(kind)


def _capacity_for(
    problem: Problem,
    subproblem: Subproblem,
    smallest: Subproblem,
    totals: Totals,
    layers: int,
    traffic: Traffic,
    limit_s: Any,
    in_flight: Any,
    paths: CriticalPaths | None,
    is_v: Any,
) -> LayerCapacity:
    """The same for `layers` layers of these costs."""
    pp = len(in_flight)
    work_s = limit_s - end_s(problem, subproblem, totals)
    costs, ends = layer_costs(problem, subproblem, totals, traffic)
    per_layer = Rate.of(costs)
    memory = _Memory(problem, smallest, totals)
    chunks = 1 if paths is None else subproblem.vpp
    hosts_s = 2.0 * problem.profile.host_action_s * chunks
    rank = np.arange(pp).reshape((pp,) + (1,) * np.ndim(work_s))
    has_head = np.where(is_v, rank == 0, rank == pp - 1)
    ends_s = hosts_s + np.where(rank == 0, ends.embedding_s, 0.0) + np.where(has_head, ends.head_s, 0.0)
    each_s = work_s / subproblem.microbatches
    if paths is not None:
        each_s = (work_s - paths.path_s(rank)) / subproblem.microbatches
        if paths.has_steady_state_schedules:
            each_s = np.minimum(each_s, paths.steady_budget_s(rank, work_s))
    fitting = np.maximum(memory.most(in_flight, rank == 0, has_head), 0.0)
    timely = np.maximum(per_layer.most(each_s - ends_s), 0.0)
    by_memory = np.floor(fitting + ROUNDING).sum(axis=0)
    by_both = np.floor(np.minimum(fitting, timely) + ROUNDING).sum(axis=0)
    return LayerCapacity(by_memory >= layers, by_both >= layers)


def layer_costs(
    problem: Problem, subproblem: Subproblem, totals: Totals, traffic: Traffic
) -> tuple[list[CheapestLayers], EndCosts]:
    """(Costs that each layer adds to a rank's work per micro-batch, costs of the ends). The former add up."""
    layer = totals.layer
    is_full, moves = subproblem.recompute == FULL, subproblem.offload >= ACTIVATIONS
    embedding_s = micro_batch_work_s(totals.embedding) + traffic.embedding_s
    head_s = micro_batch_work_s(totals.head) + traffic.head_s
    added_s: Any = traffic.layer_s
    if np.any(moves):
        moved = _OffloadExposure(problem, subproblem, totals)
        added_s = added_s + np.where(moves, moved.layer_s, 0.0)
        embedding_s = embedding_s + np.where(moves, moved.end_exposed_s(totals.embedding), 0.0)
        head_s = head_s + np.where(moves, moved.end_exposed_s(totals.head), 0.0)
    if np.any(is_full):
        share = np.minimum(subproblem.recompute_layers / np.maximum(subproblem.split.largest, 1), 1.0)
        added_s = added_s + np.where(is_full, share * layer.full_s.least, 0.0)
    costs = [layer.work_s, CheapestLayers(added_s)]
    is_selective = subproblem.recompute == SELECTIVE
    if np.any(is_selective):
        costs.append(layer.selective_s.scaled(np.where(is_selective, 1.0, 0.0)))
    return costs, EndCosts(embedding_s, head_s)


class _OffloadExposure:
    """Least exposed seconds of offloading a layer's activations, and the change due to an end of the model.

    It uses the slope of a convex function of bytes and computation, which never exceeds the function.
    """

    def __init__(self, problem: Problem, subproblem: Subproblem, totals: Totals) -> None:
        layer, self._most = totals.layer, totals.most
        plain = np.where(
            subproblem.recompute == SELECTIVE, layer.selective_bytes.least, layer.saved_bytes.least
        )
        nbytes = np.where(subproblem.recompute == FULL, layer.input_bytes.least, plain)
        self._per_s = problem.host_link_bytes_per_s
        self._slowdown = problem.efficiency.overlap_slowdown
        self._moved_s = nbytes / self._per_s

    @property
    def layer_s(self) -> Any:
        """Of one layer, in both passes."""
        passes = (self._most.forward_compute_s, self._most.input_compute_s)
        return sum(compute.exposed_s(self._moved_s, compute_s, 1.0, self._slowdown) for compute_s in passes)

    def end_exposed_s(self, end: Any) -> Any:
        """Least seconds that an end adds on the same stage; negative where it overlaps with more than it
        copies.
        """
        total_s: Any = 0.0
        for layer_s, end_compute_s in (
            (self._most.forward_compute_s, end.forward_compute_s),
            (self._most.input_compute_s, end.input_compute_s),
        ):
            is_exposed = self._moved_s > layer_s
            saved_s = end.saved_bytes / self._per_s
            exposed_s = saved_s - (2.0 - self._slowdown) * end_compute_s
            total_s = total_s + np.where(is_exposed, exposed_s, (self._slowdown - 1.0) * saved_s)
        return total_s


@dataclass(frozen=True, slots=True)
class Rate:
    """Least cost of layers together: each costs at least `least`.

    k layers cost at least k * following - saved, because only some layers are of the cheapest kinds.
    """

    least: Any
    following: Any
    saved: Any

    @staticmethod
    def of(costs: Sequence[CheapestLayers]) -> Rate:
        """The rate of costs that add up."""
        least: Any = sum(cost.least for cost in costs)
        if all(cost.following is None for cost in costs):
            return Rate(least, None, None)
        following: Any = 0.0
        saved: Any = 0.0
        for cost in costs:
            following = following + (cost.least if cost.following is None else cost.following)
            if cost.following is not None:
                saved = saved + cost.count * (cost.following - cost.least)
        return Rate(least, following, saved)

    def plus(self, other: Rate, times: Any) -> Rate:
        """This rate plus `times` another."""
        least = self.least + times * other.least
        if self.following is None and other.following is None:
            return Rate(least, None, None)
        mine, its = self._complete, other._complete
        return Rate(least, mine.following + times * its.following, mine.saved + times * its.saved)

    @property
    def _complete(self) -> Rate:
        return self if self.following is not None else Rate(self.least, self.least, 0.0)

    def most(self, budget: Any) -> Any:
        """The most layers within a budget, not rounded."""
        by_least = budget / self.least
        if self.following is None:
            return by_least
        return np.minimum(by_least, (budget + self.saved) / self.following)


class _Memory:
    """Number of layers that fit in a rank's memory."""

    def __init__(self, problem: Problem, subproblem: Subproblem, totals: Totals) -> None:
        layer, largest = totals.layer, totals.most
        self._states = StateBytes(problem, subproblem, totals)
        self._own = Rate.of(self._states.layer_costs)
        self._outstanding = np.where(subproblem.offload >= ACTIVATIONS, 0.0, 1.0)
        self._is_full = subproblem.recompute == FULL
        is_selective = subproblem.recompute == SELECTIVE
        plain = [layer.saved_bytes]
        if np.any(is_selective):
            plain = [
                layer.saved_bytes.scaled(np.where(is_selective, 0.0, 1.0)),
                layer.selective_bytes.scaled(np.where(is_selective, 1.0, 0.0)),
            ]
        self._plain, self._input = Rate.of(plain), Rate.of([layer.input_bytes])
        self._free_bytes = free_bytes(problem, subproblem, totals, self._states)
        self._recomputes = bool(np.any(self._is_full))
        self._dropped: Any = 0.0
        if self._recomputes:
            recomputed = np.where(self._is_full, largest.saved_bytes - largest.input_bytes, 0.0)
            self._free_bytes = self._free_bytes - recomputed
            dropped = (
                subproblem.vpp * subproblem.recompute_layers * (largest.saved_bytes - layer.input_bytes.least)
            )
            self._dropped = np.where(self._is_full, dropped, 0.0)

    def most(self, in_flight: Any, has_embedding: Any, has_head: Any) -> Any:
        """The most layers with these micro-batches in flight; offloaded activations do not count.

        A layer recomputed in full saves its input, all layers beyond their number save everything. So k
        layers need at least the bytes of k recomputed ones. They also need at least the bytes of k layers
        without recomputation, less the bytes that the recomputed ones drop.
        """
        spare = self._free_bytes - np.where(has_embedding, self._states.embedding, 0.0)
        spare = spare - np.where(has_head, self._states.head, 0.0)
        outstanding = self._outstanding * in_flight
        plain = self._own.plus(self._plain, outstanding).most(spare + outstanding * self._dropped)
        if not self._recomputes:
            return plain
        inputs = self._own.plus(self._input, outstanding).most(spare)
        return np.where(self._is_full, np.minimum(plain, inputs), plain)


def memory_capacity(
    problem: Problem, subproblem: Subproblem, totals: Totals, in_flight: Any, is_v: Any
) -> Any:
    """Whether all layers fit in the memory of all ranks, for subproblems with one number of ranks."""
    fits = _memory_capacity_for(problem, subproblem, totals, problem.model.layers, in_flight, is_v)
    if totals.major is None:
        return fits
    return fits & _memory_capacity_for(problem, subproblem, *_only_major(problem, totals), in_flight, is_v)


def _memory_capacity_for(
    problem: Problem, subproblem: Subproblem, totals: Totals, layers: int, in_flight: Any, is_v: Any
) -> Any:
    """The same for `layers` layers of these costs."""
    memory, pp = _Memory(problem, subproblem, totals), len(in_flight)
    rank = np.arange(pp)[:, None]
    has_head = np.where(is_v, rank == 0, rank == pp - 1)
    fitting = np.maximum(memory.most(in_flight, rank == 0, has_head), 0.0)
    return np.floor(fitting + ROUNDING).sum(axis=0) >= layers
