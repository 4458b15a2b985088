"""Moves a job from one plan to another on the same ranks, in memory: what a rank needs under the new plan and
does not hold comes from ranks that do."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from math import prod

import torch
from torch import Tensor, distributed
from torch.distributed import Work

from shardwise.cluster import Cluster
from shardwise.plans import Plan
from shardwise.runtime.gradients import local
from shardwise.runtime.job import TrainingJob
from shardwise.runtime.modules import reference_module
from shardwise.runtime.parallelize import divided
from shardwise.runtime.private import destroy_groups, forget_meshes, process_groups
from shardwise.runtime.regions import (
    LocalRegion,
    RankRegion,
    Region,
    Transfer,
    gather_rank_regions,
    overlap,
    region_of,
    transfers,
)
from shardwise.runtime.state_dict import STATES, make_states, named, whole_name

MESSAGE_BYTES = 4 << 20
"""Of one message."""

IN_FLIGHT = 2
"""Messages that a rank has at a time for each that it hears from or talks to."""

ELEMENT_BYTES = 4
"""Parameters and optimizer states are fp32."""


TransferMessage = list[tuple[int, str, Region]]
"""What one message carries: of tensors, by number, which kind and region of them."""

LocalRegions = dict[int, list[LocalRegion]]
"""What a rank holds of every tensor, by its number."""


def migrate(
    job: TrainingJob, plan: Plan, *, message_bytes: int = MESSAGE_BYTES
) -> tuple[TrainingJob, dict[tuple[int, int], int]]:
    """`job` as it goes on under `plan`, with the same parameters and optimizer states, bit by bit; and the
    bytes that went from rank to rank. Call it on every rank, between steps; `job` itself is used up.

    `plan` is for the same model and optimizer and for as many ranks. While it moves, a rank has what it holds
    under both plans, and messages of at most `message_bytes`.
    """
    groups = process_groups()
    forget_meshes()
    lr = job.optimizer.param_groups[0]["lr"]
    with torch.device("meta"):
        module = reference_module(plan.model)
    names = [name for name, _ in module.named_parameters()]
    target = divided(module, plan, lr=lr, max_norm=job.max_norm)
    steps = _steps(job, names)
    _make_states(target, steps)
    have, need = _parts(job, names), _parts(target, names)
    planned = transfers(_gather_all(have), _gather_all(need), nodes_of(plan.cluster))
    kinds = ["model", *(kind for kind in STATES[plan.job.optimizer] if kind != "step")]
    streams = {tensor: kinds if steps[name] else kinds[:1] for tensor, name in enumerate(names)}
    with torch.no_grad():
        _copy_local(have, need, streams)
        for round_number, source in enumerate((have, need)):
            these = [one for one in planned if one.round == round_number]
            _run_transfers(these, source, need, streams, message_bytes, device=target.mesh.device_type)
    target.sync_weights()
    distributed.barrier()
    destroy_groups(groups)
    sent_bytes: dict[tuple[int, int], int] = defaultdict(int)
    for one in planned:
        sent_bytes[one.source, one.target] += ELEMENT_BYTES * one.elements * len(streams[one.tensor])
    return target, dict(sent_bytes)


def nodes_of(cluster: Cluster) -> list[int]:
    """The node of every rank."""
    return [number for number, node in enumerate(cluster.nodes) for _ in range(node.devices)]


def _steps(job: TrainingJob, names: Sequence[str]) -> dict[str, int]:
    """How many steps the optimizer has taken with every parameter of the whole model (sgd: whether any)."""
    taken = torch.zeros(len(names), dtype=torch.int64)
    for index, name, parameter in named(job):
        states = job.optimizer.state[parameter]
        if any(value is not None for value in states.values()):
            taken[names.index(whole_name(job, index, name))] = int(states.get("step", 1))
    distributed.all_reduce(taken, op=distributed.ReduceOp.MAX)
    return dict(zip(names, taken.tolist(), strict=True))


def _make_states(job: TrainingJob, steps: Mapping[str, int]) -> None:
    """Optimizer states for the parameters that have been stepped, all zero but for the number of steps."""
    make_states(job)
    for index, name, parameter in named(job):
        taken = steps[whole_name(job, index, name)]
        if not taken:
            job.optimizer.state.pop(parameter, None)
        elif "step" in job.optimizer.state[parameter]:
            job.optimizer.state[parameter]["step"].fill_(taken)


def _parts(job: TrainingJob, names: Sequence[str]) -> LocalRegions:
    """What this rank holds, by the number of the tensor's name."""
    found: LocalRegions = defaultdict(list)
    for index, name, parameter in named(job):
        states = job.optimizer.state.get(parameter, {})
        tensors = {"model": local(parameter.data)}
        for kind in STATES[job.plan.job.optimizer]:
            if kind != "step":
                value = states.get(kind)
                tensors[kind] = torch.zeros_like(tensors["model"]) if value is None else local(value)
        found[names.index(whole_name(job, index, name))].append(LocalRegion(region_of(parameter), tensors))
    return found


