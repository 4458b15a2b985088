"""Training jobs of uniform plans: `UniformTrainingJob` shards a module, `step` does one step.

A module is split into pipeline stages (`stages_of`), then sharded over tensor-, context-, expert- and
data-parallel ranks. `engine_of` builds what runs the plan's schedule, `tie_of` reduces tied embeddings.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.profiler import record_function

from shardwise.errors import InternalError
from shardwise.plans import Plan
from shardwise.runtime.collectives import Boundary, SharedTokens
from shardwise.runtime.context_parallel import AllToAllAttention, ContextParallelAttention, RingAttention
from shardwise.runtime.data import check_batch
from shardwise.runtime.devices import COMPUTE
from shardwise.runtime.fsdp import mixtures, shard_states, split_experts, synchronise
from shardwise.runtime.gradients import (
    StepResult,
    TiedWeights,
    clip,
    local,
    reduce_partial_gradients,
    square_sum,
)
from shardwise.runtime.job import TrainingJob
from shardwise.runtime.loss import batch_share_loss
from shardwise.runtime.mesh import (
    RankCoordinates,
    coordinates_of,
    device_mesh,
    expert_mesh,
    group_among,
    rank_grid,
)
from shardwise.runtime.modules import TABLE, ModelStage
from shardwise.runtime.moe import TokenDispatcher
from shardwise.runtime.offload import (
    OFFLOADS_ACTIVATIONS,
    OFFLOADS_STATES,
    ActivationOffload,
    OptimizerOffload,
)
from shardwise.runtime.optimizer import optimizer_of
from shardwise.runtime.pipeline import GradientAccumulation, PipelineRunner, synchronised_stages
from shardwise.runtime.private import TensorChunks, chunk_of
from shardwise.runtime.profiling import OPTIMIZER
from shardwise.runtime.recompute import recompute_kinds
from shardwise.runtime.regions import region_of
from shardwise.runtime.state_dict import MODEL, ParameterValue, StateDict, first_states, part_of, state_name
from shardwise.runtime.tensor_parallel import split_tensors
from shardwise.schedule import SPLIT_NAMES
from shardwise.strategy import Strategy, layer_counts

# Stages of a rank

Stages = tuple[tuple[int, ModelStage], ...]
"""Stages of one rank, in order, each with its number in the pipeline."""


def stages_of(module: ModelStage, plan: Plan, place: RankCoordinates, mesh: DeviceMesh) -> Stages:
    """This rank's stages of the whole `module`, sharded over its tensor-, expert- and data-parallel groups.

    Creates meshes and process groups; call it on every rank.
    """
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
    """Shard the stage's experts and set up the token dispatchers."""
    split_experts(stage, experts)
    for mixture in mixtures(stage):
        if strategy.ep * strategy.etp > 1:
            mixture.dispatch = TokenDispatcher(experts["ep"].get_group(), experts["etp"].get_group())
        if strategy.tp > 1 and not strategy.sequence_parallel:
            mixture.shared_tokens = SharedTokens(mesh["tp"].get_group())


def _prepare_layers(
    stage: ModelStage, plan: Plan, context: ContextParallelAttention | None, host: ActivationOffload | None
) -> None:
    """Set up each layer: recomputation, context-parallel attention, and the offload of its saved
    activations."""
    stage.host = host
    kinds = recompute_kinds(plan.best.strategy, len(stage.layers))
    for layer, kind in zip(stage.layers.values(), kinds, strict=True):
        layer.recompute = kind
        layer.is_split = plan.best.strategy.pp > 1 and plan.best.strategy.schedule in SPLIT_NAMES
        layer.attention.context = context
        layer.store = host


def _context_of(strategy: Strategy) -> ContextParallelAttention | None:
    """Context-parallel attention of this rank, None without context parallelism.

    It has its own process group, even if it contains all ranks, so that keys and values do not queue behind
    gradient reductions. Creates groups; call it on every rank.
    """
    if strategy.cp == 1:
        return None
    grid = rank_grid(strategy).transpose(2, 3).reshape(-1, strategy.cp)
    group, _ = distributed.new_subgroups_by_enumeration(grid.tolist())
    return RingAttention(group) if strategy.cp_kind == "ring" else AllToAllAttention(group)


