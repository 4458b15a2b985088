"""Search over partitions of a graph into stages and layouts of the stages.

Partitions are taken in the order of their quick bounds, until the points found match all that are left. A
`Partition` has the pipelines that were evaluated and a lower-bound curve of all of its pipelines.
`staged_frontier` is the entry point.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import combinations
from math import comb

import numpy as np
import numpy.typing as npt

from shardwise.errors import ConfigError
from shardwise.graph import GraphLayout
from shardwise.pareto import non_dominated
from shardwise.plans import PROVEN_GAP
from shardwise.search.staged.problem import Cuts, Path, StagedProblem, critical_path, plain_paths
from shardwise.search.staged.stage_frontier import QuickPartitionBounds, StageFrontier, StageFrontiers
from shardwise.ties import PROVEN_TIE, ROUNDING, first_best, first_largest

Values = npt.NDArray[np.float64]
Rows = npt.NDArray[np.intp]


@dataclass(frozen=True, slots=True, eq=False)
class StagedPipeline:
    """A pipeline that was evaluated: step time in seconds, memory in bytes of the rank with most, and the
    rows of its layouts in the stage frontiers."""

    problem: StagedProblem
    cuts: Cuts
    stage_frontiers: tuple[StageFrontier, ...]
    picks: tuple[int, ...]
    time_s: float
    memory_bytes: float

    @property
    def layouts(self) -> tuple[GraphLayout, ...]:
        """The layout of each stage."""
        return tuple(
            stage_frontier.layouts[pick]
            for stage_frontier, pick in zip(self.stage_frontiers, self.picks, strict=True)
        )


@dataclass(eq=False)
class Partition:
    """A graph cut before the blocks `cuts`, and its stages. `paths` are the paths through the schedule that
    its lower bound counts, `evaluated` its pipelines."""

    stage_frontiers: StageFrontiers
    cuts: Cuts
    own: tuple[StageFrontier, ...]
    paths: list[Path]
    evaluated: list[StagedPipeline] = field(default_factory=list)

    @staticmethod
    def of(stage_frontiers: StageFrontiers, cuts: Cuts) -> Partition:
        spans = stage_frontiers.problem.spans(cuts)
        own = tuple(
            stage_frontiers.stage_frontier(stage, first, end) for stage, (first, end) in enumerate(spans)
        )
        return Partition(
            stage_frontiers,
            cuts,
            own,
            plain_paths(stage_frontiers.problem.stages, stage_frontiers.problem.microbatches),
        )

    def lower_bound(self) -> tuple[Values, Values]:
        """The lower-bound curve (seconds, bytes ascending) of all layouts of the partition. Within each
        memory limit it is the longest of all paths, with each stage at the lower bound of its frontier."""
        for path in self.paths:
            self._stages_s(path, np.empty(0))  # solving a sum adds steps to the curve
        limits = np.unique(np.concatenate([stage_frontier.nbytes for stage_frontier in self.own]))
        seconds = self._path_bounds(limits).max(axis=0)
        some = np.isfinite(seconds)
        return seconds[some], limits[some]

    def _path_bounds(self, limits: Values) -> Values:
        """Lower bounds of each path (paths, n) within memory limits (n)."""
        problem = self.stage_frontiers.problem
        return np.stack(
            [path.seconds(problem, self.cuts, self._stages_s(path, limits)) for path in self.paths]
        )

    def _stages_s(self, path: Path, limits: Values) -> list[Values]:
        return [
            stage_frontier.lower_bound_s(weights, limits)
            for stage_frontier, weights in zip(self.own, path.passes, strict=True)
        ]

    def evaluate(self) -> list[StagedPipeline]:
        """Evaluate pipelines by the schedule: for each path and memory limit, the layouts of its stages that
        finish their part of the path first."""
        problem = self.stage_frontiers.problem
        limits = np.unique(np.concatenate([stage_frontier.prices[:, 3] for stage_frontier in self.own]))
        rows = [self._picks(path, limits) for path in self.paths]
        picks = np.unique(np.concatenate(rows), axis=0)
        picks = picks[(picks >= 0).all(axis=1)]
        prices = self.prices(picks)
        time_s = problem.step_s(self.cuts, prices[..., 0], prices[..., 1], prices[..., 2])
        nbytes = prices[..., 3].max(axis=1)
        self.evaluated = [
            StagedPipeline(problem, self.cuts, self.own, tuple(pick), float(time), float(taken))
            for pick, time, taken in zip(picks.tolist(), time_s, nbytes, strict=True)
        ]
        return self.evaluated

    def prices(self, picks: Rows) -> Values:
        """Seconds and bytes (n, stages, 4) of the layouts (n, stages) of each stage."""
        return np.stack(
            [stage_frontier.prices[picks[:, stage]] for stage, stage_frontier in enumerate(self.own)], axis=1
        )

    def next_path(self, limit: float) -> bool:
        """Count one more path for the open part of the frontier at a memory limit of the lower-bound curve;
        returns whether there was one. Stages may exceed the limit by their epsilon.

        The first candidate is the critical path of the fastest pipeline there. If it is counted already: that
        of the pipeline whose layouts finish the longest path of the bounds first. Then the mean of these two.
        """
        if not self.evaluated:
            return False
        least = min(each.memory_bytes for each in self.evaluated)
        within = np.array([max(limit * (1.0 + self.stage_frontiers.epsilon), least) * (1.0 + ROUNDING)])
        fitting = [each for each in self.evaluated if each.memory_bytes <= within[0]]
        best = first_best(fitting, lambda each: (-each.time_s, -each.memory_bytes), PROVEN_TIE)
        longest = self.paths[int(first_largest(self._path_bounds(within)[:, 0], PROVEN_TIE))]
        fastest = self._picks(longest, within)[0]
        for picks in (np.array(best.picks), fastest):
            prices = self.prices(picks[None])[0, :, :3]
            path = critical_path(self.stage_frontiers.problem, self.cuts, prices)
            if path is not None and path not in self.paths:
                self.paths.append(path)
                return True
        if path is None or path == longest or path.averaged_with(longest) in self.paths:
            return False
        self.paths.append(path.averaged_with(longest))
        return True

    def _picks(self, path: Path, limits: Values) -> Rows:
        """For each memory limit (n) the layouts (n, stages) that finish their part of a path first; for
        stages not on the path, all micro-batches count."""
        many = self.stage_frontiers.problem.microbatches
        requested = (weights if any(weights) else (many, many, 1) for weights in path.passes)
        return np.column_stack(
            [
                stage_frontier.picks(limits, weights)
                for stage_frontier, weights in zip(self.own, requested, strict=True)
            ]
        )


MOST_PARTITIONS = 50_000
"""Most ways to cut a graph: all are sorted by their bounds."""

MOST_PATHS = 16
"""Most paths through a schedule that are counted for one partition."""

STAGE_EPSILON_SHARE = 0.5
"""Share of epsilon for the stage frontiers; the rest is for the gap of whole pipelines."""


@dataclass(slots=True, eq=False)
class StagedFrontier:
    """Non-dominated pipelines by ascending step time, and the proven epsilon: each layout of each partition
    is matched by one within a factor 1 + `epsilon`. `evaluated` of all `partitions` were evaluated, the
    others pruned."""

    points: list[StagedPipeline] = field(default_factory=list)
    epsilon: float = 0.0
    partitions: int = 0
    evaluated: int = 0

    @property
    def figures(self) -> Values:
        """Seconds and bytes (n, 2) of the points."""
        return np.array([[p.time_s, p.memory_bytes] for p in self.points]).reshape(-1, 2)

    def add(self, fresh: Sequence[StagedPipeline]) -> None:
        """Add pipelines and keep the non-dominated ones."""
        points = [*self.points, *fresh]
        selected = non_dominated(np.array([[p.time_s, p.memory_bytes] for p in points]))
        self.points = sorted((points[place] for place in selected.tolist()), key=lambda point: point.time_s)


def staged_frontier(
    problems: Sequence[StagedProblem], *, epsilon: float, most_labels: float
) -> tuple[StagedFrontier, list[StageFrontiers]]:
    """The Pareto frontier over all partitions of the graph and all layouts of their stages, for all problems
    together, and the stage frontiers.

    Raises ConfigError if the graph cannot be cut into this number of stages.
    """
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
                    epsilon, *(float(_gaps(found, *one).max(initial=0)) for one in lower_bounds)
                )
        # Partitions pruned with a smaller epsilon than the one known now are compared again.
        unproven = [(quick, cuts) for used, quick, cuts in pruned if used > found.epsilon]
    return found, every


def _solved(found: StagedFrontier, partition: Partition, epsilon: float) -> tuple[Values, Values]:
    """The lower-bound curve of a partition whose pipelines are added to the frontier: paths are added until
    the points match it."""
    for _ in range(MOST_PATHS):
        lower_bound = partition.lower_bound()
        found.add(partition.evaluate())
        seconds, nbytes = lower_bound
        gaps = _gaps(found, seconds, nbytes)
        if not len(gaps) or gaps.max() <= epsilon or not partition.next_path(nbytes[gaps.argmax()]):
            break
    return lower_bound


def _in_order(quick: QuickPartitionBounds) -> list[Cuts]:
    """All ways to cut a graph by ascending quick bound, of equal ones the first."""
    problem = quick.problem
    places, count = problem.places_to_cut, problem.stages - 1
    if not 1 <= comb(len(places), count) <= MOST_PARTITIONS:
        raise ConfigError(
            "this graph cannot be cut into this number of stages", key="--stages",
            found=f"{problem.stages} of {len(problem.blocks)} blocks, {comb(len(places), count):,} ways",
            allowed=f"1 to {MOST_PARTITIONS:,} ways to cut",
        )  # fmt: skip
    return sorted(combinations(places, count), key=lambda cuts: (quick.of(cuts), cuts))


def _is_matched(found: StagedFrontier, quick: QuickPartitionBounds, cuts: Cuts) -> bool:
    """Whether the points match all layouts of a partition by its quick bound. Stages whose bound is too low
    are solved with relaxed borders, heaviest first."""
    if not found.points:
        return False
    figures, factor = found.figures, 1.0 + max(found.epsilon, PROVEN_GAP)
    # Between the memory of two points, the slower one is the fastest that fits.
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


def _gaps(found: StagedFrontier, seconds: Values, nbytes: Values) -> Values:
    """The epsilon needed for each step (n) of a lower-bound curve."""
    figures = found.figures
    ratios = np.maximum(figures[None, :, 0] / seconds[:, None], figures[None, :, 1] / nbytes[:, None])
    left = ratios.min(axis=1) - 1.0
    return np.where(left > PROVEN_GAP, left, 0.0)
