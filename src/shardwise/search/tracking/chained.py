"""Least weighted sums along a whole chain: values, solutions that reach them, and what lies outside each
link."""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce

import numpy as np
import numpy.typing as npt

from shardwise.frontier import Chain
from shardwise.search.tracking.borders import Borders
from shardwise.search.tracking.flat import Peaked
from shardwise.search.tracking.scalars import Scalars, Sums
from shardwise.search.tracking.solution import Choice, Solution
from shardwise.search.tracking.steps import Order

_Asked = tuple[int, int, int, int]
"""Which weight, from which border, by which mode, to which border."""


@dataclass(frozen=True, slots=True)
class Weighing:
    """Weights (J, 5) of the columns, and where the peak is weighed: `peaks` (links, J) are the parts of its
    weight in each occurrence of a link, `peaked` where each mode of a link weighs it. Every weighted sum is a
    lower bound of the same sum of a solution's measure, as long as the weights of hidden_s and exposed_s add
    to that of time, those of held_bytes and the peak are that of memory, and the parts of all occurrences to
    no more than 1: the largest of several values is no less than any mean of them."""

    weights: npt.NDArray[np.float64]
    peaks: npt.NDArray[np.float64]
    peaked: tuple[tuple[Peaked, ...], ...]

    @staticmethod
    def without_peaks(chain: Chain, weights: npt.NDArray[np.float64]) -> Weighing:
        """Weights of all columns but the peak's."""
        return Weighing(
            weights, np.zeros((len(chain), len(weights))), tuple(((),) * len(link.modes) for link in chain)
        )


@dataclass(slots=True)
class Weighed:
    """A chain under weights. `scalars[i][m]` are the tables of mode m of link i; `ahead` and `behind` the
    least sums before and after each border between occurrences, (hubs..., border, weights)."""

    chain: Chain
    borders: Borders
    weighing: Weighing
    scalars: list[list[Scalars]]
    ahead: list[Sums]
    behind: list[Sums]

    @property
    def least(self) -> npt.NDArray[np.float64]:
        """The least total of each weight, (J)."""
        return np.asarray(_flat(self.ahead[-1]).min(axis=0))

    def around(self, before: int, after: int) -> Sums:
        """The least of all before a border and after another one, (hubs..., entry, exit, weights)."""
        return np.asarray(self.ahead[before][..., :, None, :] + self.behind[after][..., None, :, :])


def _flat(sums: Sums) -> Sums:
    """Sums at an end of a chain, (hubs, weights)."""
    return sums.reshape((-1, sums.shape[-1]))


def link_table(borders: Borders, parts: list[Scalars]) -> Sums:
    """The least of a link's modes, (hubs..., entry, exit, weights)."""
    return reduce(np.minimum, (borders.bordered(scalars.part, scalars.last) for scalars in parts))


def weighed(chain: Chain, orders: list[list[Order]], weighing: Weighing) -> Weighed:
    """`chain` under the weights; `orders[i][m]` of mode m of link i."""
    scalars: list[list[Scalars]] = []
    for place, link in enumerate(chain):
        own = weighing.weights.copy()
        own[:, 3:] *= weighing.peaks[place][:, None]
        parts = zip(link.modes, orders[place], weighing.peaked[place], strict=True)
        scalars.append([Scalars.of(part, order, own, peaked) for (_, part), order, peaked in parts])
    borders = Borders.of(chain)
    start = borders.start(len(weighing.weights))
    found = Weighed(chain, borders, weighing, scalars, [start], [start])
    tables = [
        table
        for link, parts in zip(chain, scalars, strict=True)
        for table in [link_table(borders, parts)] * link.repeat
    ]
    for table in tables:
        found.ahead.append((found.ahead[-1][..., :, None, :] + table).min(axis=-3))
    for table in reversed(tables):
        found.behind.append((table + found.behind[-1][..., None, :, :]).min(axis=-2))
    found.behind.reverse()
    return found


def solutions(found: Weighed) -> list[Solution]:
    """A solution of the least total for each weight; of equal choices the first."""
    count = found.ahead[0].shape[-1]
    each = np.arange(count)
    at = np.zeros(count, dtype=np.intp)
    borders = found.borders
    end = found.ahead[-1]
    hubs = np.unravel_index(_flat(end).argmin(axis=0), end.shape[:-1])[:-1]  # and the one border there
    chosen: list[list[Choice]] = [[] for _ in range(count)]
    border = 0
    for place, link in enumerate(found.chain):
        memo: dict[_Asked, Choice] = {}
        parts = found.scalars[place]
        stacked = np.stack([borders.bordered(scalars.part, scalars.last) for scalars in parts])
        tables = np.moveaxis(stacked, -2, 1)  # (modes, exits, hubs..., entries, weights)
        own = tuple(np.minimum(hub, size - 1) for hub, size in zip(hubs, tables.shape[2:], strict=False))
        for _ in range(link.repeat):
            border += 1
            behind = np.moveaxis(found.behind[border], -2, 0)  # (exits, hubs..., weights)
            whose = tuple(
                np.minimum(hub, size - 1) for hub, size in zip(hubs, behind.shape[1:], strict=False)
            )
            # (modes, exits, weights) from where each weight stands
            onward = tables[(slice(None), slice(None), *own, at, each)] + behind[(slice(None), *whose, each)]
            best = onward.reshape(-1, count).argmin(axis=0)
            modes, after = best // onward.shape[1], best % onward.shape[1]
            _choose(parts, dict(zip(borders.hubs, hubs, strict=True)), at, modes, after, memo, chosen)
            at = after
    return [tuple(choices) for choices in chosen]


def _choose(
    parts: list[Scalars],
    hubs: dict[str, npt.NDArray[np.intp]],
    at: npt.NDArray[np.intp],
    modes: npt.NDArray[np.intp],
    after: npt.NDArray[np.intp],
    memo: dict[_Asked, Choice],
    chosen: list[list[Choice]],
) -> None:
    """Append to `chosen` what each weight chooses between its borders; like questions are answered once."""
    asked = [
        (weight, *where)
        for weight, where in enumerate(zip(at.tolist(), modes.tolist(), after.tolist(), strict=True))
    ]
    for mode, scalars in enumerate(parts):
        unknown = [key for key in asked if key[2] == mode and key not in memo]
        if not unknown:
            continue
        part = scalars.part
        ends = {end: each for end, each in ((part.entry, at), (part.exit, after)) if end is not None}
        ends |= {variable: hubs[name] for name, variable in part.hubs}
        found = scalars.choices(ends)
        rows = np.stack([found[variable] for variable in range(len(part.sizes))], axis=1)
        memo |= {key: Choice(mode, tuple(rows[key[0]].tolist())) for key in unknown}
    for key in asked:
        chosen[key[0]].append(memo[key])
