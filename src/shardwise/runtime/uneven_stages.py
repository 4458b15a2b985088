"""Which stage of which pipeline of an uneven plan a rank works on, and that stage, ready to be run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import DeviceMesh

from shardwise.plan import Stage as PlannedStage
from shardwise.plan import UnevenFile
from shardwise.runtime.accumulate import GradientAccumulation
from shardwise.runtime.devices import to_device
from shardwise.runtime.dtypes import COMPUTE
from shardwise.runtime.groups import group_among
from shardwise.runtime.loss import batch_share_loss
from shardwise.runtime.modules import ModelStage
from shardwise.runtime.pipeline import PipelineRunner
from shardwise.runtime.private import PeerSlice, ReshardingStage
from shardwise.runtime.tensor_parallel import split_tensors
from shardwise.runtime.transfers import Region, overlap
from shardwise.schedule import generate


@dataclass(frozen=True, slots=True, kw_only=True)
class UnevenCoordinates:
    """Where a rank works: its pipeline, the stage there, which replica of the stage's rows it is of, and
    which tensor rank."""

    pipeline: int
    stage: int
    row: int
    tp: int


def coordinates_by_rank(plan: UnevenFile) -> dict[int, UnevenCoordinates]:
    """The seat of every rank that is used. Within a stage ranks count tensor ranks first."""
    return {
        rank: UnevenCoordinates(pipeline=place, stage=index, row=number // stage.tp, tp=number % stage.tp)
        for place, pipeline in enumerate(plan.best.layout.pipelines)
        for index, stage in enumerate(pipeline.stages)
        for number, rank in enumerate(stage.rank_numbers)
    }


def tensor_ranks_by_rank(plan: UnevenFile) -> Mapping[int, frozenset[int]]:
    """The ranks of every rank's tensor group, itself included."""
    groups: dict[tuple[int, int, int], set[int]] = {}
    by_rank = coordinates_by_rank(plan)
    for rank, coordinates in by_rank.items():
        groups.setdefault((coordinates.pipeline, coordinates.stage, coordinates.row), set()).add(rank)
    return {
        rank: frozenset(groups[coordinates.pipeline, coordinates.stage, coordinates.row])
        for rank, coordinates in by_rank.items()
    }


def first_sequence(plan: UnevenFile, pipeline: int) -> int:
    """Where in the batch a pipeline's sequences begin: each has its share, in the order of the pipelines."""
    return sum(plan.best.microbatches[:pipeline]) * plan.best.micro_batch_size


def tensor_mesh(plan: UnevenFile, device_type: str) -> DeviceMesh | None:
    """The mesh of this rank's tensor group, where it has mates. Makes the groups of all ranks."""
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
    plan: UnevenFile,
    coordinates: UnevenCoordinates,
    mesh: DeviceMesh | None,
    device_type: str,
) -> ModelStage:
    """The seat's stage of the whole `module`, on a device of this type, divided over the tensor ranks of
    `mesh` where there are more than one; between layers the sequence is then divided too."""
    stages = plan.best.layout.pipelines[coordinates.pipeline].stages
    start = sum(sum(stage.layers) for stage in stages[: coordinates.stage])
    stop = start + sum(stages[coordinates.stage].layers)
    end_modules = {"embedding"} if coordinates.stage == 0 else set()
    end_modules |= {"head"} if coordinates.stage == len(stages) - 1 else set()
    part = module.part(start, stop, end_modules=frozenset(end_modules))
    if plan.model.tied_embeddings and part.head is not None and part.embedding is None:
        part.head.output.weight = nn.Parameter(part.head.output.weight.detach().clone())
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
    """Have `stage` compute in `dtype`, its gradients added up in fp32. Whoever owns its weights keeps them in
    fp32."""
    stage.to(dtype)
    for parameter in stage.parameters():
        parameter.grad_dtype = torch.float32


def engine_of(
    stage: ModelStage, plan: UnevenFile, coordinates: UnevenCoordinates, mesh: DeviceMesh | None
) -> GradientAccumulation | PipelineRunner:
    """What runs 1F1B of the seat's pipeline on its stage."""
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
    """Gradients are added up behind the last backward pass."""


def _peer_slices(plan: UnevenFile, coordinates: UnevenCoordinates, neighbour: int) -> tuple[PeerSlice, ...]:
    """Which parts of this rank's hidden states every rank of a neighbouring stage has too."""
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
    """Rows and tokens of a microbatch's hidden states that each rank of a stage has between layers."""
    high, wide = rows // stage.dp, tokens // stage.tp
    for number in range(stage.devices):
        row, tp = divmod(number, stage.tp)
        yield (row * high, (row + 1) * high), (tp * wide, (tp + 1) * wide)


def local_samples(plan: UnevenFile, coordinates: UnevenCoordinates, batch: Tensor) -> Tensor:
    """Token ids of the seat's rows of its pipeline's share of `batch`; of shape (microbatches, rows, tokens +
    1)."""
    best = plan.best
    first = first_sequence(plan, coordinates.pipeline)
    share = batch[first : first + best.microbatches[coordinates.pipeline] * best.micro_batch_size]
    rows = best.micro_batch_size // best.layout.pipelines[coordinates.pipeline].stages[coordinates.stage].dp
    return share.unflatten(0, (-1, best.micro_batch_size))[
        :, coordinates.row * rows : (coordinates.row + 1) * rows
    ]


def own_coordinates(plan: UnevenFile) -> UnevenCoordinates | None:
    """The seat of this rank; None where the plan leaves it idle."""
    return coordinates_by_rank(plan).get(distributed.get_rank())
