"""What `calibrate` does: measures this machine, finds the curves that explain the times, writes them down.

What `calibrate --from` does: finds curves in what users have, without measuring anything here.

What `calibrate --devices cuda` does: measures the kernels of this machine's CUDA device, and what training
with our runtime takes beyond them.
"""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from statistics import fmean, median
from typing import TYPE_CHECKING

from shardwise import accuracy
from shardwise.accuracy import AcceleratorPlans, MeasuredStep, NcclTable
from shardwise.app.cli import words
from shardwise.app.cli.measuring import (
    KernelMeasurement,
    LinkMeasurement,
    LinkResult,
    Ranks,
    cluster_here,
    is_launched,
    ranks_of,
    threads_here,
)
from shardwise.app.cli.output import Line, Output, row
from shardwise.app.cli.request import OWN_TARGET, check_output_path
from shardwise.cluster import Cluster, Device, load_cluster
from shardwise.errors import ConfigError
from shardwise.inputs import dumps, printable, read_text, short_repr
from shardwise.plans import SCHEMA, Plan, read_plan, write_file
from shardwise.strategy import CALIBRATION_SCHEMA, PROFILES, Calibration, Profile, read_calibration, target_of
from shardwise.units import format_rate

if TYPE_CHECKING:
    from shardwise.measure import CoreSeconds
    from shardwise.runtime import RankLost


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


STEPS = 8
"""Of a plan."""

WARMING_UP = 4
"""Steps before them."""

MIN_PLANS = 6
"""Large ones that fit into the memory, by which software is told."""


def calibrate_accelerator(cluster: str | None) -> CalibrationResult:
    """What kernels reach of the peaks of the known device that the driver names, and what our runtime takes
    on it; `cluster` says which device it is where that name tells nothing.

    The software of other trainers has profiles of its own; links are measured by nccl-tests.
    """
    from shardwise.measure import accelerator_name, accelerator_times, torch_version

    name = accelerator_name()
    device = _device(name, cluster)
    dtype = "bf16" if "bf16" in device.peak_flop_per_s else "fp16"
    times = accelerator_times(dtype)
    curves = accuracy.kernel_curves(
        times.matmuls, times.passes, number_bytes=2.0, tiles=accuracy.tiles_of(device)
    )
    attention = accuracy.attention_curve(
        times.attentions, launch_s=curves.launch_s, flop_per_s=device.peak_flop_per_s[dtype]
    )
    device = accuracy.with_accelerated_kernels(device, curves, attention, dtype=dtype)
    measured: dict[str, object] = {
        "matmuls": {
            "times": len(times.matmuls),
            "mean_error": accuracy.mean_error(curves.matmul_s, times.matmuls),
        }
    }
    profile = None
    plans = accuracy.accelerator_plans(load_cluster(f"1x1x{device.name}"), _unmeasured(), dtype)
    if dtype == "bf16" and len(plans.large) >= MIN_PLANS:  # what our runtime computes in, and has room for
        profile, measured["steps"] = _software(device, plans)
    return CalibrationResult(
        device=device,
        profile=profile,
        machine=f"{name}, {dtype}, PyTorch {torch_version()}, {datetime.now(UTC):%Y-%m-%d}",
        measured=measured,
    )


def _unmeasured() -> Profile:
    """Our runtime, before its numbers are found."""
    return target_of(OWN_TARGET).run_by(accuracy.eager_profile())


def _software(device: Device, plans: AcceleratorPlans) -> tuple[Profile, object]:
    """What steps of our runtime take beyond kernels, and how close the steps are that tell it."""
    large, small = _taken([*plans.large, *plans.small], len(plans.large))
    profile = accuracy.with_dispatch(small, device, accuracy.queued_costs(large, device, _unmeasured()))
    errors = [
        abs(accuracy.predicted_step_s(step.plan, device, profile) / step.seconds - 1.0) for step in large
    ]
    return profile, {
        "times": len(large),
        "mean_error": fmean(errors),
        "worst_error": max(errors),
        "seconds": sum(step.seconds for step in large),
    }


def _taken(plans: Sequence[Plan], large: int) -> tuple[list[MeasuredStep], list[MeasuredStep]]:
    """The typical steps of the first `large` plans, and of the others."""
    from shardwise.runtime import WorkerPool

    with WorkerPool(1) as team:
        seconds = [median(team.run(1, _steps_s, plan)[0]) for plan in plans]
    steps = [MeasuredStep(plan=plan, seconds=each) for plan, each in zip(plans, seconds, strict=True)]
    return steps[:large], steps[large:]


def _steps_s(report: object, plan: Plan) -> list[float]:
    from shardwise.runtime import timed_steps

    return list(timed_steps(plan, steps=STEPS, warming_up=WARMING_UP).seconds)


def _device(name: str, cluster: str | None) -> Device:
    if cluster is not None:
        return only_class(load_cluster(cluster))
    try:
        return accuracy.device_named(name)[0]
    except ConfigError:
        raise ConfigError(
            "is not known by its name", key="--devices", found=name, allowed="--cluster 1x1xDEVICE"
        ) from None


