"""The command `calibrate`: fits efficiency curves of devices and software, and writes a calibration file.

`calibrated` measures kernels, steps and links on processes of this machine. With `--from`,
`calibrate_from_files` fits output of nccl-tests and logs of `train` instead. With `--devices cuda`,
`calibrate_accelerator` measures the kernels of a CUDA device and the overhead of our runtime.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from statistics import median
from typing import TYPE_CHECKING

from shardwise import accuracy
from shardwise.accuracy import AcceleratorPlans, MeasuredStep, NcclTable, StepFit, StepSample
from shardwise.app.cli import words
from shardwise.app.cli.calibration_sources import CalibrationSources, read_sources
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
from shardwise.cluster import Cluster, Device, load_cluster
from shardwise.errors import ConfigError
from shardwise.inputs import dumps, printable, unknown
from shardwise.plans import Plan, check_output_path, write_file
from shardwise.questions import OWN_TARGET, ReviewArguments
from shardwise.strategy import PROFILES, Calibration, Profile, WorkloadFactor, target_of
from shardwise.units import format_rate

if TYPE_CHECKING:
    from shardwise.measure import CoreSeconds
    from shardwise.runtime import RankLost


# Calibration from files


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationResult:
    """A calibrated device and software profile; `machine` names the sources, `measured` has counts and
    errors."""

    device: Device
    profile: Profile | None
    machine: str
    measured: dict[str, object]
    workloads: tuple[WorkloadFactor, ...] = ()


def calibrate_from_files(given: CalibrationSources, cluster: str | None) -> CalibrationResult:
    """The curves with which predicted times are closest to the measured ones in `given`.

    `cluster` is the cluster on which nccl-tests ran; None takes it from the output.
    """
    known = given.calibration
    devices = {} if known is None else dict(known.devices)
    measured_on = _measured_on(given, cluster, devices)
    device = only_class(measured_on)
    measured: dict[str, object] = {}
    sources: list[str] = [] if known is None else [known.machine]
    if given.tables:
        device, of_links = accuracy.with_tables(device, measured_on, given.tables)
        measured |= of_links
        sources.append(
            f"nccl-tests on {', '.join(dict.fromkeys(_ran_on(t, measured_on) for _, t in given.tables))}"
        )
    profile = None if known is None else known.profile
    workloads = () if known is None else known.workloads
    if given.steps:
        steps = [step.on(device, _software_of(step, profile)) for step in given.steps]
        fit = accuracy.fit_steps(steps)
        device = fit.factors.of_device(device)
        device = replace(device, efficiency=replace(device.efficiency, is_calibrated=True))
        ran = steps[0].problem.profile
        profile = fit.factors.of_software(PROFILES.get(ran.name, ran).with_costs(ran))
        workloads = fit.workloads
        measured["steps"] = _of_fit(fit)
        sources.append(f"steps of {', '.join(dict.fromkeys(step.problem.model.name for step in steps))}")
    return CalibrationResult(
        device=device,
        profile=profile,
        machine="; ".join(sources)[:300],
        measured=measured,
        workloads=workloads,
    )


def _software_of(step: StepSample, known: Profile | None) -> Profile:
    """The software of a measured step, with the numbers of a known calibration of the same software."""
    own = step.problem.profile
    return known if known is not None and known.name == own.name else own


def _of_fit(fit: StepFit) -> dict[str, object]:
    """What a calibration file says of measured steps: their number, mean errors without and with the factors,
    and each step that lies far off."""
    found: dict[str, object] = {
        "times": len(fit.residuals),
        "error_before": fit.before,
        "error_after": fit.after,
    }
    if fit.left_out is not None:
        found["error_left_out"] = fit.left_out
    found |= {name: getattr(fit.factors, name) for name in ("kernels", "node_links", "network", "host")}
    for name, error in fit.residuals.items():
        if abs(error) > FAR_OFF:
            found[name] = f"is predicted {error:+.0%} off: check its row, or leave it out"
    return found


FAR_OFF = 0.3
"""Error of a measured step with the fitted factors above which the card asks to check it."""


def _measured_on(given: CalibrationSources, text: str | None, devices: dict[str, Device]) -> Cluster:
    """The cluster of one device class on which all was measured."""
    if text is None and given.tables:
        text = _shorthand(given.tables)
    if text is not None:
        measured_on = load_cluster(text, measured=devices)
    else:
        measured_on = load_cluster(f"1x1x{_class(given.steps[0].problem.cluster)}", measured=devices)
    name = _class(measured_on)
    for step in given.steps:
        if _class(step.problem.cluster) != name:
            raise ConfigError(
                "have several device classes", key="--from",
                found=f"{name}, {_class(step.problem.cluster)}", allowed="one device class at a time",
            )  # fmt: skip
    return measured_on


def only_class(cluster: Cluster) -> Device:
    """The only device class of `cluster`. ConfigError where it has several."""
    if len(cluster.classes) != 1:
        raise ConfigError(
            "has several device classes", key="--cluster", found=", ".join(cluster.classes), allowed="one"
        )
    (device,) = cluster.classes.values()
    return device


def _class(cluster: Cluster) -> str:
    return only_class(cluster).name


def _shorthand(tables: Sequence[tuple[str, NcclTable]]) -> str:
    """The cluster of the largest run of nccl-tests, as a shorthand: `2x8xH100-SXM`."""
    path, table = max(tables, key=lambda each: sum(each[1].hosts))
    kinds = dict.fromkeys(table.device for _, table in tables if table.device)
    if not table.hosts or not kinds:
        raise ConfigError(
            "does not name its devices", file=printable(path), key=table.place,
            allowed="its lines '# Rank 0 ...', or --cluster",
        )  # fmt: skip
    names = {accuracy.device_named(kind)[0].name for kind in kinds}
    if len(names) > 1:
        raise ConfigError(
            "have several device classes", key="--from", found=", ".join(sorted(names)),
            allowed="one device class at a time",
        )  # fmt: skip
    return f"{len(table.hosts)}x{max(table.hosts)}x{names.pop()}"


def _ran_on(table: NcclTable, measured_on: Cluster) -> str:
    ranks = sum(table.hosts) or table.ranks or measured_on.devices
    return f"{ranks} x {table.device or _class(measured_on)}"


# Calibration of a CUDA device

STEPS = 8
"""Measured steps of each plan; their median counts."""

WARMING_UP = 4
"""Steps of each plan before the measured ones."""

MIN_PLANS = 6
"""Large plans that must fit into memory for the software to be fitted: fewer do not determine its numbers."""


def calibrate_accelerator(cluster: str | None) -> CalibrationResult:
    """Kernel efficiency of this machine's CUDA device, and the overhead of our runtime on it.

    `cluster` names the device where the driver's name is not known. Other training software has profiles of
    its own; nccl-tests measures links.
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
    measured: dict[str, object] = {"matmuls": accuracy.matmul_errors(curves, times.matmuls)}
    profile = None
    plans = accuracy.accelerator_plans(load_cluster(f"1x1x{device.name}"), _unmeasured(), dtype)
    if dtype == "bf16" and len(plans.large) >= MIN_PLANS:  # the dtype of our runtime
        profile, measured["steps"] = _software(device, plans)
    return CalibrationResult(
        device=device,
        profile=profile,
        machine=f"{name}, {dtype}, PyTorch {torch_version()}, {datetime.now(UTC):%Y-%m-%d}",
        measured=measured,
    )


