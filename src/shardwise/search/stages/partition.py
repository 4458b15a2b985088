"""One way to cut a graph: pipelines of it that were evaluated, and what none of its pipelines is below."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from shardwise.graph import GraphLayout
from shardwise.search.stages.paths import Path, critical_path, plain_paths
from shardwise.search.stages.pieces import StageFrontier, StageFrontiers
from shardwise.search.stages.setting import Cuts, StagedProblem

Values = npt.NDArray[np.float64]
Rows = npt.NDArray[np.intp]

ROUNDING = 1e-12
"""Sums added in different orders are no farther apart, relative."""


@dataclass(frozen=True, slots=True, eq=False)
class StagedPipeline:
    """A pipeline that was evaluated: seconds, bytes on the rank with most, and where its layouts are."""

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
    """A graph cut before the blocks `cuts`, with the stages that this makes; `paths` are those through the
    schedule that its floor counts, and `evaluated` its pipelines."""

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
        """The staircase (seconds, bytes ascending) below which no layout of the partition is: within each
        limit of bytes the longest of all paths, each stage as soon done as any of its layouts."""
        for path in self.paths:
            self._stages_s(path, np.empty(0))  # what is tracked adds steps
        limits = np.unique(np.concatenate([stage_frontier.nbytes for stage_frontier in self.own]))
        seconds = self._path_bounds(limits).max(axis=0)
        some = np.isfinite(seconds)
        return seconds[some], limits[some]

    def _path_bounds(self, limits: Values) -> Values:
        """What each path (paths, n) takes at least within limits (n) of bytes."""
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
        """Pipelines by the schedule's evaluator: within any limit of bytes the layouts that are soonest
        done with what a path has of them, for each path."""
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
        """Count one path more, for what is open within a limit of bytes (of the floor: what stages take may
        be more by their epsilon); whether there was any.

        The one that takes longest in the fastest pipeline there. Where it is counted: the one in the pipeline
        of the layouts that are soonest done with the longest path by floors; or the mean of these two.
        """
        if not self.evaluated:
            return False
        least = min(each.memory_bytes for each in self.evaluated)
        within = np.array([max(limit * (1.0 + self.stage_frontiers.epsilon), least) * (1.0 + ROUNDING)])
        fitting = [each for each in self.evaluated if each.memory_bytes <= within[0]]
        best = min(fitting, key=lambda each: (each.time_s, each.memory_bytes))
        longest = self.paths[int(self._path_bounds(within)[:, 0].argmax())]
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
        """For each limit (n) of bytes the layouts (n, stages) that are soonest done with a path; in stages
        that are not on it, with all micro-batches."""
        many = self.stage_frontiers.problem.microbatches
        requested = (weights if any(weights) else (many, many, 1) for weights in path.passes)
        return np.column_stack(
            [
                stage_frontier.picks(limits, weights)
                for stage_frontier, weights in zip(self.own, requested, strict=True)
            ]
        )