def sends_shards(plan: Plan) -> bool:
    """Whether tensor-parallel ranks with equal hidden states each send a part of them to the next stage."""
    strategy = plan.best.strategy
    is_whole = strategy.tp > 1 and not strategy.sequence_parallel
    return is_whole and strategy.pp > 1 and plan.model.hidden % strategy.tp == 0


def engine_of(
    stages: Stages, plan: Plan, place: RankCoordinates, mesh: DeviceMesh
) -> GradientAccumulation | PipelineRunner:
    """The engine that runs the plan's schedule on this rank's stages."""
    strategy, job = plan.best.strategy, plan.job
    tensor_mesh = mesh["tp"] if strategy.tp > 1 else None
    loss = batch_share_loss(job.global_batch_size * job.seq_len, plan.model.vocab, tensor_mesh)
    if strategy.pp == 1:
        stage = stages[0][1]
        return GradientAccumulation(
            stage,
            actions=plan.schedules[0].ranks[0],
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
        of=plan.schedules[0].stages,
        strategy=strategy,
        group=mesh["pp"].get_group(),
        tokens=tokens,
        hidden=hidden,
        logits=logits,
    )
    return PipelineRunner(parts, schedule=plan.schedules[0], loss=loss, rank=place.pp)


def tie_of(stages: Stages, plan: Plan) -> TiedWeights | None:
    """The tie of embedding and output projection if they are on two stages. Creates process groups; call it
    on every rank."""
    schedule = plan.schedules[0]
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
    """The stages at this rank's pipeline coordinate with their numbers, in order."""
    strategy, schedule = plan.best.strategy, plan.schedules[0]
    counts = layer_counts(
        plan.model.layers, schedule.stages, strategy.first_stage_layers, strategy.last_stage_layers
    )
    starts = [sum(counts[:stage]) for stage in range(schedule.stages + 1)]
    end_modules = {0: frozenset(("embedding",)), schedule.stages - 1: frozenset(("head",))}
    if schedule.stages == 1:
        end_modules = {0: frozenset(("embedding", "head"))}
    return tuple(
        (
            stage,
            module.part(starts[stage], starts[stage + 1], end_modules=end_modules.get(stage, frozenset())),
        )
        for stage, rank in enumerate(schedule.stage_rank)
        if rank == place.pp
    )


# The job


