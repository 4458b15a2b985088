"""A graph on a pipeline of meshes: what is laid out, and what a pipeline of laid-out stages takes."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from shardwise.cluster import Cluster, Mesh
from shardwise.cost import (
    LayoutSpace,
    StageTransfer,
    StepCounts,
    Training,
    entry_shapes,
    relaxed_layouts,
    stage_layouts,
    stage_transfer_of,
)
from shardwise.graph import OpGraph, blocks_joined_by_skips
from shardwise.sim import Durations, compiled_schedule

Values = npt.NDArray[np.float64]

SCHEDULE = "1f1b"

Cuts = tuple[int, ...]
"""The first block of each stage but the first, repetitions counted, ascending."""


@dataclass(frozen=True, eq=False)
class StagedProblem:
    """`stages` in a row, each on a mesh like `mesh`, through which the batch goes in so many `microbatches`;
    `graph` has the sizes of one of them."""

    graph: OpGraph
    cluster: Cluster
    training: Training
    mesh: Mesh
    stages: int
    microbatches: int

    @cached_property
    def transfer(self) -> StageTransfer:
        return stage_transfer_of(self.graph, self.cluster, self.training, self.mesh, self.stages)

    @cached_property
    def blocks(self) -> tuple[int, ...]:
        """The place in the graph of each block, repetitions counted."""
        return tuple(place for place, block in enumerate(self.graph.blocks) for _ in range(block.repeat))

    @cached_property
    def places_to_cut(self) -> tuple[int, ...]:
        """The blocks, repetitions counted, that read what the one before them made, and nothing else that
        was made before, as those behind."""
        shapes, joined = entry_shapes(self.graph), blocks_joined_by_skips(self.graph)
        return tuple(
            place for place in range(1, len(shapes)) if shapes[place] is not None and place not in joined
        )

    def spans(self, cuts: Cuts) -> list[tuple[int, int]]:
        """The first block of each stage, and the one after its last."""
        ends = (0, *cuts, len(self.blocks))
        return list(pairwise(ends))

    def counts(self, stage: int, first: int, end: int) -> StepCounts:
        return self.transfer.counts(stage, first, end, self.microbatches, schedule=SCHEDULE)

    def candidates(self, first: int, end: int, counts: StepCounts) -> LayoutSpace:
        """All layouts of some blocks in a row."""
        return stage_layouts(self.graph, self.cluster, self.training, self.mesh, counts, first=first, end=end)

    def open_candidates(self, first: int, end: int, counts: StepCounts) -> LayoutSpace:
        """All layouts of some blocks amid others."""
        return relaxed_layouts(
            self.graph, self.cluster, self.training, self.mesh, counts, first=first, end=end
        )

    def hops_s(self, cuts: Cuts) -> Values:
        """Seconds of a message across each cut beside other work."""
        return np.array([self.transfer.hop_s(stage, cut) for stage, cut in enumerate(cuts)])

    def step_s(self, cuts: Cuts, forward_s: Values, backward_s: Values, end_s: Values) -> Values:
        """Seconds (n) of the step by the schedule's evaluator: of pipelines whose stages take so long (n,
        stages) for each pass of a micro-batch, and at the end of the step."""
        return self.makespan_s(forward_s, backward_s, end_s, self.hops_s(cuts))

    def makespan_s(self, forward_s: Values, backward_s: Values, end_s: Values, hops_s: Values) -> Values:
        """The same with so many seconds of a message across each cut, one for all or (n, stages - 1)."""
        durations = Durations.of(
            stages=self.stages, batch=len(forward_s), forward_s=forward_s, backward_s=backward_s,
            reduce_s=end_s, hop_forward_s=hops_s, hop_backward_s=hops_s,
        )  # fmt: skip
        compiled = compiled_schedule(SCHEDULE, self.stages, self.microbatches, 1)
        return np.asarray(compiled.makespan_s(durations))
