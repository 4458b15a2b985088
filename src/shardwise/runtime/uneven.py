"""Training jobs of uneven plans: pipelines that differ in stages, layers, tensor-parallel degree and share.

`UnevenTrainingJob` makes the stage of each rank from its `UnevenCoordinates`; `step` does one step.

`OptimizerShards` reduces gradients and shards optimizer states (ZeRO-1). Pipelines with different layers per
stage or tensor-parallel degrees hold different regions of a weight. So weights are divided wherever any
pipeline divides them, and each region belongs to the set of ranks that hold it. Each such set is a process
group, which reduce-scatters gradients and all-gathers weights.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

import torch
from torch import Tensor, distributed, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.profiler import record_function

from shardwise.plans import Plan
from shardwise.plans import Stage as PlannedStage
from shardwise.runtime.data import check_batch
from shardwise.runtime.devices import COMPUTE, to_device
from shardwise.runtime.gradients import StepResult, clip, local, reduce_partial_gradients
from shardwise.runtime.job import TrainingJob
from shardwise.runtime.loss import batch_share_loss
from shardwise.runtime.mesh import group_among
from shardwise.runtime.modules import TABLE, ModelStage
from shardwise.runtime.optimizer import optimizer_of_parameters
from shardwise.runtime.pipeline import GradientAccumulation, PipelineRunner
from shardwise.runtime.private import PeerSlice, ReshardingStage, TensorChunks
from shardwise.runtime.profiling import OPTIMIZER
from shardwise.runtime.regions import LocalRegion, Region, gather_rank_regions, overlap, owners, region_of
from shardwise.runtime.state_dict import (
    MODEL,
    STATES,
    STEP,
    ParameterValue,
    StateDict,
    part_of,
    state_name,
)
from shardwise.runtime.tensor_parallel import split_tensors
from shardwise.schedule import generate

# Stages of a rank


@dataclass(frozen=True, slots=True, kw_only=True)
class UnevenCoordinates:
    """Coordinates of a rank in an uneven plan: its pipeline, its stage, the replica (`row`) of the stage that
    it belongs to, and its tensor-parallel rank."""

    pipeline: int
    stage: int
    row: int
    tp: int


def coordinates_by_rank(plan: Plan) -> dict[int, UnevenCoordinates]:
    """Coordinates of every rank that is not idle. Within a stage, tensor-parallel ranks are consecutive."""
    return {
        rank: UnevenCoordinates(pipeline=place, stage=index, row=number // stage.tp, tp=number % stage.tp)
        for place, pipeline in enumerate(plan.best.layout.pipelines)
        for index, stage in enumerate(pipeline.stages)
        for number, rank in enumerate(stage.rank_numbers)
    }


def tensor_ranks_by_rank(plan: Plan) -> Mapping[int, frozenset[int]]:
    """Ranks of every rank's tensor-parallel group, including itself."""
    groups: dict[tuple[int, int, int], set[int]] = {}
    by_rank = coordinates_by_rank(plan)
    for rank, coordinates in by_rank.items():
        groups.setdefault((coordinates.pipeline, coordinates.stage, coordinates.row), set()).add(rank)
    return {
        rank: frozenset(groups[coordinates.pipeline, coordinates.stage, coordinates.row])
        for rank, coordinates in by_rank.items()
    }


def first_sequence(plan: Plan, pipeline: int) -> int:
    """First sequence of a pipeline's share of the batch. Shares are in the order of the pipelines."""
    return sum(plan.best.microbatches[:pipeline]) * plan.best.micro_batch_size


def tensor_mesh(plan: Plan, device_type: str) -> DeviceMesh | None:
    """Mesh of this rank's tensor-parallel group, None if it is alone. Creates groups; call it on every
    rank."""
    groups = sorted(
        {
            tuple(sorted(tensor_ranks))
            for tensor_ranks in tensor_ranks_by_rank(plan).values()
            if len(tensor_ranks) > 1
        }
    )
    own = group_among(groups) if groups else None
    return None if own is None else DeviceMesh.from_group(own, device_type)


