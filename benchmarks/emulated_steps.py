"""Steps of several plans in turns, on the ranks that `emulate` started: OUT REPEATS PLAN..."""

from __future__ import annotations

import json
import os
import sys
import time
import warnings
from pathlib import Path
from statistics import median

import torch
from torch import distributed

from shardwise.plan import Plan, read_plan
from shardwise.runtime import Job, TrainOptions, initialise, parallelize, reference_module, samples_of

WARM_UP = 2


def main(out: str, repeats: int, paths: list[str]) -> None:
    """Rank 0 writes, of each plan, the median seconds of a step of the slowest rank, and all of them."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    distributed.init_process_group("gloo")
    plans = [read_plan(path) for path in paths]
    jobs = [_job(plan) for plan in plans]
    batches = [samples_of(plan, TrainOptions(steps=1)).batch(0) for plan in plans]
    times: list[list[float]] = [[] for _ in plans]
    for repeat in range(WARM_UP + repeats):
        for job, batch, own in zip(jobs, batches, times, strict=True):
            distributed.barrier()
            start_s = time.perf_counter()
            job.step(batch)
            spent = torch.tensor([time.perf_counter() - start_s], dtype=torch.float64)
            distributed.all_reduce(spent, op=distributed.ReduceOp.MAX)
            if repeat >= WARM_UP:
                own.append(float(spent))
    if os.environ["RANK"] == "0":
        Path(out).write_text(json.dumps([{"measured_s": median(own), "times_s": own} for own in times]))
    distributed.destroy_process_group()


def _job(plan: Plan) -> Job:
    module = reference_module(plan.model)
    initialise(module, seed=0, layers=plan.model.layers)
    return parallelize(module, plan)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3:])
