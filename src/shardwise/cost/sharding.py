"""ZeRO sharding of parameters, gradients and optimizer states: traffic, memory and the optimizer update.

`sharding_of` estimates the exposed all-gathers and reduce-scatters of every micro-batch. `shards_of` adds the
reduction and gathering once per step, bytes per rank and the end of the step. docs/concepts/cost-model.md,
sections 11, 13 and 14.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from shardwise.cost.collectives import CollectiveModel, Sizes, inner_part, outer_part
from shardwise.cost.layers import BlockCost, GridCost, has_single_backward
from shardwise.cost.problem import Machine, Problem
from shardwise.cost.recipe import FP32_BYTES
from shardwise.cost.stages import PartitionCosts, over_places
from shardwise.equations import compute, memory
from shardwise.operators import has_trained_weights

SHARD_FIELDS = ("param_shard", "grad_shard", "optim_shard")

PREFETCHED_LAYERS = 2.0
"""Layers whose sharded parameters are gathered at the same time: the current one and the next (prefetch)."""


@dataclass(frozen=True, slots=True)
class Degrees:
    """Sharding of one family of weights (dense or expert) over the group of its replicas: degrees and groups.

    `scatter` are the ranks that reduce-scatter at the end of a step, `replicate` those that all-reduce the
    shards. `regather` are those with the same parameters but different optimizer states. Groups are sizes per
    tier. `replicas` is the size of the whole group.
    """

    param: Any
    grad: Any
    optim: Any
    replicas: Any
    param_sizes: Sizes
    grad_sizes: Sizes
    scatter: Sizes
    replicate: Sizes
    regather: Sizes


def degrees_of(group: Sizes, replicas: Any, param: Any, grad: Any, optim: Any) -> Degrees:
    """The groups of shards, nested in `group`; each uses the innermost tiers that it can."""
    states = inner_part(group, optim)
    scatter = inner_part(group, np.where(grad > 1, grad, optim))
    param_sizes = inner_part(states, param)
    return Degrees(
        param=param,
        grad=grad,
        optim=optim,
        replicas=replicas,
        param_sizes=param_sizes,
        grad_sizes=inner_part(group, grad),
        scatter=scatter,
        replicate=outer_part(group, scatter),
        regather=outer_part(states, param_sizes),
    )


@dataclass(frozen=True, slots=True)
class GridSharding:
    """Sharding degrees of a grid, and exposed traffic of each block per micro-batch.

    Traffic has shape (blocks, rows), with blocks = kinds of layers, embedding, head. All-gathers of
    parameters overlap with the forward and with the input gradient, reduce-scatters of gradients with the
    weight gradient. The degree of an expert weight is the greatest common divisor of the row's degree and the
    expert's replicas. Where `is_whole`, both happen once per step (`is_whole_in_pipeline`), not here.
    """

    dense: Degrees
    expert: Degrees
    is_whole: Any
    forward_gather_s: Any
    backward_gather_s: Any
    reduce_scatter_s: Any


def sharding_of(problem: Problem, table: Any, grid: GridCost) -> GridSharding:
    """Sharding of each row; `grid` has the same rows as `table`."""
    dense, expert = shard_degrees(problem, table, grid)
    blocks = ShardedBlocks.of(grid.blocks)
    exposed = blocks.exposed(problem, *blocks.traffic_s(problem, table, grid.fabric, dense, expert))
    return GridSharding(
        dense,
        expert,
        is_whole_in_pipeline(problem, table),
        exposed.forward_gather_s,
        exposed.backward_gather_s,
        exposed.reduce_scatter_s,
    )


def shard_degrees(problem: Problem, table: Any, grid: GridCost) -> tuple[Degrees, Degrees]:
    """The groups that shard dense and expert weights.

    Where the software has instances of its optimizer, an expert's replicas are divided among them too, and
    share the states within each. The number of instances is that of dense weights, dp * cp / optim_shard.
    """
    own = [np.gcd(getattr(table, name), grid.expert_replicas) for name in SHARD_FIELDS]
    if problem.profile.shards_experts_by_instance:
        within = np.maximum(grid.expert_replicas * table.optim_shard // grid.replicas, 1)
        is_optimizer_alone = (table.param_shard == 1) & (table.grad_shard == 1)
        own[-1] = np.where(is_optimizer_alone, np.gcd(own[-1], within), own[-1])
    dense = degrees_of(grid.groups.data, grid.replicas, *(getattr(table, name) for name in SHARD_FIELDS))
    return dense, degrees_of(grid.groups.experts_data, grid.expert_replicas, *own)


@dataclass(frozen=True, slots=True)
class Exposed:
    """Exposed seconds that sharding adds to the passes of one micro-batch."""

    forward_gather_s: Any
    backward_gather_s: Any
    reduce_scatter_s: Any


@dataclass(frozen=True, slots=True)
class ShardedBlocks:
    """Sharded weights of several blocks, and the computation of the three passes that overlaps with their
    traffic.

    Shape (blocks, grids).
    """

    dense_weights: Any
    expert_weights: Any
    trained_dense: Any
    trained_expert: Any
    forward_compute_s: Any
    input_compute_s: Any
    weight_compute_s: Any

    @staticmethod
    def of(blocks: Sequence[BlockCost]) -> ShardedBlocks:
        """The columns of blocks with known costs."""
        return ShardedBlocks(
            dense_weights=np.array([block.dense_weights for block in blocks]),
            expert_weights=np.array([block.expert_weights for block in blocks]),
            trained_dense=np.array([block.trained_dense for block in blocks]),
            trained_expert=np.array([block.trained_expert for block in blocks]),
            forward_compute_s=np.array([block.forward.compute_s for block in blocks]),
            input_compute_s=np.array([block.backward_input.compute_s for block in blocks]),
            weight_compute_s=np.array([block.backward_weight.compute_s for block in blocks]),
        )

    @property
    def across(self) -> ShardedBlocks:
        """The same with an axis between blocks and grids, for several degrees."""
        return ShardedBlocks(*(getattr(self, f.name)[:, None] for f in fields(ShardedBlocks)))

    def traffic_s(
        self, problem: Problem, table: Any, fabric: CollectiveModel, dense: Degrees, expert: Degrees
    ) -> tuple[Any, Any]:
        """Seconds of (gathering, reducing) a block's sharded parameters and gradients in a micro-batch,
        before any overlap.

        ZeRO-3 gathers parameters, ZeRO-2 reduces gradients (Rajbhandari et al. 2020), which frozen weights do
        not have. Both are 0 where they happen once per step.
        """
        weight_bytes, reduced_bytes = problem.recipe.weight_bytes, problem.recipe.reduced_bytes
        gather_s = _moved_s(
            problem, fabric.all_gather_s,
            (self.dense_weights * weight_bytes, dense.param_sizes),
            (self.expert_weights * weight_bytes, expert.param_sizes),
        )  # fmt: skip
        reduce_scatter_s = _moved_s(
            problem, fabric.reduce_scatter_s,
            (self.trained_dense * reduced_bytes, dense.grad_sizes),
            (self.trained_expert * reduced_bytes, expert.grad_sizes),
        )  # fmt: skip
        is_whole = is_whole_in_pipeline(problem, table)
        return np.where(is_whole, 0.0, gather_s), np.where(is_whole, 0.0, reduce_scatter_s)

    def exposed(self, problem: Problem, gather_s: Any, reduce_scatter_s: Any) -> Exposed:
        """Exposed traffic per micro-batch."""
        overlap, slowdown = problem.profile.shard_overlap, problem.efficiency.overlap_slowdown
        return Exposed(
            compute.exposed_s(gather_s, self.forward_compute_s, overlap, slowdown),
            compute.exposed_s(gather_s, self.input_compute_s, overlap, slowdown),
            compute.exposed_s(reduce_scatter_s, self.weight_compute_s, overlap, slowdown),
        )


def _moved_s(
    problem: Problem,
    collective_s: Callable[[Any, Sizes], Any],
    dense: tuple[Any, Sizes],
    expert: tuple[Any, Sizes],
) -> Any:
    """One collective over all weights (or gradients) of a block, given as bytes and the group that shares
    them; 0 for groups of one, and where there are none."""
    dense_s, expert_s = (
        np.where(nbytes > 0, collective_s(nbytes, sizes), 0.0) for nbytes, sizes in (dense, expert)
    )
    return dense_s if problem.model.experts is None else dense_s + expert_s


@dataclass(frozen=True, slots=True)
class ShardingCosts:
    """Costs that the sharding degrees decide in a partition.

    Per place: all-gathers and `reduce_scatter_s` per micro-batch on the stage; bytes on the rank, and
    optimizer states on the host where they are offloaded. `reduction_s` and `gathering_s` are once per step
    and before overlap, only at the requested places. Per row: whether ranks share optimizer states, whether
    stages are whole (`is_whole_in_pipeline`), and the parts of the end of the step.
    """

    forward_gather_s: Any
    backward_gather_s: Any
    reduce_scatter_s: Any
    reduction_s: Any
    gathering_s: Any
    parameter_bytes: Any
    gradient_bytes: Any
    state_bytes: Any
    host_state_bytes: Any
    gathered_bytes: Any
    shares_states: Any
    is_whole: Any
    norm_s: Any
    tied_s: Any
    device_update_s: Any
    host_update_s: Any
    copies_s: Any


def shards_of(
    problem: Problem,
    table: Any,
    partition: PartitionCosts,
    of_partition: Any,
    fabric: CollectiveModel,
    sharding: GridSharding,
    synced: slice,
) -> ShardingCosts:
    """Sharding costs of each row at its places.

    Row i has partition `of_partition[i]`; `sharding` has the rows of `table`. Reduction and gathering are
    estimated at the `synced` places.
    """
    recipe, places = problem.recipe, partition.places
    dense, expert = sharding.dense, sharding.expert
    stage = tuple(
        column[..., of_partition] for column in (places.layers, places.has_embedding, places.has_head)
    )
    rank = partition.rank
    all_dense, all_expert, rank_dense, rank_expert = (
        weights[:, of_partition]
        for weights in (rank.dense_weights, rank.expert_weights, rank.trained_dense, rank.trained_expert)
    )
    frozen = all_dense - rank_dense, all_expert - rank_expert
    owned = (rank_dense / dense.optim + rank_expert / expert.optim).max(axis=0)

    is_single_backward = has_single_backward(problem, table) if problem.profile.reduces_by_block else 0
    is_reduced_early = (dense.grad > 1) | ((is_single_backward == 1) & (dense.optim > 1))

    is_whole = is_whole_in_pipeline(problem, table)

    def reduced(degrees: Degrees) -> Any:
        """Sharding degree of the gradients that stay on a rank."""
        return np.where((degrees.grad == 1) & (is_single_backward == 1), degrees.optim, degrees.grad)

    def unreduced_bytes(elements: Any, degree: Any) -> Any:
        """Bytes of whole gradients beyond those of their shards. Whole ones have the dtype of their
        reduction, shards that in which they are accumulated."""
        beyond = recipe.reduced_bytes - recipe.gradient_bytes / degree
        return np.where(is_whole & (degree > 1), elements[:, of_partition] * beyond, 0.0)

    def stored(degrees: Degrees) -> Any:
        """Sharding degree of the parameters that stay on a rank."""
        return np.where(is_whole, 1, degrees.param)

    def rank_bytes(element_bytes: float, dense_degree: Any, expert_degree: Any) -> Any:
        """Bytes of the trained weights of a rank."""
        dense_bytes = memory.sharded_bytes(rank_dense, element_bytes, dense_degree)
        return dense_bytes + memory.sharded_bytes(rank_expert, element_bytes, expert_degree)

    reduced_weights, gathered_weights = _weights_of(problem, partition, of_partition, synced)
    return ShardingCosts(
        forward_gather_s=over_places(sharding.forward_gather_s, *stage),
        backward_gather_s=over_places(sharding.backward_gather_s, *stage),
        reduce_scatter_s=over_places(sharding.reduce_scatter_s, *stage),
        reduction_s=reduction_s(problem, fabric, sharding, *reduced_weights),
        gathering_s=gathering_s(problem, fabric, sharding, *gathered_weights),
        parameter_bytes=memory.sharded_bytes(all_dense, recipe.weight_bytes, stored(dense))
        + memory.sharded_bytes(all_expert, recipe.weight_bytes, stored(expert))
        + np.where(dense.param == 1, partition.rank.copied_bytes[:, of_partition], 0.0),
        gradient_bytes=rank_bytes(recipe.gradient_bytes, reduced(dense), reduced(expert))
        + unreduced_bytes(partition.unreduced_dense, reduced(dense))
        + unreduced_bytes(partition.unreduced_expert, reduced(expert))
        + np.where(dense.grad == 1, rank_bytes(narrow_gradient_bytes(problem), 1, 1), 0.0)
        + np.where(is_reduced_early, partition.sent_bytes[:, of_partition], 0.0),
        state_bytes=_state_bytes(problem, sharding, (rank_dense, rank_expert), frozen),
        host_state_bytes=rank_bytes(host_own_bytes(problem), dense.optim, expert.optim),
        gathered_bytes=np.where(is_whole, 0.0, gathered_bytes(problem, partition, of_partition, sharding)),
        shares_states=dense.optim > 1,
        is_whole=is_whole,
        norm_s=norm_s(problem, fabric, owned, table.tp * table.cp * table.pp * table.dp),
        tied_s=partition.tied_s[of_partition],
        device_update_s=device_update_s(problem, owned),
        host_update_s=host_update_s(problem, owned),
        copies_s=copies_s(problem, table, owned, (rank_dense + rank_expert).max(axis=0))
        + frozen_copies_s(problem, (frozen[0] / dense.optim + frozen[1] / expert.optim).max(axis=0),
                          (frozen[0] + frozen[1]).max(axis=0)),
    )  # fmt: skip


def _state_bytes(
    problem: Problem, sharding: GridSharding, trained: tuple[Any, Any], frozen: tuple[Any, Any]
) -> Any:
    """Bytes of a rank's own shares of its dense and expert weights: states, and copies of weights."""
    total: Any = 0.0
    for each, (degrees, elements) in (
        (own_bytes, (sharding.dense, trained[0])),
        (own_bytes, (sharding.expert, trained[1])),
        (frozen_bytes, (sharding.dense, frozen[0])),
        (frozen_bytes, (sharding.expert, frozen[1])),
    ):
        per_weight = each(problem, degrees.param, degrees.optim)
        total = total + memory.sharded_bytes(elements, per_weight, degrees.optim)
    return total


