"""Lower bounds of the step time of a subproblem (docs/concepts/lower-bounds.md).

Every term is the length of a path through the schedule's graph of actions, or a weighted mean of such
lengths. The end of the step is added. So no term exceeds the evaluated time of any strategy in the
subproblem. `grid_work_lower_bound_s`, `grid_lower_bound_s` and `any_micro_batch_lower_bound_s` bound a grid;
`lower_bound_s` adds the critical paths of the schedules (`CriticalPaths`).
"""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np

from shardwise.cost.activations import ACTIVATIONS, BOTH, FULL, OPTIMIZER, SELECTIVE
from shardwise.cost.bounds.subproblem import LayerCounts, Subproblem, Totals, Traffic
from shardwise.cost.layers import GRID_FIELDS, WORK_FIELDS, compute_s, grid_cost
from shardwise.cost.problem import Problem, distinct_rows
from shardwise.cost.sharding import device_update_s, host_update_s, norm_passes_s
from shardwise.cost.stages import Sums, block_columns, whole_sums
from shardwise.equations import compute
from shardwise.schedule import in_flight
from shardwise.strategy import INTERLEAVED, SCHEDULES

# Bounds of grids


def grid_lower_bound_s(problem: Problem, subproblem: Subproblem, totals: Totals, traffic: Traffic) -> Any:
    """Lower bound in seconds for every schedule and number of chunks of a grid.

    The larger of two: all work divided by all ranks; one micro-batch through all stages and back, without
    weight gradients, which may be postponed.
    """
    whole, pp, m = totals.whole, subproblem.pp, subproblem.microbatches
    added = added_s(
        problem, subproblem, totals, np.minimum(subproblem.recompute_layers / problem.model.layers, 1.0), 1.0
    )
    path_s = (
        whole.forward_s + whole.input_s + added + traffic.gathers_s + 2.0 * pp * problem.profile.host_action_s
    )
    work_s = path_s + whole.weight_s + traffic.reduce_scatters_s
    through_s = path_s + 2.0 * (pp - 1) * totals.mean_hop_s
    return np.maximum(m * work_s / pp, through_s) + end_s(problem, subproblem, totals)


def any_micro_batch_lower_bound_s(problem: Problem, table: Any) -> Any:
    """Lower bound in seconds of a grid for any micro-batch size up to the row's.

    A sample never takes less in a smaller micro-batch on a device without tile quantisation: the rest of the
    efficiency grows with size, and more samples share latencies. Computation plus exposed communication grows
    with both where the slowdown is between 1 and 2. Where two kinds of communication overlap with the same
    matmuls, less computation may expose more than it saves; then only computation counts.
    """
    profile = problem.profile
    if profile.expert_overlap > 0.0 and profile.tensor_overlap + profile.tensor_backward_overlap > 0.0:
        return any_micro_batch_compute_bound_s(problem, table)
    rows, of_grid = distinct_rows([getattr(table, name) for name in GRID_FIELDS])
    few = table.take(rows)
    whole = whole_sums(problem, block_columns(grid_cost(_without_tiles(problem), few)))
    each_s = (whole.forward_s + whole.input_s + whole.weight_s) / few.micro_batch_size
    samples = problem.job.global_batch_size / (few.dp * few.pp)
    return (samples * each_s)[of_grid] + problem.profile.host_step_s


def any_micro_batch_compute_bound_s(problem: Problem, table: Any) -> Any:
    """The same without communication: a smaller bound that takes less time to compute."""
    rows, of_row = distinct_rows([getattr(table, name) for name in WORK_FIELDS])
    few = table.take(rows)
    each_s = compute_s(_without_tiles(problem), few) / few.micro_batch_size
    samples = problem.job.global_batch_size / (table.dp * table.pp)
    return samples * each_s[of_row] + problem.profile.host_step_s


def _without_tiles(problem: Problem) -> Problem:
    """The problem on a device without tile quantisation of matmuls: the envelope of its efficiency."""
    efficiency = problem.efficiency
    smooth = replace(efficiency, matmul=replace(efficiency.matmul, tile_m=1, tile_n=1, units=1))
    return replace(problem, device=replace(problem.device, efficiency=smooth))


