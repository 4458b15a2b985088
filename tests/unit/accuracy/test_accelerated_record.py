"""Plans for an H200, by the calibration that is shipped, against what was measured on one."""

from __future__ import annotations

from statistics import fmean
from unittest.mock import patch

import pytest
from benchmarks.accelerated_record import CALIBRATION, Compared, peaks, steps

from shardwise.strategy import Calibration, read_calibration

STEP_WITHIN, SHAPES_WITHIN = 0.04, 12
PEAK_WITHIN = 0.05


@pytest.fixture(scope="module")
def calibration() -> Calibration:
    return read_calibration(str(CALIBRATION))


def mean_off(found: list[Compared]) -> float:
    return fmean(abs(one.off) for one in found)


def test_steps_take_what_is_planned(calibration: Calibration) -> None:
    found = steps(calibration)
    assert len(found) == 26
    assert sum(abs(one.off) <= STEP_WITHIN for one in found) >= 25 >= SHAPES_WITHIN
    assert mean_off(found) < 0.022 and max(abs(one.off) for one in found) < 0.05


def test_peaks_are_what_is_planned(calibration: Calibration) -> None:
    found = peaks(calibration)
    assert len(found) == 26 + 16
    assert max(abs(one.off) for one in found) <= PEAK_WITHIN
    assert mean_off(found) < 0.01


def test_twins_whose_software_copies_nothing_are_caught(calibration: Calibration) -> None:
    with patch("shardwise.cost.sync.copies_s", lambda problem, table, owned, held: 0.0 * owned):
        assert mean_off(steps(calibration)) > 0.04
    with patch("shardwise.cost.temporaries.LOGITS_NUMBER_BYTES", 0.0):
        assert max(abs(one.off) for one in peaks(calibration)) > PEAK_WITHIN
