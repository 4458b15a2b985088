"""Validates predictions against measured rows: per row, per group, and overall.

`validate` reads a file of measured rows, predicts each row (`JudgedRow`), and summarises the errors
(`Errors`), the coverage of the prediction band, and the ranking within each `Workload`. A workload is a set
of rows that ran the same training job with different plans; its ranking is judged by Kendall's tau-b and by
the regret of the plan that is predicted fastest.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from shardwise.accuracy.case import Case, CaseBuilder, fault_of
from shardwise.accuracy.measured import Measured, measured_of, predicted_bytes
from shardwise.accuracy.predict import Known, Prediction, predictions_of
from shardwise.accuracy.rows import LEVELS, Fault, Row, read_rows, source_of
from shardwise.accuracy.spellings import device_named, dtype_named, family_named, profile_named
from shardwise.errors import ConfigError
from shardwise.inputs import unknown
from shardwise.model import Model
from shardwise.search import band_of as band_of_software
from shardwise.strategy import Calibration, Strategy, kind_of_profile
from shardwise.ties import ties_of_least

# Error statistics
TOO_SMALL: Final = 0.1
"""Error below which, times minus 1, a prediction counts as too small."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Errors:
    """Summary of relative errors (predicted over measured, minus 1).

    `n` is their number, `mape` and `median` the mean and median absolute error, `bias` the mean error,
    `worst` the largest absolute error, and `too_small` the share of errors below -TOO_SMALL."""

    n: int
    mape: float
    median: float
    bias: float
    worst: float
    too_small: float


def errors_of(errors: Sequence[float]) -> Errors | None:
    """The summary of errors; None for an empty sequence."""
    if not errors:
        return None
    sizes = [abs(error) for error in errors]
    return Errors(
        n=len(errors),
        mape=mean(sizes),
        median=float(np.median(sizes)),
        bias=mean(errors),
        worst=max(sizes),
        too_small=mean([error < -TOO_SMALL for error in errors]),
    )


def mean(values: Sequence[float]) -> float:
    """The mean of at least one value, summed exactly."""
    return math.fsum(values) / len(values)


def kendall_tau(measured: Sequence[float], predicted: Sequence[float]) -> float | None:
    """Kendall's tau-b: (concordant - discordant) / sqrt(pairs not tied in one * pairs not tied in the other).

    1 for the same order, -1 for the reverse order. 0 where all predictions are equal. None where all measured
    values are equal or there are fewer than two. Discordant pairs are the inversions of the predictions in
    the order of the measured values (Knight 1966), so that n values take n log n steps.
    """
    a = np.unique(np.asarray(measured, np.float64), return_inverse=True)[1]
    x = np.unique(np.asarray(predicted, np.float64), return_inverse=True)[1]
    pairs = math.comb(len(a), 2)
    untied_measured, untied_predicted = pairs - _tied_pairs(a), pairs - _tied_pairs(x)
    if untied_measured == 0:
        return None
    if untied_predicted == 0:
        return 0.0
    untied_in_one = untied_measured + untied_predicted - pairs + _tied_pairs(a * len(x) + x)
    agreement = untied_in_one - 2 * _inversions(x[np.lexsort((x, a))])
    return agreement / math.sqrt(untied_measured * untied_predicted)


def _tied_pairs(values: NDArray[np.int64]) -> int:
    """Number of pairs of equal values."""
    return sum(math.comb(count, 2) for count in np.unique(values, return_counts=True)[1].tolist())


def _inversions(ranks: NDArray[np.int64]) -> int:
    """Number of pairs of which the first is larger, of ranks from 0 to below their number: a merge sort, all
    merges of one width at a time."""
    count, found, width = len(ranks), 0, 1
    places = np.arange(count)
    while width < count:
        blocks = places // (2 * width)
        keys = blocks * count + ranks  # ascending within each half of a block, and from block to block
        is_right = places // width % 2 == 1
        lefts, rights = keys[~is_right], keys[is_right]
        ends = np.searchsorted(lefts, (blocks[is_right] + 1) * count)
        found += int((ends - np.searchsorted(lefts, rights, side="right")).sum())
        keys.sort()
        ranks = keys - blocks * count
        width *= 2
    return found


def regret(measured: Sequence[float], predicted: Sequence[float]) -> float:
    """Measured value of the plan with the least prediction over the least measured value, minus 1.

    Where several predictions tie, the worst measured value counts."""
    return float(np.asarray(measured)[ties_of_least(predicted)].max() / min(measured) - 1.0)


def share(flags: Sequence[bool]) -> float | None:
    """The share of flags that are true; None for an empty sequence."""
    return sum(flags) / len(flags) if flags else None


# Judged rows
Band = tuple[float, float]
"""Low and high factor of the predicted step time."""