def grid_work_lower_bound_s(problem: Problem, subproblem: Subproblem, totals: Totals) -> Any:
    """Lower bound in seconds of a grid for any recomputation, sharding and offload."""
    whole, m = totals.whole, subproblem.microbatches
    path_s = whole.forward_s + whole.input_s + 2.0 * subproblem.pp * problem.profile.host_action_s
    through_s = path_s + 2.0 * (subproblem.pp - 1) * totals.mean_hop_s
    work_s = np.maximum(m * (path_s + whole.weight_s) / subproblem.pp, through_s)
    return work_s + problem.profile.host_step_s


def added_s(problem: Problem, subproblem: Subproblem, totals: Totals, least: Any, most: Any) -> Any:
    """Least seconds that recomputation and activation offload add to one micro-batch on the whole model.

    `least` and `most` limit the share of the layers' work that is recomputed in full. Recomputing a share x
    costs time that grows with x, and exposes less offload. Both are piecewise linear and together convex. So
    the least value is at either end, or where the copies just overlap with one of the passes. Where kinds of
    layers differ, the share of time is not the share of bytes: the least time then goes with the fewest
    bytes.
    """
    whole = totals.whole
    is_full, moves = subproblem.recompute == FULL, subproblem.offload >= ACTIVATIONS
    is_selective = subproblem.recompute == SELECTIVE
    plain_s = np.where(is_selective, whole.selective_s, 0.0)
    if not np.any(moves):
        return np.where(is_full, least * whole.full_s, plain_s)
    plain_bytes = np.where(is_selective, whole.selective_bytes, whole.saved_bytes)
    plain_s = plain_s + np.where(moves, _exposed_s(problem, plain_bytes, whole), 0.0)
    if not np.any(is_full):
        return plain_s
    span = whole.saved_bytes - whole.input_bytes

    def recompute_share_s(x: Any, offload_share: Any) -> Any:
        moved_s = _exposed_s(problem, whole.saved_bytes - offload_share * span, whole)
        return x * whole.full_s + np.where(moves, moved_s, 0.0)

    if not totals.layer.are_alike:
        left_s = _exposed_s(problem, _least_saved_bytes(totals, problem.model.layers, most), whole)
        return np.where(is_full, least * whole.full_s + np.where(moves, left_s, 0.0), plain_s)
    full_s = np.minimum(recompute_share_s(least, least), recompute_share_s(most, most))
    for computation_s in (whole.forward_compute_s, whole.input_compute_s):
        hidden_bytes = computation_s * problem.host_link_bytes_per_s
        kink = np.clip((whole.saved_bytes - hidden_bytes) / np.maximum(span, 1.0), least, most)
        full_s = np.minimum(full_s, recompute_share_s(kink, kink))
    return np.where(is_full, full_s, plain_s)


def _least_saved_bytes(totals: Totals, layers: int, share: Any) -> Any:
    """Least bytes saved per micro-batch if that share of all layers saves its input only, whichever layers
    they are.
    """
    ends_bytes = totals.embedding.saved_bytes + totals.head.saved_bytes
    saved_bytes = totals.layer.saved_bytes.of((1.0 - share) * layers)
    inputs_bytes = totals.layer.input_bytes.of(share * layers)
    return np.maximum(saved_bytes + inputs_bytes + ends_bytes, totals.whole.input_bytes)


def _exposed_s(problem: Problem, nbytes: Any, sums: Sums) -> Any:
    """Exposed seconds of copying bytes to the host in the forward pass and back in the backward pass.

    The function is convex and homogeneous in bytes and computation where the slowdown is at most 2. So its
    value for a sum is at most the sum over the stages, and stages may be taken together.
    """
    moved_s, slowdown = nbytes / problem.host_link_bytes_per_s, problem.efficiency.overlap_slowdown
    there_s = compute.exposed_s(moved_s, sums.forward_compute_s, 1.0, slowdown)
    return there_s + compute.exposed_s(moved_s, sums.input_compute_s, 1.0, slowdown)


