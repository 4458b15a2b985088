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
from shardwise.search.tracking.borders import SeparatorAxes
from shardwise.search.tracking.flat import PeakShares
from shardwise.search.tracking.scalars import FactorSums, Sums
from shardwise.search.tracking.solution import SegmentChoice, Solution
from shardwise.search.tracking.steps import EliminationOrder

_StepKey = tuple[int, int, int, int]
"""Which weight, from which border, by which mode, to which border."""


@dataclass(frozen=True, slots=True)
class ChainWeights:
    """Weights (J, 5) of the columns, and where the peak is weighed: `peaks` (links, J) are the parts of its
    weight in each occurrence of a link, `peak_shares` where each mode of a link weighs it. Every weighted sum
    is a lower bound of the same sum of a solution's measure, as long as the weights of hidden_s and exposed_s
    add to that of time, those of held_bytes and the peak are that of memory, and the parts of all occurrences
    to no more than 1: the largest of several values is no less than any mean of them."""

    weights: npt.NDArray[np.float64]
    peaks: npt.NDArray[np.float64]
    peak_shares: tuple[tuple[PeakShares, ...], ...]

    @staticmethod
    def without_peaks(chain: Chain, weights: npt.NDArray[np.float64]) -> ChainWeights:
        """Weights of all columns but the peak's."""
        return ChainWeights(
            weights,
            np.zeros((len(chain), len(weights))),
            tuple(((),) * len(segment.modes) for segment in chain),
        )


@dataclass(slots=True)
class ChainSums:
    """A chain under weights. `factor_sums[i][m]` are the tables of mode m of link i; `prefix` and `suffix`
    the least sums before and after each border between occurrences, (hubs..., border, weights)."""

    chain: Chain
    borders: SeparatorAxes
    chain_weights: ChainWeights
    factor_sums: list[list[FactorSums]]
    prefix: list[Sums]
    suffix: list[Sums]

    @property
    def least(self) -> npt.NDArray[np.float64]:
        """The least total of each weight, (J)."""
        return np.asarray(_flat(self.prefix[-1]).min(axis=0))

    def some(self, rows: npt.NDArray[np.intp]) -> ChainSums:
        """Under some of the weights."""
        chain_weights = ChainWeights(
            self.chain_weights.weights[rows],
            self.chain_weights.peaks[:, rows],
            self.chain_weights.peak_shares,
        )
        factor_sums = [[own.some(rows) for own in parts] for parts in self.factor_sums]
        prefix, suffix = ([sums[..., rows] for sums in every] for every in (self.prefix, self.suffix))
        return ChainSums(self.chain, self.borders, chain_weights, factor_sums, prefix, suffix)

    def outside(self, spans: Sequence[range], shared: Collection[str]) -> Sums:
        """The least of all outside any of some spans of occurrences, for each choice of these hubs: (hubs...,
        entry, exit, weights), of 1 for each of the others."""
        away = [axis for axis, name in enumerate(self.borders.shared) if name not in shared]
        both = ((self.prefix[span.start], self.suffix[span.stop]) for span in spans)
        return reduce(np.minimum, (_outside(prefix, suffix, away) for prefix, suffix in both))


def _without(sums: Sums, axes: Sequence[int]) -> Sums:
    """The least along some axes, of 1 then."""
    return np.asarray(sums.min(axis=tuple(axes), keepdims=True)) if axes else sums


def _outside(prefix: Sums, suffix: Sums, away: Sequence[int]) -> Sums:
    """The least of both together, (hubs..., entry, exit, weights), of 1 for hubs `away`."""
    # Of a hub that is on one side alone the best choice there is the best of all.
    alone = [axis for axis in away if prefix.shape[axis] == 1 or suffix.shape[axis] == 1]
    prefix, suffix = _without(prefix, alone), _without(suffix, alone)
    shape = np.broadcast_shapes(prefix.shape[:-2], suffix.shape[:-2])
    sizes_outside = (prefix.shape[-2], suffix.shape[-2])
    if not machine.uses_numba_for_sums(prod((*shape, *sizes_outside, prefix.shape[-1]))):
        return _without(prefix[..., :, None, :] + suffix[..., None, :, :], away)
    from shardwise.search.tracking.compiled_chains import least_outside

    shape_left = tuple(1 if axis in away else size for axis, size in enumerate(shape))
    found = np.full((prefix.shape[-1], prod(shape_left), *sizes_outside), np.inf)
    least_outside(
        _by_weight(prefix, 1), _by_weight(suffix, 1),
        _rows(prefix.shape[:-2], shape), _rows(suffix.shape[:-2], shape), _rows(shape_left, shape), found,
    )  # fmt: skip
    return np.moveaxis(found, 0, -1).reshape((*shape_left, *sizes_outside, len(found)))


def _by_weight(sums: Sums, borders: int) -> Sums:
    """Sums (hubs..., borders..., weights) as (weights, all hubs, borders...), one weight after the other."""
    first = np.moveaxis(sums, -1, 0)
    return np.ascontiguousarray(first.reshape((len(first), -1, *sums.shape[-1 - borders : -1])))


def _rows(own: tuple[int, ...], shape: tuple[int, ...]) -> npt.NDArray[np.intp]:
    """The row of each choice of hubs (of `shape`) among those that some sums tell apart (of `own`, or 1)."""
    return np.broadcast_to(np.arange(prod(own), dtype=np.intp).reshape(own), shape).reshape(-1)


