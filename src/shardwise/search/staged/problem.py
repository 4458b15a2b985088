"""A graph on a pipeline of meshes: what is laid out, and what a pipeline of laid-out stages takes.

Ways through a schedule: what takes longest in a pipeline, and so what no like pipeline is below.
"""

from __future__ import annotations

from collections.abc import Sequence
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


Weights = tuple[int, int, int]
"""So many forward passes of micro-batches, backward passes, and ends of the step."""

PERTURBATION, DIFFERENCE_STEP = 1e-6, 1e-9
"""How far durations are moved apart, so that one way alone takes longest, and how far each is moved to see
whether it is on that way; of the seconds of the step."""

GOLDEN = 0.6180339887498949
"""Multiples of it, without their whole parts, are all apart."""


@dataclass(frozen=True, slots=True)
class Path:
    """Actions of a schedule of which each waits for the one before: whatever the stages are, the step takes
    at least what these take. `passes` are those through each stage, `hops` the messages across each cut. Of
    several paths together, the step takes at least the mean: `paths` is how many they are."""

    passes: tuple[Weights, ...]
    hops: tuple[int, ...]
    paths: int = 1

    def seconds(self, problem: StagedProblem, cuts: Cuts, stages_s: Sequence[Values]) -> Values:
        """The step (n) at least, where the passes take so long (n) in each of the stages."""
        hops_s = float(np.array(self.hops) @ problem.hops_s(cuts))
        return np.asarray((np.sum(stages_s, axis=0) + hops_s) / self.paths)

    def averaged_with(self, other: Path) -> Path:
        """Both together."""
        passes = tuple(
            (a[0] + b[0], a[1] + b[1], a[2] + b[2]) for a, b in zip(self.passes, other.passes, strict=True)
        )
        hops = tuple(a + b for a, b in zip(self.hops, other.hops, strict=True))
        return Path(passes, hops, self.paths + other.paths)


def plain_paths(stages: int, microbatches: int) -> list[Path]:
    """What `pipeline_lower_bound` counts: a stage begins after a message through each cut before it and is
    busy for its whole; or the first micro-batch comes to it through all stages before, and the last one's
    gradients go back through them, where the first stage ends its step."""
    many = microbatches
    found = []
    for stage in range(stages):
        messages = [1] * stage + [0] * (stages - 1 - stage)
        after: list[Weights] = [(0, 0, 0)] * (stages - 1 - stage)
        own: list[Weights] = [*[(0, 0, 0)] * stage, (many, many, 1), *after]
        found.append(Path(tuple(own), tuple(messages)))
        if stage:
            through: list[Weights] = [(1, 1, 1), *[(1, 1, 0)] * (stage - 1), (many, many, 0), *after]
            found.append(Path(tuple(through), tuple(2 * each for each in messages)))
    return found


def critical_path(problem: StagedProblem, cuts: Cuts, prices: Values) -> Path | None:
    """The path that takes longest in a pipeline whose stages take so many seconds (stages, 3) forward,
    backward and at the end of the step; None where several are as long.

    The step is the largest of the sums of all paths, and rises with each duration as often as that is on the
    longest. That all of them together make up the step again shows that they are of one path.
    """
    stages = problem.stages
    given = np.concatenate([prices.T.reshape(-1), problem.hops_s(cuts)])
    whole = float(problem.step_s(cuts, *(prices[None, :, column] for column in range(3)))[0])
    number = np.arange(1, len(given) + 1)
    base = given + whole * PERTURBATION * (1.0 + number * GOLDEN % 1.0)
    perturbed = np.concatenate([base[None], base + whole * DIFFERENCE_STEP * np.eye(len(given))])
    forward_s, backward_s, end_s = (perturbed[:, stages * part : stages * (part + 1)] for part in range(3))
    seconds = problem.makespan_s(forward_s, backward_s, end_s, perturbed[:, 3 * stages :])
    counts = np.rint((seconds[1:] - seconds[0]) / (whole * DIFFERENCE_STEP))
    if abs(float(counts @ base) - float(seconds[0])) > DIFFERENCE_STEP * float(seconds[0]):
        return None
    of_stages = counts[: 3 * stages].astype(int).reshape(3, stages).T.tolist()
    passes = tuple((forward, backward, end) for forward, backward, end in of_stages)
    return Path(passes, tuple(counts[3 * stages :].astype(int).tolist()))
