"""Runs steps of several plans alternately on ranks that `emulate` started, with calibration measurements.

Arguments: OUT REPEATS EPOCH_S CALIBRATION EPOCHS CLUSTER... PLAN...

The network changes between epochs, which have a cluster each. All plans are measured in each epoch, and the
ranks wait for its end.
"""

from __future__ import annotations

import json
import os
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from benchmarks.emulated_rounds import ROUNDS, STEPS_A_ROUND, measurements_after
from torch import distributed

from shardwise.accuracy import calibration_document
from shardwise.app.cli.measuring import KernelMeasurement, LinkMeasurement, ranks_of
from shardwise.cluster import Cluster, load_cluster
from shardwise.plans import Plan, read_plan
from shardwise.runtime import TrainOptions, network_of
from shardwise.runtime.data import SYNTHETIC
from shardwise.runtime.private import destroy_groups, process_groups
from shardwise.runtime.train import start_job
from shardwise.strategy import Calibration, read_calibration

SETTLED_S = 3.0
"""Seconds from the start of an epoch, by this process's clock, to its first step."""


def main(
    out: str,
    repeats: int,
    epoch_s: float,
    known: Calibration,
    clusters: Sequence[Cluster],
    paths: Sequence[str],
) -> None:
    """Measures all epochs; rank 0 writes the results.

    For each epoch and plan these are all times of a step of the slowest rank and their median. For each epoch
    they are a `calibration` during it, for the device of the calibration `known`, and `small_s`, the total
    time of the steps of its small plans."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    with ranks_of(clusters[0]) as ranks:
        made = [partial(_step, read_plan(path)) for path in paths]
        found = []
        for epoch, cluster in enumerate(clusters):
            machine, links = (
                KernelMeasurement(ranks, threads=1),
                LinkMeasurement(ranks, cluster, threads=1, rounds=ROUNDS),
            )
            times = _interleaved(made, repeats, _round(machine, links))
            plans = [{"measured_s": median(own), "times_s": own} for own in times]
            found.append({"plans": plans, **_calibrated(machine, links, known)})
            if epoch + 1 < len(clusters):
                left_s = (epoch + 1) * epoch_s - _age_s()
                if left_s < 0.0:
                    raise SystemExit(
                        f"{out}: the network changed {-left_s:.0f} s before all plans were measured"
                    )
                time.sleep(left_s + SETTLED_S)
        if ranks.rank == 0:
            Path(out).write_text(json.dumps({"epochs": found}))


def _round(machine: KernelMeasurement, links: LinkMeasurement) -> list[Callable[[], object]]:
    """The measurements of one round, with the steps of small plans STEPS_A_ROUND times."""
    *small, kernels = _measurements(machine)
    return [*small * STEPS_A_ROUND, kernels, *_measurements(links)]


def _measurements(of: KernelMeasurement | LinkMeasurement) -> list[Callable[[], object]]:
    return [partial(of.measure, measurement) for measurement in range(of.measurements)]


def _calibrated(rounds: KernelMeasurement, links: LinkMeasurement, known: Calibration) -> dict[str, Any]:
    """The content of a calibration from `rounds` and `links`, and the seconds of its steps."""
    (device,) = known.devices.values()
    found, between = rounds.found(device), links.found()
    document = calibration_document(
        between.of_device(found.device), between.of_software(found.profile),
        machine=known.machine, measured={**found.measured, **between.measured},
    )  # fmt: skip
    return {"calibration": document, "small_s": sum(found.steps_s)}


def _age_s() -> float:
    """Seconds since the start of this process (proc(5), field 22 of `stat`)."""
    ticks = int(Path("/proc/self/stat").read_text().rsplit(")", 1)[1].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")


def _interleaved(
    made: Sequence[Callable[[], Callable[[], object]]],
    repeats: int,
    measurements: Sequence[Callable[[], object]],
) -> list[list[float]]:
    """Step times of the slowest rank, for each plan in each of `repeats` rounds; between the plans run
    calibration `measurements`.

    Idle plans would slow the running one by threads of their process groups and by their memory. So each plan
    is built for its measurement and destroyed after it. The second step is timed, since steps of a training
    run follow each other.
    """
    times: list[list[float]] = [[] for _ in made]
    place, places = 0, repeats * len(made)
    for _ in range(repeats):
        for plan, own in zip(made, times, strict=True):
            own.append(_second_s(plan))
            for measurement in measurements_after(place, places, len(measurements)):
                measurements[measurement % len(measurements)]()
            place += 1
    return times


def _second_s(made: Callable[[], Callable[[], object]]) -> float:
    """Seconds of the second step of a plan, which is built here; its process groups are destroyed
    afterwards."""
    before = process_groups()
    step = made()
    step()
    spent_s = slowest_s(step)
    del step
    destroy_groups(process_groups() - before)
    return spent_s


def slowest_s(call: Callable[[], object]) -> float:
    """Seconds of the slowest rank for a call that all ranks start at once."""
    distributed.barrier()
    start_s = time.perf_counter()
    call()
    slowest = torch.tensor([time.perf_counter() - start_s], dtype=torch.float64)
    distributed.all_reduce(slowest, op=distributed.ReduceOp.MAX)
    return float(slowest)


def _step(plan: Plan) -> Callable[[], object]:
    """A function that runs a step of `plan`, always on the same batch."""
    job, batch = start_job(plan, TrainOptions(steps=1)), network_of(plan).samples(SYNTHETIC, seed=0).batch(0)
    return lambda: job.step(batch)


if __name__ == "__main__":
    epochs = int(sys.argv[5])
    files, plans = sys.argv[6 : 6 + epochs], sys.argv[6 + epochs :]
    main(
        sys.argv[1],
        int(sys.argv[2]),
        float(sys.argv[3]),
        read_calibration(sys.argv[4]),
        list(map(load_cluster, files)),
        plans,
    )
