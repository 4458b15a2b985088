"""Steps of a plan on this process's device: what they take, and what they allocate there."""

from __future__ import annotations

import gc
import time
from dataclasses import dataclass

import torch
from torch import Tensor

from shardwise.plan import Plan
from shardwise.runtime.data import Synthetic
from shardwise.runtime.devices import is_on_host, synchronize_device
from shardwise.runtime.job import TrainingJob
from shardwise.runtime.modules import reference_module
from shardwise.runtime.parallelize import parallelize


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedSteps:
    """Seconds of steps, each until the device is done with it, and bytes of tensors at the peak of one:
    without what libraries keep for themselves; None on the host, which does not tell."""

    seconds: tuple[float, ...]
    allocated_bytes: int | None


def timed_steps(plan: Plan, *, steps: int, warming_up: int) -> TimedSteps:
    """`steps` steps of `plan` in a process group of its devices, behind `warming_up` others that find their
    kernels and their memory. Parameters are as PyTorch's modules make them, samples are synthetic."""
    has_memory_stats = not is_on_host(plan.cluster)
    accelerator = torch.accelerator.current_accelerator(check_available=True) if has_memory_stats else None
    with torch.device(accelerator or "cpu"):
        module = reference_module(plan.model)
    running = parallelize(module, plan)
    job = plan.job
    samples = Synthetic(
        vocab=plan.model.vocab, global_batch_size=job.global_batch_size, seq_len=job.seq_len, seed=0
    )
    for step in range(warming_up):
        running.step(samples.batch(step))
    if has_memory_stats:
        torch.accelerator.reset_peak_memory_stats()
    seconds = [_step_s(running, samples.batch(warming_up + step), plan) for step in range(steps)]
    if not has_memory_stats:
        return TimedSteps(seconds=tuple(seconds), allocated_bytes=None)
    peak_bytes = torch.accelerator.max_memory_allocated()
    del module, running
    gc.collect()
    libraries_bytes = torch.accelerator.memory_allocated()
    torch.accelerator.empty_cache()
    return TimedSteps(seconds=tuple(seconds), allocated_bytes=peak_bytes - libraries_bytes)


def _step_s(running: TrainingJob, batch: Tensor, plan: Plan) -> float:
    synchronize_device(plan.cluster)
    start_s = time.perf_counter()
    running.step(batch)
    synchronize_device(plan.cluster)
    return time.perf_counter() - start_s
