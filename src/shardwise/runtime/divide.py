"""Divides a whole module as a plan says: into stages, over tensor ranks, over data ranks."""

from __future__ import annotations

import torch
from torch import distributed, nn
from torch.distributed.device_mesh import DeviceMesh

from shardwise.plan import Plan
from shardwise.runtime.accumulate import GradientAccumulation
from shardwise.runtime.context import AllToAllAttention, ContextParallelAttention, RingAttention
from shardwise.runtime.dispatch import TokenDispatcher
from shardwise.runtime.dtypes import COMPUTE
from shardwise.runtime.gradients import TiedWeights
from shardwise.runtime.groups import group_among
from shardwise.runtime.host_activations import OFFLOADS_ACTIVATIONS, ActivationOffload
from shardwise.runtime.loss import batch_share_loss
from shardwise.runtime.mesh import RankCoordinates, expert_mesh, rank_grid
from shardwise.runtime.modules import ModelStage
from shardwise.runtime.parts import Boundary, SharedTokens
from shardwise.runtime.pipeline import PipelineRunner, synchronised_stages
from shardwise.runtime.recompute import recompute_kinds
from shardwise.runtime.shard import mixtures, shard_states, split_experts, synchronise
from shardwise.runtime.tensor_parallel import split_tensors
from shardwise.schedule import SPLIT_NAMES
from shardwise.strategy import Strategy, layer_counts

Stages = tuple[tuple[int, ModelStage], ...]
"""What one rank holds: stages with their numbers in the pipeline, in order."""


def stages_of(module: ModelStage, plan: Plan, place: RankCoordinates, mesh: DeviceMesh) -> Stages:
    """This rank's stages of the whole `module`, their parameters divided over its tensor, expert and data
    groups. Makes meshes and process groups on every rank."""
    strategy = plan.best.strategy
    experts = expert_mesh(strategy, mesh.device_type) if plan.model.experts is not None else None
    context = _context_of(strategy)
    stages = _parts(module, plan, place)
    host = ActivationOffload(mesh.device_type) if strategy.offload in OFFLOADS_ACTIVATIONS else None
    for _, stage in stages:
        _prepare_layers(stage, plan, context, host)
        positions = torch.arange(plan.job.seq_len)
        if context is not None:
            positions = context.positions(plan.job.seq_len)
        stage.positions = positions.to(mesh.device_type)
        stage.hidden_positions = stage.positions
        if strategy.tp > 1:
            split_tensors(stage, mesh["tp"], sequence_parallel=strategy.sequence_parallel)
            if strategy.sequence_parallel:
                stage.hidden_positions = stage.positions.chunk(strategy.tp)[place.tp]
            elif sends_shards(plan):
                stage.boundary = Boundary(mesh["tp"].get_group())
        if experts is not None and distributed.get_world_size() > 1:
            _place_experts(stage, mesh, experts, strategy)
        shard_states(stage, mesh, experts, strategy, plan.job.dtype)
    return stages


def _place_experts(stage: ModelStage, mesh: DeviceMesh, experts: DeviceMesh, strategy: Strategy) -> None:
    """Divide the stage's experts, and say how tokens get to them."""
    split_experts(stage, experts)
    for mixture in mixtures(stage):
        if strategy.ep * strategy.etp > 1:
            mixture.dispatch = TokenDispatcher(experts["ep"].get_group(), experts["etp"].get_group())
        if strategy.tp > 1 and not strategy.sequence_parallel:
            mixture.shared_tokens = SharedTokens(mesh["tp"].get_group())


def _prepare_layers(
    stage: ModelStage, plan: Plan, context: ContextParallelAttention | None, host: ActivationOffload | None
) -> None:
    """Say what each layer recomputes, how its attention crosses the context group, and what has what it
    keeps on the host."""
    stage.host = host
    kinds = recompute_kinds(plan.best.strategy, len(stage.layers))
    for layer, kind in zip(stage.layers.values(), kinds, strict=True):
        layer.recompute = kind
        layer.is_split = plan.best.strategy.pp > 1 and plan.best.strategy.schedule in SPLIT_NAMES
        layer.attention.context = context
        layer.store = host


