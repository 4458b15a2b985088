"""Which stage of which pipeline of an uneven plan a rank works on, and that stage, ready to be run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import DeviceMesh

from shardwise.plan import Stage as PlannedStage
from shardwise.plan import UnevenFile
from shardwise.runtime.accumulate import Accumulation
from shardwise.runtime.devices import place
from shardwise.runtime.dtypes import COMPUTE
from shardwise.runtime.groups import group_among
from shardwise.runtime.loss import batch_share_loss
from shardwise.runtime.modules import Stage
from shardwise.runtime.pipeline import Pipeline
from shardwise.runtime.private import Handed, HandingStage
from shardwise.runtime.tensor_parallel import split_tensors
from shardwise.runtime.transfers import Region, overlap
from shardwise.schedule import generate


@dataclass(frozen=True, slots=True, kw_only=True)
class Seat:
    """Where a rank works: its pipeline, the stage there, which replica of the stage's rows it is of, and
    which tensor rank."""

    pipeline: int
    stage: int
    row: int
    tp: int


def seats_of(plan: UnevenFile) -> dict[int, Seat]:
    """The seat of every rank that is used. Within a stage ranks count tensor ranks first."""
    return {
        rank: Seat(pipeline=place, stage=index, row=number // stage.tp, tp=number % stage.tp)
        for place, pipeline in enumerate(plan.best.layout.pipelines)
        for index, stage in enumerate(pipeline.stages)
        for number, rank in enumerate(stage.rank_numbers)
    }


def tensor_mates(plan: UnevenFile) -> Mapping[int, frozenset[int]]:
    """The ranks of every rank's tensor group, itself included."""
    groups: dict[tuple[int, int, int], set[int]] = {}
    seats = seats_of(plan)
    for rank, seat in seats.items():
        groups.setdefault((seat.pipeline, seat.stage, seat.row), set()).add(rank)
    return {rank: frozenset(groups[seat.pipeline, seat.stage, seat.row]) for rank, seat in seats.items()}


def first_sequence(plan: UnevenFile, pipeline: int) -> int:
    """Where in the batch a pipeline's sequences begin: each has its share, in the order of the pipelines."""
    return sum(plan.best.microbatches[:pipeline]) * plan.best.micro_batch_size


def tensor_mesh(plan: UnevenFile, device_type: str) -> DeviceMesh | None:
    """The mesh of this rank's tensor group, where it has mates. Makes the groups of all ranks."""
    groups = sorted({tuple(sorted(mates)) for mates in tensor_mates(plan).values() if len(mates) > 1})
    own = group_among(groups) if groups else None
    return None if own is None else DeviceMesh.from_group(own, device_type)


def stage_of(module: Stage, plan: UnevenFile, seat: Seat, mesh: DeviceMesh | None, device_type: str) -> Stage:
    """The seat's stage of the whole `module`, on a device of this type, divided over the tensor ranks of
    `mesh` where there are more than one; between layers the sequence is then divided too."""
    stages = plan.best.layout.pipelines[seat.pipeline].stages
    start = sum(sum(stage.layers) for stage in stages[: seat.stage])
    stop = start + sum(stages[seat.stage].layers)
    ends = {"embedding"} if seat.stage == 0 else set()
    ends |= {"head"} if seat.stage == len(stages) - 1 else set()
    part = module.part(start, stop, ends=frozenset(ends))
    if plan.model.tied_embeddings and part.head is not None and part.embedding is None:
        part.head.output.weight = nn.Parameter(part.head.output.weight.detach().clone())
    for layer in part.layers.values():
        layer.recompute = plan.best.recompute[seat.pipeline][seat.stage]
    part.positions = torch.arange(plan.job.seq_len, device=device_type)
    part.kept = part.positions
    if mesh is not None:
        split_tensors(part, mesh, sequence_parallel=True)
        part.kept = part.positions.chunk(mesh.size())[seat.tp]
    place(part, device_type)
    return part


def narrow(stage: Stage, dtype: torch.dtype) -> None:
    """Have `stage` compute in `dtype`, its gradients added up in fp32. Whoever owns its weights keeps them in
    fp32."""
    stage.to(dtype)
    for parameter in stage.parameters():
        parameter.grad_dtype = torch.float32


def engine_of(stage: Stage, plan: UnevenFile, seat: Seat, mesh: DeviceMesh | None) -> Accumulation | Pipeline:
    """What runs 1F1B of the seat's pipeline on its stage."""
    best, job = plan.best, plan.job
    stages = best.layout.pipelines[seat.pipeline].stages
    schedule = generate("1f1b", pp=len(stages), microbatches=best.microbatches[seat.pipeline], vpp=1)
    loss = batch_share_loss(job.global_batch_size * job.seq_len, plan.model.vocab, mesh)
    if len(stages) == 1:
        return Accumulation(stage, actions=schedule.ranks[0], loss=loss, before_backward=_nothing)
    own = stages[seat.stage]
    rows, classes, dtype = best.micro_batch_size // own.dp, -(-plan.model.vocab // own.tp), COMPUTE[job.dtype]
    with torch.device("meta"):
        tokens = torch.empty(rows, job.seq_len, dtype=torch.long)
        hidden = torch.empty(rows, job.seq_len // own.tp, plan.model.hidden, dtype=dtype, requires_grad=True)
        logits = torch.empty(rows, job.seq_len, classes, dtype=dtype, requires_grad=True)
    part = HandingStage(
        stage,
        seat.stage,
        len(stages),
        next(stage.parameters()).device,
        before_backward=_nothing,
        reduce=lambda: None,
        input_args=tokens if seat.stage == 0 else hidden,
        output_args=logits if seat.stage == len(stages) - 1 else hidden,
        earlier=_handed(plan, seat, seat.stage - 1),
        later=_handed(plan, seat, seat.stage + 1),
    )
    return Pipeline([part], schedule=schedule, loss=loss, rank=seat.stage)


def _nothing(is_last: bool) -> None:
    """Gradients are added up behind the last backward pass."""


def _handed(plan: UnevenFile, seat: Seat, neighbour: int) -> tuple[Handed, ...]:
    """Which parts of this rank's hidden states every rank of a neighbouring stage has too."""
    stages = plan.best.layout.pipelines[seat.pipeline].stages
    if not 0 <= neighbour < len(stages):
        return ()
    rows, tokens = plan.best.micro_batch_size, plan.job.seq_len
    own = list(_boxes(stages[seat.stage], rows, tokens))[seat.row * stages[seat.stage].tp + seat.tp]
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


def own_samples(plan: UnevenFile, seat: Seat, batch: Tensor) -> Tensor:
    """Token ids of the seat's rows of its pipeline's share of `batch`; of shape (microbatches, rows, tokens +
    1)."""
    best = plan.best
    first = first_sequence(plan, seat.pipeline)
    share = batch[first : first + best.microbatches[seat.pipeline] * best.micro_batch_size]
    rows = best.micro_batch_size // best.layout.pipelines[seat.pipeline].stages[seat.stage].dp
    return share.unflatten(0, (-1, best.micro_batch_size))[:, seat.row * rows : (seat.row + 1) * rows]


def this_seat(plan: UnevenFile) -> Seat | None:
    """The seat of this rank; None where the plan leaves it idle."""
    return seats_of(plan).get(distributed.get_rank())
