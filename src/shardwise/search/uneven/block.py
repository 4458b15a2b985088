"""One block of uneven plans: the least time in which its pipelines do all microbatches, or that none is less.

Whether a block can be done within a time is a question of shares: how many microbatches each pipeline does
by then, at most by its bound. Where the shares suffice, the pipelines that were taken are bounded closer,
laid out and evaluated; those that take longer than their bound said do fewer microbatches from then on, and
the question is asked again. So a block is done within a time only where evaluated pipelines do it.
"""

from __future__ import annotations

from collections import Counter
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from shardwise.search.clock import SearchClock
from shardwise.search.uneven.options import StageOptions
from shardwise.search.uneven.proving import MAX_STEP_S, SubproblemSearch
from shardwise.search.uneven.shares import Items, KnapsackDual, best_set, is_exact_dp, non_dominated
from shardwise.search.uneven.space import UnevenSubproblem

Ints = NDArray[np.int64]

_NONE: Ints = np.empty(0, dtype=np.int64)

ROUNDING = 1e-9
"""Of the microbatches that are wanted, for rounding."""


def subproblem_search(
    options: StageOptions,
    subproblem: UnevenSubproblem,
    effort: int,
    parent: SubproblemSearch | None = None,
    most_sites: int | None = None,
    clock: SearchClock | None = None,
) -> SubproblemSearch:
    """The search of a block, with at most so many partial layouts of one pipeline, until the `clock` is over;
    `parent` is that of a block with all of its numbers of pipelines and more."""
    kind = IdenticalPipelineSearch if subproblem.is_alike else KnapsackSearch
    return kind(options, subproblem.least, subproblem.most, effort, parent, most_sites, clock)


class KnapsackSearch(SubproblemSearch):
    """Any pipelines side by side: shares are a knapsack."""

    @property
    def is_exact(self) -> bool:
        """Whether plans with other numbers of pipelines than the block's are told apart."""
        items = self._items(self.proven(MAX_STEP_S))
        return is_exact_dp(self.options.available, len(non_dominated(items)), self.most)

    @cached_property
    def _dual(self) -> KnapsackDual:
        return KnapsackDual(self.options.available, self.shapes.devices)

    def critical(self, done: Ints) -> tuple[Ints, Ints]:
        """By prices on the devices."""
        required, set_size = self.options.microbatches, self.shapes.set_size
        if self.most * int(done.max(initial=0)) < required:
            return _NONE, _NONE
        places, threshold = self._dual.critical(done * set_size, required * (1.0 - ROUNDING))
        return places, np.clip(np.ceil(threshold / set_size[places]).astype(np.int64), 1, done[places])

    def chosen(self, done: Ints) -> Counter[int] | None:
        """By dynamic programming over devices."""
        options = self.options
        return best_set(options.available, self._items(done), self.least, self.most, options.microbatches)

    def _items(self, done: Ints) -> Items:
        shapes = self.shapes
        return Items(shapes.devices, done * shapes.set_size, shapes.set_size)


class IdenticalPipelineSearch(SubproblemSearch):
    """Pipelines that have the same stages: as many of one shape as are needed, if there are devices."""

    @property
    def share(self) -> int:
        """Its part of them, where pipelines are fewest."""
        return -(-self.options.microbatches // self.least)

    @property
    def is_exact(self) -> bool:
        """Numbers of pipelines are always told apart."""
        return True

    @cached_property
    def _needed(self) -> Ints:
        """What each shape has to do where there are as many of it as can be; nothing where there are too
        few."""
        sets = (np.array(self.options.available) // np.maximum(self.shapes.devices, 1)).astype(np.int64)
        sets = np.where(self.shapes.devices > 0, sets, self.most).min(axis=1)
        number = np.minimum(sets, self.most // self.shapes.set_size) * self.shapes.set_size
        needed: Ints = -(-self.options.microbatches // np.maximum(number, 1))
        return np.where(number >= self.least, needed, 0)

    def may_finish(self, time_s: float) -> bool:
        """Whether any shape may do what it has to."""
        places = np.flatnonzero(self._needed)
        return bool(self.capacity.can_do(places, self._needed[places], time_s).any())

    def critical(self, done: Ints) -> tuple[Ints, Ints]:
        """Those of which there are devices for as many as do all microbatches."""
        number = self._number(done)
        there = np.array(self.options.available)
        sets = number // self.shapes.set_size
        fits = (number <= self.most) & (sets[:, None] * self.shapes.devices <= there).all(axis=1)
        places = np.flatnonzero(fits)
        found: Ints = places[np.argsort(-done[places], kind="stable")]
        return found, self._needed[found]

    def chosen(self, done: Ints) -> Counter[int] | None:
        """The one that does most."""
        places, _ = self.critical(done)
        if not len(places):
            return None
        place = int(places[0])
        return Counter({place: int(self._number(done)[place] // self.shapes.set_size[place])})

    def _number(self, done: Ints) -> Ints:
        """Pipelines of each shape that are needed, in whole sets."""
        needed = -(-self.options.microbatches // np.maximum(done, 1))
        number = np.maximum(np.where(done > 0, needed, self.most + 1), self.least)
        found: Ints = -(-number // self.shapes.set_size) * self.shapes.set_size
        return found