def is_whole_in_pipeline(problem: Problem, table: Any) -> Any:
    """Whether a rank has whole parameters and gradients of its stage, although they are sharded.

    PyTorch's stages reduce gradients and reshard parameters once, after all backward passes of a step
    (`backward_maybe_with_nosync` and `perform_reduce_grad` in torch/distributed/pipelining/stage.py).
    """
    return problem.profile.whole_in_pipelines & (table.pp > 1)


def own_bytes(problem: Problem, param_shard: Any, optim_shard: Any) -> Any:
    """Bytes per element of a rank's own share: master copy and optimizer states.

    Software that reduces block by block may also have the weights of these states. It does if there is no
    master copy and parameters are sharded less than states.
    """
    recipe, state_bytes = problem.recipe, problem.optimizer.state_bytes
    own = recipe.master_bytes + state_bytes
    if not problem.profile.reduces_by_block or recipe.master_bytes or not state_bytes:
        return own
    return own + recipe.weight_bytes * np.where(param_shard < optim_shard, 1.0, 0.0)


def frozen_bytes(problem: Problem, param_shard: Any, optim_shard: Any) -> Any:
    """Bytes per element of a rank's own share of frozen weights, in addition to its parameters.

    0 in software that has them in the training dtype alone. Software that reduces block by block, or with
    wide frozen weights, shards all weights of a block together, in one dtype, so that frozen ones have the
    master copy of trained ones; or without master copies their share, where parameters are sharded less.
    (PyTorch's fully_shard: "uniform original parameter dtype" in _fsdp_param_group.py; Accelerate:
    `fsdp2_prepare_model` in utils/fsdp_utils.py.)
    """
    recipe, profile = problem.recipe, problem.profile
    if not profile.reduces_by_block:
        return recipe.master_bytes if profile.has_wide_frozen_weights else 0.0
    if recipe.master_bytes:
        return recipe.master_bytes
    return recipe.weight_bytes * np.where(param_shard < optim_shard, 1.0, 0.0)


