"""The least time of everything in a block.

Every term is the length of a path through the schedule's graph of actions, or a mean of such lengths,
followed by what comes after all of them; so it can never exceed the evaluated time.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from shardwise.cost.blocks import Subproblem
from shardwise.cost.distinct import distinct_rows
from shardwise.cost.keeping import ACTIVATIONS, BOTH, FULL, OPTIMIZER, SELECTIVE
from shardwise.cost.layers import GRID_FIELDS, WORK_FIELDS, compute_s, grid_cost
from shardwise.cost.nodes import Sums, block_columns, whole_sums
from shardwise.cost.problem import Problem
from shardwise.cost.sync import device_update_s, host_update_s
from shardwise.cost.totals import Totals, Traffic
from shardwise.equations import compute


def grid_lower_bound_s(problem: Problem, subproblem: Subproblem, totals: Totals, traffic: Traffic) -> Any:
    """The same for every schedule and number of chunks: all work over all ranks, or one microbatch through
    the stages and back, where even a weight's gradient may wait."""
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
    """Seconds that everything on a grid takes at least with any micro-batch size up to the row's.

    A sample never takes less in a smaller micro-batch: where tiles and waves are as small as can be, all that
    is left of efficiency grows with size, and latencies are shared by more. (Computation and what it hides
    together grow with both, where the slowdown lies between 1 and 2. Where two communications hide beside the
    same matmuls, less computation may expose more than it saves: there computation counts alone.)
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
    """The same without communication: less, and sooner known."""
    rows, of_row = distinct_rows([getattr(table, name) for name in WORK_FIELDS])
    few = table.take(rows)
    each_s = compute_s(_without_tiles(problem), few) / few.micro_batch_size
    samples = problem.job.global_batch_size / (table.dp * table.pp)
    return samples * each_s[of_row] + problem.profile.host_step_s


def _without_tiles(problem: Problem) -> Problem:
    """The problem on a device whose matmuls fill it whatever their shape: the envelope of its efficiency."""
    efficiency = problem.efficiency
    smooth = replace(efficiency, matmul=replace(efficiency.matmul, tile_m=1, tile_n=1, units=1))
    return replace(problem, device=replace(problem.device, efficiency=smooth))


def grid_work_lower_bound_s(problem: Problem, subproblem: Subproblem, totals: Totals) -> Any:
    """Seconds that everything on a grid takes at least, whatever is kept, sharded or offloaded."""
    whole, m = totals.whole, subproblem.microbatches
    path_s = whole.forward_s + whole.input_s + 2.0 * subproblem.pp * problem.profile.host_action_s
    through_s = path_s + 2.0 * (subproblem.pp - 1) * totals.mean_hop_s
    work_s = np.maximum(m * (path_s + whole.weight_s) / subproblem.pp, through_s)
    return work_s + problem.profile.host_step_s


def added_s(problem: Problem, subproblem: Subproblem, totals: Totals, least: Any, most: Any) -> Any:
    """What recomputation and the offload of activations add to a microbatch's way through the model, where
    the share of the layers' work that is recomputed in full lies between these two.

    What recomputing a share x costs grows with x, what moving the rest exposes falls with it, both piecewise
    straight and together convex: least at either end or where bytes just hide beside one of the passes. Where
    layers differ, a share of the layers is neither that of the time nor that of the bytes: the least time
    goes with the fewest bytes that so many layers may leave.
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
    """What a microbatch keeps at least where that share of all layers keeps inputs alone, whichever they
    are."""
    ends_bytes = totals.embedding.saved_bytes + totals.head.saved_bytes
    saved_bytes = totals.layer.saved_bytes.of((1.0 - share) * layers)
    inputs_bytes = totals.layer.input_bytes.of(share * layers)
    return np.maximum(saved_bytes + inputs_bytes + ends_bytes, totals.whole.input_bytes)


def _exposed_s(problem: Problem, nbytes: Any, sums: Sums) -> Any:
    """What moving bytes to the host beside a forward and back beside a backward adds to both.

    Convex and homogeneous in bytes and computation where the slowdown is at most 2: of a sum it is no more
    than the sum of the parts', so stages may be taken together.
    """
    moved_s, slowdown = nbytes / problem.host_link_bytes_per_s, problem.efficiency.overlap_slowdown
    there_s = compute.exposed_s(moved_s, sums.forward_compute_s, 1.0, slowdown)
    return there_s + compute.exposed_s(moved_s, sums.input_compute_s, 1.0, slowdown)


def micro_batch_work_s(sums: Sums) -> Any:
    """All work of one microbatch."""
    return sums.forward_s + sums.input_s + sums.weight_s


def end_s(problem: Problem, subproblem: Subproblem, totals: Totals) -> Any:
    """Norm, update and host, where the average rank owns as little as any: the one that owns most owns no
    less."""
    whole, pp = totals.whole, subproblem.pp
    owned = whole.dense_weights / subproblem.optim_shard
    if problem.model.experts is not None:
        owned = owned + whole.expert_weights / np.gcd(subproblem.optim_shard, totals.expert_replicas)
    owned = owned / pp
    on_host = (subproblem.offload == OPTIMIZER) | (subproblem.offload == BOTH)
    update_s = np.where(on_host, host_update_s(problem, owned), device_update_s(problem, owned))
    bandwidth = problem.memory_bytes_per_s * problem.efficiency.memory.fraction
    norm_s = 3.0 * owned * problem.recipe.gradient_bytes / bandwidth
    return update_s + norm_s + problem.profile.host_step_s
