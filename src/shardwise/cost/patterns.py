"""Which kinds of layers decoders are made of, and in which order: of one decoder, or of one for each row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

Pattern = tuple[int, ...]
"""The kind of every layer."""


@dataclass(frozen=True, slots=True, eq=False)
class Patterns:
    """Of decoders with these `patterns`, `before[d, k, i]` says how many of the first i layers (of all, where
    there are fewer) are of kind k. `of_row` is the decoder of each row of a table; 0 where all have one.
    """

    patterns: tuple[Pattern, ...]
    before: Any
    of_row: Any = 0

    @staticmethod
    def of(patterns: Sequence[Pattern], kinds: int, of_row: Any = 0) -> Patterns:
        """Of decoders with so many kinds of layers."""
        steps = np.zeros((len(patterns), kinds, max(map(len, patterns)) + 1), dtype=np.int64)
        for decoder, pattern in enumerate(patterns):
            steps[decoder, pattern, np.arange(1, len(pattern) + 1)] = 1
        return Patterns(tuple(patterns), steps.cumsum(axis=2), of_row)

    @staticmethod
    def joined(parts: Sequence[Patterns], rows: Sequence[int]) -> Patterns:
        """Of so many rows of each of these, in their order."""
        every = dict.fromkeys(pattern for part in parts for pattern in part.patterns)
        at = {pattern: place for place, pattern in enumerate(every)}
        own = [np.array([at[pattern] for pattern in part.patterns])[part.of_row] for part in parts]
        of_row = np.concatenate([np.broadcast_to(places, n) for places, n in zip(own, rows, strict=True)])
        return Patterns.of(list(every), parts[0].before.shape[1], of_row if len(every) > 1 else 0)

    @property
    def columns(self) -> list[Any]:
        """What rows must agree in to have the same layers."""
        return [self.of_row] if np.ndim(self.of_row) else []

    @property
    def layers(self) -> Any:
        """How many layers there are, of each row."""
        return np.array([len(pattern) for pattern in self.patterns])[self.of_row]

    def count(self, kind: int) -> Any:
        """How many of them are of a kind."""
        return self.before[self.of_row, kind, -1]

    def between(self, start: Any, end: Any) -> Any:
        """Layers of each kind from `start` to before `end`, columns over places and rows; shape (kinds,
        places, rows)."""
        kinds = np.arange(self.before.shape[1])[:, None, None]
        return self.before[self.of_row, kinds, end] - self.before[self.of_row, kinds, start]

    def taken(self, rows: Any) -> Patterns:
        """The same of these rows."""
        return Patterns(self.patterns, self.before, self.of_row[rows]) if self.columns else self
