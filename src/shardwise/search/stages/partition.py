"""One way to cut a graph: pipelines of it that were evaluated, and what none of its pipelines is below."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from shardwise.graph import GraphLayout
from shardwise.search.stages.paths import Path, critical_path, plain_paths
from shardwise.search.stages.pieces import Piece, Pieces
from shardwise.search.stages.setting import Cuts, Setting

Values = npt.NDArray[np.float64]
Rows = npt.NDArray[np.intp]

ROUNDING = 1e-12
"""Sums added in different orders are no farther apart, relative."""


@dataclass(frozen=True, slots=True, eq=False)
class Staged:
    """A pipeline that was evaluated: seconds, bytes on the rank with most, and where its layouts are."""

    setting: Setting
    cuts: Cuts
    pieces: tuple[Piece, ...]
    picks: tuple[int, ...]
    time_s: float
    memory_bytes: float

    @property
    def layouts(self) -> tuple[GraphLayout, ...]:
        """The layout of each stage."""
        return tuple(piece.layouts[pick] for piece, pick in zip(self.pieces, self.picks, strict=True))


@dataclass(eq=False)
class Partition:
    """A graph cut before the blocks `cuts`, with the stages that this makes; `paths` are those through the
    schedule that its floor counts, and `evaluated` its pipelines."""

    pieces: Pieces
    cuts: Cuts
    own: tuple[Piece, ...]
    paths: list[Path]
    evaluated: list[Staged] = field(default_factory=list)

    @staticmethod
    def of(pieces: Pieces, cuts: Cuts) -> Partition:
        spans = pieces.setting.spans(cuts)
        own = tuple(pieces.piece(stage, first, end) for stage, (first, end) in enumerate(spans))
        return Partition(pieces, cuts, own, plain_paths(pieces.setting.stages, pieces.setting.microbatches))

    def floor(self) -> tuple[Values, Values]:
        """The staircase (seconds, bytes ascending) below which no layout of the partition is: within each
        limit of bytes the longest of all paths, each stage as soon done as any of its layouts."""
        for path in self.paths:
            self._stages_s(path, np.empty(0))  # what is tracked adds steps
        limits = np.unique(np.concatenate([piece.nbytes for piece in self.own]))
        seconds = self._path_floors(limits).max(axis=0)
        some = np.isfinite(seconds)
        return seconds[some], limits[some]

    def _path_floors(self, limits: Values) -> Values:
        """What each path (paths, n) takes at least within limits (n) of bytes."""
        setting = self.pieces.setting
        return np.stack(
            [path.seconds(setting, self.cuts, self._stages_s(path, limits)) for path in self.paths]
        )

    def _stages_s(self, path: Path, limits: Values) -> list[Values]:
        return [piece.floor_s(weights, limits) for piece, weights in zip(self.own, path.passes, strict=True)]

    def evaluate(self) -> list[Staged]:
        """Pipelines by the schedule's evaluator: within any limit of bytes the layouts that are soonest
        done with what a path has of them, for each path."""
        setting = self.pieces.setting
        limits = np.unique(np.concatenate([piece.prices[:, 3] for piece in self.own]))
        rows = [self._picks(path, limits) for path in self.paths]
        picks = np.unique(np.concatenate(rows), axis=0)
        picks = picks[(picks >= 0).all(axis=1)]
        prices = self.prices(picks)
        time_s = setting.step_s(self.cuts, prices[..., 0], prices[..., 1], prices[..., 2])
        nbytes = prices[..., 3].max(axis=1)
        self.evaluated = [
            Staged(setting, self.cuts, self.own, tuple(pick), float(time), float(taken))
            for pick, time, taken in zip(picks.tolist(), time_s, nbytes, strict=True)
        ]
        return self.evaluated

    def prices(self, picks: Rows) -> Values:
        """Seconds and bytes (n, stages, 4) of the layouts (n, stages) of each stage."""
        return np.stack([piece.prices[picks[:, stage]] for stage, piece in enumerate(self.own)], axis=1)

    def next_path(self, limit: float) -> bool:
        """Count one path more, for what is open within a limit of bytes (of the floor: what stages take may
        be more by their epsilon); whether there was any.

        The one that takes longest in the fastest pipeline there. Where it is counted: the one in the pipeline
        of the layouts that are soonest done with the longest path by floors; or the mean of these two.
        """
        if not self.evaluated:
            return False
        least = min(each.memory_bytes for each in self.evaluated)
        within = np.array([max(limit * (1.0 + self.pieces.epsilon), least) * (1.0 + ROUNDING)])
        fitting = [each for each in self.evaluated if each.memory_bytes <= within[0]]
        best = min(fitting, key=lambda each: (each.time_s, each.memory_bytes))
        longest = self.paths[int(self._path_floors(within)[:, 0].argmax())]
        soonest = self._picks(longest, within)[0]
        for picks in (np.array(best.picks), soonest):
            prices = self.prices(picks[None])[0, :, :3]
            path = critical_path(self.pieces.setting, self.cuts, prices)
            if path is not None and path not in self.paths:
                self.paths.append(path)
                return True
        if path is None or path == longest or path.beside(longest) in self.paths:
            return False
        self.paths.append(path.beside(longest))
        return True

    def _picks(self, path: Path, limits: Values) -> Rows:
        """For each limit (n) of bytes the layouts (n, stages) that are soonest done with a path; in stages
        that are not on it, with all micro-batches."""
        many = self.pieces.setting.microbatches
        wanted = (weights if any(weights) else (many, many, 1) for weights in path.passes)
        return np.column_stack(
            [piece.picks(limits, weights) for piece, weights in zip(self.own, wanted, strict=True)]
        )
