"""Measured steps from rows and from plans, for the fit of a few numbers."""

from __future__ import annotations

from shardwise.accuracy.calibration import StepSample
from shardwise.accuracy.case import cases_of, fault_of
from shardwise.accuracy.measured import measured_of
from shardwise.accuracy.predict import predictions_of
from shardwise.accuracy.rows import Fault, read_rows
from shardwise.cost import bind
from shardwise.errors import ConfigError
from shardwise.inputs import printable
from shardwise.plans import Plan


def samples_of_rows(path: str) -> tuple[list[StepSample], list[Fault]]:
    """The measured steps of the rows in a CSV file, and the faults of the rows that are none.

    Where a row leaves its strategy open, it ran the fastest that fits. ConfigError where no row has a step
    that can be predicted."""
    rows, faults = read_rows(path)
    cases, unusable = cases_of(rows)
    faults += unusable
    used, times_s = [], []
    for case in cases:
        try:
            if case.mixed is not None:
                raise ConfigError("ran on unequal devices")
            seconds = measured_of(case.row, case.problem).step_time_s
            if seconds is None:
                raise ConfigError("gives no step time")
        except ConfigError as error:
            faults.append(fault_of(case.row, error))
            continue
        used.append(case)
        times_s.append(seconds)
    if not used:
        raise ConfigError("has no row with a step time that can be predicted", file=printable(path),
                          found=faults[0].text if faults else "no row")  # fmt: skip
    samples = [
        StepSample(
            problem=prediction.case.problem, strategy=prediction.strategy, seconds=seconds,
            name=prediction.case.row.id,
        )
        for prediction, seconds in zip(predictions_of(used), times_s, strict=True)
    ]  # fmt: skip
    return samples, sorted(faults, key=lambda fault: fault.line)


def sample_of_plan(plan: Plan, seconds: float, *, name: str) -> StepSample:
    """The measured step of a plan."""
    problem = bind(plan.model, plan.cluster, plan.job)
    return StepSample(problem=problem, strategy=plan.best.strategy, seconds=seconds, name=name)
