"""Steps of several plans in turns, on the ranks that `emulate` started: OUT REPEATS EPOCH_S EPOCHS PLAN...

Where there are several epochs all plans are measured in each, and wait for the next: then the network
changes.
"""

from __future__ import annotations

import json
import os
import sys
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from statistics import median

import torch
from torch import distributed

from shardwise.plan import Plan, read_plan
from shardwise.runtime import Job, TrainOptions, initialise, parallelize, reference_module, samples_of

WARM_UP = 2


SETTLED_S = 3.0
"""Between the change of an epoch by this process's clock and the first step after it."""


def main(out: str, repeats: int, epoch_s: float, epochs: int, paths: list[str]) -> None:
    """Rank 0 writes, of each epoch and plan, the median seconds of a step of the slowest rank, and all of
    them."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    distributed.init_process_group("gloo")
    plans = [read_plan(path) for path in paths]
    jobs = [_job(plan) for plan in plans]
    batches = [samples_of(plan, TrainOptions(steps=1)).batch(0) for plan in plans]
    found = []
    for epoch in range(epochs):
        found.append(_in_turns(jobs, batches, repeats))
        if epochs > 1:
            left_s = (epoch + 1) * epoch_s - _age_s()
            if left_s < 0.0:
                raise SystemExit(f"{out}: the network changed {-left_s:.0f} s before all plans were measured")
            time.sleep(left_s + SETTLED_S)
    if os.environ["RANK"] == "0":
        medians = [[{"measured_s": median(own), "times_s": own} for own in times] for times in found]
        Path(out).write_text(json.dumps(medians))
    distributed.destroy_process_group()


def _age_s() -> float:
    """Seconds since this process was started (proc(5), field 22 of `stat`)."""
    ticks = int(Path("/proc/self/stat").read_text().rsplit(")", 1)[1].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")


def _in_turns(jobs: Sequence[Job], batches: Sequence[torch.Tensor], repeats: int) -> list[list[float]]:
    """Seconds of `repeats` steps of each job, that of the slowest rank each."""
    times: list[list[float]] = [[] for _ in jobs]
    for repeat in range(WARM_UP + repeats):
        for job, batch, own in zip(jobs, batches, times, strict=True):
            distributed.barrier()
            start_s = time.perf_counter()
            job.step(batch)
            spent = torch.tensor([time.perf_counter() - start_s], dtype=torch.float64)
            distributed.all_reduce(spent, op=distributed.ReduceOp.MAX)
            if repeat >= WARM_UP:
                own.append(float(spent))
    return times


def _job(plan: Plan) -> Job:
    module = reference_module(plan.model)
    initialise(module, seed=0, layers=plan.model.layers)
    return parallelize(module, plan)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]), int(sys.argv[4]), sys.argv[5:])