CPU = "cpu"
ACCELERATOR = "cuda"
DEVICES = (CPU, ACCELERATOR)

FAILED = 1
"""Exit code where a rank is lost."""

ROUNDS = 3
"""Of all kernels and steps: a machine that others use too is faster and slower from second to second, and a
median over rounds has some of each."""

OTHER_PROGRAMS = "other programs"
"""What ran beside, among what was measured."""

NOTABLE_SHARE = 0.1
"""Of the cores: where other programs take more, it is said."""


def calibrated(
    *,
    out: str,
    devices: str,
    cluster: str | None,
    links: bool,
    sources: Sequence[str],
    threads: int | None,
) -> Output:
    """Find the curves that the files `sources` tell, or, where they hold no more than a calibration, measure
    kernels and software on the processes of `cluster` (those of the calibration stay), with `links` the links
    between them too; write the calibration to `out`. Each process has so many `threads`, or as many as in
    training. `devices` are those that are measured: cpu, or cuda.

    Under torchrun every rank takes part, and rank 0 writes.
    """
    if devices not in DEVICES:
        raise ConfigError(
            "is not measured", key="--devices", found=short_repr(devices), allowed=", ".join(DEVICES)
        )
    check_output_path("--out", out, inputs=tuple(sources))
    if devices == ACCELERATOR:
        return _accelerator_calibrated(out, cluster, links=links, sources=sources)
    given = read_sources(sources)
    if given.is_measured:
        if links:
            raise ConfigError("measures this machine", key="--links", allowed="a calibration alone in --from")
        found = calibrate_from_files(given, cluster)
    else:
        local_cluster = _local_cluster(cluster, links=links)
        from shardwise.runtime import RankLost

        if threads is None:
            threads = threads_here(local_cluster.devices)
        try:
            measured = _measured_here(given.calibration, local_cluster, links=links, threads=threads)
        except RankLost as error:
            return Output(notes=_lost(error), code=FAILED)
        if measured is None:  # another rank writes
            return Output()
        found = measured
    return _written(found, out)


def _accelerator_calibrated(out: str, cluster: str | None, *, links: bool, sources: Sequence[str]) -> Output:
    for option, is_augmented in (("--links", links), ("--from", bool(sources))):
        if is_augmented:
            raise ConfigError(
                f"does not go with --devices {ACCELERATOR}", key=option,
                allowed="one device alone; then output of nccl-tests beside this calibration, with --from",
            )  # fmt: skip
    from shardwise.runtime import RankLost

    try:
        found = calibrate_accelerator(cluster)
    except RankLost as error:
        return Output(notes=_lost(error), code=FAILED)
    return _written(found, out)


def _written(found: CalibrationResult, out: str) -> Output:
    document = accuracy.calibration_document(
        found.device, found.profile, machine=found.machine, measured=found.measured
    )
    write_file(out, dumps(document, file=out).encode())
    return Output(lines=_lines(found, out))


def _lost(error: RankLost) -> list[str]:
    """What is said where a rank is lost; of those that a launcher started rank 0 speaks."""
    if is_launched() and os.environ.get("RANK", "0") != "0":
        return []
    lines = [f"shardwise: error: {error} while it measured; nothing was written"]
    if os.environ.get("SHARDWISE_DEBUG") and error.details:
        lines.append(error.details)
    return lines


def _local_cluster(cluster: str | None, *, links: bool) -> Cluster:
    """The cluster whose devices are processes here. ConfigError where they cannot be measured."""
    local_cluster = load_cluster(cluster or cluster_here(CPU))
    if set(local_cluster.classes) != {CPU}:
        raise ConfigError(
            "is not measured", key="--cluster", found=", ".join(local_cluster.classes), allowed=CPU
        )
    if links and local_cluster.devices < 2:
        raise ConfigError("has no links", key="--cluster", found="1 device", allowed="2 devices or more")
    if links and len(local_cluster.nodes) > 1 and not is_launched():
        raise ConfigError(
            "has several nodes, and processes of one machine have no network between them", key="--cluster",
            found=f"{len(local_cluster.nodes)} nodes",
            allowed="one node; of more: calibrate under torchrun on their hosts, or under shardwise emulate",
        )  # fmt: skip
    return local_cluster


def _measured_here(
    known: Calibration | None, local_cluster: Cluster, *, links: bool, threads: int
) -> CalibrationResult | None:
    """What this machine's processes take; None on ranks that torchrun started but the first."""
    device = (
        local_cluster.classes[CPU] if known is None else known.devices.get(CPU, local_cluster.classes[CPU])
    )
    profile = None if known is None else known.profile
    measured: dict[str, object] = {}
    with ranks_of(local_cluster) as ranks:
        start = _core_seconds(ranks)
        if known is None:
            device, profile, kernels = _kernels(device, ranks, threads)
            measured |= kernels
        if links:
            link_result = _links(local_cluster, ranks, threads)
            device = link_result.of_device(device)
            measured |= link_result.measured
            if profile is not None:
                profile = link_result.of_software(profile)
        measured |= _other_programs(start, _core_seconds(ranks))
        if ranks.rank > 0:
            return None
    return CalibrationResult(device=device, profile=profile, machine=_machine(threads), measured=measured)


