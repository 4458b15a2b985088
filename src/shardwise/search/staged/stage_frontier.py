"""Stage frontiers and lower bounds of partitions.

`StageFrontier` has the layouts found for one stage and a lower-bound curve for each weighted sum of its
durations. `StageFrontiers` solves each distinct stage once. `QuickPartitionBounds` bounds partitions by the
least time of each block and by bounds with relaxed borders.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from math import gcd

import numpy as np
import numpy.typing as npt

from shardwise.cost import LayoutSpace, StepCounts
from shardwise.graph import GraphLayout
from shardwise.pareto import Chain
from shardwise.search.pareto import ParetoSearchResult, pareto_search
from shardwise.search.pareto.solution import Solution, measure
from shardwise.search.staged.problem import Cuts, StagedProblem, Weights
from shardwise.ties import PROVEN_TIE, first_least

Values = npt.NDArray[np.float64]

Key = tuple[object, ...]


@dataclass(frozen=True, slots=True, eq=False)
class LowerBoundCurve:
    """Lower-bound curve: a layout of at most `nbytes[i]` takes at least `seconds[i]`, and none has less than
    the first bytes. Bytes ascend and seconds descend."""

    seconds: Values
    nbytes: Values

    @staticmethod
    def of(found: ParetoSearchResult) -> LowerBoundCurve:
        """From a Pareto frontier: no layout is below its points divided by 1 + its epsilon."""
        points = found.points[::-1] / (1.0 + found.epsilon)
        return LowerBoundCurve(points[:, 0], points[:, 1])

    def at(self, limits: Values) -> Values:
        """Lower bound of seconds (n) of layouts of at most `limits` (n) bytes; infinite where there is
        none."""
        return self._of(np.searchsorted(self.nbytes, limits, side="right"))

    def below(self, limits: Values) -> Values:
        """Lower bound of seconds (n) of layouts of less than `limits` (n) bytes."""
        return self._of(np.searchsorted(self.nbytes, limits, side="left"))

    def _of(self, places: npt.NDArray[np.intp]) -> Values:
        return np.where(places > 0, self.seconds[np.maximum(places - 1, 0)], np.inf)


@dataclass(eq=False)
class StageFrontier:
    """A stage, the `layouts` found, and their `prices` (n, 4): seconds of a micro-batch forward and backward,
    seconds at the end of the step, and bytes.

    Each weighted sum of these seconds that was requested has been solved, and has a lower-bound curve.
    """

    stage_frontiers: StageFrontiers
    stage: int
    first: int
    end: int
    layouts: list[GraphLayout] = field(default_factory=list)
    prices: Values = field(default_factory=lambda: np.empty((0, 4)))
    _lower_bounds: dict[Weights, LowerBoundCurve] = field(default_factory=dict)
    _known: set[Solution] = field(default_factory=set)

    @property
    def nbytes(self) -> Values:
        """Memory values at which the lower-bound curves or the layouts change, ascending."""
        return np.unique(
            np.concatenate(
                [*(lower_bound.nbytes for lower_bound in self._lower_bounds.values()), self.prices[:, 3]]
            )
        )

    def knows(self, weights: Weights) -> bool:
        """Whether a weighted sum has been solved."""
        return _normalised(weights) in self._lower_bounds

    def lower_bound_s(self, weights: Weights, limits: Values) -> Values:
        """Lower bound of a weighted sum in seconds (n), of layouts of at most `limits` (n) bytes."""
        if not any(weights):
            return np.zeros(len(limits))
        own = _normalised(weights)
        if own not in self._lower_bounds:
            self._lower_bounds[own] = self._solve(own)
        return self._lower_bounds[own].at(limits) * (max(weights) // max(own))

    def picks(self, limits: Values, weights: Weights) -> npt.NDArray[np.intp]:
        """For each memory limit (n) the layout within it with the least sum; -1 where there is none."""
        seconds = self.prices[:, :3] @ np.array(weights, dtype=np.float64)
        fits = self.prices[None, :, 3] <= limits[:, None]
        best = np.where(fits, seconds[None], np.inf)
        return np.where(fits.any(axis=1), first_least(best.T, PROVEN_TIE), -1)

    def _solve(self, weights: Weights) -> LowerBoundCurve:
        """The lower-bound curve of a weighted sum; the layouts found are added."""
        candidates = self._candidates(weights)
        found = self.stage_frontiers.solve(candidates.chain)
        # The choices are the same for all sums.
        fresh = [
            (solution, candidates.layout(solution))
            for _, solution in found.solutions
            if solution not in self._known
        ]
        self._known |= {solution for solution, _ in fresh}
        self.layouts += [layout for _, layout in fresh]
        rows = [self._costs(solution) for solution, _ in fresh]
        self.prices = np.concatenate([self.prices, np.array(rows).reshape(-1, 4)])
        return LowerBoundCurve.of(found)

    def _candidates(self, weights: Weights) -> LayoutSpace:
        """All layouts of the stage, with their time as a weighted sum."""
        forwards, backwards, ends = weights
        problem = self.stage_frontiers.problem
        counts = replace(
            problem.counts(self.stage, self.first, self.end),
            microbatches=backwards, extra_forwards=forwards - backwards, steps=ends,
        )  # fmt: skip
        return problem.candidates(self.first, self.end, counts)

    @cached_property
    def _parts(self) -> tuple[Chain, ...]:
        """The chain of the stage under each duration alone."""
        return tuple(self._candidates(weights).chain for weights in ((1, 0, 0), (0, 1, 0), (0, 0, 1)))

    def _costs(self, solution: Solution) -> list[float]:
        """Seconds of each duration, and bytes."""
        measures = [measure(chain, solution) for chain in self._parts]
        return [*(time_s for time_s, _ in measures), measures[0][1]]


def _normalised(weights: Weights) -> Weights:
    """The weights divided by their greatest common divisor."""
    forwards, backwards, ends = weights
    shared = gcd(*weights) or 1
    return forwards // shared, backwards // shared, ends // shared


@dataclass(eq=False)
class StageFrontiers:
    """The stage frontiers of a problem, each solved once to `epsilon` or within `most_labels`; equal stages
    share one. `labels`, `weights` and `choices` count the effort."""

    problem: StagedProblem
    epsilon: float
    most_labels: float
    labels: int = 0
    weights: int = 0
    choices: int = 0
    _frontiers: dict[Key, StageFrontier] = field(default_factory=dict)
    _open_bounds: dict[tuple[int, tuple[int, ...]], LowerBoundCurve] = field(default_factory=dict)

    def stage_frontier(self, stage: int, first: int, end: int) -> StageFrontier:
        """The frontier of a stage; equal stages share one."""
        blocks = self.problem.blocks
        key = (stage, blocks[first:end], first > 0, blocks[end] if end < len(blocks) else None)
        if key not in self._frontiers:
            self._frontiers[key] = StageFrontier(self, stage, first, end)
        return self._frontiers[key]

    def open_bound(self, stage: int, first: int, end: int) -> LowerBoundCurve:
        """Lower-bound curve of the busy seconds per step of every stage of this number that contains these
        blocks (relaxed borders)."""
        key = (stage, self.problem.blocks[first:end])
        if key not in self._open_bounds:
            candidates = self.problem.open_candidates(first, end, self.problem.counts(stage, first, end))
            self._open_bounds[key] = LowerBoundCurve.of(self.solve(candidates.chain))
        return self._open_bounds[key]

    def least_passes_s(self, place: int) -> float:
        """Lower bound of the seconds of a micro-batch's passes through a block, for any layout of its
        neighbours."""
        candidates = self.problem.open_candidates(place, place + 1, StepCounts(microbatches=1, steps=0))
        return float(LowerBoundCurve.of(self.solve(candidates.chain)).seconds.min())

    def open_bounds(self, stage: int, first: int, end: int) -> list[LowerBoundCurve]:
        """The relaxed lower bounds known so far that hold for a stage."""
        own = self.problem.blocks[first:end]
        return [
            lower_bound
            for (number, blocks), lower_bound in self._open_bounds.items()
            if number == stage and _has(own, blocks)
        ]

    def solve(self, chain: Chain) -> ParetoSearchResult:
        """The Pareto frontier of a chain to the epsilon of stages."""
        found = pareto_search([chain], epsilon=self.epsilon, most_labels=self.most_labels)
        self.labels += sum(effort.labels for effort in found.efforts)
        self.weights += sum(effort.weights for effort in found.efforts)
        self.choices += sum(effort.choices for effort in found.efforts)
        return found


def _has(blocks: tuple[int, ...], part: tuple[int, ...]) -> bool:
    """Whether the blocks contain `part` as consecutive blocks."""
    return any(blocks[at : at + len(part)] == part for at in range(len(blocks) - len(part) + 1))


def pipeline_lower_bound(
    problem: StagedProblem, cuts: Cuts, passes_s: Values, whole_s: Values, once_s: Values
) -> Values:
    """Lower bound of the step time (n) of pipelines.

    Their stages take at least `passes_s` (n, stages) seconds for each micro-batch, and `whole_s` (n, stages)
    with all of them and the end of the step. The first stage takes at least `once_s` (n) for one micro-batch
    and the end of the step.

    Stage s begins after a message through each cut before it, and is then busy for `whole_s`. The first
    micro-batch reaches it through all stages before, the gradients of the last one go back through them, and
    then the first stage ends its step. Between these, stage s is busy with its passes.
    """
    hops_s = np.concatenate([[0.0], np.cumsum(problem.hops_s(cuts))])
    alone_s = (whole_s + hops_s).max(axis=1)
    inner_s = passes_s[:, 1:]
    between_s = np.cumsum(np.pad(inner_s, ((0, 0), (1, 0)))[:, :-1], axis=1)
    through_s = once_s[:, None] + between_s + problem.microbatches * inner_s + 2.0 * hops_s[1:]
    return np.asarray(np.maximum(alone_s, through_s.max(axis=1)))


class QuickPartitionBounds:
    """Quick bounds of partitions: by the least time of each block alone, and by the relaxed lower bounds
    known so far."""

    def __init__(self, stage_frontiers: StageFrontiers) -> None:
        self.stage_frontiers, self.problem = stage_frontiers, stage_frontiers.problem
        blocks = self.problem.blocks
        least = {
            block: stage_frontiers.least_passes_s(blocks.index(block)) for block in dict.fromkeys(blocks)
        }
        self.least_s = np.array([least[block] for block in blocks])

    def passes_s(self, cuts: Cuts) -> Values:
        """Lower bound of the seconds of a micro-batch's passes, for each stage."""
        return np.array([self.least_s[first:end].sum() for first, end in self.problem.spans(cuts)])

    def of(self, cuts: Cuts) -> float:
        """Lower bound of the step time of any layout of a partition."""
        passes_s = self.passes_s(cuts)[None]
        whole_s = self.problem.microbatches * passes_s
        return float(pipeline_lower_bound(self.problem, cuts, passes_s, whole_s, passes_s[:, 0])[0])

    def below(self, cuts: Cuts, limits: Values) -> Values:
        """Lower bound of the step time of layouts of less than `limits` (n) bytes."""
        passes_s = np.broadcast_to(self.passes_s(cuts), (len(limits), self.problem.stages))
        whole_s = self.problem.microbatches * passes_s
        for stage, (first, end) in enumerate(self.problem.spans(cuts)):
            for lower_bound in self.stage_frontiers.open_bounds(stage, first, end):
                whole_s[:, stage] = np.maximum(whole_s[:, stage], lower_bound.below(limits))
        return pipeline_lower_bound(self.problem, cuts, passes_s, whole_s, passes_s[:, 0])
