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

from shardwise.search.clock import Clock
from shardwise.search.uneven.options import Options
from shardwise.search.uneven.proving import FOREVER_S, Search
from shardwise.search.uneven.shares import Items, Market, best_set, is_counted, undominated
from shardwise.search.uneven.space import Block

Ints = NDArray[np.int64]

_NONE: Ints = np.empty(0, dtype=np.int64)

NEARLY = 1e-9
"""Of the microbatches that are wanted, for rounding."""


def search_of(
    options: Options,
    block: Block,
    effort: int,
    wider: Search | None = None,
    most_sites: int | None = None,
    clock: Clock | None = None,
) -> Search:
    """The search of a block, with at most so many partial layouts of one pipeline, until the `clock` is over;
    `wider` is that of a block with all of its numbers of pipelines and more."""
    kind = AlikeSearch if block.is_alike else MixedSearch
    return kind(options, block.least, block.most, effort, wider, most_sites, clock)


class MixedSearch(Search):
    """Any pipelines side by side: shares are a knapsack."""

    @property
    def is_exact(self) -> bool:
        """Whether plans with other numbers of pipelines than the block's are told apart."""
        items = self._items(self.proven(FOREVER_S))
        return is_counted(self.options.available, len(undominated(items)), self.most)

    @cached_property
    def _market(self) -> Market:
        return Market(self.options.available, self.shapes.devices)

    def dear(self, done: Ints) -> tuple[Ints, Ints]:
        """By prices on the devices."""
        wanted, alike = self.options.microbatches, self.shapes.alike
        if self.most * int(done.max(initial=0)) < wanted:
            return _NONE, _NONE
        places, enough = self._market.dear(done * alike, wanted * (1.0 - NEARLY))
        return places, np.clip(np.ceil(enough / alike[places]).astype(np.int64), 1, done[places])

    def chosen(self, done: Ints) -> Counter[int] | None:
        """By dynamic programming over devices."""
        options = self.options
        return best_set(options.available, self._items(done), self.least, self.most, options.microbatches)

    def _items(self, done: Ints) -> Items:
        shapes = self.shapes
        return Items(shapes.devices, done * shapes.alike, shapes.alike)


class AlikeSearch(Search):
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
        number = np.minimum(sets, self.most // self.shapes.alike) * self.shapes.alike
        needed: Ints = -(-self.options.microbatches // np.maximum(number, 1))
        return np.where(number >= self.least, needed, 0)

    def may_do(self, time_s: float) -> bool:
        """Whether any shape may do what it has to."""
        places = np.flatnonzero(self._needed)
        return bool(self.reach.can_do(places, self._needed[places], time_s).any())

    def dear(self, done: Ints) -> tuple[Ints, Ints]:
        """Those of which there are devices for as many as do all microbatches."""
        number = self._number(done)
        there = np.array(self.options.available)
        sets = number // self.shapes.alike
        enough = (number <= self.most) & (sets[:, None] * self.shapes.devices <= there).all(axis=1)
        places = np.flatnonzero(enough)
        found: Ints = places[np.argsort(-done[places], kind="stable")]
        return found, self._needed[found]

    def chosen(self, done: Ints) -> Counter[int] | None:
        """The one that does most."""
        places, _ = self.dear(done)
        if not len(places):
            return None
        place = int(places[0])
        return Counter({place: int(self._number(done)[place] // self.shapes.alike[place])})

    def _number(self, done: Ints) -> Ints:
        """Pipelines of each shape that are needed, in whole sets."""
        needed = -(-self.options.microbatches // np.maximum(done, 1))
        number = np.maximum(np.where(done > 0, needed, self.most + 1), self.least)
        found: Ints = -(-number // self.shapes.alike) * self.shapes.alike
        return found
