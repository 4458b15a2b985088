"""Layouts and stages together: partitions in the order of what they take at least, until none is left that
could add to what is found."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import combinations
from math import comb

import numpy as np
import numpy.typing as npt

from shardwise.errors import ConfigError
from shardwise.frontier import non_dominated
from shardwise.search.stages.floors import QuickPartitionBounds
from shardwise.search.stages.partition import ROUNDING, Partition, StagedPipeline
from shardwise.search.stages.pieces import StageFrontiers
from shardwise.search.stages.setting import Cuts, StagedProblem

Values = npt.NDArray[np.float64]

MOST_PARTITIONS = 50_000
"""Ways to cut a graph that are held in order."""

MOST_PATHS = 16
"""Paths through a schedule that are counted for one partition."""

STAGE_EPSILON_SHARE = 0.5
"""Of an epsilon, the part for stages; the rest is for what bounds of whole pipelines leave."""


@dataclass(slots=True, eq=False)
class StagedFrontier:
    """Pipelines of which none is beaten by another, seconds ascending, and up to which factor 1 + `epsilon`
    each layout of each partition is matched by one. Of all `partitions`, `evaluated` were."""

    points: list[StagedPipeline] = field(default_factory=list)
    epsilon: float = 0.0
    partitions: int = 0
    evaluated: int = 0

    @property
    def figures(self) -> Values:
        """Seconds and bytes (n, 2) of the points."""
        return np.array([[p.time_s, p.memory_bytes] for p in self.points]).reshape(-1, 2)

    def add(self, fresh: Sequence[StagedPipeline]) -> None:
        """Take over what is beaten by none."""
        points = [*self.points, *fresh]
        selected = non_dominated(np.array([[p.time_s, p.memory_bytes] for p in points]))
        self.points = sorted((points[place] for place in selected.tolist()), key=lambda point: point.time_s)


def staged_frontier(
    problems: Sequence[StagedProblem], *, epsilon: float, most_labels: float
) -> tuple[StagedFrontier, list[StageFrontiers]]:
    """The frontier over all partitions of the graph and layouts of the stages, in any of the settings."""
    found = StagedFrontier(epsilon=epsilon)
    every = [StageFrontiers(problem, epsilon * STAGE_EPSILON_SHARE, most_labels) for problem in problems]
    lower_bounds: list[tuple[Values, Values]] = []
    quick_bounds = [QuickPartitionBounds(stage_frontiers) for stage_frontiers in every]
    unproven = [(quick, cuts) for quick in quick_bounds for cuts in _in_order(quick)]
    found.partitions = len(unproven)
    while unproven:
        pruned: list[tuple[float, QuickPartitionBounds, Cuts]] = []
        for quick, cuts in unproven:
            if _is_matched(found, quick, cuts):
                pruned.append((found.epsilon, quick, cuts))
            else:
                lower_bounds.append(_solved(found, Partition.of(quick.stage_frontiers, cuts), epsilon))
                found.evaluated += 1
                found.epsilon = max(
                    epsilon, *(_epsilon_left(found, *lower_bound) for lower_bound in lower_bounds)
                )
        # What was cut while less was known is held against what is known now.
        unproven = [(quick, cuts) for used, quick, cuts in pruned if used > found.epsilon]
    return found, every


def _solved(found: StagedFrontier, partition: Partition, epsilon: float) -> tuple[Values, Values]:
    """The floor of a partition whose pipelines are found: path by path, until these match it."""
    for _ in range(MOST_PATHS):
        lower_bound = partition.lower_bound()
        found.add(partition.evaluate())
        seconds, nbytes = lower_bound
        gaps = _gaps(found, seconds, nbytes)
        if not len(gaps) or gaps.max() <= epsilon or not partition.next_path(nbytes[gaps.argmax()]):
            break
    return lower_bound


def _in_order(quick: QuickPartitionBounds) -> list[Cuts]:
    """All ways to cut a graph by what they take at least, of equals the first."""
    problem = quick.problem
    places, count = problem.places_to_cut, problem.stages - 1
    if not 1 <= comb(len(places), count) <= MOST_PARTITIONS:
        raise ConfigError(
            "is no number of stages that this graph can be cut into", key="--stages",
            found=f"{problem.stages} of {len(problem.blocks)} blocks, {comb(len(places), count):,} ways",
            allowed=f"1 to {MOST_PARTITIONS:,} ways to cut",
        )  # fmt: skip
    return sorted(combinations(places, count), key=lambda cuts: (quick.of(cuts), cuts))


def _is_matched(found: StagedFrontier, quick: QuickPartitionBounds, cuts: Cuts) -> bool:
    """Whether points match all layouts of a partition, by its crude floor; stages that say too little are
    tracked amid others, one after the other."""
    if not found.points:
        return False
    figures, factor = found.figures, 1.0 + max(found.epsilon, ROUNDING)
    # Between two points' bytes the slower one is the fastest that there is.
    rising = figures[np.argsort(figures[:, 1])]
    limits = np.append(rising[:, 1] / factor, np.inf)
    required_s = np.append(np.inf, rising[:, 0] / factor)

    def is_matched() -> bool:
        return bool((quick.below(cuts, limits) >= required_s).all())

    if is_matched():
        return True
    spans = quick.problem.spans(cuts)
    heaviest = np.argsort(-quick.passes_s(cuts), kind="stable")
    for stage in heaviest.tolist():
        quick.stage_frontiers.open_bound(stage, *spans[stage])
        if is_matched():
            return True
    return False


def _epsilon_left(found: StagedFrontier, seconds: Values, nbytes: Values) -> float:
    """The least epsilon with which points match all above a staircase."""
    return float(_gaps(found, seconds, nbytes).max(initial=0.0))


def _gaps(found: StagedFrontier, seconds: Values, nbytes: Values) -> Values:
    """The same for each step (n) of the staircase."""
    figures = found.figures
    ratios = np.maximum(figures[None, :, 0] / seconds[:, None], figures[None, :, 1] / nbytes[:, None])
    left = ratios.min(axis=1) - 1.0
    return np.where(left > ROUNDING, left, 0.0)
