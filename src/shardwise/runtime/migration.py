"""Migration of a running job to another plan on the same ranks, in memory.

Each rank receives the regions of weights and optimizer states that it needs under the new plan and does not
hold. `regions.transfers` decides who sends them.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from math import prod

import torch
from torch import Tensor, distributed
from torch.distributed import Work

from shardwise.cluster import Cluster
from shardwise.plans import Plan
from shardwise.runtime.distribute import divided, network_of
from shardwise.runtime.gradients import local
from shardwise.runtime.job import TrainingJob
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
from shardwise.runtime.state_dict import MODEL, STATES, STEP
from shardwise.runtime.uniform import UniformTrainingJob, require_uniform

MESSAGE_BYTES = 4 << 20
"""Largest message in bytes. Bounds the buffers."""

IN_FLIGHT = 2
"""Messages in flight between each pair of ranks, so that unpacking overlaps with receiving."""

ELEMENT_BYTES = 4
"""Bytes per element: parameters and optimizer states are fp32."""


TransferMessage = list[tuple[int, str, Region]]
"""Content of one message: number of the tensor, kind (`model` or the name of an optimizer state), region."""

LocalRegions = dict[int, list[LocalRegion]]
"""Regions that a rank holds of every tensor, by number of the tensor."""


def migrate(
    job: TrainingJob, plan: Plan, *, message_bytes: int = MESSAGE_BYTES
) -> tuple[UniformTrainingJob, dict[tuple[int, int], int]]:
    """Continue `job` under `plan` with bitwise equal parameters and optimizer states.

    Returns the new job and the bytes sent from rank to rank. Call it on every rank, between steps; `job`
    becomes unusable. `plan` must have the same model, optimizer and number of ranks. During the migration, a
    rank holds its state under both plans, and messages of at most `message_bytes`.
    """
    source, groups = require_uniform(job), process_groups()
    forget_meshes()
    module = network_of(plan).module()
    names = [name for name, _ in module.named_parameters()]
    lr = source.optimizer.param_groups[0]["lr"]
    target = require_uniform(divided(module, plan, lr=lr, max_norm=job.max_norm))
    steps = _steps(source, names)
    _make_states(target, steps)
    have, need = _parts(source, names), _parts(target, names)
    planned = transfers(_gather_all(have), _gather_all(need), nodes_of(plan.cluster))
    kinds = [MODEL, *(kind for kind in STATES[plan.job.optimizer] if kind != STEP)]
    streams = {tensor: kinds if steps[name] else kinds[:1] for tensor, name in enumerate(names)}
    with torch.no_grad():
        _copy_local(have, need, streams)
        for round_number, held in enumerate((have, need)):
            these = [one for one in planned if one.round == round_number]
            _run_transfers(these, held, need, streams, message_bytes, device=target.device_type)
    target.sync_weights()
    distributed.barrier()
    destroy_groups(groups)
    sent_bytes: dict[tuple[int, int], int] = defaultdict(int)
    for one in planned:
        sent_bytes[one.source, one.target] += ELEMENT_BYTES * one.elements * len(streams[one.tensor])
    return target, dict(sent_bytes)


def nodes_of(cluster: Cluster) -> list[int]:
    """Node of every rank."""
    return [number for number, node in enumerate(cluster.nodes) for _ in range(node.devices)]


def _steps(job: UniformTrainingJob, names: Sequence[str]) -> dict[str, int]:
    """Optimizer steps taken for every parameter of the whole model, by name (sgd: 1 if it has a state)."""
    taken = torch.zeros(len(names), dtype=torch.int64)
    for name, parameter in job.named_parameters():
        states = job.optimizer.state[parameter]
        if any(value is not None for value in states.values()):
            taken[names.index(name)] = int(states.get(STEP, 1))
    distributed.all_reduce(taken, op=distributed.ReduceOp.MAX)
    return dict(zip(names, taken.tolist(), strict=True))


def _make_states(job: UniformTrainingJob, steps: Mapping[str, int]) -> None:
    """Create zero optimizer states for the parameters that have been stepped, with their step counts."""
    job.make_states()
    for name, parameter in job.named_parameters():
        taken = steps[name]
        if not taken:
            job.optimizer.state.pop(parameter, None)
        elif STEP in job.optimizer.state[parameter]:
            job.optimizer.state[parameter][STEP].fill_(taken)


def _parts(job: UniformTrainingJob, names: Sequence[str]) -> LocalRegions:
    """Regions that this rank holds, by number of the tensor."""
    found: LocalRegions = defaultdict(list)
    for name, parameter in job.named_parameters():
        states = job.optimizer.state.get(parameter, {})
        tensors = {MODEL: local(parameter.data)}
        for kind in STATES[job.plan.job.optimizer]:
            if kind != STEP:
                value = states.get(kind)
                tensors[kind] = torch.zeros_like(tensors[MODEL]) if value is None else local(value)
        found[names.index(name)].append(LocalRegion(region_of(parameter), tensors))
    return found


def _gather_all(parts: LocalRegions) -> list[RankRegion]:
    """Regions that all ranks hold."""
    return gather_rank_regions(
        (tensor, part.region)
        for tensor, local_regions in parts.items()
        for part in local_regions
        if part.tensors[MODEL].numel()
    )


def _copy_local(have: LocalRegions, need: LocalRegions, streams: Mapping[int, Sequence[str]]) -> None:
    """Copy the regions that this rank holds under both plans."""
    for tensor, local_regions in have.items():
        for part in local_regions:
            for kind in streams[tensor]:
                _put(need.get(tensor, []), kind, part.region, part.view(kind, part.region))


def _put(parts: Sequence[LocalRegion], kind: str, region: Region, values: Tensor) -> None:
    """Write the values of a region into all local regions that overlap it."""
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
    """Carry out this rank's transfers of one round: messages with all other ranks at once, and in order with
    each of them."""
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
        # Wait for the older messages while newer ones are in flight, then unpack them.
        if in_flight and (len(in_flight) == IN_FLIGHT or not pending):
            requests, arrived = in_flight.popleft()
            for request in requests:
                request.wait()
            for message, buffer in arrived:
                _unpack(message, buffer, need)


def messages_of(
    planned: Sequence[Transfer], streams: Mapping[int, Sequence[str]], message_bytes: int
) -> Iterator[TransferMessage]:
    """Split the transfers into messages of at most `message_bytes`."""
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
    """Split a region into boxes of at most `most` elements, by halving the longest dim."""
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