def _unmeasured() -> Profile:
    """The profile of our runtime before the fit."""
    return target_of(OWN_TARGET).run_by(accuracy.eager_profile())


def _software(device: Device, plans: AcceleratorPlans) -> tuple[Profile, object]:
    """The overhead of our runtime beyond kernels, and the errors of the fit."""
    large, small = _taken([*plans.large, *plans.small], len(plans.large))
    profile = accuracy.with_dispatch(small, device, accuracy.queued_costs(large, device, _unmeasured()))
    return profile, accuracy.step_errors(large, device, profile)


def _taken(plans: Sequence[Plan], large: int) -> tuple[list[MeasuredStep], list[MeasuredStep]]:
    """Median steps of the first `large` plans, and of the others."""
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
            "is not a known device", key="--devices", found=name, allowed="--cluster 1x1xDEVICE"
        ) from None


# The command

CPU = "cpu"
ACCELERATOR = "cuda"
DEVICES = (CPU, ACCELERATOR)

FAILED = 1
"""Exit code after a lost rank."""

ROUNDS = 3
"""Rounds of all kernels and steps. The speed of a shared machine varies within seconds; the median over
rounds averages that."""

OTHER_PROGRAMS = "other programs"
"""Key of the load by other programs among the measured values."""

NOTABLE_SHARE = 0.1
"""Share of the cores used by other programs above which the card has a warning."""


