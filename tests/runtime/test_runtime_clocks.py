"""Spans of ranks with different clocks are put on one time axis."""

from __future__ import annotations

import time

import pytest
import torch

from shardwise.runtime import WorkerPool, gather_spans
from shardwise.runtime.workers import Report
from shardwise.sim import COMPUTE, Span

AHEAD_S = (0.0, 1000.0, -500.0)


def _joined(report: Report) -> tuple[Span, ...]:
    """One span of a second per rank that starts now, by clocks that differ widely."""
    rank = torch.distributed.get_rank()

    def now() -> float:
        return time.time() + AHEAD_S[rank]

    torch.distributed.barrier()
    start_s = now()
    return gather_spans([Span(rank, COMPUTE, "0F0", start_s, start_s + 1.0)], now=now)


def test_clocks_of_other_hosts_are_read(team: WorkerPool) -> None:
    """All spans start at one barrier, so within seconds of each other by rank 0's clock. A mutant that does
    not convert clocks finds them 500 s or 1,000 s apart."""
    first, *others = team.run(3, _joined)
    assert others == [(), ()]
    assert [span.rank for span in first] == [0, 1, 2]
    starts_s = [span.start_s for span in first]
    assert max(starts_s) - min(starts_s) < 60.0
    assert all(span.finish_s - span.start_s == pytest.approx(1.0, abs=1e-5) for span in first)
