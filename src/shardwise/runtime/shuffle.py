"""A permutation of many numbers that is asked place by place, and never made as a whole."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

ROUNDS = 8
"""Rounds of the network; four are enough for one that tells nothing of its keys (Luby and Rackoff 1988)."""

_Words = NDArray[np.uint64]


class FeistelPermutation:
    """The numbers below `count` in an order that `generator` draws; every one of them at one place.

    A Feistel network permutes the numbers of an even number of bits, `count` of them at least and less than
    4 * count. One that is not below `count` is permuted again until it is: since the network is a cycle for
    each number, that ends, and at a number of its own.
    """

    def __init__(self, count: int, generator: np.random.Generator) -> None:
        half = max(1, -(-(count - 1).bit_length() // 2))
        self.count = count
        self._half, self._mask = np.uint64(half), np.uint64((1 << half) - 1)
        self._keys = generator.integers(1 << 64, size=ROUNDS, dtype=np.uint64)

    def at(self, places: NDArray[np.int64]) -> NDArray[np.int64]:
        """The numbers at `places`, all of them from 0 to `count` - 1."""
        found = self._permuted(places.astype(np.uint64))
        while (beyond := found >= self.count).any():
            found[beyond] = self._permuted(found[beyond])
        return found.astype(np.int64)

    def _permuted(self, numbers: _Words) -> _Words:
        left, right = numbers >> self._half, numbers & self._mask
        for key in self._keys:
            left, right = right, left ^ (_mix_bits(right + key) & self._mask)
        return (left << self._half) | right


def _mix_bits(words: _Words) -> _Words:
    """Each word so that all of its bits hang on all that it had (the last steps of SplitMix64)."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))