def narrow_gradient_bytes(problem: Problem) -> float:
    """Bytes per element of gradients in the dtype of the weights that exist next to fp32 ones."""
    recipe = problem.recipe
    is_twice = problem.profile.keeps_narrow_gradients and recipe.gradient_bytes > recipe.weight_bytes
    return recipe.weight_bytes if is_twice else 0.0


def host_own_bytes(problem: Problem) -> Any:
    """Host bytes per element of an offloaded optimizer: states, master copy and the weights that return to
    the device; or what the software has there, with gradients where they are offloaded.
    """
    profile, recipe = problem.profile, problem.recipe
    if not profile.host_weight_bytes:
        return recipe.master_bytes + problem.optimizer.state_bytes + recipe.weight_bytes
    gradient_bytes = recipe.gradient_bytes if profile.offloads_gradients else 0.0
    return problem.optimizer.state_bytes + profile.host_weight_bytes + gradient_bytes


@dataclass(frozen=True, slots=True)
class Weights:
    """Weights of one family on stages; they are reduced and gathered in `blocks` equal parts."""

    elements: Any
    blocks: Any = 1

    def moved_s(self, element_bytes: Any, collective_s: Callable[[Any], Any]) -> Any:
        """Seconds of a collective over `element_bytes` per weight; each part is a collective of its own."""
        seconds = self.blocks * collective_s(self.elements * element_bytes / self.blocks)
        return np.where(self.elements > 0, seconds, 0.0)


