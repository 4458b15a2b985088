"""Plans for an H200 and an H100 with the shipped calibrations, compared with measured steps."""

from __future__ import annotations

from statistics import fmean
from unittest.mock import patch

import pytest
from benchmarks.accelerated_record import H100, H200, Compared, Record, peaks, steps

STEP_WITHIN, SHAPES_WITHIN = 0.04, 12
PEAK_WITHIN = 0.05


def mean_off(found: list[Compared]) -> float:
    return fmean(abs(one.error) for one in found)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("record", "near", "mean", "worst"), [(H200, 25, 0.022, 0.05), (H100, 21, 0.024, 0.075)]
)
def test_steps_take_the_planned_time(record: Record, near: int, mean: float, worst: float) -> None:
    found = steps(record)
    assert len(found) == 26
    assert sum(abs(one.error) <= STEP_WITHIN for one in found) >= near >= SHAPES_WITHIN
    assert mean_off(found) < mean and max(abs(one.error) for one in found) < worst


@pytest.mark.parametrize(("record", "shapes"), [(H200, 26 + 16), (H100, 26)])
def test_peaks_have_the_planned_size(record: Record, shapes: int) -> None:
    found = peaks(record)
    assert len(found) == shapes
    assert max(abs(one.error) for one in found) <= PEAK_WITHIN
    assert mean_off(found) < 0.01


@pytest.mark.slow
def test_mutants_whose_software_copies_nothing_are_caught() -> None:
    with patch("shardwise.cost.sharding.copies_s", lambda problem, table, owned, held: 0.0 * owned):
        assert min(mean_off(steps(H200)), mean_off(steps(H100))) > 0.04
    with patch("shardwise.cost.layers.loss_bytes", lambda problem, logits_bytes: logits_bytes):
        assert max(abs(one.error) for one in peaks(H200)) > PEAK_WITHIN
