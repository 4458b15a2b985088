"""What `calibrate --from` does: finds curves in what users have, without measuring anything here."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from shardwise import accuracy
from shardwise.accuracy import MeasuredStep, NcclTable
from shardwise.app.cli.request import OWN_TARGET
from shardwise.cluster import Cluster, Device, load_cluster
from shardwise.errors import ConfigError
from shardwise.inputs import printable, read_text
from shardwise.plan import SCHEMA, Plan, read_plan
from shardwise.strategy import (
    CALIBRATION_SCHEMA,
    PROFILES,
    Calibration,
    Profile,
    read_calibration,
    target_of,
)

MAX_BYTES = 64 << 20

_SCHEMA = re.compile(r'^[\s{]*"?schema"?\s*:\s*"?(shardwise\.[a-z-]+)', re.MULTILINE)
_TABLE = re.compile(r"#\s*size\s+count\s+type\b")
_STEP = re.compile(r'\s*\{[^\n]*"step_time_s"')


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationSources:
    """The files named by --from, each by what it is: one calibration at most; tables, logs (measured by
    predicted seconds) and plans with their paths."""

    calibration: Calibration | None
    tables: tuple[tuple[str, NcclTable], ...]
    logs: tuple[tuple[str, dict[float, float]], ...]
    plans: tuple[tuple[str, Plan], ...]

    @property
    def is_measured(self) -> bool:
        """Whether there is more than a calibration."""
        return bool(self.tables or self.logs or self.plans)


def read_sources(paths: Sequence[str]) -> CalibrationSources:
    """Read the files at `paths`. ConfigError where one is none of these."""
    calibrations: list[Calibration] = []
    tables: list[tuple[str, NcclTable]] = []
    logs: list[tuple[str, dict[float, float]]] = []
    plans: list[tuple[str, Plan]] = []
    for path in paths:
        text = read_text(path, max_bytes=MAX_BYTES)
        schema = match.group(1) if (match := _SCHEMA.search(text)) else None
        if _STEP.match(text):
            logs.append((path, dict(accuracy.logged_times(text, file=path))))
        elif _TABLE.search(text):
            tables += [(path, table) for table in accuracy.nccl_tables(text, file=path)]
        elif schema == SCHEMA:
            plans.append((path, read_plan(path)))
        elif schema == CALIBRATION_SCHEMA or path.lower().endswith((".yaml", ".yml", ".json")):
            calibrations.append(read_calibration(path))
        else:
            raise ConfigError(
                "is nothing to calibrate from", file=printable(path), key="--from",
                allowed="a calibration, output of nccl-tests, a log of train and its plan",
            )  # fmt: skip
        if len(calibrations) > 1:
            raise ConfigError("is a second calibration", file=printable(path), key="--from", allowed="one")
    return CalibrationSources(
        calibration=calibrations[0] if calibrations else None,
        tables=tuple(tables),
        logs=tuple(logs),
        plans=tuple(plans),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationResult:
    """A device and software with what was found in files; `machine` says what those were."""

    device: Device
    profile: Profile | None
    machine: str
    measured: dict[str, object]


def calibrate_from_files(given: CalibrationSources, cluster: str | None) -> CalibrationResult:
    """The curves with which the predicted times of `given` are closest to the measured ones.

    `cluster` is where nccl-tests ran; left out, it is as many nodes of the device as the output names.
    """
    known = given.calibration
    devices = {} if known is None else dict(known.devices)
    steps = _steps(given)
    measured_on = _measured_on(given, cluster, steps, devices)
    device = only_class(measured_on)
    measured: dict[str, object] = {}
    sources: list[str] = [] if known is None else [known.machine]
    if given.tables:
        device, of_links = accuracy.with_tables(device, measured_on, given.tables)
        measured |= of_links
        sources.append(
            f"nccl-tests on {', '.join(dict.fromkeys(_ran_on(t, measured_on) for _, t in given.tables))}"
        )
    if steps:
        speed = accuracy.device_speed(steps, device)
        device = accuracy.with_speed(device, speed)
        errors = [
            abs(accuracy.predicted_step_s(step.plan, device, step.plan.job.profile) / step.seconds - 1.0)
            for step in steps
        ]
        measured["steps"] = {"times": len(steps), "speed": speed, "worst_error": max(errors)}
        sources.append(f"steps of {', '.join(dict.fromkeys(step.plan.model.name for step in steps))}")
    profile = None if known is None else known.profile
    return CalibrationResult(
        device=device, profile=profile, machine="; ".join(sources)[:300], measured=measured
    )


# --- logs ------------------------------------------------------------------------------------------------


def _steps(given: CalibrationSources) -> list[MeasuredStep]:
    """Each plan with what its steps took, told by the predicted time that log and plan have in common."""
    calibrated = given.calibration.profile if given.calibration is not None else None
    known = [*PROFILES.values(), *([] if calibrated is None else [calibrated])]
    run_by = target_of(
        OWN_TARGET
    ).run_by  # plans for our own runtime were made with what it does in its own way
    by_time = {plan.best.step_time_s: (path, plan) for path, plan in given.plans}
    used: set[str] = set()
    steps = []
    for log, times in given.logs:
        matching = [(by_time[predicted_s], seconds) for predicted_s, seconds in times.items()
                    if predicted_s in by_time]  # fmt: skip
        if not matching:
            raise ConfigError(
                "is no plan's that is given", file=printable(log), key="predicted_s",
                found=f"{next(iter(times)):.6g}", allowed="the plan of this log, with --from too",
            )  # fmt: skip
        for (path, plan), seconds in matching:
            used.add(path)
            if run_by(plan.job.profile) not in map(run_by, known):
                raise ConfigError(
                    "was made with a calibration", file=printable(path), key="job.profile",
                    found=plan.job.profile.name, allowed="that calibration, with --from too",
                )  # fmt: skip
            steps.append(MeasuredStep(plan=plan, seconds=seconds))
    for path, _ in given.plans:
        if path not in used:
            raise ConfigError("has no log", file=printable(path), key="--from", allowed="its log too")
    return steps


# --- tables ----------------------------------------------------------------------------------------------


def _measured_on(
    given: CalibrationSources, text: str | None, steps: Sequence[MeasuredStep], devices: dict[str, Device]
) -> Cluster:
    """The cluster of one kind of devices that everything was measured on."""
    if text is None and given.tables:
        text = _shorthand(given.tables)
    if text is not None:
        measured_on = load_cluster(text, measured=devices)
    else:
        measured_on = load_cluster(f"1x1x{_class(steps[0].plan.cluster)}", measured=devices)
    name = _class(measured_on)
    for step in steps:
        if _class(step.plan.cluster) != name:
            raise ConfigError(
                "are of several kinds of devices", key="--from",
                found=f"{name}, {_class(step.plan.cluster)}", allowed="one at a time",
            )  # fmt: skip
    return measured_on


def only_class(cluster: Cluster) -> Device:
    """The one kind of devices of `cluster`. ConfigError where it has several."""
    if len(cluster.classes) != 1:
        raise ConfigError(
            "has several kinds of devices", key="--cluster", found=", ".join(cluster.classes), allowed="one"
        )
    (device,) = cluster.classes.values()
    return device


def _class(cluster: Cluster) -> str:
    return only_class(cluster).name


def _shorthand(tables: Sequence[tuple[str, NcclTable]]) -> str:
    """The cluster that the largest run names: `2x8xH100-SXM`."""
    path, table = max(tables, key=lambda each: sum(each[1].hosts))
    kinds = dict.fromkeys(table.device for _, table in tables if table.device)
    if not table.hosts or not kinds:
        raise ConfigError(
            "does not say what it ran on", file=printable(path), key=f"line {table.line}",
            allowed="its lines '# Rank 0 ...', or --cluster",
        )  # fmt: skip
    names = {accuracy.device_named(kind)[0].name for kind in kinds}
    if len(names) > 1:
        raise ConfigError(
            "are of several kinds of devices", key="--from", found=", ".join(sorted(names)),
            allowed="one at a time",
        )  # fmt: skip
    return f"{len(table.hosts)}x{max(table.hosts)}x{names.pop()}"


def _ran_on(table: NcclTable, measured_on: Cluster) -> str:
    ranks = sum(table.hosts) or table.ranks or measured_on.devices
    return f"{ranks} x {table.device or _class(measured_on)}"