Families = tuple[Weights, Weights]
"""Dense and expert weights."""


def _weights_of(
    problem: Problem, partition: PartitionCosts, of_partition: Any, synced: slice
) -> tuple[Families, Families]:
    """The weights of the `synced` places whose gradients are reduced, and those that are gathered.

    They are in one part. Where the software reduces block by block, there is one part per layer (with
    experts, for expert weights) and per end of the model. Frozen weights are not reduced. They are gathered
    where the software has shards of all weights: else only weights that an update changed are.
    """
    stage = partition.stage
    dense, expert, trained_dense, trained_expert = (
        weights[synced][:, of_partition]
        for weights in (stage.dense_weights, stage.expert_weights, stage.trained_dense, stage.trained_expert)
    )
    if not problem.profile.reduces_by_block:
        trained = Weights(trained_dense), Weights(trained_expert)
        return trained, trained
    model, places = problem.model, partition.places
    have_experts = [kind.experts is not None for kind in model.kinds]
    of_dense = places.layers.sum(axis=0) + places.has_embedding + places.has_head
    if model.tied_embeddings:  # a stage with both ends has the tied embedding once, in one block
        of_dense = of_dense - places.has_embedding * places.has_head
    of_expert = places.layers[have_experts].sum(axis=0)
    of_expert = of_expert + (model.head_experts is not None) * places.has_head
    of_dense, of_expert = (np.maximum(blocks, 1)[synced][:, of_partition] for blocks in (of_dense, of_expert))
    gathered = Weights(dense, of_dense), Weights(expert, of_expert)
    if not model.is_partly_frozen:
        return gathered, gathered
    trains = [1.0 * has_trained_weights(kind.operators) for kind in model.kinds]
    of_trained = np.tensordot(trains, places.layers, 1)
    of_embedding, of_head = map(has_trained_weights, (model.embedding, model.head))
    of_trained = of_trained + of_embedding * places.has_embedding + of_head * places.has_head
    if model.tied_embeddings and of_embedding and of_head:
        of_trained = of_trained - places.has_embedding * places.has_head
    of_trained = np.maximum(of_trained, 1)[synced][:, of_partition]
    return (Weights(trained_dense, of_trained), Weights(trained_expert, of_expert)), gathered


