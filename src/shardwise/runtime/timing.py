"""How long a step waits for other ranks: what communication adds to computation, as it is.

Steps of a plan on this process's device: what they take, and what they allocate there.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from shardwise.plans import Plan
from shardwise.runtime.data import Synthetic
from shardwise.runtime.devices import is_on_host, synchronize_device
from shardwise.runtime.job import TrainingJob
from shardwise.runtime.modules import reference_module
from shardwise.runtime.parallelize import parallelize

_SCHEDSTAT = Path("/proc/thread-self/schedstat")
"""Of this thread: nanoseconds on a core, nanoseconds ready for one, turns (Linux)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stopwatch:
    """Begun at a time of the clock, when this thread had been `busy_s` at work, or kept from it by others on
    its core or by its share of one; None where the system does not tell."""

    start_s: float
    busy_s: float | None
    now: Callable[[], float]
    busy: Callable[[], float | None]

    @classmethod
    def started(
        cls, *, now: Callable[[], float] = time.perf_counter, busy: Callable[[], float | None] | None = None
    ) -> Stopwatch:
        busy = busy or thread_busy_s
        return cls(start_s=now(), busy_s=busy(), now=now, busy=busy)

    def read(self) -> tuple[float, float | None]:
        """Seconds since it was begun, and those of them in which this thread waited for something else than
        a core: for messages, and for ranks that are late. (Computation on a CPU is on the thread that waits.)
        """
        spent_s, busy_s = self.now() - self.start_s, self.busy()
        if self.busy_s is None or busy_s is None:
            return spent_s, None
        return spent_s, min(max(spent_s - (busy_s - self.busy_s), 0.0), spent_s)


def unknown_busy_s() -> None:
    """What is known of a thread whose work is on a device beside it."""


def thread_busy_s() -> float | None:
    """Seconds that this thread has been on a core, or ready for one."""
    try:
        ready_ns = int(_SCHEDSTAT.read_text().split()[1])
    except (OSError, ValueError, IndexError):
        return None
    return time.thread_time() + 1e-9 * ready_ns


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
