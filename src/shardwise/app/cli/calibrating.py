"""What `calibrate` does: measures this machine, finds the curves that explain the times, writes them down."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from shardwise import accuracy
from shardwise.app.cli import words
from shardwise.app.cli.calibrating_cuda import calibrate_accelerator
from shardwise.app.cli.calibrating_from import CalibrationResult, calibrate_from_files, read_sources
from shardwise.app.cli.calibrating_links import LinkMeasurement, LinkResult
from shardwise.app.cli.calibrating_ranks import Ranks, cluster_here, is_launched, ranks_of, threads_here
from shardwise.app.cli.calibrating_rounds import KernelMeasurement
from shardwise.app.cli.output import Line, Output, row
from shardwise.app.cli.request import check_output_path
from shardwise.cluster import Cluster, Device, load_cluster
from shardwise.errors import ConfigError
from shardwise.inputs import dumps, short_repr
from shardwise.plan import write_file
from shardwise.strategy import Calibration, Profile
from shardwise.units import format_rate

if TYPE_CHECKING:
    from shardwise.measure import CoreSeconds
    from shardwise.runtime import RankLost

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
