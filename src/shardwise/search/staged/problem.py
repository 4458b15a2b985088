"""The problem of a graph on a pipeline of meshes, and paths through its schedule.

`StagedProblem` gives the layouts of a stage, the messages across cuts and the step time of a pipeline. A
`Path` is a chain of actions of which each waits for the one before, so its length is a lower bound of the
step. `critical_path` finds the longest path of a pipeline.
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
from shardwise.sim import Durations, makespan_s

Values = npt.NDArray[np.float64]

SCHEDULE = "1f1b"

Cuts = tuple[int, ...]
"""The first block of each stage but the first, repetitions counted, ascending."""


@dataclass(frozen=True, eq=False)
class StagedProblem:
    """`stages` in a row, each on a mesh equal to `mesh`; the batch goes through them in `microbatches`.
    `graph` has the sizes of one micro-batch."""

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
        """The index in the graph of each block, repetitions counted."""
        return tuple(place for place, block in enumerate(self.graph.blocks) for _ in range(block.repeat))

    @cached_property
    def places_to_cut(self) -> tuple[int, ...]:
        """The blocks, repetitions counted, before which a cut is possible: they read the output of the block
        before them, and no block from there on reads a skip tensor from before the cut."""
        shapes, joined = entry_shapes(self.graph), blocks_joined_by_skips(self.graph)
        return tuple(
            place for place in range(1, len(shapes)) if shapes[place] is not None and place not in joined
        )

    def spans(self, cuts: Cuts) -> list[tuple[int, int]]:
        """The first block of each stage, and the block after its last."""
        ends = (0, *cuts, len(self.blocks))
        return list(pairwise(ends))

    def counts(self, stage: int, first: int, end: int) -> StepCounts:
        return self.transfer.counts(stage, first, end, self.microbatches, schedule=SCHEDULE)

    def candidates(self, first: int, end: int, counts: StepCounts) -> LayoutSpace:
        """All layouts of some consecutive blocks as a stage."""
        return stage_layouts(self.graph, self.cluster, self.training, self.mesh, counts, first=first, end=end)

    def open_candidates(self, first: int, end: int, counts: StepCounts) -> LayoutSpace:
        """Relaxed layouts of some consecutive blocks: their border tensors are free. A lower bound for every
        stage that contains them."""
        return relaxed_layouts(
            self.graph, self.cluster, self.training, self.mesh, counts, first=first, end=end
        )

    def hops_s(self, cuts: Cuts) -> Values:
        """Seconds of a message across each cut that other work does not hide."""
        return np.array([self.transfer.hop_s(stage, cut) for stage, cut in enumerate(cuts)])

    def step_s(self, cuts: Cuts, forward_s: Values, backward_s: Values, end_s: Values) -> Values:
        """Step time (n) by evaluation of the schedule: of pipelines whose stages take these seconds (n,
        stages) for each forward and backward pass of a micro-batch, and once at the end of the step."""
        return self.makespan_s(forward_s, backward_s, end_s, self.hops_s(cuts))

    def makespan_s(self, forward_s: Values, backward_s: Values, end_s: Values, hops_s: Values) -> Values:
        """Step time (n) with these seconds of a message across each cut, one for all pipelines or (n, stages
        - 1)."""
        durations = Durations.of(
            stages=self.stages, batch=len(forward_s), forward_s=forward_s, backward_s=backward_s,
            reduce_s=end_s, hop_forward_s=hops_s, hop_backward_s=hops_s,
        )  # fmt: skip
        return makespan_s(
            SCHEDULE, pp=self.stages, microbatches=self.microbatches, vpp=1, durations=durations
        )


Weights = tuple[int, int, int]
"""Numbers of forward passes and backward passes of micro-batches, and of ends of the step."""

PERTURBATION, DIFFERENCE_STEP = 1e-6, 1e-9
"""Relative perturbation of durations, so that only one path is the longest, and the relative step by which
each duration is changed to see whether it is on that path; of the step time."""

GOLDEN = 0.6180339887498949
"""Golden ratio: the fractional parts of its multiples are all distinct."""


@dataclass(frozen=True, slots=True)
class Path:
    """Path through a schedule: actions of which each waits for the one before. The step takes at least their
    total duration, whatever the stages are.

    `passes` are the passes in each stage, `hops` the messages across each cut. A mean of several paths is a
    lower bound too: `paths` is their number.
    """

    passes: tuple[Weights, ...]
    hops: tuple[int, ...]
    paths: int = 1

    def seconds(self, problem: StagedProblem, cuts: Cuts, stages_s: Sequence[Values]) -> Values:
        """Lower bound of the step time (n), if the passes take these seconds (n) in each of the stages."""
        hops_s = float(np.array(self.hops) @ problem.hops_s(cuts))
        return np.asarray((np.sum(stages_s, axis=0) + hops_s) / self.paths)

    def averaged_with(self, other: Path) -> Path:
        """The mean of two paths, as their sum."""
        passes = tuple(
            (a[0] + b[0], a[1] + b[1], a[2] + b[2]) for a, b in zip(self.passes, other.passes, strict=True)
        )
        hops = tuple(a + b for a, b in zip(self.hops, other.hops, strict=True))
        return Path(passes, hops, self.paths + other.paths)


def plain_paths(stages: int, microbatches: int) -> list[Path]:
    """The two kinds of paths that `pipeline_lower_bound` counts, for each stage.

    A stage begins after a message through each cut before it, and is then busy with all micro-batches. Or the
    first micro-batch reaches it through all stages before, the gradients of the last one go back through
    them, and the first stage ends its step.
    """
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
    """The longest path in a pipeline whose stages take `prices` (stages, 3) seconds forward, backward and at
    the end of the step; None if several paths are equally long.

    The step time is the largest sum of any path, so its derivative by each duration is the number of times
    that the longest path contains it. If these numbers times the durations add up to the step time, they
    belong to one path.
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
