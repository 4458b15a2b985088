"""Rows that ran the same work in different ways: how well predictions rank them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from shardwise.accuracy.judge import JudgedRow
from shardwise.accuracy.metrics import kendall_tau, regret
from shardwise.ties import ties_of_least

LEAST_PLANS: Final = 5
"""Rows that a workload needs for its ranking to say something."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """One piece of work: its rows, how well they are ranked (tau-b), and what it costs to take the plan that
    is predicted fastest; `chosen` and `best` are the ids of that row and of the fastest measured."""

    source: str
    model: str
    device: str
    devices: int
    seq_len: int
    global_batch_size: int
    dtype: str
    framework: str
    rows: tuple[str, ...]
    chosen: str
    best: str
    kendall_tau: float | None
    regret: float


def workloads_of(judged: Sequence[JudgedRow]) -> tuple[Workload, ...]:
    """The workloads with at least LEAST_PLANS rows that have both times, in the order of their first rows."""
    groups: dict[tuple[str | int, ...], list[JudgedRow]] = {}
    for one in judged:
        if one.measured_s is not None and one.predicted_s is not None:
            groups.setdefault(_key(one), []).append(one)
    return tuple(_workload(group) for group in groups.values() if len(group) >= LEAST_PLANS)


def _key(one: JudgedRow) -> tuple[str | int, ...]:
    """Same source, model, device, device count, sequence, global batch, dtype, framework."""
    row = one.row
    return (
        row.group, row.source, row.model_name, row.gpu, row.gpus or 0, row.seq_len or 0,
        row.global_batch or 0, row.dtype, row.framework,
    )  # fmt: skip


def _workload(group: Sequence[JudgedRow]) -> Workload:
    row = group[0].row
    measured = [one.measured_s or 0.0 for one in group]
    predicted = [one.predicted_s or 0.0 for one in group]
    ties = np.flatnonzero(ties_of_least(predicted)).tolist()
    return Workload(
        source=row.source or row.group,
        model=row.model_name,
        device=row.gpu,
        devices=row.gpus or 0,
        seq_len=row.seq_len or 0,
        global_batch_size=row.global_batch or 0,
        dtype=row.dtype,
        framework=row.framework,
        rows=tuple(one.row.id for one in group),
        chosen=group[max(ties, key=lambda index: measured[index])].row.id,
        best=group[min(range(len(group)), key=lambda index: measured[index])].row.id,
        kendall_tau=kendall_tau(measured, predicted),
        regret=regret(measured, predicted),
    )
