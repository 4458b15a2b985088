"""What pipelines take at least: of all layouts of their stages, and of a partition as a whole."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from shardwise.search.stages.pieces import StageFrontiers
from shardwise.search.stages.setting import Cuts, StagedProblem

Values = npt.NDArray[np.float64]


def pipeline_lower_bound(
    problem: StagedProblem, cuts: Cuts, passes_s: Values, whole_s: Values, once_s: Values
) -> Values:
    """Seconds (n) that a pipeline takes at least whose stages take at least `passes_s` (n, stages) for each
    micro-batch and `whole_s` with all of them and the end of the step; the first of them `once_s` (n) for one
    micro-batch and the end of the step.

    Stage s begins after a message through each cut before it, and is busy for its whole. The first
    micro-batch comes to it through all stages before, the last one's gradients go back through them, and
    then the first stage ends its step; between these, s is busy with its passes.
    """
    hops_s = np.concatenate([[0.0], np.cumsum(problem.hops_s(cuts))])
    alone_s = (whole_s + hops_s).max(axis=1)
    inner_s = passes_s[:, 1:]
    between_s = np.cumsum(np.pad(inner_s, ((0, 0), (1, 0)))[:, :-1], axis=1)
    through_s = once_s[:, None] + between_s + problem.microbatches * inner_s + 2.0 * hops_s[1:]
    return np.asarray(np.maximum(alone_s, through_s.max(axis=1)))


class QuickPartitionBounds:
    """What partitions take at least by what each block takes alone, and by the open floors known so far."""

    def __init__(self, stage_frontiers: StageFrontiers) -> None:
        self.stage_frontiers, self.problem = stage_frontiers, stage_frontiers.problem
        blocks = self.problem.blocks
        least = {
            block: stage_frontiers.least_passes_s(blocks.index(block)) for block in dict.fromkeys(blocks)
        }
        self.least_s = np.array([least[block] for block in blocks])

    def passes_s(self, cuts: Cuts) -> Values:
        """Of each stage, a micro-batch's passes."""
        return np.array([self.least_s[first:end].sum() for first, end in self.problem.spans(cuts)])

    def of(self, cuts: Cuts) -> float:
        """The step of any layout."""
        passes_s = self.passes_s(cuts)[None]
        whole_s = self.problem.microbatches * passes_s
        return float(pipeline_lower_bound(self.problem, cuts, passes_s, whole_s, passes_s[:, 0])[0])

    def below(self, cuts: Cuts, limits: Values) -> Values:
        """The step of layouts of less than `limits` (n) bytes."""
        passes_s = np.broadcast_to(self.passes_s(cuts), (len(limits), self.problem.stages))
        whole_s = self.problem.microbatches * passes_s
        for stage, (first, end) in enumerate(self.problem.spans(cuts)):
            for lower_bound in self.stage_frontiers.open_bounds(stage, first, end):
                whole_s[:, stage] = np.maximum(whole_s[:, stage], lower_bound.below(limits))
        return pipeline_lower_bound(self.problem, cuts, passes_s, whole_s, passes_s[:, 0])