@dataclass(frozen=True, slots=True, eq=False)
class _Extension:
    """The sums of a link, (hubs..., from, after, weights), and the same one weight after the other where
    machine code goes through them."""

    table: Sums
    by_weight: Sums | None

    @staticmethod
    def of(table: Sums) -> _Extension:
        """Of a link's sums."""
        return _Extension(table, _by_weight(table, 2) if machine.uses_numba_for_sums(table.size) else None)

    def least(self, before: Sums) -> Sums:
        """The least of what is before and the link together, (hubs..., after, weights)."""
        if self.by_weight is None:
            return np.asarray((before[..., :, None, :] + self.table).min(axis=-3))
        from shardwise.search.tracking.compiled_chains import extended_sums

        own, table = before.shape[:-2], self.table.shape[:-3]
        shape = np.broadcast_shapes(own, table)
        found = np.full((len(self.by_weight), prod(shape), self.table.shape[-2]), np.inf)
        extended_sums(_by_weight(before, 1), self.by_weight, _rows(own, shape), _rows(table, shape), found)
        return np.moveaxis(found, 0, -1).reshape((*shape, *found.shape[2:], len(found)))


def _flat(sums: Sums) -> Sums:
    """Sums at an end of a chain, (hubs, weights)."""
    return sums.reshape((-1, sums.shape[-1]))


def segment_table(borders: SeparatorAxes, parts: list[FactorSums]) -> Sums:
    """The least of a link's modes, (hubs..., entry, exit, weights)."""
    return reduce(np.minimum, (borders.to_axes(factor_sums.part, factor_sums.last) for factor_sums in parts))


def chain_sums(chain: Chain, orders: list[list[EliminationOrder]], chain_weights: ChainWeights) -> ChainSums:
    """`chain` under the weights; `orders[i][m]` of mode m of link i."""
    factor_sums: list[list[FactorSums]] = []
    for place, segment in enumerate(chain):
        own = chain_weights.weights.copy()
        own[:, 3:] *= chain_weights.peaks[place][:, None]
        parts = zip(segment.modes, orders[place], chain_weights.peak_shares[place], strict=True)
        factor_sums.append(
            [FactorSums.of(part, order, own, peak_shares) for (_, part), order, peak_shares in parts]
        )
    borders = SeparatorAxes.of(chain)
    start = borders.start(len(chain_weights.weights))
    found = ChainSums(chain, borders, chain_weights, factor_sums, [start], [start])
    tables = [segment_table(borders, parts) for parts in factor_sums]
    for segment, table in zip(chain, tables, strict=True):
        onward = _Extension.of(table)
        for _ in range(segment.repeat):
            found.prefix.append(onward.least(found.prefix[-1]))
    for segment, table in zip(reversed(chain), reversed(tables), strict=True):
        back = _Extension.of(table.swapaxes(-3, -2))
        for _ in range(segment.repeat):
            found.suffix.append(back.least(found.suffix[-1]))
    found.suffix.reverse()
    return found


def solutions(found: ChainSums) -> list[Solution]:
    """A solution of the least total for each weight; of equal choices the first."""
    count = found.prefix[0].shape[-1]
    each = np.arange(count)
    at = np.zeros(count, dtype=np.intp)
    borders = found.borders
    end = found.prefix[-1]
    shared = np.unravel_index(_flat(end).argmin(axis=0), end.shape[:-1])[:-1]  # and the one border there
    chosen: list[list[SegmentChoice]] = [[] for _ in range(count)]
    border = 0
    for place, segment in enumerate(found.chain):
        memo: dict[_StepKey, SegmentChoice] = {}
        parts = found.factor_sums[place]
        stacked = np.stack([borders.to_axes(factor_sums.part, factor_sums.last) for factor_sums in parts])
        tables = np.moveaxis(stacked, -2, 1)  # (modes, exits, hubs..., entries, weights)
        own = tuple(
            np.minimum(shared_variable, size - 1)
            for shared_variable, size in zip(shared, tables.shape[2:], strict=False)
        )
        for _ in range(segment.repeat):
            border += 1
            suffix = np.moveaxis(found.suffix[border], -2, 0)  # (exits, hubs..., weights)
            whose = tuple(
                np.minimum(shared_variable, size - 1)
                for shared_variable, size in zip(shared, suffix.shape[1:], strict=False)
            )
            # (modes, exits, weights) from where each weight stands
            onward = tables[(slice(None), slice(None), *own, at, each)] + suffix[(slice(None), *whose, each)]
            best = onward.reshape(-1, count).argmin(axis=0)
            modes, after = best // onward.shape[1], best % onward.shape[1]
            _choose(parts, dict(zip(borders.shared, shared, strict=True)), at, modes, after, memo, chosen)
            at = after
    return [tuple(choices) for choices in chosen]


def _choose(
    parts: list[FactorSums],
    shared: dict[str, npt.NDArray[np.intp]],
    at: npt.NDArray[np.intp],
    modes: npt.NDArray[np.intp],
    after: npt.NDArray[np.intp],
    memo: dict[_StepKey, SegmentChoice],
    chosen: list[list[SegmentChoice]],
) -> None:
    """Append to `chosen` what each weight chooses between its borders; like questions are answered once."""
    step_keys = [
        (weight, *where)
        for weight, where in enumerate(zip(at.tolist(), modes.tolist(), after.tolist(), strict=True))
    ]
    for mode, factor_sums in enumerate(parts):
        unknown = [key for key in step_keys if key[2] == mode and key not in memo]
        if not unknown:
            continue
        part = factor_sums.part
        fixed = {end: each for end, each in ((part.entry, at), (part.exit, after)) if end is not None}
        fixed |= {variable: shared[name] for name, variable in part.shared}
        found = factor_sums.choices(fixed)
        rows = np.stack([found[variable] for variable in range(len(part.sizes))], axis=1)
        memo |= {key: SegmentChoice(mode, tuple(rows[key[0]].tolist())) for key in unknown}
    for key in step_keys:
        chosen[key[0]].append(memo[key])
