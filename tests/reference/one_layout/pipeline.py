"""Estimate of one layout in pipeline stages: each stage operator by operator, sends, and the schedule."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from tests.reference.one_layout.layout import LayoutEstimate, estimate_stage
from tests.reference.one_layout.rank import Rank, rank_of, value_shards

from shardwise.cluster import Cluster, Mesh
from shardwise.cost.training import StepCounts, Training
from shardwise.errors import InternalError
from shardwise.graph import OpGraph, StagedLayout, scaled, tensor_shapes
from shardwise.ties import first_largest

BUFFERS = 4.0
"""Send and receive buffers per stage: one each, in both directions."""

Action = tuple[str, int]
"""Kind (F: forward, B: backward) and micro-batch."""


@dataclass(frozen=True, slots=True)
class PipelineEstimate:
    """The fields of that of `search.graph_pipeline`, which this module does not import."""

    time_s: float
    memory_bytes: float
    at_once_bytes: float
    seconds: Mapping[str, float]
    nbytes: Mapping[str, float]
    stages: tuple[LayoutEstimate, ...]
    hops_s: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Message:
    """A rank's part of a tensor that crosses a cut, or of its gradient on the way back.

    `seconds` is the time of the send, of which the sender is blocked for `blocked_s`.
    """

    nbytes: float
    seconds: float
    blocked_s: float


def estimate_pipeline(
    graph: OpGraph, cluster: Cluster, training: Training, mesh: Mesh, layout: StagedLayout
) -> PipelineEstimate:
    """Costs of a layout of `graph` (sizes of the whole batch) in 1F1B stages on meshes like `mesh`."""
    of_one = scaled(graph, graph.batch // layout.microbatches)
    count = len(layout.cuts) + 1
    messages = messages_of(of_one, rank_of(cluster, training, mesh), layout)
    stages = []
    for stage, (first, end) in enumerate(pairwise((0, *layout.cuts, len(layout.blocks)))):
        after = messages[stage] if stage < count - 1 else None
        before = messages[stage - 1] if stage else None
        counts = StepCounts(
            microbatches=layout.microbatches,
            in_flight=max_in_flight(actions_of(stage, count, layout.microbatches)),
            stages=count,
            sent_forward_s=after.blocked_s if after else 0.0,
            sent_backward_s=before.blocked_s if before else 0.0,
            buffer_bytes=BUFFERS * max(each.nbytes if each else 0.0 for each in (before, after)),
        )
        stages.append(
            estimate_stage(
                of_one, cluster, training, mesh, layout.stages[stage], first=first, end=end, counts=counts
            )
        )
    hops_s = [message.seconds - message.blocked_s for message in messages]
    step_s = simulated_s(stages, hops_s, layout.microbatches)
    busy = stages[int(first_largest([estimate.time_s for estimate in stages]))]
    full = stages[int(first_largest([estimate.memory_bytes for estimate in stages]))]
    return PipelineEstimate(
        time_s=step_s,
        memory_bytes=full.memory_bytes,
        at_once_bytes=max(estimate.at_once_bytes for estimate in stages),
        seconds={**busy.seconds, "waiting": step_s - busy.time_s},
        nbytes=full.nbytes,
        stages=tuple(stages),
        hops_s=tuple(hops_s),
    )


def messages_of(graph: OpGraph, rank: Rank, layout: StagedLayout) -> list[Message]:
    """The messages across each cut for one micro-batch, which has the sizes of `graph`."""
    blocks = [
        (block, shapes)
        for block, shapes in zip(graph.blocks, tensor_shapes(graph), strict=True)
        for _ in range(block.repeat)
    ]
    found = []
    for stage, cut in enumerate(layout.cuts):
        block, shapes = blocks[cut]
        if block.entry is None:
            raise InternalError(f"block {block.name} has no entry tensor from the stage before it")
        shards = value_shards(layout.blocks[cut].tensors[block.entry])
        nbytes = rank.elements(shapes[block.entry], shards) * rank.activation_bytes
        seconds = _message_s(rank, stage, nbytes)
        found.append(Message(nbytes, seconds, (1.0 - rank.profile.pipeline_overlap) * seconds))
    return found


def _message_s(rank: Rank, stage: int, nbytes: float) -> float:
    """Seconds of a send from each rank of a stage to the rank with the same index in the next.

    It crosses the innermost tier that joins all of these pairs. All ranks of the stage that share links to it
    send at once.
    """
    size, tiers = rank.mesh.devices, rank.machine.tiers
    tier = 0
    for own in range(stage * size, (stage + 1) * size):
        while own // tiers[tier].span != (own + size) // tiers[tier].span:
            tier += 1
    return rank.send_s(nbytes, tier, min(size, tiers[tier - 1].span if tier else 1))


def actions_of(stage: int, stages: int, microbatches: int) -> list[Action]:
    """The 1F1B actions of a stage: warm-up forwards, then backward and forward in alternation."""
    ahead = min(stages - stage, microbatches)
    actions = [("F", number) for number in range(ahead)]
    for number in range(microbatches):
        actions.append(("B", number))
        if number + ahead < microbatches:
            actions.append(("F", number + ahead))
    return actions


def max_in_flight(actions: Sequence[Action]) -> int:
    """The most micro-batches between forward and backward at the same time."""
    in_flight = most = 0
    for kind, _ in actions:
        in_flight += 1 if kind == "F" else -1
        most = max(most, in_flight)
    return most


def simulated_s(stages: Sequence[LayoutEstimate], hops_s: Sequence[float], microbatches: int) -> float:
    """Seconds of the step: each action starts when its stage is free and its input has arrived.

    Work that happens once per step follows the last action of a stage.
    """
    count = len(stages)
    waiting = [actions_of(stage, count, microbatches) for stage in range(count)]
    free_s = [0.0] * count
    done_s: dict[tuple[int, str, int], float] = {}
    while any(waiting):
        for stage, estimate in enumerate(stages):
            while waiting[stage]:
                kind, number = waiting[stage][0]
                near = stage - 1 if kind == "F" else stage + 1
                came_s = 0.0
                if 0 <= near < count:
                    if (near, kind, number) not in done_s:
                        break
                    came_s = done_s[near, kind, number] + hops_s[min(stage, near)]
                work_s = estimate.forward_s if kind == "F" else estimate.backward_s
                free_s[stage] = max(free_s[stage], came_s) + work_s
                done_s[stage, kind, number] = free_s[stage]
                waiting[stage].pop(0)
    return max(free + estimate.end_s for free, estimate in zip(free_s, stages, strict=True))