def stage_of(
    module: ModelStage,
    plan: Plan,
    coordinates: UnevenCoordinates,
    mesh: DeviceMesh | None,
    device_type: str,
) -> ModelStage:
    """The stage of the whole `module` at these coordinates, on a device of this type. With a `mesh`, it is
    sharded over its tensor-parallel ranks with sequence parallelism."""
    stages = plan.best.layout.pipelines[coordinates.pipeline].stages
    start = sum(sum(stage.layers) for stage in stages[: coordinates.stage])
    stop = start + sum(stages[coordinates.stage].layers)
    end_modules = {"embedding"} if coordinates.stage == 0 else set()
    end_modules |= {"head"} if coordinates.stage == len(stages) - 1 else set()
    part = module.part(start, stop, end_modules=frozenset(end_modules))
    for layer in part.layers.values():
        layer.recompute = plan.best.recompute[coordinates.pipeline][coordinates.stage]
    part.positions = torch.arange(plan.job.seq_len, device=device_type)
    part.hidden_positions = part.positions
    if mesh is not None:
        split_tensors(part, mesh, sequence_parallel=True)
        part.hidden_positions = part.positions.chunk(mesh.size())[coordinates.tp]
    to_device(part, device_type)
    return part


def to_compute_dtype(stage: ModelStage, dtype: torch.dtype) -> None:
    """Make `stage` compute in `dtype` and accumulate gradients in fp32. The optimizer shards keep its weights
    in fp32."""
    stage.to(dtype)
    for parameter in stage.parameters():
        parameter.grad_dtype = torch.float32