def calibrated(
    *,
    out: str,
    devices: str,
    cluster: str | None,
    links: bool,
    sources: Sequence[str],
    threads: int | None,
    measured_s: Sequence[float] = (),
    run: Mapping[str, object] | None = None,
) -> Output:
    """The answer of `calibrate`; writes the calibration to `out`.

    With measurements in the files `sources`, fits these. Else measures kernels and software on processes of
    `cluster` (unless `sources` has a calibration with them), and with `links` the links between them. Each
    process has `threads` threads; None takes the default of training. `devices` is cpu or cuda. `measured_s`
    are step times of plans and configurations in `sources` without a log; `run` has what configurations lack.

    Under torchrun every rank takes part, and rank 0 writes.
    """
    if devices not in DEVICES:
        raise unknown("cannot be measured", devices, DEVICES, key="--devices")
    check_output_path("--out", out, inputs=tuple(sources))
    if devices == ACCELERATOR:
        return _accelerator_calibrated(out, cluster, links=links, sources=sources)
    given = read_sources(sources, measured_s, ReviewArguments(cluster=cluster, **(run or {})))
    if given.is_measured:
        if links:
            raise ConfigError("measures this machine", key="--links", allowed="only a calibration in --from")
        found = calibrate_from_files(given, cluster)
        return _written(found, out, [f"skipped {text}" for text in given.skipped])
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
                f"cannot be combined with --devices {ACCELERATOR}", key=option,
                allowed="--devices cuda alone; then output of nccl-tests and this calibration with --from",
            )  # fmt: skip
    from shardwise.runtime import RankLost

    try:
        found = calibrate_accelerator(cluster)
    except RankLost as error:
        return Output(notes=_lost(error), code=FAILED)
    return _written(found, out)


def _written(found: CalibrationResult, out: str, notes: Sequence[str] = ()) -> Output:
    document = accuracy.calibration_document(
        found.device, found.profile, machine=found.machine, measured=found.measured,
        workloads=found.workloads,
    )  # fmt: skip
    write_file(out, dumps(document, file=out).encode())
    return Output(lines=_lines(found, out), notes=list(notes))


def _lost(error: RankLost) -> list[str]:
    """The error of a lost rank; of launched processes only rank 0 reports it."""
    if is_launched() and os.environ.get("RANK", "0") != "0":
        return []
    lines = [f"shardwise: error: {error} during measurement; nothing was written"]
    if os.environ.get("SHARDWISE_DEBUG") and error.details:
        lines.append(error.details)
    return lines


