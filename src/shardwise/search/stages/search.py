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
from shardwise.search.stages.floors import CrudeFloors
from shardwise.search.stages.partition import ROUNDING, Partition, Staged
from shardwise.search.stages.pieces import Pieces
from shardwise.search.stages.setting import Cuts, Setting

Values = npt.NDArray[np.float64]

MOST_PARTITIONS = 50_000
"""Ways to cut a graph that are held in order."""

MOST_PATHS = 16
"""Paths through a schedule that are counted for one partition."""

PIECE_SHARE = 0.5
"""Of an epsilon, the part for stages; the rest is for what bounds of whole pipelines leave."""


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
    crudes = [CrudeFloors(pieces) for pieces in every]
    waiting = [(crude, cuts) for crude in crudes for cuts in _in_order(crude)]
    found.partitions = len(waiting)
    while waiting:
        cut: list[tuple[float, CrudeFloors, Cuts]] = []
        for crude, cuts in waiting:
            if _is_matched(found, crude, cuts):
                cut.append((found.epsilon, crude, cuts))
            else:
                floors.append(_settled(found, Partition.of(crude.pieces, cuts), epsilon))
                found.evaluated += 1
                found.epsilon = max(epsilon, *(_left(found, *floor) for floor in floors))
        # What was cut while less was known is held against what is known now.
        waiting = [(crude, cuts) for used, crude, cuts in cut if used > found.epsilon]
    return found, every


def _settled(found: StagedFound, partition: Partition, epsilon: float) -> tuple[Values, Values]:
    """The floor of a partition whose pipelines are found: path by path, until these match it."""
    for _ in range(MOST_PATHS):
        floor = partition.floor()
        found.add(partition.evaluate())
        seconds, nbytes = floor
        apart = _apart(found, seconds, nbytes)
        if not len(apart) or apart.max() <= epsilon or not partition.next_path(nbytes[apart.argmax()]):
            break
    return floor


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
    figures, factor = found.figures, 1.0 + max(found.epsilon, ROUNDING)
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


def _left(found: StagedFound, seconds: Values, nbytes: Values) -> float:
    """The least epsilon with which points match all above a staircase."""
    return float(_apart(found, seconds, nbytes).max(initial=0.0))


def _apart(found: StagedFound, seconds: Values, nbytes: Values) -> Values:
    """The same for each step (n) of the staircase."""
    figures = found.figures
    ratios = np.maximum(figures[None, :, 0] / seconds[:, None], figures[None, :, 1] / nbytes[:, None])
    left = ratios.min(axis=1) - 1.0
    return np.where(left > ROUNDING, left, 0.0)