def reduction_s(
    problem: Problem, fabric: CollectiveModel, sharding: GridSharding, dense: Weights, expert: Weights
) -> Any:
    """Reducing the gradients of a stage at the end of the step, before any overlap.

    Not sharded: one all-reduce. Optimizer states sharded k ways: a reduce-scatter among the k, then an
    all-reduce of a k-th among the replicas. Gradients sharded: each micro-batch did the reduce-scatter,
    unless stages are whole.
    """

    def of(family: Weights, degrees: Degrees) -> Any:
        is_done = (degrees.grad > 1) & ~sharding.is_whole
        shard = np.where(degrees.grad > 1, degrees.grad, degrees.optim)

        def seconds(nbytes: Any) -> Any:
            scatter_s = np.where(is_done, 0.0, fabric.reduce_scatter_s(nbytes, degrees.scatter))
            return scatter_s + fabric.all_reduce_s(nbytes / shard, degrees.replicate)

        return family.moved_s(problem.recipe.reduced_bytes, seconds)

    dense_s = of(dense, sharding.dense)
    if problem.model.experts is None:
        return dense_s
    return dense_s + np.where(expert.elements > 0, of(expert, sharding.expert), 0.0)


def gathering_s(
    problem: Problem, fabric: CollectiveModel, sharding: GridSharding, dense: Weights, expert: Weights
) -> Any:
    """Gathering a stage's updated weights from the ranks that share their optimizer states, before any
    overlap; and its sharded parameters, where stages are whole.
    """
    weight_bytes = problem.recipe.weight_bytes

    def of(family: Weights, degrees: Degrees) -> Any:
        def seconds(nbytes: Any) -> Any:
            sharded_s = np.where(sharding.is_whole, fabric.all_gather_s(nbytes, degrees.param_sizes), 0.0)
            return sharded_s + fabric.all_gather_s(nbytes / degrees.param, degrees.regather)

        return family.moved_s(weight_bytes, seconds)

    dense_s = of(dense, sharding.dense)
    if problem.model.experts is None:
        return dense_s
    return dense_s + np.where(expert.elements > 0, of(expert, sharding.expert), 0.0)