def band_of(case: Case) -> Band:
    """The central 80 % prediction interval of the case's step time, multiplicative."""
    return band_of_software(case.problem.profile, case.problem.efficiency)


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgedRow:
    """A measured row with its prediction: seconds per step, and peak bytes of `memory_kind`, with the
    central 80 % of the peaks that unseen sources show.

    Measured values are None where the row has none. `device` is the name of the device that the row's text
    was mapped to.
    """

    row: Row
    device: str
    model: Model
    strategy: Strategy
    measured_s: float | None
    predicted_s: float
    band: Band
    measured_bytes: float | None
    predicted_bytes: float
    memory_band_bytes: Band
    memory_kind: str
    assumed: tuple[str, ...]

    @property
    def error(self) -> float | None:
        """Relative error of the step time: predicted over measured, minus 1."""
        return None if self.measured_s is None else self.predicted_s / self.measured_s - 1.0

    @property
    def memory_error(self) -> float | None:
        """Relative error of the peak memory: predicted over measured, minus 1."""
        return None if self.measured_bytes is None else self.predicted_bytes / self.measured_bytes - 1.0

    @property
    def is_in_band(self) -> bool | None:
        """Whether the measured time is in the prediction band; None where there is no measured time."""
        if self.measured_s is None:
            return None
        low, high = self.band
        return self.predicted_s * low <= self.measured_s <= self.predicted_s * high

    @property
    def is_in_memory_band(self) -> bool | None:
        """Whether the measured peak is in its band; None where there is no measured peak."""
        if self.measured_bytes is None:
            return None
        low, high = self.memory_band_bytes
        return low <= self.measured_bytes <= high


ROWS_AT_A_TIME: Final = 2_000
"""Rows whose cases are held in memory together: some kB each."""

Progress = Callable[[str], None]
"""Called with a text that says how far a command is."""


def judged(
    rows: Sequence[Row], calibration: Calibration | None = None, progress: Progress | None = None
) -> tuple[list[JudgedRow], list[Fault]]:
    """Every usable row with its prediction, with the devices and software of `calibration`, and the faults of
    the others, both in the order of the rows."""
    ready = CaseBuilder(calibration)
    known: Known = {}
    found: list[JudgedRow] = []
    faults: list[Fault] = []
    for start in range(0, len(rows), ROWS_AT_A_TIME):
        cases: list[Case] = []
        figures: list[Measured] = []
        for row in rows[start : start + ROWS_AT_A_TIME]:
            try:
                case = ready.of(row)
                figures.append(measured_of(row, case.problem))
                cases.append(case)
            except ConfigError as error:
                faults.append(fault_of(row, error))
        predictions = predictions_of(cases, known)
        found += [_judged(one, what) for one, what in zip(predictions, figures, strict=True)]
        if len(known) > ROWS_AT_A_TIME:
            known.clear()
        if progress is not None:
            progress(f"{min(start + ROWS_AT_A_TIME, len(rows)):,} of {len(rows):,} rows")
    return found, faults


def _judged(prediction: Prediction, measured: Measured) -> JudgedRow:
    case = prediction.case
    peak_bytes = predicted_bytes(prediction, measured.memory_kind)
    return JudgedRow(
        row=case.row,
        device=case.problem.device.name,
        model=case.problem.model,
        strategy=prediction.strategy,
        measured_s=measured.step_time_s,
        predicted_s=prediction.step_time_s,
        band=band_of(case),
        measured_bytes=measured.peak_bytes,
        predicted_bytes=peak_bytes,
        memory_band_bytes=case.problem.profile.peak_errors.band_bytes(peak_bytes),
        memory_kind=measured.memory_kind,
        assumed=(*case.assumed, *measured.assumed),
    )


# Workloads
LEAST_PLANS: Final = 5
"""Fewest rows of a workload whose ranking is judged."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Rows that ran the same training job, with the quality of their predicted ranking.

    `kendall_tau` is tau-b of measured and predicted times. `chosen` is the id of the row with the least
    predicted time, `best` that of the row with the least measured time, and `regret` the loss by `chosen`."""

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
    groups: dict[Hashable, list[JudgedRow]] = {}
    sizes = ModelSizes()
    for one in judged:
        if one.measured_s is not None and one.predicted_s is not None:
            groups.setdefault(job_of(one.row, sizes.number_of(one.model)), []).append(one)
    return tuple(_workload(group) for group in groups.values() if len(group) >= LEAST_PLANS)


class ModelSizes:
    """Numbers that are equal for models of the same sizes; names of models do not count."""

    def __init__(self) -> None:
        self._numbers: dict[Model, int] = {}
        self._known: dict[int, tuple[Model, int]] = {}

    def number_of(self, model: Model) -> int:
        """The number of the sizes of a model."""
        if id(model) not in self._known:
            sizes = replace(model, name="", family="", notes=(), config={})
            # The model is part of the value, so that no other one gets its address.
            self._known[id(model)] = model, self._numbers.setdefault(sizes, len(self._numbers))
        return self._known[id(model)][1]


