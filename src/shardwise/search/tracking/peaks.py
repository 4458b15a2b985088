"""How small the largest temporary can be, beside each part of a chain."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from shardwise.search.tracking.labels import Labels

Values = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class LeastPeaks:
    """The least peak of all that is `prefix` of each border between occurrences, and of all `suffix` it, for
    each choice at the border: of several values the largest counts, so a label's own peak makes no difference
    where that is larger."""

    prefix: list[Values]
    suffix: list[Values]

    @staticmethod
    def of(tables: list[Labels]) -> LeastPeaks:
        """Of the tables of all occurrences, on (entry, exit) or on the one that there is; whatever hubs
        choose."""
        least = [_least(table, is_first=place == 0) for place, table in enumerate(tables)]
        prefix, suffix = [np.zeros(1)], [np.zeros(1)]
        for table in least:
            prefix.append(np.maximum(prefix[-1][:, None], table).min(axis=0))
        for table in reversed(least):
            suffix.append(np.maximum(table, suffix[-1][None]).min(axis=1))
        return LeastPeaks(prefix, suffix[::-1])

    def outside(self, spans: list[range]) -> Values:
        """Outside each of these spans of occurrences, whichever has least, (entry, exit)."""
        return np.asarray(
            np.minimum.reduce(
                [np.maximum(self.prefix[span.start][:, None], self.suffix[span.stop][None]) for span in spans]
            )
        )


def _least(table: Labels, *, is_first: bool) -> Values:
    """The least peak in each cell of a table, (entry or 1, exit or 1); infinite where there is no label."""
    least = np.full(int(np.prod(table.sizes, dtype=np.intp)), np.inf)
    np.minimum.at(least, table.cells, table.points[:, -1])
    sizes = [size for variable, size in zip(table.variables, table.sizes, strict=True) if variable >= 0]
    least = np.asarray(least.reshape((-1, *sizes)).min(axis=0))
    if len(sizes) == 2:
        return least
    return least.reshape((1, -1) if is_first else (-1, 1))
