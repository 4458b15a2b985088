"""Ways through a schedule: what takes longest in a pipeline, and so what no like pipeline is below."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from shardwise.search.stages.setting import Cuts, StagedProblem

Values = npt.NDArray[np.float64]

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