def job_of(row: Row, sizes: int) -> Hashable:
    """What rows of one workload share: source, sizes of the model, device, number of devices, sequence
    length, global batch size, dtype and framework."""
    return (
        row.group, row.source, sizes, row.gpu, row.gpus, row.seq_len, row.global_batch,
        dtype_named(row.dtype), row.framework,
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


# Validation
GROUPINGS: Final = ("source", "software", "gpu", "family", "row")


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Prediction quality of a group of rows.

    `time` and `memory` are None where no row has that value. `kendall_tau` is the mean and `regret` the worst
    over `workloads`, None where no workload has enough rows. `band_coverage` and `memory_band_coverage` are
    the shares of measured times and peaks within their bands.
    """

    name: str
    skipped: int
    time: Errors | None
    memory: Errors | None
    workloads: int
    kendall_tau: float | None
    regret: float | None
    band_coverage: float | None
    memory_band_coverage: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Validation:
    """Result of a validation: `judged` has the used rows and `faults` the skipped ones, in the order of the
    file."""

    by: str
    level: str
    overall: Group
    groups: tuple[Group, ...]
    workloads: tuple[Workload, ...]
    judged: tuple[JudgedRow, ...]
    faults: tuple[Fault, ...]


def validate(
    path: str,
    *,
    by: str = "source",
    level: str = "all",
    calibration: Calibration | None = None,
    progress: Progress | None = None,
) -> Validation:
    """Validates the rows of `level` (one of LEVELS) in the file at `path`, grouped by one of GROUPINGS.
    `calibration` replaces the shipped numbers of its devices and its software. `progress` is called with a
    text that says how far it is.

    Raises ConfigError where no row of the file can be read."""
    for key, found, allowed in (("by", by, GROUPINGS), ("level", level, LEVELS)):
        if found not in allowed:
            raise unknown("is not one of the choices", found, allowed, key=key)
    rows, unread = read_rows(path)
    selected = [row for row in rows if level == "all" or row.is_complete == (level == "complete")]
    used, unusable = judged(selected, calibration, progress)
    faults = sorted((*unread, *unusable), key=lambda fault: fault.line)
    workloads = workloads_of(used)
    groups = _grouped(used, faults, {row.line: row for row in selected}, by)
    return Validation(
        by=by,
        level=level,
        overall=_group("overall", used, faults, workloads),
        groups=tuple(_group(name, *members, workloads_of(members[0])) for name, members in groups.items()),
        workloads=workloads,
        judged=tuple(used),
        faults=tuple(faults),
    )


def _grouped(
    used: Sequence[JudgedRow], faults: Sequence[Fault], rows: Mapping[int, Row], by: str
) -> dict[str, tuple[list[JudgedRow], list[Fault]]]:
    """Used and skipped rows by the name of their group, in the order of the file."""
    names: dict[str, Callable[[Row], str]] = {
        "source": lambda row: row.group,
        "software": lambda row: _software_kind(row),
        "gpu": lambda row: _device_name(row.gpu),
        "family": lambda row: family_named(row.model_name),
        "row": lambda row: row.id,
    }
    known: dict[Hashable, str] = {}

    def name_of(row: Row) -> str:
        texts = row.group, row.gpu, row.framework, row.year, row.notes, row.model_name, row.id
        key = texts[:1] if by == "source" else texts[-1:] if by == "row" else texts[1:-1]
        if key not in known:
            known[key] = names[by](row)
        return known[key]

    lines: list[tuple[int, JudgedRow | Fault, str]] = [(one.row.line, one, name_of(one.row)) for one in used]
    for fault in faults:
        row = rows.get(fault.line)
        unread = source_of(fault.id) if by == "source" else fault.id if by == "row" else "not read"
        lines.append((fault.line, fault, unread if row is None else name_of(row)))
    groups: dict[str, tuple[list[JudgedRow], list[Fault]]] = {}
    for _, one, name in sorted(lines, key=lambda item: item[0]):
        predicted, skipped = groups.setdefault(name, ([], []))
        if isinstance(one, JudgedRow):
            predicted.append(one)
        else:
            skipped.append(one)
    return groups


def _software_kind(row: Row) -> str:
    """The kind of software, such as `megatron`; the text of a framework that is not known."""
    profile = profile_named(row.framework, row.year, row.notes)
    return (row.framework or "not given") if profile is None else kind_of_profile(profile)


def _device_name(text: str) -> str:
    try:
        return device_named(text)[0].name
    except ConfigError:
        return text or "not given"


def _group(
    name: str, used: Sequence[JudgedRow], faults: Sequence[Fault], workloads: Sequence[Workload]
) -> Group:
    taus = [workload.kendall_tau for workload in workloads if workload.kendall_tau is not None]
    return Group(
        name=name,
        skipped=len(faults),
        time=errors_of([one.error for one in used if one.error is not None]),
        memory=errors_of([one.memory_error for one in used if one.memory_error is not None]),
        workloads=len(workloads),
        kendall_tau=mean(taus) if taus else None,
        regret=max((workload.regret for workload in workloads), default=None),
        band_coverage=share([one.is_in_band for one in used if one.is_in_band is not None]),
        memory_band_coverage=share(
            [one.is_in_memory_band for one in used if one.is_in_memory_band is not None]
        ),
    )
