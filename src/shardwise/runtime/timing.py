"""Timing of steps: exposed communication of a running step (`Stopwatch`), and step times of a plan with peak
memory (`timed_steps`)."""

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
from shardwise.runtime.distribute import parallelize
from shardwise.runtime.job import TrainingJob
from shardwise.runtime.modules import reference_module

# Exposed communication

_SCHEDSTAT = Path("/proc/thread-self/schedstat")
"""Scheduler statistics of this thread (Linux): nanoseconds on a core, nanoseconds waiting for one, time
slices."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stopwatch:
    """Measures elapsed time and the part in which this thread waited for messages.

    `busy_s` is the time that the thread was running or runnable until the start; None if unknown.
    """

    start_s: float
    busy_s: float | None
    now: Callable[[], float]
    busy: Callable[[], float | None]

    @classmethod
    def started(
        cls, *, now: Callable[[], float] = time.perf_counter, busy: Callable[[], float | None] | None = None
    ) -> Stopwatch:
        """A stopwatch started now; `now` and `busy` are clocks in seconds, replaced in tests."""
        busy = busy or thread_busy_s
        return cls(start_s=now(), busy_s=busy(), now=now, busy=busy)

    def read(self) -> tuple[float, float | None]:
        """Elapsed seconds, and the seconds in which this thread was neither running nor runnable (None if
        unknown).

        The latter is exposed communication, including the wait for late ranks: on CPUs, the same thread
        computes.
        """
        spent_s, busy_s = self.now() - self.start_s, self.busy()
        if self.busy_s is None or busy_s is None:
            return spent_s, None
        return spent_s, min(max(spent_s - (busy_s - self.busy_s), 0.0), spent_s)


def unknown_busy_s() -> None:
    """Busy time of a thread whose computation is on an accelerator: unknown."""


def thread_busy_s() -> float | None:
    """Seconds that this thread was running or runnable; None if the system does not report them."""
    try:
        ready_ns = int(_SCHEDSTAT.read_text().split()[1])
    except (OSError, ValueError, IndexError):
        return None
    return time.thread_time() + 1e-9 * ready_ns


# Step times of a plan


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedSteps:
    """Seconds of each step, until the device is done, and peak bytes of allocated tensors, without those of
    libraries. The bytes are None on the host, where PyTorch does not count them."""

    seconds: tuple[float, ...]
    allocated_bytes: int | None


def timed_steps(plan: Plan, *, steps: int, warming_up: int) -> TimedSteps:
    """Time `steps` steps of `plan` after `warming_up` others, in a process group with a rank per device.
    Parameters have PyTorch's default initial values; samples are synthetic."""
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