def micro_batch_work_s(sums: Sums) -> Any:
    """All work of one micro-batch."""
    return sums.forward_s + sums.input_s + sums.weight_s


def end_s(problem: Problem, subproblem: Subproblem, totals: Totals) -> Any:
    """Seconds of gradient norm, update and host, for the average rank, which owns no more than the rank with
    most.
    """
    whole, pp = totals.whole, subproblem.pp
    owned = whole.trained_dense / subproblem.optim_shard
    if problem.model.experts is not None:
        owned = owned + whole.trained_expert / np.gcd(subproblem.optim_shard, totals.expert_replicas)
    owned = owned / pp
    on_host = (subproblem.offload == OPTIMIZER) | (subproblem.offload == BOTH)
    update_s = np.where(on_host, host_update_s(problem, owned), device_update_s(problem, owned))
    return update_s + norm_passes_s(problem, owned) + problem.profile.host_step_s


# Bounds of schedules

ONE_F_ONE_B = SCHEDULES.index("1f1b")
GPIPE = SCHEDULES.index("gpipe")


def lower_bound_s(
    problem: Problem, subproblem: Subproblem, layer_counts: LayerCounts, totals: Totals, traffic: Traffic
) -> Any:
    """Lower bound in seconds of a subproblem; `totals` and `traffic` are of its grid."""
    paths = CriticalPaths(problem, subproblem, layer_counts, totals, traffic)
    return np.maximum(paths.whole_s, paths.ranks_s) + end_s(problem, subproblem, totals)


