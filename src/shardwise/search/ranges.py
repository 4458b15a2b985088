"""Ranges of numbers of recomputed layers: blocks between a row and its single numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardwise.strategy import Column

Ints = NDArray[np.intp]


@dataclass(frozen=True, slots=True)
class Ranges:
    """Range i belongs to row `row[i]` and holds `numbers[start[i]]` to `numbers[stop[i] - 1]`, ascending;
    none is empty."""

    numbers: Column
    row: Ints
    start: Ints
    stop: Ints

    def __len__(self) -> int:
        return len(self.row)

    @property
    def least(self) -> Column:
        """The smallest number of each."""
        return self.numbers[self.start]

    @property
    def most(self) -> Column:
        """The largest number of each."""
        return self.numbers[self.stop - 1]

    @property
    def width(self) -> Ints:
        """How many numbers each holds."""
        return self.stop - self.start

    def take(self, ranges: Any) -> Ranges:
        """These ranges."""
        return replace(self, row=self.row[ranges], start=self.start[ranges], stop=self.stop[ranges])

    def halved(self) -> Ranges:
        """Both halves of each, one after another; a single number as it is."""
        count = np.minimum(self.width, 2)
        whole = np.repeat(np.arange(len(self)), count)
        is_second = np.arange(len(whole)) != np.repeat(np.cumsum(count) - count, count)
        middle = ((self.start + self.stop + 1) // 2)[whole]
        start, stop = self.start[whole], self.stop[whole]
        return replace(
            self,
            row=self.row[whole],
            start=np.where(is_second, middle, start),
            stop=np.where(is_second, stop, middle),
        )


def ranges_from(
    least: Column, largest: Column, choices_of: Callable[[int], Sequence[int] | Column]
) -> tuple[Ranges, Ints]:
    """Of every row the ascending choices for its `largest` from `least` on (one at least), and how many
    choices are less."""
    each, of_row = np.unique(largest, return_inverse=True)
    choices = [np.asarray(choices_of(most), dtype=np.int64) for most in each.tolist()]
    numbers, begins = np.concatenate(choices), np.cumsum([0, *map(len, choices)])
    # One ascending key for all choices, so that every row is found at once.
    step = int(each.max()) + 1
    keys = np.repeat(np.arange(len(each)), np.diff(begins)) * step + numbers
    start = np.searchsorted(keys, of_row * step + least)
    ranges = Ranges(numbers, np.arange(len(least)), start, begins[of_row + 1])
    return ranges, start - begins[of_row]
