"""Least weighted sums along a whole chain: values, solutions that reach them, and what lies outside each
link."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from shardwise.frontier import Chain, Part
from shardwise.search.tracking.scalars import Scalars, Sums
from shardwise.search.tracking.solution import Choice, Solution
from shardwise.search.tracking.steps import Order

_Asked = tuple[bool, int, int, int, int]
"""With the weight of the peak or without, which weight, from which border, by which mode, to which border."""


@dataclass(frozen=True, slots=True)
class Weighing:
    """Weights (J, 5) of the columns, and where the peak is weighed: at one factor of one mode of one link's
    last occurrence, or nowhere. Every weighted sum is a lower bound of the same sum of a solution's measure,
    as long as the weights of hidden_s and exposed_s add to that of time, and those of held_bytes and the peak
    are that of memory."""

    weights: npt.NDArray[np.float64]
    peak_link: int | None = None
    peak_factors: tuple[int | None, ...] = ()


@dataclass(slots=True)
class Weighed:
    """A chain under weights. `plain[i][m]` and `peaked[i][m]` are the tables of mode m of link i, without and
    with the weight of the peak; `ahead` and `behind` the least sums before and after each border between
    occurrences."""

    chain: Chain
    plain: list[list[Scalars]]
    peaked: dict[int, list[Scalars]]
    ahead: list[Sums]
    behind: list[Sums]

    @property
    def least(self) -> npt.NDArray[np.float64]:
        """The least total of each weight, (J)."""
        return np.asarray(self.ahead[-1][0])

    def scalars_of(self, place: int, is_last: bool) -> list[Scalars]:
        """The modes of an occurrence."""
        return self.peaked[place] if is_last and place in self.peaked else self.plain[place]


def bordered(part: Part, table: Sums) -> Sums:
    """A part's last table as (choices of the entry or 1, choices of the exit or 1, weights)."""
    entry = 1 if part.entry is None else part.sizes[part.entry]
    leaving = 1 if part.exit is None else part.sizes[part.exit]
    if part.entry is not None and part.exit is not None and part.entry > part.exit:
        table = table.swapaxes(0, 1)
    return table.reshape((entry, leaving, table.shape[-1]))


def unbordered(part: Part, values: Sums) -> Sums:
    """The inverse of `bordered`."""
    ends = [end for end in (part.entry, part.exit) if end is not None]
    if len(ends) == 2 and ends[0] > ends[1]:
        values = values.swapaxes(0, 1)
    return values.reshape((*(part.sizes[end] for end in sorted(ends)), values.shape[-1]))


def link_table(parts: list[Scalars]) -> Sums:
    """The least of a link's modes, (entry, exit, weights)."""
    tables = [bordered(scalars.part, scalars.last) for scalars in parts]
    return np.asarray(np.minimum.reduce(tables))


def weighed(chain: Chain, orders: list[list[Order]], weighing: Weighing) -> Weighed:
    """`chain` under the weights; `orders[i][m]` of mode m of link i."""
    plain_weights = weighing.weights.copy()
    plain_weights[:, 3:] = 0.0
    plain = [
        [
            Scalars.of(part, order, plain_weights)
            for (_, part), order in zip(link.modes, orders[place], strict=True)
        ]
        for place, link in enumerate(chain)
    ]
    peaked: dict[int, list[Scalars]] = {}
    if weighing.peak_link is not None:
        place = weighing.peak_link
        peaked[place] = [
            Scalars.of(part, order, weighing.weights, factor)
            for (_, part), order, factor in zip(
                chain[place].modes, orders[place], weighing.peak_factors, strict=True
            )
        ]
    count = len(weighing.weights)
    found = Weighed(chain, plain, peaked, [np.zeros((1, count))], [np.zeros((1, count))])
    tables: list[Sums] = []
    for place, link in enumerate(chain):
        usual = link_table(plain[place])
        tables += [usual] * (link.repeat - 1)
        tables.append(link_table(peaked[place]) if place in peaked else usual)
    for table in tables:
        found.ahead.append((found.ahead[-1][:, None] + table).min(axis=0))
    for table in reversed(tables):
        found.behind.append((table + found.behind[-1][None]).min(axis=1))
    found.behind.reverse()
    return found


def solutions(found: Weighed) -> list[Solution]:
    """A solution of the least total for each weight; of equal choices the first."""
    count = found.ahead[0].shape[-1]
    each = np.arange(count)
    at = np.zeros(count, dtype=np.intp)
    chosen: list[list[Choice]] = [[] for _ in range(count)]
    border = 0
    for place, link in enumerate(found.chain):
        memo: dict[_Asked, Choice] = {}
        for occurrence in range(link.repeat):
            is_last = occurrence == link.repeat - 1
            parts = found.scalars_of(place, is_last)
            is_peaked = is_last and place in found.peaked
            border += 1
            tables = np.stack([bordered(scalars.part, scalars.last) for scalars in parts])
            # (modes, exits, weights) from where each weight stands
            onward = tables[:, at, :, each].transpose(1, 2, 0) + found.behind[border][None]
            best = onward.reshape(-1, count).argmin(axis=0)
            modes, after = best // onward.shape[1], best % onward.shape[1]
            _choose(parts, is_peaked, at, modes, after, memo, chosen)
            at = after
    return [tuple(choices) for choices in chosen]


def _choose(
    parts: list[Scalars],
    is_peaked: bool,
    at: npt.NDArray[np.intp],
    modes: npt.NDArray[np.intp],
    after: npt.NDArray[np.intp],
    memo: dict[_Asked, Choice],
    chosen: list[list[Choice]],
) -> None:
    """Append to `chosen` what each weight chooses between its borders; like questions are answered once."""
    asked = [
        (is_peaked, weight, *where)
        for weight, where in enumerate(zip(at.tolist(), modes.tolist(), after.tolist(), strict=True))
    ]
    for mode, scalars in enumerate(parts):
        unknown = [key for key in asked if key[3] == mode and key not in memo]
        if not unknown:
            continue
        part = scalars.part
        ends = {end: each for end, each in ((part.entry, at), (part.exit, after)) if end is not None}
        found = scalars.choices(ends)
        rows = np.stack([found[variable] for variable in range(len(part.sizes))], axis=1)
        memo |= {key: Choice(mode, tuple(rows[key[1]].tolist())) for key in unknown}
    for key in asked:
        chosen[key[1]].append(memo[key])
