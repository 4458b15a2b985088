"""Quick bound of parts of a cluster: the computation of a step, spread over as many devices as a part has.

No grid of a part is listed. A number of devices without legal degrees has no candidates at all.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardwise.cost import Problem, any_micro_batch_compute_bound_s
from shardwise.search.space import Degrees, Space, divisors
from shardwise.strategy import CP_KINDS, GRID_RULES, Limits, StrategyTable, first_broken

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class DeviceWork:
    """Device-seconds of a step, at least, by tp * cp; and the host's seconds on top of their share."""

    by_width: Mapping[int, float]
    host_s: float

    def least_s(self, width: int, devices: Any) -> Any:
        """Seconds of a step, at least, on `devices` of which tp * cp is `width`."""
        return self.by_width[width] / devices + self.host_s


class DegreeBounds:
    """Bounds for one space and job on devices of one or several kinds, on up to `most` devices."""

    def __init__(self, space: Space, limits: Limits, most: int) -> None:
        self._space, self._limits, self._most = space, limits, most

    def work(self, problem: Problem) -> DeviceWork:
        """What a step takes of the devices of `problem`.

        A sample takes least in the largest micro-batch: that of the whole batch on one replica. Its
        device-seconds are shared by all replicas and stages.
        """
        table, host_s = self._shapes, problem.profile.host_step_s
        if not len(table):
            return DeviceWork({}, host_s)
        widths = np.asarray(table.tp * table.cp)
        work = (any_micro_batch_compute_bound_s(problem, table) - host_s) * widths
        return DeviceWork(
            {width: float(work[widths == width].min()) for width in np.unique(widths).tolist()}, host_s
        )

    def least_s(self, work: DeviceWork) -> Floats:
        """Seconds of a step, at least, on as many devices as the index says; infinity where no degrees are
        legal, and at index 0."""
        found = np.full(self._most + 1, np.inf)
        for width in work.by_width:
            counts = width * self._replicas_by_stages
            counts = counts[counts <= self._most]
            found[counts] = np.minimum(found[counts], work.least_s(width, counts))
        return found

    def degrees_below(self, work: DeviceWork, devices: int, below_s: float) -> list[Degrees]:
        """The legal degrees on so many devices whose bound is below `below_s`."""
        table = self._shapes
        pairs = dict.fromkeys(zip(table.tp.tolist(), table.cp.tolist(), strict=True))
        return [
            (tp, cp, devices // (tp * cp * pp), pp)
            for tp, cp in pairs
            if devices % (tp * cp) == 0 and work.least_s(tp * cp, devices) < below_s
            for pp in self._stages
            if devices % (tp * cp * pp) == 0 and devices // (tp * cp * pp) in self._replicas
        ]

    @cached_property
    def _shapes(self) -> StrategyTable:
        """Every legal choice of tp, cp and expert degrees of one replica without stages, whose micro-batch is
        the whole batch."""
        space, limits = self._space, self._limits
        of_heads = divisors(limits.heads)
        of_sequence = (1,) if space.is_core else divisors(limits.seq_len)
        tps = [tp for tp in space.allowed("tp", of_heads) if tp <= self._most]
        cps = [cp for cp in space.allowed("cp", of_sequence) if cp <= self._most]
        experts = self._expert_degrees()
        rows = [
            (tp, cp, etp if experts else 1, ep, kind, sequence_parallel)
            for tp in tps
            for cp in cps
            if tp * cp <= self._most
            for etp, ep in (experts or [(1, 1)])
            if not (space.is_core and experts and etp != tp)
            for kind in (range(len(CP_KINDS)) if cp > 1 else (0,))
            for sequence_parallel in ((1, 0) if tp > 1 else (0,))
        ]
        names = ("tp", "cp", "etp", "ep", "cp_kind", "sequence_parallel")
        columns = np.array(rows, dtype=np.int64).reshape(-1, len(names)).T
        ones = np.ones(columns.shape[1], dtype=np.int64)
        table = space.plain({**dict(zip(names, columns, strict=True)), "dp": ones, "pp": ones})
        table = table.replaced(micro_batch_size=limits.global_batch_size * ones)
        return table.take(np.flatnonzero(first_broken(table, limits, GRID_RULES) < 0))

    def _expert_degrees(self) -> list[tuple[int, int]]:
        """Every etp and ep; none where the model has no experts."""
        if not self._space.experts:
            return []
        limits = self._limits
        etps = self._space.allowed("etp", divisors(limits.expert_ffn))
        eps = (1,) if self._space.is_core else self._space.allowed("ep", divisors(limits.experts))
        return [(etp, ep) for etp in etps for ep in eps if etp * ep <= self._most]

    @cached_property
    def _replicas(self) -> frozenset[int]:
        """Every legal dp."""
        return frozenset(self._space.allowed("dp", divisors(self._limits.global_batch_size)))

    @cached_property
    def _stages(self) -> list[int]:
        """Every legal pp."""
        return self._space.allowed("pp", range(1, self._limits.layers + 1))

    @cached_property
    def _replicas_by_stages(self) -> Ints:
        """Every product of a legal dp and a legal pp, ascending."""
        dps, pps = np.array(sorted(self._replicas), dtype=np.int64), np.array(self._stages, dtype=np.int64)
        return np.unique(dps[:, None] * pps[None, :])
