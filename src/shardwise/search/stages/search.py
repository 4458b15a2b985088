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
from shardwise.frontier import reduce
from shardwise.graph import GraphLayout
from shardwise.search.stages.floors import CrudeFloors, fine_floor
from shardwise.search.stages.pieces import Piece, Pieces
from shardwise.search.stages.setting import Cuts, Setting

Values = npt.NDArray[np.float64]

MOST_PARTITIONS = 50_000
"""Ways to cut a graph that are held in order."""

PIECE_SHARE = 0.5
"""Of an epsilon, the part for stages; the rest is for what bounds of whole pipelines leave."""


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


@dataclass(slots=True, eq=False)
class StagedFound:
    """Pipelines of which none is beaten by another, seconds ascending, and up to which factor 1 + `epsilon`
    each layout of each partition is matched by one. Of all `partitions`, `evaluated` were."""

    points: list[Staged] = field(default_factory=list)
    epsilon: float = 0.0
    partitions: int = 0
    evaluated: int = 0

    @property
    def figures(self) -> Values:
        """Seconds and bytes (n, 2) of the points."""
        return np.array([[p.time_s, p.memory_bytes] for p in self.points]).reshape(-1, 2)

    def add(self, fresh: Sequence[Staged]) -> None:
        """Take over what is beaten by none."""
        points = [*self.points, *fresh]
        kept = reduce(np.array([[p.time_s, p.memory_bytes] for p in points]))
        self.points = sorted((points[place] for place in kept.tolist()), key=lambda point: point.time_s)


def staged(
    settings: Sequence[Setting], *, epsilon: float, most_labels: float
) -> tuple[StagedFound, list[Pieces]]:
    """The frontier over all partitions of the graph and layouts of the stages, in any of the settings."""
    found = StagedFound(epsilon=epsilon)
    every = [Pieces(setting, epsilon * PIECE_SHARE, most_labels) for setting in settings]
    floors: list[tuple[Values, Values]] = []
    for pieces in every:
        crude = CrudeFloors(pieces)
        for cuts in _in_order(crude):
            found.partitions += 1
            if not _is_matched(found, crude, cuts):
                found.add(_evaluated(pieces, cuts))
                found.evaluated += 1
                floors.append(fine_floor(pieces, cuts))
                found.epsilon = max(epsilon, *(_left(found, *floor) for floor in floors))
    return found, every


def _in_order(crude: CrudeFloors) -> list[Cuts]:
    """All ways to cut a graph by what they take at least, of equals the first."""
    setting = crude.setting
    places, count = setting.places_to_cut, setting.stages - 1
    if not 1 <= comb(len(places), count) <= MOST_PARTITIONS:
        raise ConfigError(
            "is no number of stages that this graph can be cut into", key="--stages",
            found=f"{setting.stages} of {len(setting.blocks)} blocks, {comb(len(places), count):,} ways",
            allowed=f"1 to {MOST_PARTITIONS:,} ways to cut",
        )  # fmt: skip
    return sorted(combinations(places, count), key=lambda cuts: (crude.of(cuts), cuts))


def _is_matched(found: StagedFound, crude: CrudeFloors, cuts: Cuts) -> bool:
    """Whether points match all layouts of a partition, by its crude floor; stages that say too little are
    tracked amid others, one after the other."""
    if not found.points:
        return False
    figures, factor = found.figures, 1.0 + found.epsilon
    # Between two points' bytes the slower one is the fastest that there is.
    rising = figures[np.argsort(figures[:, 1])]
    limits = np.append(rising[:, 1] / factor, np.inf)
    wanted_s = np.append(np.inf, rising[:, 0] / factor)

    def is_matched() -> bool:
        return bool((crude.below(cuts, limits) >= wanted_s).all())

    if is_matched():
        return True
    spans = crude.setting.spans(cuts)
    heaviest = np.argsort(-crude.passes_s(cuts), kind="stable")
    for stage in heaviest.tolist():
        crude.pieces.open_floor(stage, *spans[stage])
        if is_matched():
            return True
    return False


def _evaluated(pieces: Pieces, cuts: Cuts) -> list[Staged]:
    """Pipelines of a partition: within any limit of bytes the layouts of its stages that are soonest done, by
    the schedule's evaluator."""
    setting = pieces.setting
    spans = setting.spans(cuts)
    own = tuple(pieces.piece(stage, first, end) for stage, (first, end) in enumerate(spans))
    limits = np.unique(np.concatenate([piece.prices[:, 3] for piece in own]))
    rows = [
        np.column_stack([piece.picks(limits, count) for piece in own])
        for count in (float(setting.microbatches), 1.0)
    ]
    picks = np.unique(np.concatenate(rows), axis=0)
    picks = picks[(picks >= 0).all(axis=1)]
    prices = np.stack([piece.prices[picks[:, stage]] for stage, piece in enumerate(own)], axis=1)
    time_s = setting.step_s(cuts, prices[..., 0], prices[..., 1], prices[..., 2])
    nbytes = prices[..., 3].max(axis=1)
    return [
        Staged(setting, cuts, own, tuple(pick), float(time), float(taken))
        for pick, time, taken in zip(picks.tolist(), time_s, nbytes, strict=True)
    ]


def _left(found: StagedFound, seconds: Values, nbytes: Values) -> float:
    """The least epsilon with which points match all above a staircase."""
    if not len(seconds):
        return 0.0
    figures = found.figures
    ratios = np.maximum(figures[None, :, 0] / seconds[:, None], figures[None, :, 1] / nbytes[:, None])
    return float(max(ratios.min(axis=1).max() - 1.0, 0.0))