class UniformTrainingJob(TrainingJob):
    """A job of a model under one strategy. A rank has the stages at its pipeline coordinate."""

    def __init__(
        self, source: ModelStage, plan: Plan, *, device_type: str, lr: float, max_norm: float
    ) -> None:
        super().__init__(source, plan, device_type=device_type, lr=lr, max_norm=max_norm)
        strategy = plan.best.strategy
        self.place = coordinates_of(strategy, distributed.get_rank())
        mesh = device_mesh(strategy, device_type)
        self.stages = stages_of(source, plan, self.place, mesh)
        self.host: OptimizerOffload | None = None
        if strategy.offload in OFFLOADS_STATES:
            self.host = OptimizerOffload(
                [stage for _, stage in self.stages], device_type=device_type,
                dtype=COMPUTE[plan.job.dtype], keeps_shards=strategy.param_shard > 1,
            )  # fmt: skip
        self._engine = engine_of(self.stages, plan, self.place, mesh)
        self._tie = tie_of(self.stages, plan)
        self.optimizer = optimizer_of(plan.job.optimizer, map(self.owned, self.parameters), lr=lr)

    @property
    def executed(self) -> tuple[str, ...]:
        """Actions that a step runs on this rank, in order."""
        return self._engine.executed

    @property
    def parameters(self) -> list[nn.Parameter]:
        """This rank's parameters, including tied copies."""
        return [parameter for _, stage in self.stages for parameter in stage.parameters()]

    def backward(self, batch: Tensor) -> StepResult:
        """As in `TrainingJob`; `batch` has token ids of shape (global_batch_size, seq_len + 1)."""
        tokens, targets = self._local_batch(batch)
        replicas = [stage.replicas for _, stage in self.stages if stage.replicas is not None]
        for each in replicas:
            each.start()
        loss = self._engine.run(tokens, targets)
        for each in replicas:
            each.finish()
        reduce_partial_gradients(self.parameters)
        if self._tie is not None:
            self._tie.add_up()
        strategy = self.plan.best.strategy
        ranks = strategy.tp * strategy.cp * strategy.dp
        squares = square_sum(self._norm_parameters(), ranks, device=self.device_type)
        return clip(loss / strategy.tp, squares, self.parameters, self.max_norm)

    def update(self) -> None:
        with record_function(OPTIMIZER):
            if self.host is not None:
                self.host.step(self.optimizer)
            else:
                self.optimizer.step()
        self.optimizer.zero_grad()

    def owned(self, parameter: nn.Parameter) -> nn.Parameter:
        """The parameter that the optimizer updates for `parameter`: itself, or the host's with optimizer
        offload."""
        return parameter if self.host is None else self.host.parameters[parameter]

    def sync_weights(self) -> None:
        """Copy the optimizer's weights to the device after they were changed from outside (optimizer
        offload)."""
        if self.host is not None:
            self.host.sync_weights()

    def named_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """This rank's parameters as its optimizer has them, with their names in the whole model. The second
        copy of tied embeddings has the embedding's name."""
        return [
            (TABLE if self.is_copy(index, name) else name, self.owned(parameter))
            for index, stage in self.stages
            for name, parameter in stage.named_parameters()
        ]

    def fill(self, whole: ParameterValue) -> None:
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                own = local(parameter)
                if own.numel():
                    own.copy_(part_of(whole(name, parameter.shape), region_of(parameter)).reshape(own.shape))
        self.sync_weights()

    def make_states(self) -> None:
        """Create optimizer states, as before the first step, for every trained parameter."""
        trained = (p for _, stage in self.stages for p in stage.parameters() if p.requires_grad)
        for parameter in map(self.owned, trained):
            self.optimizer.state[parameter].update(first_states(self.plan.job.optimizer, parameter))

    def state(self) -> dict[str, Tensor]:
        """Parameters and optimizer states of this rank by their names in a state dict; not copies."""
        state: dict[str, Tensor] = {}
        for name, parameter in self.named_parameters():
            state[state_name(MODEL, name)] = parameter.data
            for kind, value in self.optimizer.state[parameter].items():
                if value is not None:
                    state[state_name(kind, name)] = value
        return state

    def saved_state(self) -> StateDict:
        return {name: _copied(tensor.detach()) for name, tensor in self.state().items()}

    def load(self, read: Callable[[StateDict], None]) -> None:
        self.make_states()
        state = self.state()
        read(dict(state))
        with torch.no_grad():  # of two copies on one rank (tied weights), only the second was filled
            for name, parameter in self.named_parameters():
                parameter.copy_(state[state_name(MODEL, name)])
                for kind, value in self.optimizer.state[parameter].items():
                    value.copy_(state[state_name(kind, name)])
        self.sync_weights()

    def _norm_parameters(self) -> Iterable[nn.Parameter]:
        """Parameters that count in the gradient norm: of tied copies only the first."""
        for index, stage in self.stages:
            for name, parameter in stage.named_parameters():
                if not self.is_copy(index, name):
                    yield parameter

    def is_copy(self, index: int, name: str) -> bool:
        """Whether parameter `name` of stage `index` is the second copy of a tied weight."""
        is_last = index == self.plan.schedules[0].stages - 1
        return self._tie is not None and is_last and name == "head.output.weight"

    def _local_batch(self, batch: Tensor) -> tuple[Tensor, Tensor]:
        """This rank's tokens and targets, each (microbatches, rows, tokens).

        Data-parallel rank d takes the d-th part of the batch, in consecutive micro-batches. Of each sequence
        it takes the positions of its context-parallel rank.
        """
        strategy, job = self.plan.best.strategy, self.plan.job
        check_batch(batch, job)
        rows = job.global_batch_size // strategy.dp
        own = batch[self.place.dp * rows : (self.place.dp + 1) * rows]
        own = own.unflatten(0, (-1, strategy.micro_batch_size)).to(self.device_type)
        places = self.stages[0][1].places(self.plan.job.seq_len)
        return own[..., places].contiguous(), own[..., places + 1].contiguous()


def _copied(tensor: Tensor) -> Tensor | TensorChunks:
    own = local(tensor).to("cpu", copy=True)
    if not isinstance(tensor, DTensor):
        return own
    start, _ = chunk_of(tensor)
    return TensorChunks(tensor.shape, {tuple(start): own} if own.numel() else {})


def require_uniform(job: TrainingJob) -> UniformTrainingJob:
    """`job`, which is of a uniform plan."""
    if not isinstance(job, UniformTrainingJob):
        raise InternalError("only jobs of uniform strategies change their strategy")
    return job