def _context_of(strategy: Strategy) -> ContextParallelAttention | None:
    """This rank's context group, where the plan has them: one of its own, also where that is all ranks, for
    keys and values must not queue behind sums of gradients. Makes the groups of all ranks."""
    if strategy.cp == 1:
        return None
    grid = rank_grid(strategy).transpose(2, 3).reshape(-1, strategy.cp)
    group, _ = distributed.new_subgroups_by_enumeration(grid.tolist())
    return RingAttention(group) if strategy.cp_kind == "ring" else AllToAllAttention(group)


def sends_shards(plan: Plan) -> bool:
    """Whether tensor ranks that all have the hidden states send a part each to the next stage."""
    strategy = plan.best.strategy
    is_whole = strategy.tp > 1 and not strategy.sequence_parallel
    return is_whole and strategy.pp > 1 and plan.model.hidden % strategy.tp == 0


def engine_of(
    stages: Stages, plan: Plan, place: RankCoordinates, mesh: DeviceMesh
) -> GradientAccumulation | PipelineRunner:
    """What runs the plan's schedule on this rank's stages."""
    strategy, job = plan.best.strategy, plan.job
    tensor_mesh = mesh["tp"] if strategy.tp > 1 else None
    loss = batch_share_loss(job.global_batch_size * job.seq_len, plan.model.vocab, tensor_mesh)
    if strategy.pp == 1:
        stage = stages[0][1]
        return GradientAccumulation(
            stage,
            actions=plan.schedule.ranks[0],
            loss=loss,
            before_backward=lambda is_last: synchronise(stage, strategy, is_last=is_last),
        )
    rows, local_tokens = strategy.micro_batch_size, job.seq_len // strategy.cp
    hidden_tokens = local_tokens // strategy.tp if strategy.sequence_parallel else local_tokens
    width = plan.model.hidden // strategy.tp if sends_shards(plan) else plan.model.hidden
    classes = -(-plan.model.vocab // strategy.tp)
    dtype = COMPUTE[job.dtype]
    with torch.device("meta"):
        tokens = torch.empty(rows, local_tokens, dtype=torch.long)
        hidden = torch.empty(rows, hidden_tokens, width, dtype=dtype, requires_grad=True)
        logits = torch.empty(rows, local_tokens, classes, dtype=dtype, requires_grad=True)
    parts = synchronised_stages(
        stages,
        of=plan.schedule.stages,
        strategy=strategy,
        group=mesh["pp"].get_group(),
        tokens=tokens,
        hidden=hidden,
        logits=logits,
    )
    return PipelineRunner(parts, schedule=plan.schedule, loss=loss, rank=place.pp)


def tie_of(stages: Stages, plan: Plan) -> TiedWeights | None:
    """The tie of the embedding and the output projection where they are on two stages. Makes its process
    groups on every rank."""
    schedule = plan.schedule
    if not plan.model.tied_embeddings or schedule.stages == 1:
        return None
    first, last = schedule.stage_rank[0], schedule.stage_rank[-1]
    here = tuple(stage.embedding.tokens.weight for _, stage in stages if stage.embedding is not None)
    here += tuple(stage.head.output.weight for _, stage in stages if stage.head is not None)
    if first == last:
        return TiedWeights(here, None)
    grid = rank_grid(plan.best.strategy)
    pairs = torch.stack((grid[first].flatten(), grid[last].flatten()), dim=1)
    return TiedWeights(here, group_among(pairs.tolist()))


def _parts(module: ModelStage, plan: Plan, place: RankCoordinates) -> Stages:
    """The stages that this rank's place in the pipeline holds, with their numbers, in order."""
    strategy, schedule = plan.best.strategy, plan.schedule
    counts = layer_counts(
        plan.model.layers, schedule.stages, strategy.first_stage_layers, strategy.last_stage_layers
    )
    starts = [sum(counts[:stage]) for stage in range(schedule.stages + 1)]
    end_modules = {0: frozenset(("embedding",)), schedule.stages - 1: frozenset(("head",))}
    if schedule.stages == 1:
        end_modules = {0: frozenset(("embedding", "head"))}
    parts = tuple(
        (
            stage,
            module.part(starts[stage], starts[stage + 1], end_modules=end_modules.get(stage, frozenset())),
        )
        for stage, rank in enumerate(schedule.stage_rank)
        if rank == place.pp
    )
    for _, part in parts:
        if plan.model.tied_embeddings and part.head is not None and part.embedding is None:
            part.head.output.weight = nn.Parameter(part.head.output.weight.detach().clone())
    return parts