def gathered_bytes(
    problem: Problem, partition: PartitionCosts, of_partition: Any, sharding: GridSharding
) -> Any:
    """Gathered copies where parameters are sharded: of the current layers, or as many as the software
    gathers ahead."""
    element_bytes, live = problem.recipe.weight_bytes, problem.profile.gathered_elements
    if live:
        weights = (partition.rank.dense_weights + partition.rank.expert_weights)[:, of_partition].max(axis=0)
        largest = partition.end_weights[of_partition]
        elements = np.minimum(weights, np.maximum(live, largest))
        return np.where(sharding.dense.param > 1, element_bytes * elements, 0.0)
    dense, expert = partition.layer_dense_weights[of_partition], partition.layer_expert_weights[of_partition]
    dense_bytes = memory.gathered_bytes(dense, element_bytes, sharding.dense.param, PREFETCHED_LAYERS)
    return dense_bytes + memory.gathered_bytes(
        expert, element_bytes, sharding.expert.param, PREFETCHED_LAYERS
    )


def update_bytes(problem: Machine) -> float:
    """Traffic in bytes per parameter of the optimizer update: gradient, master copy, states, compute copy
    (which is read too where the master copy has only the bits that it lacks).
    """
    recipe = problem.recipe
    own = recipe.master_bytes or recipe.weight_bytes
    copy = recipe.weight_bytes if recipe.master_bytes else 0.0
    if 0.0 < recipe.master_bytes < FP32_BYTES:
        copy *= 2.0
    return recipe.gradient_bytes + 2.0 * own + 2.0 * problem.optimizer.state_bytes + copy