class CriticalPaths:
    """Paths through the actions of a subproblem's schedules: lower bounds of the pipeline makespan.

    `whole_s` are paths of the whole model's work, `ranks_s` those of single ranks, `steady_budget_s` the
    inverse of the steady-state bound. Gathering before the first forward and reduction after the last
    backward do not count.
    """

    def __init__(
        self,
        problem: Problem,
        subproblem: Subproblem,
        layer_counts: LayerCounts,
        totals: Totals,
        traffic: Traffic,
    ) -> None:
        self._problem, self._subproblem, self._layer_counts = problem, subproblem, layer_counts
        self._totals, self._traffic = totals, traffic
        whole, stages = totals.whole, subproblem.stages
        self._is_full, self._is_selective = subproblem.recompute == FULL, subproblem.recompute == SELECTIVE
        self._offloads_activations = subproblem.offload >= ACTIVATIONS
        self._recomputes, self._offloads = (
            bool(np.any(self._is_full)),
            bool(np.any(self._offloads_activations)),
        )
        self._host_s = problem.profile.host_action_s
        self._is_1f1b, self._is_interleaved = (
            subproblem.schedule == ONE_F_ONE_B,
            subproblem.schedule == INTERLEAVED,
        )
        added = added_s(problem, subproblem, totals, *self._recomputed())
        path_s = whole.forward_s + whole.input_s + added + traffic.gathers_s + 2.0 * stages * self._host_s
        self._work_s = path_s + whole.weight_s + traffic.reduce_scatters_s
        # One trip along the ranks per chunk, and a hop from the last rank to the first between two chunks,
        # except in a V.
        along_s = subproblem.vpp * (subproblem.pp - 1) * totals.mean_hop_s
        hops_s = along_s + np.where(layer_counts.is_v, 0, subproblem.vpp - 1) * totals.hop_s
        self._through_s = np.where(layer_counts.is_split, path_s, self._work_s) + 2.0 * hops_s

    def _recomputed(self) -> tuple[Any, Any]:
        """(Least, most) share of the layers that is recomputed in full."""
        if not self._recomputes:
            return 0.0, 0.0
        least = self._recomputed_share(self._subproblem.recompute_layers)
        return least, np.maximum(np.minimum(self._most_recomputed(), 1.0), least)

    def _recomputed_share(self, each: Any) -> Any:
        """Least share of the model's forward work that is repeated if each stage recomputes `each` layers."""
        layer_counts, split = self._layer_counts, self._subproblem.split
        count = np.maximum(self._subproblem.stages - 2, 0) * np.minimum(each, layer_counts.least)
        count = count + np.minimum(each, split.first)
        count = count + np.where(layer_counts.is_single, 0, np.minimum(each, split.last))
        least = np.minimum(each / np.maximum(split.largest, 1), 1.0)
        full_s = self._totals.layer.full_s.of(count) / self._totals.whole.full_s
        return np.maximum(least, np.minimum(full_s, 1.0))

    def _most_recomputed(self) -> Any:
        """Largest share of layers that are recomputed."""
        return self._subproblem.stages * self._subproblem.recompute_most / self._problem.model.layers

    @property
    def whole_s(self) -> Any:
        """Bounds by the work of the whole model, for any stage split.

        - One micro-batch through all stages and back (1F1B: once for every pp of them).
        - All work over all ranks: m W / p on average. Where backwards of other stages follow a rank's last
          action (1F1B, GPipe), stages that shrink by (m-1)/m balance waiting and work. The least of max_s
          (sum_{k<s} w_k + m w_s) is then W / (1 - (1 - 1/m)^p).
        - Interleaved 1F1B: the mean of `_steady_s` over the ranks.
        """
        subproblem, work_s, m, pp = (
            self._subproblem,
            self._work_s,
            self._subproblem.microbatches,
            self._subproblem.pp,
        )
        rounds_s = np.where(self._is_1f1b, -(-m // pp), 1) * self._through_s
        tapered_s = work_s / (1.0 - (1.0 - 1.0 / m) ** pp)
        spread_s = np.where(self._is_1f1b | (subproblem.schedule == GPIPE), tapered_s, m * work_s / pp)
        longest_s = np.maximum(spread_s, rounds_s)
        if not np.any(self._is_interleaved):
            return longest_s
        return np.maximum(longest_s, np.where(self._is_interleaved & (m > pp), self._mean_steady_s(), 0.0))

    def _mean_steady_s(self) -> Any:
        """Lower bound of the mean of `_steady_s` over all ranks, if only the whole of their work is known.

        The first chunk of rank r < (p-1)/2 counts at most p-2r-1 times less. The last one of rank r > (p-1)/2
        counts 2r+1-p times more. The stages after the last chunks of lower ranks count at least r times more.
        """
        subproblem, totals, layer_counts, split = (
            self._subproblem,
            self._totals,
            self._layer_counts,
            self._subproblem.split,
        )
        pp, m, layers = subproblem.pp, subproblem.microbatches, self._problem.model.layers
        head_s = micro_batch_work_s(totals.head) + self._traffic.head_s + 2.0 * self._host_s
        if np.all(pp == 2) and totals.layer.are_alike:
            return self._mean_steady_of_two_s(head_s)
        rounds = pp * pp // 4
        first_s = self._most_s(np.minimum(layers // subproblem.stages, split.largest))
        less_s = (pp - 1) * first_s + (rounds - (pp - 1)) * self._most_s(split.largest)
        lower_bound_s = self._stage_s(layer_counts.least, None, 0.0)
        more_s = (rounds - (pp - 1) + (pp - 1) * (pp - 2) / 2.0) * lower_bound_s + 2 * (pp - 1) * head_s
        mean_s = (more_s - less_s) / pp + (pp - 1) * totals.hop_s
        return self._through_s + (m - pp) * self._work_s / pp + mean_s

    def _mean_steady_of_two_s(self, head_s: Any) -> Any:
        """The same for two ranks, weighted so that the first stage's work x does not count.

        W is the work of the model, S one micro-batch through all stages and back, y the last stage's work, c
        a hop. For the ranks' work, w_0 + w_1 = W and w_0 - w_1 >= x - y: stages between the ends share
        evenly, and the later ones have more. The bounds are T_0 = S + 2 c + y + (m-2) w_0 - x and T_1 = S +
        (m-2) w_1 + y. With weight a for T_0, a T_0 + (1-a) T_1 >= S + (m-2) W/2 + (a - 1/2)(m-2)(x-y) + y + 2
        a c - a x. At a = (m-2) / (2m-6) x cancels: S + (m-2) W/2 + (1-a) y + 2 a c.
        """
        m = self._subproblem.microbatches
        weight = (m - 2) / np.maximum(2 * m - 6, 1)
        mean_s = (m - 2) * self._work_s / 2.0 + (1.0 - weight) * head_s + 2.0 * weight * self._totals.hop_s
        return np.where(m > 3, self._through_s + mean_s, 0.0)

    def _most_s(self, layers: Any) -> Any:
        """Largest time of a stage with this number of layers and the embedding.

        All other layers and the head take their least; the rest of the whole is left.
        """
        head_s = micro_batch_work_s(self._totals.head) + self._traffic.head_s
        others = self._problem.model.layers - layers
        return self._work_s - self._layers_s(others, None, self._subproblem.stages) - head_s

    def _layers_s(self, layers: Any, end: Sums | None, stages: Any = 1) -> Any:
        """Least seconds of one micro-batch, forward and backward, of layers on a number of stages, and an
        end.

        Without full recomputation and the end's own work.
        """
        costs = self._totals.layer
        work_s = costs.work_s.of(layers) + layers * self._traffic.layer_s
        if np.any(self._is_selective):
            work_s = work_s + np.where(self._is_selective, costs.selective_s.of(layers), 0.0)
        if self._offloads:
            work_s = work_s + np.where(self._offloads_activations, self._moved_s(layers, end, stages), 0.0)
        return work_s

    def _moved_s(self, layers: Any, end: Sums | None, stages: Any) -> Any:
        """Least exposed seconds of activation offload: the fewest bytes with the most computation."""
        costs, most, subproblem = self._totals.layer, self._totals.most, self._subproblem
        recomputed = np.where(self._is_full, np.minimum(stages * subproblem.recompute_most, layers), 0)
        nbytes = costs.saved_bytes.of(layers - recomputed) + costs.input_bytes.of(recomputed)
        nbytes = np.where(self._is_selective, costs.selective_bytes.of(layers), nbytes)
        forward_s, input_s = layers * most.forward_compute_s, layers * most.input_compute_s
        if end is not None:
            nbytes = nbytes + end.saved_bytes
            forward_s, input_s = forward_s + end.forward_compute_s, input_s + end.input_compute_s
        moved_s, slowdown = (
            nbytes / self._problem.host_link_bytes_per_s,
            self._problem.efficiency.overlap_slowdown,
        )
        there_s = compute.exposed_s(moved_s, forward_s, 1.0, slowdown)
        return there_s + compute.exposed_s(moved_s, input_s, 1.0, slowdown)

    def _stage_s(self, layers: Any, end: Sums | None, end_s: Any) -> Any:
        """Least seconds of one micro-batch, forward and backward, of a stage; `end_s` is the work of
        its end.
        """
        stage_s = self._layers_s(layers, end) + 2.0 * self._host_s + end_s
        return stage_s + self._recompute_s(layers) if self._recomputes else stage_s

    def _recompute_s(self, layers: Any) -> Any:
        """Seconds of recomputing a stage's layers in full, for the fewest recomputed layers."""
        recomputed = np.minimum(self._subproblem.recompute_layers, layers)
        return np.where(self._is_full, self._totals.layer.full_s.of(recomputed), 0.0)

    def _stages_s(self, stages: Any, layers: Any) -> Any:
        """Least seconds of `stages` stages between the ends with `layers` layers together, at least `least`
        on each.
        """
        stages_s = self._layers_s(layers, None, stages) + stages * 2.0 * self._host_s
        return (
            stages_s + stages * self._recompute_s(self._layer_counts.least) if self._recomputes else stages_s
        )

    @property
    def ranks_s(self) -> Any:
        """Bounds by the work of single ranks: the first, the second, the last but one and the last.

        Before a rank's work come the forwards of the stages before it. Where backwards end every path, those
        of these stages follow its work.
        """
        subproblem, layer_counts, split, totals = (
            self._subproblem,
            self._layer_counts,
            self._subproblem.split,
            self._totals,
        )
        pp, vpp, m = subproblem.pp, subproblem.vpp, subproblem.microbatches
        embedding_s = micro_batch_work_s(totals.embedding) + self._traffic.embedding_s
        head_s = micro_batch_work_s(totals.head) + self._traffic.head_s
        single = layer_counts.is_single
        first_s = self._stage_s(split.first, totals.embedding, embedding_s)
        if np.any(single):
            first_s = np.where(single, first_s + head_s - self._single_slack_s(), first_s)
        if np.all(single):
            return m * first_s
        last_s = self._stage_s(split.last, totals.head, head_s)
        inner_s = self._stage_s(layer_counts.least, None, 0.0)
        if np.any(layer_counts.is_v):
            more_first_s = np.where(
                layer_counts.is_v, last_s, self._stages_s(vpp - 1, layer_counts.on_first - split.first)
            )
        else:
            more_first_s = self._stages_s(vpp - 1, layer_counts.on_first - split.first)
        more_first_s = np.where(single, 0.0, more_first_s)
        between = layer_counts.on_last - np.where(layer_counts.is_v, 0, split.last)
        on_last_s = self._stages_s(np.where(layer_counts.is_v, 2, vpp - 1), between) + np.where(
            layer_counts.is_v, 0.0, last_s
        )
        path_s, step_s = self._ramps_s(first_s, inner_s)
        last_path_s = np.where(pp > 2, path_s + np.maximum(pp - 2, 0) * step_s, path_s)
        longest_s = np.maximum(
            m * (first_s + more_first_s), np.where(single, 0.0, last_path_s + m * on_last_s)
        )
        ends = (first_s, more_first_s, on_last_s, last_s)
        has_middle = bool(np.any(pp > 2))
        middle_s = (
            (self._stages_s(vpp, layer_counts.on_second), self._stages_s(vpp, layer_counts.on_third))
            if has_middle
            else None
        )
        if middle_s is not None:
            third_path_s = path_s + np.maximum(pp - 3, 0) * step_s
            between_s = np.maximum(path_s + m * middle_s[0], third_path_s + m * middle_s[1])
            longest_s = np.maximum(longest_s, np.where(pp > 2, between_s, 0.0))
        has_split_backward = layer_counts.is_split & ~layer_counts.is_v
        if np.any(has_split_backward):
            split_backward_s = self._split_backward_s(0 * pp, split.first, totals.embedding, first_s)
            if has_middle:
                inner = self._split_backward_s(np.minimum(1, pp - 2), layer_counts.least, None, inner_s)
                split_backward_s = np.maximum(split_backward_s, np.where(pp > 2, inner, 0.0))
            longest_s = np.maximum(longest_s, np.where(has_split_backward & ~single, split_backward_s, 0.0))
        is_steady = self._is_1f1b | self._is_interleaved
        if np.any(is_steady):
            steady_s = self._longest_steady_s(ends, inner_s, middle_s)
            longest_s = np.maximum(longest_s, np.where(is_steady & ~single, steady_s, 0.0))
        return longest_s

    def _longest_steady_s(
        self, ends: tuple[Any, Any, Any, Any], inner_s: Any, middle_s: tuple[Any, Any] | None
    ) -> Any:
        """The longest of `_steady_s` over the first, the second, the last but one and the last rank."""
        layer_counts, pp = self._layer_counts, self._subproblem.pp
        first_s, more_first_s, on_last_s, last_s = ends
        after = (last_s, inner_s + 2.0 * self._totals.hop_s)
        chunked = self._subproblem.vpp > 1
        full_s = np.where(chunked, self._stage_s(layer_counts.full_first, None, 0.0), first_s)
        steady_s = self._steady_s(0 * pp, first_s, more_first_s, full_s, after)
        own_s = np.where(chunked, inner_s, last_s)
        others_s = np.where(chunked, on_last_s - inner_s, 0.0)
        ended_s = np.where(chunked, np.maximum(last_s, self._longest_back_s()), last_s)
        steady_s = np.maximum(steady_s, self._steady_s(pp - 1, own_s, others_s, ended_s, after))
        if middle_s is None:
            return steady_s
        fullest = (layer_counts.full_second, layer_counts.full_third)
        for rank, rank_s, layers in zip((np.minimum(1, pp - 2), pp - 2), middle_s, fullest, strict=True):
            full_s = self._stage_s(layers, None, 0.0)
            between_s = self._steady_s(rank, inner_s, rank_s - inner_s, full_s, after)
            steady_s = np.maximum(steady_s, np.where(pp > 2, between_s, 0.0))
        return steady_s

    def _single_slack_s(self) -> Any:
        """On a single stage, offload may also overlap with the head."""
        if not self._offloads:
            return 0.0
        head = self._totals.head
        return np.where(self._offloads_activations, head.forward_compute_s + head.input_compute_s, 0.0)

    def _ramps_s(self, first_s: Any, inner_s: Any) -> tuple[Any, Any]:
        """(Seconds before and after a rank's work due to the first stage, due to each stage between)."""
        layer_counts, totals, host_s = self._layer_counts, self._totals, self._host_s
        forward_s = totals.layer.forward_s
        there_s = totals.embedding.forward_s + forward_s.of(self._subproblem.split.first) + host_s
        hops_s = np.where(layer_counts.is_split, 1.0, 2.0) * totals.hop_s
        path_s = np.where(layer_counts.is_split, there_s, first_s) + hops_s
        return path_s, np.where(
            layer_counts.is_split, forward_s.of(layer_counts.least) + host_s, inner_s
        ) + hops_s

    def _longest_back_s(self) -> Any:
        """Least backward time of the fullest stage between the ends."""
        middle = np.maximum(self._subproblem.stages - 2, 1)
        layers = -(-self._subproblem.split.between // middle)
        return self._input_s(layers, None) + self._totals.layer.weight_s.of(layers)

    def _split_backward_s(self, rank: Any, layers: Any, end: Sums | None, stage_s: Any) -> Any:
        """Bound of a rank with split backwards.

        It is the time until the first micro-batch reaches the rank's first backward, plus all the work that
        is left then. At most as many forwards are done before as the rank has in flight.
        """
        subproblem, layer_counts, totals, host_s = (
            self._subproblem,
            self._layer_counts,
            self._totals,
            self._host_s,
        )
        pp, m = subproblem.pp, subproblem.microbatches
        there_s = totals.whole.forward_s + pp * host_s + (pp - 1) * totals.mean_hop_s
        inner_s = self._input_s(layer_counts.least, None)
        back_s = np.maximum(pp - 2 - rank, 0) * inner_s + self._input_s(subproblem.split.last, totals.head)
        back_s = back_s + (pp - 1 - rank) * totals.hop_s
        outstanding = np.minimum(in_flight(subproblem.schedule, pp, m, subproblem.vpp, rank), m)
        left_s = self._input_s(layers, end) + totals.layer.weight_s.of(layers)
        left_s = left_s + (end.weight_s if end is not None else 0.0)
        return there_s + back_s + (m - outstanding) * stage_s + outstanding * left_s

    def _input_s(self, layers: Any, end: Sums | None) -> Any:
        """Least input-gradient time of one micro-batch on a stage, with its recomputation."""
        costs = self._totals.layer
        input_s = costs.input_s.of(layers) + self._host_s + (end.input_s if end is not None else 0.0)
        if np.any(self._is_selective):
            input_s = input_s + np.where(self._is_selective, costs.selective_s.of(layers), 0.0)
        return input_s + self._recompute_s(layers) if self._recomputes else input_s

    @property
    def is_v(self) -> Any:
        """Whether the last stage is on the first rank."""
        return self._layer_counts.is_v

    @cached_property
    def _first_ramps_s(self) -> tuple[Any, Any]:
        embedding_s = micro_batch_work_s(self._totals.embedding) + self._traffic.embedding_s
        first_s = self._stage_s(self._subproblem.split.first, self._totals.embedding, embedding_s)
        return self._ramps_s(first_s, self._steady_stages_s[2])

    def path_s(self, rank: Any) -> Any:
        """Seconds before the work of ranks, and after it where their last action is their first stage's
        backward.

        0 for the first rank.
        """
        path_s, step_s = self._first_ramps_s
        return np.where(rank > 0, path_s + (rank - 1) * step_s, 0.0)

    @property
    def has_steady_state_schedules(self) -> bool:
        """Whether some schedule has a steady state: `steady_budget_s` is finite."""
        return bool(np.any(self._is_1f1b | self._is_interleaved))

    @cached_property
    def _steady_stages_s(self) -> tuple[Any, Any, Any]:
        """Least seconds of (the last stage, the stage that ends a steady state, a stage between the ends)."""
        subproblem, head_s = self._subproblem, micro_batch_work_s(self._totals.head) + self._traffic.head_s
        last_s = self._stage_s(subproblem.split.last, self._totals.head, head_s)
        ended_s = np.maximum(last_s, np.where(subproblem.vpp > 1, self._longest_back_s(), 0.0))
        return last_s, ended_s, self._stage_s(self._layer_counts.least, None, 0.0)

    def steady_budget_s(self, rank: Any, limit_s: Any) -> Any:
        """Largest work of one micro-batch on all stages of a rank for which `_steady_s` stays within a limit.

        Infinite where the schedule has no steady state.
        """
        subproblem, hop_s, layers = self._subproblem, self._totals.hop_s, self._problem.model.layers
        pp, m = subproblem.pp, subproblem.microbatches
        last_s, ended_s, inner_s = self._steady_stages_s
        count = pp - 1 - rank
        ramps_s = np.maximum(count - 1, 0) * (inner_s + 2.0 * hop_s) + last_s + 2.0 * hop_s
        left_s = limit_s - self._through_s - np.where(count > 0, ramps_s, 0.0)
        less, more = np.maximum(pp - 2 * rank - 1, 0), np.maximum(2 * rank + 1 - pp, 0)
        steady_s = left_s - more * np.where(count == 0, ended_s, inner_s)
        most = subproblem.split.largest
        fullest = np.where(rank == 0, np.minimum(layers // subproblem.stages, most), most)
        steady_s = steady_s + less * self._most_s(fullest)
        steady_s = np.where(self._is_interleaved & (m > pp), steady_s / np.maximum(m - pp, 1), np.inf)
        if not np.any(self._is_1f1b):
            return steady_s
        rounds = m - pp + rank
        steady_1f1b_s = np.where(rounds > 0, left_s / np.maximum(rounds, 1), np.inf)
        return np.where(self._is_1f1b & (pp > 1), steady_1f1b_s, steady_s)

    def _steady_s(self, rank: Any, first_s: Any, others_s: Any, last_s: Any, after: tuple[Any, Any]) -> Any:
        """Bound by a rank's steady state, from its first backward to its last forward.

        The first micro-batch reaches the first backward before the steady state; the last micro-batch
        continues from the last forward after it. Until its first backward a rank has done as many forwards as
        it has in flight, and as many backwards remain after its last forward. Let p be the ranks, m the
        micro-batches, s_c the time of its chunk c and W that of the model. The bound is W + 2 (n-1) hops +
        the stages after its last chunk, plus

            1F1B:         (m - p + r) s
            interleaved:  (m - p) sum(s) - max(p - 2 r - 1, 0) s_first + max(2 r + 1 - p, 0) s_last

        On the last rank, s_last may be any stage's backward instead. The path then leaves the rank's order
        with the last group of p micro-batches: its first one leads to that stage, where the backwards of the
        others follow.
        """
        m, pp = self._subproblem.microbatches, self._subproblem.pp
        count = pp - 1 - rank
        end_s, inner_s = after
        ramps_s = np.maximum(count - 1, 0) * inner_s + end_s + 2.0 * self._totals.hop_s
        less, more = np.maximum(pp - 2 * rank - 1, 0), np.maximum(2 * rank + 1 - pp, 0)
        own_s = (m - pp - less) * first_s + (m - pp) * others_s + more * last_s
        own_s = np.where(self._is_1f1b, (m - pp + rank) * first_s, own_s)
        has_steady_state = np.where(self._is_1f1b, m > pp - rank, (m - pp >= less) & ((m > pp) | (more > 0)))
        return np.where(has_steady_state, self._through_s + np.where(count > 0, ramps_s, 0.0) + own_s, 0.0)