def _local_cluster(cluster: str | None, *, links: bool) -> Cluster:
    """The cluster whose devices are processes of this machine. ConfigError where they cannot be measured."""
    local_cluster = load_cluster(cluster or cluster_here(CPU))
    if set(local_cluster.classes) != {CPU}:
        raise ConfigError(
            "cannot be measured", key="--cluster", found=", ".join(local_cluster.classes), allowed=CPU
        )
    if links and local_cluster.devices < 2:
        raise ConfigError("has no links", key="--cluster", found="1 device", allowed="at least 2 devices")
    if links and len(local_cluster.nodes) > 1 and not is_launched():
        raise ConfigError(
            "has several nodes, but processes of one machine have no network between them", key="--cluster",
            found=f"{len(local_cluster.nodes)} nodes",
            allowed="one node; for more, calibrate under torchrun on their hosts or under shardwise emulate",
        )  # fmt: skip
    return local_cluster


def _measured_here(
    known: Calibration | None, local_cluster: Cluster, *, links: bool, threads: int
) -> CalibrationResult | None:
    """The calibration of this machine's processes; None on launched ranks other than 0."""
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
    """Cores used by other programs during the measurement; empty where a rank cannot read its load."""
    from shardwise.measure import cores_used_by_others

    first, last = [each for each in start if each], [each for each in end if each]
    if len(first) < len(start) or len(last) < len(end):
        return {}
    taken = cores_used_by_others(first, last)
    return {OTHER_PROGRAMS: {"cores": round(taken.cores, 2), "of": taken.of}}


def _kernels(device: Device, ranks: Ranks, threads: int) -> tuple[Device, Profile, Mapping[str, object]]:
    """The fitted device and software profile, and the errors of the fit."""
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
            (f" in {dtype}, half of it at inner dimension {matmul.k_half:.0f}", "")),
        row("memory", (format_rate(device.memory_bytes_per_s * efficiency.memory.fraction), "value"),
            (f", {words.seconds(efficiency.launch_s)} per kernel", "")),
        row("in a node", (format_rate(device.scale_up_bytes_per_s * efficiency.scale_up.fraction), "value"),
            (f", {words.seconds(device.scale_up_latency_s)} per hop,"
             f" {words.seconds(efficiency.scale_up.before_s)} per collective", "")),
        row("network", (f"{_of_cards(found):.0%} of its bandwidth", "value"),
            (f", {words.seconds(device.scale_out_latency_s)} per hop,"
             f" {words.seconds(efficiency.scale_out.before_s)} per collective", "")),
    ]  # fmt: skip
    if profile is not None:
        lines.append(
            row("software", (f"{profile.pointwise_passes:.2f} pointwise passes", "value"),
                (f", {words.seconds(profile.host_action_s)} per action,"
                 f" {words.seconds(profile.host_step_s)} per step,"
                 f" {profile.data_overlap:.0%} of gradient reduction overlapped", ""))
        )  # fmt: skip
    for name, errors in found.measured.items():
        if isinstance(errors, Mapping):
            numbers = {
                key.replace("_", " "): each for key, each in errors.items() if not isinstance(each, str)
            }
            described = ", ".join(f"{key} {value:.3g}" for key, value in numbers.items())
            lines += words.text_rows("", f"{name}: {described}", "dim")
            lines += [
                row("", (f"{name}: {key} {text}", "warn"))
                for key, text in errors.items()
                if isinstance(text, str)
            ]
    return [*lines, *_warnings(found.measured)]


def _of_cards(found: CalibrationResult) -> float:
    """Part of the bandwidth of the network cards that was measured; else the fraction of the device."""
    for errors in found.measured.values():
        if isinstance(errors, Mapping) and "of_cards" in errors:
            return min(float(errors["of_cards"]), 1.0)
    return found.device.efficiency.scale_out.fraction


def _warnings(measured: Mapping[str, object]) -> Iterator[Line]:
    taken = measured.get(OTHER_PROGRAMS)
    if isinstance(taken, Mapping) and taken["cores"] > NOTABLE_SHARE * taken["of"]:
        cores = f"{taken['cores']:.1f} of {words.counted(taken['of'], 'core')}"
        yield row("warning", (f"other programs used {cores}", "warn"),
                  ("; measure again on an idle machine", ""))  # fmt: skip
