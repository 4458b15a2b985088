"""Stages as they may be, tracked: some blocks in a row on a mesh, with bounds on all of their layouts."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt

from shardwise.cost import Turns
from shardwise.frontier import Chain
from shardwise.graph import GraphLayout
from shardwise.search.stages.setting import Setting
from shardwise.search.tracking import Tracked, tracked

Values = npt.NDArray[np.float64]

Key = tuple[object, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Floor:
    """A staircase that no layout is below: one of at most `nbytes[i]` takes at least `seconds[i]`, and none
    takes less than the first bytes. Bytes ascend and seconds descend."""

    seconds: Values
    nbytes: Values

    @staticmethod
    def of(found: Tracked) -> Floor:
        """What a tracked frontier says: each of its points stands for what is better by its epsilon."""
        points = found.points[::-1] / (1.0 + found.epsilon)
        return Floor(points[:, 0], points[:, 1])

    def at(self, limits: Values) -> Values:
        """Least seconds (n) of layouts of at most `limits` (n) bytes; infinite where there is none."""
        return self._of(np.searchsorted(self.nbytes, limits, side="right"))

    def below(self, limits: Values) -> Values:
        """The same of layouts of less than that."""
        return self._of(np.searchsorted(self.nbytes, limits, side="left"))

    def _of(self, places: npt.NDArray[np.intp]) -> Values:
        return np.where(places > 0, self.seconds[np.maximum(places - 1, 0)], np.inf)


@dataclass(frozen=True, eq=False)
class Piece:
    """A stage with layouts that were found, and their `prices` (n, 4): seconds of a micro-batch forward and
    backward, seconds at the end of the step, and bytes.

    No layout takes less than the floors: `whole` of busy seconds in the step, `passes` of those of a
    micro-batch, `once` of the latter with the end of the step.
    """

    layouts: tuple[GraphLayout, ...]
    prices: Values
    microbatches: int
    whole: Floor
    passes: Floor
    once: Floor

    @cached_property
    def nbytes(self) -> Values:
        """Where floors step, and what layouts take."""
        floors = (self.whole.nbytes, self.passes.nbytes, self.once.nbytes)
        return np.unique(np.concatenate([*floors, self.prices[:, 3]]))

    def picks(self, limits: Values, microbatches: float) -> npt.NDArray[np.intp]:
        """For each limit (n) of bytes the layout within it that is soonest done with so many micro-batches
        and the end of the step; -1 where there is none."""
        seconds = microbatches * self.prices[:, :2].sum(axis=1) + self.prices[:, 2]
        fits = self.prices[None, :, 3] <= limits[:, None]
        best = np.where(fits, seconds[None], np.inf)
        return np.where(fits.any(axis=1), best.argmin(axis=1), -1)


@dataclass(eq=False)
class Pieces:
    """The stages of a setting, each tracked once to `epsilon` or as far as `most_labels` go; those that are
    alike are one. `labels`, `weights` and `choices` count the effort."""

    setting: Setting
    epsilon: float
    most_labels: float
    labels: int = 0
    weights: int = 0
    choices: int = 0
    _pieces: dict[Key, Piece] = field(default_factory=dict)
    _open: dict[tuple[int, tuple[int, ...]], Floor] = field(default_factory=dict)

    def piece(self, stage: int, first: int, end: int) -> Piece:
        """A stage, tracked."""
        blocks = self.setting.blocks
        key = (stage, blocks[first:end], first > 0, blocks[end] if end < len(blocks) else None)
        if key not in self._pieces:
            self._pieces[key] = self._piece(stage, first, end)
        return self._pieces[key]

    def open_floor(self, stage: int, first: int, end: int) -> Floor:
        """What no stage of that number is below that has these blocks among its own, busy seconds in the
        step."""
        key = (stage, self.setting.blocks[first:end])
        if key not in self._open:
            laid = self.setting.opened(first, end, self.setting.turns(stage, first, end))
            self._open[key] = Floor.of(self._track(laid.chains[0]))
        return self._open[key]

    def least_passes_s(self, place: int) -> float:
        """Seconds that a micro-batch's passes through a block take at least, whatever its neighbours do."""
        laid = self.setting.opened(place, place + 1, Turns(microbatches=1, steps=0))
        return float(Floor.of(self._track(laid.chains[0])).seconds.min())

    def open_floors(self, stage: int, first: int, end: int) -> list[Floor]:
        """The open floors known so far that hold for a stage."""
        own = self.setting.blocks[first:end]
        return [
            floor for (number, blocks), floor in self._open.items() if number == stage and _has(own, blocks)
        ]

    def _piece(self, stage: int, first: int, end: int) -> Piece:
        turns = self.setting.turns(stage, first, end)
        layouts: list[GraphLayout] = []
        floors: list[Floor] = []
        for each in (turns, replace(turns, microbatches=1, steps=0), replace(turns, microbatches=1)):
            laid = self.setting.laid(first, end, each)
            found = self._track(laid.chains[0])
            layouts += [laid.layout(solution, case) for case, solution in found.solutions]
            floors.append(Floor.of(found))
        prices = [self.setting.price(stage, first, end, layout) for layout in layouts]
        return Piece(
            layouts=tuple(layouts),
            prices=np.array([[p.forward_s, p.backward_s, p.end_s, p.memory_bytes] for p in prices]),
            microbatches=turns.microbatches,
            whole=floors[0],
            passes=floors[1],
            once=floors[2],
        )

    def _track(self, chain: Chain) -> Tracked:
        found = tracked([chain], epsilon=self.epsilon, most_labels=self.most_labels)
        self.labels += sum(effort.labels for effort in found.efforts)
        self.weights += sum(effort.weights for effort in found.efforts)
        self.choices += sum(effort.choices for effort in found.efforts)
        return found


def _has(blocks: tuple[int, ...], part: tuple[int, ...]) -> bool:
    """Whether `part` is among the blocks, in a row."""
    return any(blocks[at : at + len(part)] == part for at in range(len(blocks) - len(part) + 1))
