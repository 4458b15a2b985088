"""Least weighted sums along a whole chain: values, solutions that reach them, and what lies outside each
link."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import reduce
from math import prod

import numpy as np
import numpy.typing as npt

from shardwise.frontier import Chain
from shardwise.search.tracking import machine
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

    def some(self, rows: npt.NDArray[np.intp]) -> Weighed:
        """Under some of the weights."""
        weighing = Weighing(self.weighing.weights[rows], self.weighing.peaks[:, rows], self.weighing.peaked)
        scalars = [[own.some(rows) for own in parts] for parts in self.scalars]
        ahead, behind = ([sums[..., rows] for sums in every] for every in (self.ahead, self.behind))
        return Weighed(self.chain, self.borders, weighing, scalars, ahead, behind)

    def outside(self, spans: Sequence[range], hubs: Collection[str]) -> Sums:
        """The least of all outside any of some spans of occurrences, for each choice of these hubs: (hubs...,
        entry, exit, weights), of 1 for each of the others."""
        away = [axis for axis, name in enumerate(self.borders.hubs) if name not in hubs]
        both = ((self.ahead[span.start], self.behind[span.stop]) for span in spans)
        return reduce(np.minimum, (_outside(ahead, behind, away) for ahead, behind in both))


def _without(sums: Sums, axes: Sequence[int]) -> Sums:
    """The least along some axes, of 1 then."""
    return np.asarray(sums.min(axis=tuple(axes), keepdims=True)) if axes else sums


def _outside(ahead: Sums, behind: Sums, away: Sequence[int]) -> Sums:
    """The least of both together, (hubs..., entry, exit, weights), of 1 for hubs `away`."""
    # Of a hub that is on one side alone the best choice there is the best of all.
    alone = [axis for axis in away if ahead.shape[axis] == 1 or behind.shape[axis] == 1]
    ahead, behind = _without(ahead, alone), _without(behind, alone)
    shape = np.broadcast_shapes(ahead.shape[:-2], behind.shape[:-2])
    ends = (ahead.shape[-2], behind.shape[-2])
    if not machine.pays_for_sums(prod((*shape, *ends, ahead.shape[-1]))):
        return _without(ahead[..., :, None, :] + behind[..., None, :, :], away)
    from shardwise.search.tracking.compiled_chains import least_outside

    kept = tuple(1 if axis in away else size for axis, size in enumerate(shape))
    found = np.full((ahead.shape[-1], prod(kept), *ends), np.inf)
    least_outside(
        _by_weight(ahead, 1), _by_weight(behind, 1),
        _rows(ahead.shape[:-2], shape), _rows(behind.shape[:-2], shape), _rows(kept, shape), found,
    )  # fmt: skip
    return np.moveaxis(found, 0, -1).reshape((*kept, *ends, len(found)))


def _by_weight(sums: Sums, borders: int) -> Sums:
    """Sums (hubs..., borders..., weights) as (weights, all hubs, borders...), one weight after the other."""
    first = np.moveaxis(sums, -1, 0)
    return np.ascontiguousarray(first.reshape((len(first), -1, *sums.shape[-1 - borders : -1])))


def _rows(own: tuple[int, ...], shape: tuple[int, ...]) -> npt.NDArray[np.intp]:
    """The row of each choice of hubs (of `shape`) among those that some sums tell apart (of `own`, or 1)."""
    return np.broadcast_to(np.arange(prod(own), dtype=np.intp).reshape(own), shape).reshape(-1)


@dataclass(frozen=True, slots=True, eq=False)
class _Onward:
    """The sums of a link, (hubs..., from, after, weights), and the same one weight after the other where
    machine code goes through them."""

    table: Sums
    by_weight: Sums | None

    @staticmethod
    def of(table: Sums) -> _Onward:
        """Of a link's sums."""
        return _Onward(table, _by_weight(table, 2) if machine.pays_for_sums(table.size) else None)

    def least(self, before: Sums) -> Sums:
        """The least of what is before and the link together, (hubs..., after, weights)."""
        if self.by_weight is None:
            return np.asarray((before[..., :, None, :] + self.table).min(axis=-3))
        from shardwise.search.tracking.compiled_chains import least_onward

        own, table = before.shape[:-2], self.table.shape[:-3]
        shape = np.broadcast_shapes(own, table)
        found = np.full((len(self.by_weight), prod(shape), self.table.shape[-2]), np.inf)
        least_onward(_by_weight(before, 1), self.by_weight, _rows(own, shape), _rows(table, shape), found)
        return np.moveaxis(found, 0, -1).reshape((*shape, *found.shape[2:], len(found)))


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
    tables = [link_table(borders, parts) for parts in scalars]
    for link, table in zip(chain, tables, strict=True):
        onward = _Onward.of(table)
        for _ in range(link.repeat):
            found.ahead.append(onward.least(found.ahead[-1]))
    for link, table in zip(reversed(chain), reversed(tables), strict=True):
        back = _Onward.of(table.swapaxes(-3, -2))
        for _ in range(link.repeat):
            found.behind.append(back.least(found.behind[-1]))
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