def engine_of(
    stage: ModelStage, plan: Plan, coordinates: UnevenCoordinates, mesh: DeviceMesh | None
) -> GradientAccumulation | PipelineRunner:
    """The engine that runs 1F1B of the rank's pipeline on its stage."""
    best, job = plan.best, plan.job
    stages = best.layout.pipelines[coordinates.pipeline].stages
    schedule = generate("1f1b", pp=len(stages), microbatches=best.microbatches[coordinates.pipeline], vpp=1)
    loss = batch_share_loss(job.global_batch_size * job.seq_len, plan.model.vocab, mesh)
    if len(stages) == 1:
        return GradientAccumulation(stage, actions=schedule.ranks[0], loss=loss, before_backward=_nothing)
    own = stages[coordinates.stage]
    rows, classes, dtype = best.micro_batch_size // own.dp, -(-plan.model.vocab // own.tp), COMPUTE[job.dtype]
    with torch.device("meta"):
        tokens = torch.empty(rows, job.seq_len, dtype=torch.long)
        hidden = torch.empty(rows, job.seq_len // own.tp, plan.model.hidden, dtype=dtype, requires_grad=True)
        logits = torch.empty(rows, job.seq_len, classes, dtype=dtype, requires_grad=True)
    part = ReshardingStage(
        stage,
        coordinates.stage,
        len(stages),
        next(stage.parameters()).device,
        before_backward=_nothing,
        reduce=lambda: None,
        input_args=tokens if coordinates.stage == 0 else hidden,
        output_args=logits if coordinates.stage == len(stages) - 1 else hidden,
        earlier=_peer_slices(plan, coordinates, coordinates.stage - 1),
        later=_peer_slices(plan, coordinates, coordinates.stage + 1),
    )
    return PipelineRunner([part], schedule=schedule, loss=loss, rank=coordinates.stage)


def _nothing(is_last: bool) -> None:
    """No reductions before the end: `OptimizerShards` reduces gradients after the last backward pass."""


def _peer_slices(plan: Plan, coordinates: UnevenCoordinates, neighbour: int) -> tuple[PeerSlice, ...]:
    """The slices of this rank's hidden states that each rank of a neighbouring stage also has."""
    stages = plan.best.layout.pipelines[coordinates.pipeline].stages
    if not 0 <= neighbour < len(stages):
        return ()
    rows, tokens = plan.best.micro_batch_size, plan.job.seq_len
    own = list(_boxes(stages[coordinates.stage], rows, tokens))[
        coordinates.row * stages[coordinates.stage].tp + coordinates.tp
    ]
    found = []
    for rank, box in zip(
        stages[neighbour].rank_numbers, _boxes(stages[neighbour], rows, tokens), strict=True
    ):
        common = overlap(own, box)
        if common is not None:
            places = (slice(a - first, b - first) for (a, b), (first, _) in zip(common, own, strict=True))
            found.append((rank, tuple(places)))
    return tuple(found)


def _boxes(stage: PlannedStage, rows: int, tokens: int) -> Iterator[Region]:
    """Rows and tokens of a micro-batch's hidden states on each rank of a stage, between layers."""
    high, wide = rows // stage.dp, tokens // stage.tp
    for number in range(stage.devices):
        row, tp = divmod(number, stage.tp)
        yield (row * high, (row + 1) * high), (tp * wide, (tp + 1) * wide)


def local_samples(plan: Plan, coordinates: UnevenCoordinates, batch: Tensor) -> Tensor:
    """Token ids of this rank's rows of its pipeline's share of `batch`, of shape (microbatches, rows, tokens
    + 1)."""
    best = plan.best
    first = first_sequence(plan, coordinates.pipeline)
    share = batch[first : first + best.microbatches[coordinates.pipeline] * best.micro_batch_size]
    rows = best.micro_batch_size // best.layout.pipelines[coordinates.pipeline].stages[coordinates.stage].dp
    return share.unflatten(0, (-1, best.micro_batch_size))[
        :, coordinates.row * rows : (coordinates.row + 1) * rows
    ]


def own_coordinates(plan: Plan) -> UnevenCoordinates | None:
    """Coordinates of this rank; None if the plan leaves it idle."""
    return coordinates_by_rank(plan).get(distributed.get_rank())


# Optimizer shards


@dataclass(slots=True, kw_only=True)
class _WeightRegion:
    """A region of a weight on this rank: the parameter, its local region and the region itself.

    `weight` multiplies its gradient, since several ranks may have computed the same one. One of the ranks
    that hold the region `saves` it.
    """

    parameter: nn.Parameter
    local_region: Region
    region: Region
    weight: float
    saves: bool

    def view(self, values: Tensor) -> Tensor:
        """The region as a view of `values`, which have the shape of the parameter's local part."""
        return LocalRegion(self.local_region, {"": values}).view("", self.region)

    @property
    def elements(self) -> int:
        return prod(stop - start for start, stop in self.region)


@dataclass(slots=True, kw_only=True)
class _ShareGroup:
    """Regions that the same ranks hold, in the same order on all of them, with this rank's `share`.

    The elements of the regions are concatenated and divided into equal shares. `parameters` are the parts of
    the share that the optimizer updates, each with whether it decays and its place in the share.
    """

    group: ProcessGroup | None
    weight_regions: list[_WeightRegion]
    share: Tensor
    parameters: list[tuple[nn.Parameter, bool, slice]] = field(default_factory=list)


class OptimizerShards:
    """Weights of a rank's stage, with optimizer states sharded over all ranks that hold the same regions."""

    def __init__(
        self,
        parameters: Iterable[tuple[str, nn.Parameter]],
        names: Sequence[str],
        tensor_ranks: Mapping[int, frozenset[int]],
    ) -> None:
        """`parameters` have their names in the whole model, which has `names`.

        `tensor_ranks` has each rank's tensor-parallel group, whose ranks have equal gradients of replicated
        weights. Creates process groups; call it on every rank.
        """
        here: dict[int, list[nn.Parameter]] = defaultdict(list)
        for name, parameter in parameters:
            here[names.index(name)].append(parameter)
        rank_regions = gather_rank_regions(
            (tensor, region_of(one))
            for tensor, same in here.items()
            for one in same
            if local(one.detach()).numel()
        )
        sets: dict[tuple[int, ...], list[tuple[int, Region]]] = defaultdict(list)
        for tensor, region, ranks in owners(rank_regions, distributed.get_world_size()):
            sets[ranks].append((tensor, region))
        rank = distributed.get_rank()
        self._share_groups: list[_ShareGroup] = []
        for ranks, regions in sorted(sets.items()):
            group = group_among([ranks]) if len(ranks) > 1 else None
            if rank in ranks:
                weight = 1.0 / len(tensor_ranks[rank] & set(ranks))
                is_saver = (number % len(ranks) == ranks.index(rank) for number in range(len(regions)))
                weight_regions = [
                    _weight_region_of(here[tensor], region, weight, saves)
                    for (tensor, region), saves in zip(regions, is_saver, strict=True)
                ]
                weight_regions.sort(
                    key=lambda weight_region: weight_region.parameter.dim() <= 1
                )  # those with weight decay first
                self._share_groups.append(
                    _share_group_of(group, weight_regions, len(ranks), ranks.index(rank))
                )

    @property
    def parameters(self) -> list[tuple[nn.Parameter, bool]]:
        """This rank's shares, which the optimizer updates, each with whether it decays. All ranks together
        have every element of the model once."""
        return [
            (own, decays) for share_group in self._share_groups for own, decays, _ in share_group.parameters
        ]

    def reduce(self) -> None:
        """Reduce-scatter the gradients into `parameters`, and clear those of the weights."""
        pending = []
        for share_group in self._share_groups:
            whole = _packed(
                [_gradient(weight_region) for weight_region in share_group.weight_regions], share_group
            )
            part, work = whole, None
            if share_group.group is not None:
                part = torch.empty_like(share_group.share)
                work = distributed.reduce_scatter_single(part, whole, group=share_group.group, async_op=True)
            pending.append((share_group, part, whole, work))
        for share_group, part, _, work in pending:
            if work is not None:
                work.wait()
            for own, _, place in share_group.parameters:
                own.grad = part[place]
        for weight_region in (
            weight_region
            for share_group in self._share_groups
            for weight_region in share_group.weight_regions
        ):
            weight_region.parameter.grad = None

    def sync_weights(self) -> None:
        """All-gather the shares into the weights."""
        with torch.no_grad():
            for weight_region, values in self._gathered_regions([own for own, _ in self.parameters]):
                there = weight_region.view(local(weight_region.parameter))
                there.copy_(values.view(there.shape))

    @property
    def regions(self) -> list[tuple[nn.Parameter, Region, bool]]:
        """Regions of the weights on this rank that belong to the same ranks, each with whether this rank
        saves it."""
        return [
            (weight_region.parameter, weight_region.region, weight_region.saves)
            for share_group in self._share_groups
            for weight_region in share_group.weight_regions
        ]

    def gathered_regions(self, shares: Sequence[Tensor]) -> Iterator[Tensor]:
        """The flat values of each of `regions`, all-gathered from `shares`, which are like `parameters`. Call
        it on every rank."""
        return (values for _, values in self._gathered_regions(shares))

    def scattered(self, values: Sequence[Tensor]) -> list[Tensor]:
        """This rank's shares, like `parameters`, of `values`, which are those of all `regions`."""
        left, shares = iter(values), []
        for share_group in self._share_groups:
            whole = _packed([next(left) for _ in share_group.weight_regions], share_group)
            first = (
                0
                if share_group.group is None
                else distributed.get_rank(share_group.group) * len(share_group.share)
            )
            own = whole[first : first + len(share_group.share)]
            shares += [own[place] for _, _, place in share_group.parameters]
        return shares

    def _gathered_regions(self, shares: Sequence[Tensor]) -> Iterator[tuple[_WeightRegion, Tensor]]:
        left = iter(shares)
        for share_group in self._share_groups:
            own = torch.cat([next(left).detach() for _ in share_group.parameters])
            whole = own
            if share_group.group is not None:
                whole = own.new_empty(len(own) * distributed.get_world_size(share_group.group))
                distributed.all_gather_single(whole, own, group=share_group.group)
            sizes = [weight_region.elements for weight_region in share_group.weight_regions]
            parts = whole[: sum(sizes)].split(sizes)
            yield from zip(share_group.weight_regions, parts, strict=True)


def _weight_region_of(
    same: Sequence[nn.Parameter], region: Region, weight: float, saves: bool
) -> _WeightRegion:
    (parameter,) = same
    return _WeightRegion(
        parameter=parameter, local_region=region_of(parameter), region=region, weight=weight, saves=saves
    )


def _share_group_of(
    group: ProcessGroup | None, weight_regions: list[_WeightRegion], ranks: int, place: int
) -> _ShareGroup:
    elements = sum(weight_region.elements for weight_region in weight_regions)
    decaying = sum(
        weight_region.elements for weight_region in weight_regions if weight_region.parameter.dim() > 1
    )
    size = -(-elements // ranks)
    start = place * size
    share_group = _ShareGroup(group=group, weight_regions=weight_regions, share=torch.empty(0))
    with torch.no_grad():
        values = _packed(
            [weight_region.view(local(weight_region.parameter)) for weight_region in weight_regions],
            share_group,
        )
    share_group.share = values[start : start + size].clone()
    middle = min(max(decaying - start, 0), size)
    for decays, run in ((True, slice(0, middle)), (False, slice(middle, size))):
        if run.start < run.stop:
            share_group.parameters.append((nn.Parameter(share_group.share[run]), decays, run))
    return share_group


def _gradient(weight_region: _WeightRegion) -> Tensor:
    return weight_region.view(local(weight_region.parameter.grad)) * weight_region.weight


def _packed(values: Sequence[Tensor], share_group: _ShareGroup) -> Tensor:
    """The values, flattened and concatenated, with zeros up to a multiple of the number of ranks."""
    ranks = 1 if share_group.group is None else distributed.get_world_size(share_group.group)
    flat = torch.cat([one.reshape(-1) for one in values])
    return torch.cat((flat, flat.new_zeros(-len(flat) % ranks)))


# The job


class UnevenTrainingJob(TrainingJob):
    """A job of a model whose stages or pipelines differ.

    A rank has one stage of one pipeline, or none if the plan leaves it idle. Optimizer states (ZeRO-1), and
    fp32 weights if the compute dtype is narrower, are sharded over all ranks that hold the same region of a
    weight. `names` has the names of the rank's parameters in the whole model.
    """

    def __init__(
        self, source: ModelStage, plan: Plan, *, device_type: str, lr: float, max_norm: float
    ) -> None:
        super().__init__(source, plan, device_type=device_type, lr=lr, max_norm=max_norm)
        self.coordinates = own_coordinates(plan)
        self.stage: ModelStage | None = None
        self._engine: GradientAccumulation | PipelineRunner | None = None
        mesh, named = tensor_mesh(plan, device_type), []
        names = [name for name, _ in source.named_parameters()]
        if self.coordinates is not None:
            self.stage = stage_of(source, plan, self.coordinates, mesh, device_type)
            self._engine = engine_of(self.stage, plan, self.coordinates, mesh)
            # The output projection of tied embeddings has the embedding's name.
            own = self.stage.named_parameters()
            named = [(name if name in names else TABLE, parameter) for name, parameter in own]
        self.names = {parameter: name for name, parameter in named}
        self.owned = OptimizerShards(named, names, tensor_ranks_by_rank(plan))
        if self.stage is not None and plan.job.dtype != "fp32":
            to_compute_dtype(self.stage, COMPUTE[plan.job.dtype])
        self.optimizer: torch.optim.Optimizer | None = None
        if self.owned.parameters:
            self.optimizer = optimizer_of_parameters(plan.job.optimizer, self.owned.parameters, lr=lr)

    @property
    def executed(self) -> tuple[str, ...]:
        """Actions that a step runs on this rank, in order."""
        return () if self._engine is None else self._engine.executed

    @property
    def parameters(self) -> list[nn.Parameter]:
        """This rank's parameters, including tied copies."""
        return [] if self.stage is None else list(self.stage.parameters())

    def backward(self, batch: Tensor) -> StepResult:
        """As in `TrainingJob`; `batch` has token ids of shape (global_batch_size, seq_len + 1)."""
        check_batch(batch, self.plan.job)
        loss = torch.zeros((), device=self.device_type)
        if self.coordinates is not None and self._engine is not None:
            own = local_samples(self.plan, self.coordinates, batch).to(self.device_type)
            loss = self._engine.run(own[..., :-1].contiguous(), own[..., 1:].contiguous())
            stages = self.plan.best.layout.pipelines[self.coordinates.pipeline].stages
            loss = loss / stages[self.coordinates.stage].tp  # equal on all tensor-parallel ranks
        reduce_partial_gradients(self.parameters)
        self.owned.reduce()
        shares = [own for own, _ in self.owned.parameters]
        squares = torch.zeros((), device=self.device_type)
        for own in shares:
            if own.grad is not None:
                squares += own.grad.square().sum()
        return clip(loss, squares, shares, self.max_norm)

    def update(self) -> None:
        """As in `TrainingJob`; weights are all-gathered."""
        if self.optimizer is not None:
            with record_function(OPTIMIZER):
                self.optimizer.step()
            self.optimizer.zero_grad()
        self.owned.sync_weights()

    def fill(self, whole: ParameterValue) -> None:
        """Writes the values into the ranks' optimizer shards, and from there into the weights."""
        with torch.no_grad():
            regions: dict[nn.Parameter, list[tuple[int, Region]]] = defaultdict(list)
            for place, (parameter, region, _) in enumerate(self.owned.regions):
                regions[parameter].append((place, region))
            values: dict[int, Tensor] = {}
            for parameter, parts in regions.items():
                value = whole(self.names[parameter], parameter.shape)
                values |= {place: part_of(value, region).flatten() for place, region in parts}
            shares = self.owned.scattered([values[place] for place in range(len(values))])
            for (own, _), share in zip(self.owned.parameters, shares, strict=True):
                own.copy_(share)
        self.owned.sync_weights()

    def saved_state(self) -> StateDict:
        chunks = _ChunkBuilder(self.names)
        for kind, shares in self._shares().items():
            gathered = self.owned.gathered_regions(shares)
            for (parameter, region, saves), values in zip(self.owned.regions, gathered, strict=True):
                if saves:
                    chunks.add(kind, parameter, region, values.to("cpu", copy=True))
        step = next((state[STEP] for state in self._states() if STEP in state), None)  # equal for all
        if step is None:
            return chunks.by_name()
        names = (state_name(STEP, name) for name in self.names.values())
        return chunks.by_name() | {name: step.to("cpu", copy=True) for name in names}

    def load(self, read: Callable[[StateDict], None]) -> None:
        chunks, values = _ChunkBuilder(self.names), defaultdict[str, list[Tensor]](list)
        states = STATES[self.plan.job.optimizer]
        for kind in (MODEL, *(state for state in states if state != STEP)):
            for parameter, region, _ in self.owned.regions:
                elements = prod(stop - start for start, stop in region)
                values[kind].append(torch.empty(elements, device=self.device_type))
                chunks.add(kind, parameter, region, values[kind][-1])
        steps = {
            state_name(STEP, name): torch.zeros((), device=self.device_type)
            for name in self.names.values()
            if STEP in states
        }
        read(chunks.by_name() | steps)
        with torch.no_grad():
            for kind, regions in values.items():
                for (own, _), share in zip(self.owned.parameters, self.owned.scattered(regions), strict=True):
                    if kind == MODEL:
                        own.copy_(share)
                    elif self.optimizer is not None:
                        self.optimizer.state[own][kind] = share.clone()
                        if steps:
                            self.optimizer.state[own][STEP] = next(iter(steps.values())).clone()
        self.owned.sync_weights()

    def _shares(self) -> dict[str, list[Tensor]]:
        """This rank's optimizer shards of the weights and of each optimizer state."""
        shares: dict[str, list[Tensor]] = {MODEL: [own.detach() for own, _ in self.owned.parameters]}
        for kind in STATES[self.plan.job.optimizer]:
            if kind != STEP:
                shares[kind] = [state[kind] for state in self._states()]
        return shares

    def _states(self) -> Iterator[dict[str, Tensor]]:
        if self.optimizer is not None:
            yield from (self.optimizer.state[own] for own, _ in self.owned.parameters)


class _ChunkBuilder:
    """Collects regions of full tensors with their values."""

    def __init__(self, names: Mapping[nn.Parameter, str]) -> None:
        self._names = names
        self._found: dict[str, tuple[nn.Parameter, dict[tuple[int, ...], Tensor]]] = {}

    def add(self, kind: str, parameter: nn.Parameter, region: Region, values: Tensor) -> None:
        """Add the flat `values` of a region of the parameter itself, or of an optimizer state of it."""
        _, chunks = self._found.setdefault(state_name(kind, self._names[parameter]), (parameter, {}))
        bounds = region[: parameter.dim()]
        chunks[tuple(start for start, _ in bounds)] = values.view([stop - start for start, stop in bounds])

    def by_name(self) -> StateDict:
        return {
            name: TensorChunks(parameter.shape, chunks) for name, (parameter, chunks) in self._found.items()
        }
