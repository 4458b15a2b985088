"""Steps of several plans in turns, on the ranks that `emulate` started.

Arguments: OUT REPEATS EPOCH_S EPOCHS SPEEDS PLAN...; SPEEDS are those of the ranks' devices, with commas.

Where there are several epochs all plans are measured in each, and wait for the next: then the network
changes.
"""

from __future__ import annotations

import json
import os
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median

import torch
from torch import distributed

from shardwise.measure import pace_s
from shardwise.plan import is_graph_plan, read_graph_plan, read_plan
from shardwise.runtime import (
    TrainOptions,
    graph_module,
    initialise,
    parallelize,
    reference_module,
    samples_of,
    synthetic_batch,
)

SETTLED_S = 3.0
"""Between the change of an epoch by this process's clock and the first step after it."""


def main(
    out: str, repeats: int, epoch_s: float, epochs: int, speeds: Sequence[float], paths: Sequence[str]
) -> None:
    """Rank 0 writes, of each epoch and plan, the median seconds of a step of the slowest rank, and all of
    them; and of each epoch those of the product that `calibrate` times."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    distributed.init_process_group("gloo")
    steps = [_graph_step(path) if is_graph_plan(path) else _step(path) for path in paths]
    found = []
    for epoch in range(epochs):
        found.append(_in_turns(steps, repeats, speeds[distributed.get_rank()]))
        if epochs > 1:
            left_s = (epoch + 1) * epoch_s - _age_s()
            if left_s < 0.0:
                raise SystemExit(f"{out}: the network changed {-left_s:.0f} s before all plans were measured")
            time.sleep(left_s + SETTLED_S)
    if os.environ["RANK"] == "0":
        medians = [
            {
                "pace_s": median(paces),
                "plans": [{"measured_s": median(own), "times_s": own} for own in times],
            }
            for times, paces in found
        ]
        Path(out).write_text(json.dumps({"epochs": medians}))
    distributed.destroy_process_group()


def _age_s() -> float:
    """Seconds since this process was started (proc(5), field 22 of `stat`)."""
    ticks = int(Path("/proc/self/stat").read_text().rsplit(")", 1)[1].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")


def _in_turns(
    steps: Sequence[Callable[[], object]], repeats: int, speed: float
) -> tuple[list[list[float]], list[float]]:
    """Seconds of `repeats` calls of each of `steps`, of the slowest rank, since all wait for it; and of the
    product before and after each, of all ranks in the mean, since a calibration times it on one. Those of the
    product are what a device of speed 1 would take; `speed` is that of this rank's.

    A step behind one of another plan takes up to a fifth longer: its memory has been used for others. One
    behind its like, as in training, is what is timed.
    """
    times: list[list[float]] = [[] for _ in steps]
    paces: list[float] = []
    for repeat in range(1 + repeats):
        for step, own in zip(steps, times, strict=True):
            step()
            before_s, spent_s, after_s = mean_pace_s(speed), slowest_s(step), mean_pace_s(speed)
            if repeat:  # all before is to warm up
                own.append(spent_s)
                paces += [before_s, after_s]
    return times, paces


def slowest_s(call: Callable[[], object]) -> float:
    """Seconds of the slowest rank for what all begin at once."""
    return _over_ranks(_spent_s(call), distributed.ReduceOp.MAX)


def mean_pace_s(speed: float) -> float:
    """Seconds of the product, times the rank's `speed`, in the mean of all ranks, which begin at once.

    A product is too short for the mean of a rank's times to hold: of the slowest of four ranks it takes 8 %
    longer than of one, a step does not.
    """
    ranks: int = distributed.get_world_size()
    return _over_ranks(speed * _spent_s(pace_s), distributed.ReduceOp.SUM) / ranks


def _spent_s(call: Callable[[], object]) -> float:
    """Seconds of `call`, which every rank begins with the others."""
    distributed.barrier()
    start_s = time.perf_counter()
    call()
    return time.perf_counter() - start_s


def _over_ranks(value: float, combine: distributed.ReduceOp.RedOpType) -> float:
    whole = torch.tensor([value], dtype=torch.float64)
    distributed.all_reduce(whole, op=combine)
    return float(whole)


def _step(path: str) -> Callable[[], object]:
    """A step of the plan of a strategy, always on the same batch."""
    plan = read_plan(path)
    module = reference_module(plan.model)
    initialise(module, seed=0, layers=plan.model.layers)
    job, batch = parallelize(module, plan), samples_of(plan, TrainOptions(steps=1)).batch(0)
    return lambda: job.step(batch)


def _graph_step(path: str) -> Callable[[], object]:
    """A step of the plan of an operator graph, always on the same batch."""
    plan = read_graph_plan(path)
    job = parallelize(graph_module(plan.graph, seed=0), plan)
    batch = synthetic_batch(plan.graph, seed=0, step=0)
    return lambda: job.step(batch)


if __name__ == "__main__":
    main(
        sys.argv[1],
        int(sys.argv[2]),
        float(sys.argv[3]),
        int(sys.argv[4]),
        [float(speed) for speed in sys.argv[5].split(",")],
        sys.argv[6:],
    )