def _machine(threads: int) -> str:
    from shardwise.measure import torch_version

    return (
        f"{platform.machine()}, {os.cpu_count()} cores, {words.counted(threads, 'thread')} a process, "
        f"PyTorch {torch_version()}, {datetime.now(UTC):%Y-%m-%d}"
    )


def _core_seconds(ranks: Ranks) -> list[CoreSeconds | None]:
    from shardwise.measure import CoreSeconds, core_seconds

    now = core_seconds()
    gathered = ranks.gathered(None if now is None else asdict(now))
    return [None if each is None else CoreSeconds.of_values(each) for each in gathered]


def _other_programs(
    start: Sequence[CoreSeconds | None], end: Sequence[CoreSeconds | None]
) -> dict[str, object]:
    """How many cores other programs took meanwhile, where all ranks can tell."""
    from shardwise.measure import cores_used_by_others

    first, last = [each for each in start if each], [each for each in end if each]
    if len(first) < len(start) or len(last) < len(end):
        return {}
    taken = cores_used_by_others(first, last)
    return {OTHER_PROGRAMS: {"cores": round(taken.cores, 2), "of": taken.of}}


# --- what is measured ------------------------------------------------------------------------------------


def _kernels(device: Device, ranks: Ranks, threads: int) -> tuple[Device, Profile, Mapping[str, object]]:
    """The device and its software, and how well they explain what was measured."""
    rounds = KernelMeasurement(ranks, threads=threads)
    for _ in range(ROUNDS):
        for measurement in range(rounds.measurements):
            rounds.measure(measurement)
    found = rounds.found(device)
    return found.device, found.profile, found.measured


def _links(local_cluster: Cluster, ranks: Ranks, threads: int) -> LinkResult:
    links = LinkMeasurement(ranks, local_cluster, threads=threads)
    for measurement in range(links.measurements):
        links.measure(measurement)
    return links.found()


# --- the answer ------------------------------------------------------------------------------------------


def _lines(found: CalibrationResult, out: str) -> list[Line]:
    device, profile = found.device, found.profile
    efficiency = device.efficiency
    half = next((name for name in ("bf16", "fp16") if name in device.peak_flop_per_s), "fp32")
    dtype = "fp32" if device.name == CPU else half
    peak = device.peak_flop_per_s[dtype]
    matmul = efficiency.matmul
    lines = [
        row("calibrated", (out, "value"), (f"   {device.name}", "")),
        row("matmul", (format_rate(peak * matmul.peak_fraction, "FLOP/s"), "value"),
            (f" in {dtype}, half of it at {matmul.k_half:.0f} summands", "")),
        row("memory", (format_rate(device.memory_bytes_per_s * efficiency.memory.fraction), "value"),
            (f", {words.seconds(efficiency.launch_s)} a kernel", "")),
        row("in a node", (format_rate(device.scale_up_bytes_per_s * efficiency.scale_up.fraction), "value"),
            (f", {words.seconds(device.scale_up_latency_s)} a hop,"
             f" {words.seconds(efficiency.scale_up.before_s)} a collective", "")),
        row("network", (f"{efficiency.scale_out.fraction:.0%} of its cards", "value"),
            (f", {words.seconds(device.scale_out_latency_s)} a hop,"
             f" {words.seconds(efficiency.scale_out.before_s)} a collective", "")),
    ]  # fmt: skip
    if profile is not None:
        lines.append(
            row("software", (f"{profile.pointwise_passes:.2f} passes", "value"),
                (f", {words.seconds(profile.host_action_s)} an action,"
                 f" {words.seconds(profile.host_step_s)} a step,"
             f" {profile.data_overlap:.0%} of sums of gradients beside computation", ""))
        )  # fmt: skip
    for name, errors in found.measured.items():
        if isinstance(errors, Mapping):
            described = ", ".join(f"{key.replace('_', ' ')} {value:.3g}" for key, value in errors.items())
            lines.append(row("", (f"{name}: {described}", "dim")))
    return [*lines, *_warnings(found.measured)]


def _warnings(measured: Mapping[str, object]) -> Iterator[Line]:
    taken = measured.get(OTHER_PROGRAMS)
    if isinstance(taken, Mapping) and taken["cores"] > NOTABLE_SHARE * taken["of"]:
        cores = f"{taken['cores']:.1f} of {words.counted(taken['of'], 'core')}"
        yield row("beside", (f"other programs took {cores} meanwhile", "warn"),
                  (": measure again when nothing else runs", ""))  # fmt: skip
