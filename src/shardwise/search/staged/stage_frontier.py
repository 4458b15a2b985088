"""Stages as they may be, tracked: some blocks in a row on a mesh, with bounds on all of their layouts.

What pipelines take at least: of all layouts of their stages, and of a partition as a whole.
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

Values = npt.NDArray[np.float64]

Key = tuple[object, ...]


@dataclass(frozen=True, slots=True, eq=False)
class LowerBoundCurve:
    """A staircase that no layout is below: one of at most `nbytes[i]` takes at least `seconds[i]`, and none
    takes less than the first bytes. Bytes ascend and seconds descend."""

    seconds: Values
    nbytes: Values

    @staticmethod
    def of(found: ParetoSearchResult) -> LowerBoundCurve:
        """What a tracked frontier says: each of its points stands for what is better by its epsilon."""
        points = found.points[::-1] / (1.0 + found.epsilon)
        return LowerBoundCurve(points[:, 0], points[:, 1])

    def at(self, limits: Values) -> Values:
        """Least seconds (n) of layouts of at most `limits` (n) bytes; infinite where there is none."""
        return self._of(np.searchsorted(self.nbytes, limits, side="right"))

    def below(self, limits: Values) -> Values:
        """The same of layouts of less than that."""
        return self._of(np.searchsorted(self.nbytes, limits, side="left"))

    def _of(self, places: npt.NDArray[np.intp]) -> Values:
        return np.where(places > 0, self.seconds[np.maximum(places - 1, 0)], np.inf)


@dataclass(eq=False)
class StageFrontier:
    """A stage, its `layouts` that were found, and their `prices` (n, 4): seconds of a micro-batch forward and
    backward, seconds at the end of the step, and bytes.

    Each sum of these seconds that was asked for was tracked, and has a floor that no layout is below.
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
        """Where floors step, and what layouts take."""
        return np.unique(
            np.concatenate(
                [*(lower_bound.nbytes for lower_bound in self._lower_bounds.values()), self.prices[:, 3]]
            )
        )

    def knows(self, weights: Weights) -> bool:
        """Whether the floor of a sum has been tracked."""
        return _normalised(weights) in self._lower_bounds

    def lower_bound_s(self, weights: Weights, limits: Values) -> Values:
        """Seconds (n) that such a sum takes at least in layouts of at most `limits` (n) bytes."""
        if not any(weights):
            return np.zeros(len(limits))
        own = _normalised(weights)
        if own not in self._lower_bounds:
            self._lower_bounds[own] = self._solve(own)
        return self._lower_bounds[own].at(limits) * (max(weights) // max(own))

    def picks(self, limits: Values, weights: Weights) -> npt.NDArray[np.intp]:
        """For each limit (n) of bytes the layout within it with the least sum; -1 where there is none."""
        seconds = self.prices[:, :3] @ np.array(weights, dtype=np.float64)
        fits = self.prices[None, :, 3] <= limits[:, None]
        best = np.where(fits, seconds[None], np.inf)
        return np.where(fits.any(axis=1), best.argmin(axis=1), -1)

    def _solve(self, weights: Weights) -> LowerBoundCurve:
        """The floor of a sum; the layouts that are found on the way are taken over."""
        candidates = self._candidates(weights)
        found = self.stage_frontiers.solve(candidates.chain)
        # All sums have the same choices.
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
        """All layouts of the stage, priced by a sum."""
        forwards, backwards, ends = weights
        problem = self.stage_frontiers.problem
        counts = replace(
            problem.counts(self.stage, self.first, self.end),
            microbatches=backwards, extra_forwards=forwards - backwards, steps=ends,
        )  # fmt: skip
        return problem.candidates(self.first, self.end, counts)

    @cached_property
    def _parts(self) -> tuple[Chain, ...]:
        """The stage priced by each part of its sums alone."""
        return tuple(self._candidates(weights).chain for weights in ((1, 0, 0), (0, 1, 0), (0, 0, 1)))

    def _costs(self, solution: Solution) -> list[float]:
        """Seconds of the parts of its sums, and bytes."""
        measures = [measure(chain, solution) for chain in self._parts]
        return [*(time_s for time_s, _ in measures), measures[0][1]]


def _normalised(weights: Weights) -> Weights:
    """The least sum that these are a multiple of."""
    forwards, backwards, ends = weights
    shared = gcd(*weights) or 1
    return forwards // shared, backwards // shared, ends // shared


@dataclass(eq=False)
class StageFrontiers:
    """The stages of a setting, each tracked once to `epsilon` or as far as `most_labels` go; those that are
    alike are one. `labels`, `weights` and `choices` count the effort."""

    problem: StagedProblem
    epsilon: float
    most_labels: float
    labels: int = 0
    weights: int = 0
    choices: int = 0
    _frontiers: dict[Key, StageFrontier] = field(default_factory=dict)
    _open_bounds: dict[tuple[int, tuple[int, ...]], LowerBoundCurve] = field(default_factory=dict)

    def stage_frontier(self, stage: int, first: int, end: int) -> StageFrontier:
        """A stage; those that are alike are one."""
        blocks = self.problem.blocks
        key = (stage, blocks[first:end], first > 0, blocks[end] if end < len(blocks) else None)
        if key not in self._frontiers:
            self._frontiers[key] = StageFrontier(self, stage, first, end)
        return self._frontiers[key]

    def open_bound(self, stage: int, first: int, end: int) -> LowerBoundCurve:
        """What no stage of that number is below that has these blocks among its own, busy seconds in the
        step."""
        key = (stage, self.problem.blocks[first:end])
        if key not in self._open_bounds:
            candidates = self.problem.open_candidates(first, end, self.problem.counts(stage, first, end))
            self._open_bounds[key] = LowerBoundCurve.of(self.solve(candidates.chain))
        return self._open_bounds[key]

    def least_passes_s(self, place: int) -> float:
        """Seconds that a micro-batch's passes through a block take at least, whatever its neighbours do."""
        candidates = self.problem.open_candidates(place, place + 1, StepCounts(microbatches=1, steps=0))
        return float(LowerBoundCurve.of(self.solve(candidates.chain)).seconds.min())

    def open_bounds(self, stage: int, first: int, end: int) -> list[LowerBoundCurve]:
        """The open floors known so far that hold for a stage."""
        own = self.problem.blocks[first:end]
        return [
            lower_bound
            for (number, blocks), lower_bound in self._open_bounds.items()
            if number == stage and _has(own, blocks)
        ]

    def solve(self, chain: Chain) -> ParetoSearchResult:
        """The frontier of a chain, as closely as stages are tracked."""
        found = pareto_search([chain], epsilon=self.epsilon, most_labels=self.most_labels)
        self.labels += sum(effort.labels for effort in found.efforts)
        self.weights += sum(effort.weights for effort in found.efforts)
        self.choices += sum(effort.choices for effort in found.efforts)
        return found


def _has(blocks: tuple[int, ...], part: tuple[int, ...]) -> bool:
    """Whether `part` is among the blocks, in a row."""
    return any(blocks[at : at + len(part)] == part for at in range(len(blocks) - len(part) + 1))


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
