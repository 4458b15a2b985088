"""What it takes to hand tensors from stage to stage where a graph is cut, on stages with meshes alike."""

from __future__ import annotations

from dataclasses import dataclass

from shardwise.cluster import Cluster, Mesh
from shardwise.cost.fabric import CollectiveModel, collective_model_of
from shardwise.cost.layouts.stage import entry_shapes, transfer_elements
from shardwise.cost.memory import BOUNDARY_BUFFERS
from shardwise.cost.problem import machine_of
from shardwise.cost.training import Training
from shardwise.cost.turns import StepCounts
from shardwise.graph import OpGraph
from shardwise.schedule import NAMES, in_flight


@dataclass(frozen=True, slots=True, eq=False)
class StageTransfer:
    """`nbytes` are a rank's part of what each block reads, repetitions counted; `tiers` those that lie
    between the like ranks of a stage and the next, over which `senders` of a group below it send at once. Of
    a message the share `overlap` runs beside other work.
    """

    fabric: CollectiveModel
    nbytes: tuple[float, ...]
    tiers: tuple[int, ...]
    senders: tuple[int, ...]
    overlap: float

    def sent_s(self, stage: int, block: int) -> float:
        """Seconds of a message from `stage` to the next one, which begins with `block`, or back."""
        return float(self.fabric.send_s(self.nbytes[block], self.tiers[stage], self.senders[stage]))

    def hop_s(self, stage: int, block: int) -> float:
        """Seconds of it during which both ranks may work."""
        return self.overlap * self.sent_s(stage, block)

    def counts(
        self, stage: int, first: int, end: int, microbatches: int, *, schedule: str = "1f1b"
    ) -> StepCounts:
        """How often what happens on a stage with the blocks from `first` to before `end`, under a schedule
        with one stage per rank."""
        stages = len(self.tiers) + 1
        blocked = 1.0 - self.overlap
        code = NAMES.index(schedule)
        there_s = blocked * self.sent_s(stage, end) if stage < stages - 1 else 0.0
        back_s = blocked * self.sent_s(stage - 1, first) if stage else 0.0
        out_bytes = self.nbytes[end] if stage < stages - 1 else 0.0
        return StepCounts(
            microbatches=microbatches,
            in_flight=int(in_flight(code, stages, microbatches, 1, stage)),
            stages=stages,
            sent_forward_s=there_s,
            sent_backward_s=back_s,
            buffer_bytes=BOUNDARY_BUFFERS * max(self.nbytes[first] if stage else 0.0, out_bytes),
        )


def stage_transfer_of(
    graph: OpGraph, cluster: Cluster, training: Training, mesh: Mesh, stages: int
) -> StageTransfer:
    """What handing over takes between `stages` in a row, each on `mesh.devices` devices of the cluster."""
    machine = machine_of(cluster, training.dtype, training.optimizer, training.profile)
    element_bytes = machine.recipe.activation_bytes
    shapes = entry_shapes(graph)
    spans = [tier.span for tier in cluster.tiers]
    tiers = []
    for stage in range(stages - 1):
        begin, size = stage * mesh.devices, mesh.devices
        pairs = [(rank, rank + size) for rank in range(begin, begin + size)]
        tiers.append(
            next(place for place, span in enumerate(spans) if all(a // span == b // span for a, b in pairs))
        )
    return StageTransfer(
        fabric=collective_model_of(machine),
        nbytes=tuple(
            0.0 if shape is None else element_bytes * transfer_elements(shape, mesh.ranks) for shape in shapes
        ),
        tiers=tuple(tiers),
        senders=tuple(min(mesh.devices, 1 if tier == 0 else spans[tier - 1]) for tier in tiers),
        overlap=training.profile.pipeline_overlap,
    )
