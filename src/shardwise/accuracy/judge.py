"""Each row beside its prediction."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shardwise.accuracy.bands import Band, band_of
from shardwise.accuracy.case import Case, CaseBuilder, fault_of
from shardwise.accuracy.measured import Measured, measured_of, predicted_bytes
from shardwise.accuracy.predict import Prediction, predictions_of
from shardwise.accuracy.rows import Fault, Row
from shardwise.errors import ConfigError
from shardwise.strategy import Strategy


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgedRow:
    """A row with what was measured and predicted: seconds per step, and peak bytes of `memory_kind`.

    Measured values are None where the row gives none. `device` is the name of the device it was taken for.
    """

    row: Row
    device: str
    strategy: Strategy
    measured_s: float | None
    predicted_s: float
    band: Band
    measured_bytes: float | None
    predicted_bytes: float
    memory_kind: str
    assumed: tuple[str, ...]

    @property
    def error(self) -> float | None:
        """Predicted over measured step time, minus 1."""
        return None if self.measured_s is None else self.predicted_s / self.measured_s - 1.0

    @property
    def memory_error(self) -> float | None:
        """Predicted over measured peak memory, minus 1."""
        return None if self.measured_bytes is None else self.predicted_bytes / self.measured_bytes - 1.0

    @property
    def is_in_band(self) -> bool | None:
        """Whether the measured time lies in the predicted band."""
        if self.measured_s is None:
            return None
        low, high = self.band
        return self.predicted_s * low <= self.measured_s <= self.predicted_s * high


def judged(rows: Sequence[Row]) -> tuple[list[JudgedRow], list[Fault]]:
    """Every row that can be used with its prediction, and why the others cannot; both in the order of the
    rows."""
    ready = CaseBuilder()
    cases: list[Case] = []
    figures: list[Measured] = []
    faults: list[Fault] = []
    for row in rows:
        try:
            case = ready.of(row)
            figures.append(measured_of(row, case.problem))
            cases.append(case)
        except ConfigError as error:
            faults.append(fault_of(row, error))
    predictions = predictions_of(cases)
    return [_judged(one, what) for one, what in zip(predictions, figures, strict=True)], faults


def _judged(prediction: Prediction, measured: Measured) -> JudgedRow:
    case = prediction.case
    return JudgedRow(
        row=case.row,
        device=case.problem.device.name,
        strategy=prediction.strategy,
        measured_s=measured.step_time_s,
        predicted_s=prediction.step_time_s,
        band=band_of(case),
        measured_bytes=measured.peak_bytes,
        predicted_bytes=predicted_bytes(prediction, measured.memory_kind),
        memory_kind=measured.memory_kind,
        assumed=(*case.assumed, *measured.assumed),
    )
