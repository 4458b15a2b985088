"""Reads the files of `calibrate --from`: calibrations, output of nccl-tests, and measured steps.

Measured steps are rows of a CSV file, plans with their logs of `train`, and configurations of training
software with their logs; a plan or a configuration may have its time by `--measured` instead.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from shardwise import accuracy
from shardwise.accuracy import NcclTable, StepSample
from shardwise.errors import ConfigError
from shardwise.inputs import printable, read_text
from shardwise.plans import SCHEMA, Plan, read_plan
from shardwise.questions import ReviewArguments, run_of_file
from shardwise.strategy import CALIBRATION_SCHEMA, Calibration, read_calibration
from shardwise.targets import has_steps, is_configuration, logged_step_s

MAX_BYTES = 64 << 20
"""Largest size of a file of `--from`, bytes."""

_SCHEMA = re.compile(r'^[\s{]*"?schema"?\s*:\s*"?(shardwise\.[a-z-]+)', re.MULTILINE)
_STEP = re.compile(r'\s*\{[^\n]*"step_time_s"')


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationSources:
    """The files of `--from` by kind: at most one calibration; tables of nccl-tests with their paths; measured
    steps; and rows that cannot be used, with the reason."""

    calibration: Calibration | None
    tables: tuple[tuple[str, NcclTable], ...]
    steps: tuple[StepSample, ...]
    skipped: tuple[str, ...] = ()

    @property
    def is_measured(self) -> bool:
        """Whether there are measurements, not only a calibration."""
        return bool(self.tables or self.steps)


def read_sources(
    paths: Sequence[str], measured_s: Sequence[float] = (), run: ReviewArguments | None = None
) -> CalibrationSources:
    """Read the files at `paths`. `measured_s` are the step times of the plans and configurations among them
    that have no log, in their order. `run` has the cluster on which configurations ran, and what they lack.
    ConfigError where a file is of no known kind, or a plan has no time."""
    calibrations: list[Calibration] = []
    tables: list[tuple[str, NcclTable]] = []
    logs: list[tuple[str, dict[float, float]]] = []
    plans: list[tuple[str, Plan]] = []
    configurations: list[tuple[str, list[str]]] = []
    steps: list[StepSample] = []
    skipped: list[str] = []
    for path in paths:
        text = read_text(path, max_bytes=MAX_BYTES)
        schema = match.group(1) if (match := _SCHEMA.search(text)) else None
        if _STEP.match(text):
            logs.append((path, dict(accuracy.logged_times(text, file=path))))
        elif accuracy.is_nccl_tests(text):
            tables += [(path, table) for table in accuracy.nccl_tables(text, file=path)]
        elif schema == SCHEMA:
            plans.append((path, read_plan(path)))
        elif path.lower().endswith(".csv"):
            found, faults = accuracy.samples_of_rows(path)
            steps += found
            skipped += [fault.text for fault in faults]
        elif schema is None and is_configuration(text):
            configurations.append((path, [text]))
        elif schema is None and configurations and has_steps(text):
            configurations[-1][1].append(text)
        elif schema == CALIBRATION_SCHEMA or path.lower().endswith((".yaml", ".yml", ".json")):
            calibrations.append(read_calibration(path))
        else:
            raise ConfigError(
                "is not a file to calibrate from", file=printable(path), key="--from",
                allowed="a calibration, output of nccl-tests, a CSV of measured rows, a plan, a log of train,"
                " a configuration or log of training software",
            )  # fmt: skip
        if len(calibrations) > 1:
            raise ConfigError("is a second calibration", file=printable(path), key="--from", allowed="one")
    steps += [
        *_steps_of_plans(plans, logs, measured_s[: _without_log(plans, logs)]),
        *_steps_of_configurations(configurations, measured_s[_without_log(plans, logs) :], run),
    ]
    return CalibrationSources(
        calibration=calibrations[0] if calibrations else None,
        tables=tuple(tables),
        steps=tuple(steps),
        skipped=tuple(skipped),
    )


def _steps_of_plans(
    plans: Sequence[tuple[str, Plan]],
    logs: Sequence[tuple[str, dict[float, float]]],
    measured_s: Sequence[float],
) -> list[StepSample]:
    """Each plan with its measured step time; a log belongs to the plan with the same predicted time."""
    by_time = {plan.best.step_time_s: (path, plan) for path, plan in plans}
    timed: dict[str, float] = {}
    for log, times in logs:
        matching = [
            (by_time[predicted_s][0], seconds)
            for predicted_s, seconds in times.items()
            if predicted_s in by_time
        ]
        if not matching:
            raise ConfigError(
                "has no plan in --from that predicts this step time", file=printable(log), key="predicted_s",
                found=f"{next(iter(times)):.6g}", allowed="--from with the plan of this log",
            )  # fmt: skip
        timed |= matching
    without = [path for path, _ in plans if path not in timed]
    for path, seconds in zip(without, measured_s, strict=False):
        timed[path] = seconds
    for path in without[len(measured_s) :]:
        raise ConfigError(
            "has no log", file=printable(path), key="--from",
            allowed="its log, also with --from, or --measured TIME",
        )  # fmt: skip
    return [accuracy.sample_of_plan(plan, timed[path], name=printable(path)) for path, plan in plans]


def _without_log(plans: Sequence[tuple[str, Plan]], logs: Sequence[tuple[str, dict[float, float]]]) -> int:
    """The number of plans without a log."""
    logged = {predicted_s for _, times in logs for predicted_s in times}
    return sum(plan.best.step_time_s not in logged for _, plan in plans)


def _steps_of_configurations(
    configurations: Sequence[tuple[str, list[str]]], measured_s: Sequence[float], run: ReviewArguments | None
) -> list[StepSample]:
    """Each configuration with the step time of its logs, of which the first is its own file."""
    found, times = [], list(measured_s)
    for path, texts in configurations:
        if run is None or run.cluster is None:
            raise ConfigError(
                "does not say on which devices it ran", file=printable(path), key="--cluster",
                allowed="--cluster of the run",
            )  # fmt: skip
        problem, strategy = run_of_file(path, run)
        job, devices = problem.job, problem.cluster.devices
        logged = [
            logged_step_s(text, devices=devices, seq_len=job.seq_len, global_batch_size=job.global_batch_size)
            for text in texts
        ]
        seconds = next((each for each in reversed(logged) if each is not None), None)
        if seconds is None and times:
            seconds = times.pop(0)
        if seconds is None:
            raise ConfigError(
                "has no measured steps", file=printable(path), key="--from",
                allowed="its log, also with --from after it, or --measured TIME",
            )  # fmt: skip
        found.append(StepSample(problem=problem, strategy=strategy, seconds=seconds, name=printable(path)))
    if times:
        raise ConfigError(
            "is not given once for each plan or configuration without a log", key="--measured",
            found=str(len(measured_s)), allowed=str(len(measured_s) - len(times)),
        )  # fmt: skip
    return found