def update_s(machine: Machine, owned: Any, width: float) -> Any:
    """Optimizer update of the parameters that a rank owns: its traffic, and its arithmetic if it has any.

    Newton-Schulz works on the smaller side of a matrix, its `width`.
    """
    speed = machine.matmul_flop_per_s * machine.efficiency.matmul.peak_fraction
    arithmetic_s = owned * machine.optimizer.work_flop_per_hidden * width / speed
    return owned * update_bytes(machine) / machine.stream_bytes_per_s + arithmetic_s


def device_update_s(problem: Problem, owned: Any) -> Any:
    """The same for a model; its hidden size stands for the width of its matrices."""
    return update_s(problem, owned, problem.model.hidden)


def copies_s(problem: Problem, table: Any, owned: Any, resident: Any) -> Any:
    """Copies of weights and gradients per step in software that reduces block by block; 0 without a master
    copy.

    A rank owns `owned` elements and has `resident` ones. Its weights are cast to the compute dtype (the
    optimizer's traffic includes that write), copied into the gathering buffer and out of it again. Gradients
    of several micro-batches are cast and accumulated, then copied into the reduction buffer; those of one are
    cast into it. Reduced gradients of a narrower dtype are cast to that of the accumulated ones. A rank
    without replicas also gathers and reduces, by copies. (PyTorch's fully_shard:
    `foreach_all_gather`, `foreach_all_gather_copy_out` and `foreach_reduce` in _fsdp_collectives.py,
    `accumulate_unsharded_grad_if_needed` in _fsdp_param.py.)
    """
    recipe = problem.recipe
    if not problem.profile.reduces_by_block or not recipe.master_bytes:
        return 0.0 * owned
    weight, gradient, master = recipe.weight_bytes, recipe.reduced_bytes, recipe.master_bytes
    microbatches = problem.job.global_batch_size // (table.dp * table.micro_batch_size)
    summed = np.where(microbatches > 1, microbatches * (weight + 2.0 * gradient) - gradient, 0.0)
    laid = np.where(microbatches > 1, 2.0 * gradient, weight + gradient)
    widened = gradient + recipe.gradient_bytes if gradient < recipe.gradient_bytes else 0.0
    moved = owned * (master + 2.0 * weight + widened) + resident * (2.0 * weight + summed + laid)
    alone = np.where(owned == resident, 2.0 * (weight + gradient), 0.0)
    return (moved + alone * resident) / problem.stream_bytes_per_s


def frozen_copies_s(problem: Problem, owned: Any, resident: Any) -> Any:
    """The same of frozen weights, of which a rank owns `owned` and has `resident` elements: cast to the
    compute dtype, copied into the gathering buffer and out of it again."""
    recipe = problem.recipe
    if not problem.profile.reduces_by_block or not recipe.master_bytes:
        return 0.0 * owned
    weight, master = recipe.weight_bytes, recipe.master_bytes
    return (owned * (master + 3.0 * weight) + resident * 2.0 * weight) / problem.stream_bytes_per_s


def host_update_s(problem: Problem, owned: Any) -> Any:
    """Optimizer update on the host: its traffic, and gradients and weights, over the host link."""
    moved_bytes = problem.recipe.gradient_bytes + problem.recipe.weight_bytes + update_bytes(problem)
    return owned * moved_bytes / problem.host_link_bytes_per_s


NORM_PASSES = 3.0
"""Passes over the gradients for their norm and clipping: two reads and a write."""


def norm_passes_s(machine: Machine, owned: Any) -> Any:
    """Seconds of the passes over a rank's gradients for their norm and clipping."""
    return NORM_PASSES * owned * machine.recipe.gradient_bytes / machine.stream_bytes_per_s


def norm_s(machine: Machine, fabric: CollectiveModel, owned: Any, devices: Any) -> Any:
    """Gradient norm and clipping: passes over the gradients, and one number from all devices."""
    return norm_passes_s(machine, owned) + fabric.number_s(devices)