def _gather_all(parts: LocalRegions) -> list[RankRegion]:
    """What all ranks hold."""
    return gather_rank_regions(
        (tensor, part.region)
        for tensor, local_regions in parts.items()
        for part in local_regions
        if part.tensors["model"].numel()
    )


def _copy_local(have: LocalRegions, need: LocalRegions, streams: Mapping[int, Sequence[str]]) -> None:
    """Copy what this rank holds under both plans."""
    for tensor, local_regions in have.items():
        for part in local_regions:
            for kind in streams[tensor]:
                _put(need.get(tensor, []), kind, part.region, part.view(kind, part.region))


def _put(parts: Sequence[LocalRegion], kind: str, region: Region, values: Tensor) -> None:
    """Write the values of a region into whatever parts it lies in."""
    for part in parts:
        common = overlap(part.region, region)
        if common is not None:
            part.view(kind, common).copy_(LocalRegion(region, {kind: values}).view(kind, common))


def _run_transfers(
    planned: Sequence[Transfer],
    source: LocalRegions,
    need: LocalRegions,
    streams: Mapping[int, Sequence[str]],
    message_bytes: int,
    *,
    device: str,
) -> None:
    """Carry out the transfers of one round that this rank has a part in: with each other rank piece after
    piece, with all of them at a time."""
    rank = distributed.get_rank()
    sends: dict[int, list[Transfer]] = defaultdict(list)
    receives: dict[int, list[Transfer]] = defaultdict(list)
    for one in planned:
        if one.source == rank:
            sends[one.target].append(one)
        elif one.target == rank:
            receives[one.source].append(one)
    outgoing = {other: messages_of(these, streams, message_bytes) for other, these in sorted(sends.items())}
    incoming = {
        other: messages_of(these, streams, message_bytes) for other, these in sorted(receives.items())
    }
    in_flight: deque[tuple[list[Work], list[tuple[TransferMessage, Tensor]]]] = deque()
    while outgoing or incoming or in_flight:
        pending = []
        arriving = []
        for other, messages in list(incoming.items()):
            message = next(messages, None)
            if message is None:
                del incoming[other]
                continue
            buffer = torch.empty(sum(_size(region) for _, _, region in message), device=device)
            pending.append(distributed.P2POp(distributed.irecv, buffer, other))
            arriving.append((message, buffer))
        for other, messages in list(outgoing.items()):
            message = next(messages, None)
            if message is None:
                del outgoing[other]
                continue
            pending.append(distributed.P2POp(distributed.isend, _packed(message, source).to(device), other))
        if pending:
            in_flight.append((distributed.batch_isend_irecv(pending), arriving))
        # The next pieces are on their way while these are put where they belong.
        if in_flight and (len(in_flight) == IN_FLIGHT or not pending):
            requests, arrived = in_flight.popleft()
            for request in requests:
                request.wait()
            for message, buffer in arrived:
                _unpack(message, buffer, need)


def messages_of(
    planned: Sequence[Transfer], streams: Mapping[int, Sequence[str]], message_bytes: int
) -> Iterator[TransferMessage]:
    """All that is transferred, in messages of at most `message_bytes`: tensor, kind and region of each
    part."""
    most = message_bytes // ELEMENT_BYTES
    message: TransferMessage = []
    free_elements = most
    for one in planned:
        for kind in streams[one.tensor]:
            for region in _bounded(one.region, most):
                if _size(region) > free_elements:
                    yield message
                    message, free_elements = [], most
                message.append((one.tensor, kind, region))
                free_elements -= _size(region)
    if message:
        yield message


def _bounded(region: Region, most: int) -> Iterator[Region]:
    """The region in boxes of at most so many elements: halved along its longest dim until they are."""
    if _size(region) <= most:
        yield region
        return
    dim = max(range(len(region)), key=lambda place: region[place][1] - region[place][0])
    start, stop = region[dim]
    middle = (start + stop) // 2
    for half in ((start, middle), (middle, stop)):
        yield from _bounded((*region[:dim], half, *region[dim + 1 :]), most)


def _size(region: Region) -> int:
    return prod(stop - start for start, stop in region)


def _packed(message: Sequence[tuple[int, str, Region]], source: LocalRegions) -> Tensor:
    values = []
    for tensor, kind, region in message:
        part = next(part for part in source[tensor] if overlap(part.region, region) == region)
        values.append(part.view(kind, region).reshape(-1))
    return torch.cat(values)


def _unpack(message: Sequence[tuple[int, str, Region]], buffer: Tensor, need: LocalRegions) -> None:
    at = 0
    for tensor, kind, region in message:
        size = _size(region)
        _put(need[tensor], kind, region, buffer[at : at + size])
        at += size
