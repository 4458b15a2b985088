"""Accuracy of the CPU shares of emulated devices: `python -m benchmarks.emulated_shares`.

It needs root and Linux. Processes in the control groups of `shardwise emulate` repeatedly pause for 20 to
40 ms and then compute, all at once. It prints their times for several amounts of work next to the exact time
of a device with that share, with and without the ticks of `shardwise.emulate`.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Sequence
from statistics import fmean, pstdev

from shardwise.emulate.cgroups import CpuShares, Ticks

WORK_MS = (2, 5, 12, 30, 80)
REPEATS = 12
SETTLE_MS, STEADY_MS = 100, 600


def measured(devices: int, share: float, *, has_ticks: bool) -> tuple[float, list[Sequence[float]]]:
    """The mean share that devices get in long computation, and the seconds of each amount of work, of all
    devices."""
    shares, ticks = CpuShares(devices, os.getpid()), Ticks()
    shares.build()
    try:
        pipes = [_started(shares, device, share) for device in range(devices)]
        if has_ticks:
            ticks.begin(print)
        found = [_read(pid, pipe) for pid, pipe in pipes]
    finally:
        ticks.close()
        shares.close()
    steady = fmean(STEADY_MS * 1e-3 / each[-1] for each in found)
    count = len(WORK_MS)
    return steady, [[s for each in found for s in each[place:-1:count]] for place in range(count)]


def _started(shares: CpuShares, device: int, share: float) -> tuple[int, int]:
    shares.set(device, share)
    reading, writing = os.pipe()
    pid = os.fork()
    if pid:
        os.close(writing)
        return pid, reading
    shares.members(device).write_text(str(os.getpid()))
    pauses = random.Random(device)
    _compute(SETTLE_MS)
    times = []
    for _ in range(REPEATS):
        for work_ms in WORK_MS:
            time.sleep(pauses.uniform(0.02, 0.04))
            times.append(_compute(work_ms))
    times.append(_compute(STEADY_MS))
    os.write(writing, " ".join(map(str, times)).encode())
    os._exit(0)


def _compute(work_ms: float) -> float:
    """Wall seconds of `work_ms` milliseconds of computation."""
    start_s, end_s = time.perf_counter(), time.thread_time() + work_ms * 1e-3
    while time.thread_time() < end_s:
        pass
    return time.perf_counter() - start_s


def _read(pid: int, pipe: int) -> list[float]:
    os.waitpid(pid, 0)
    with os.fdopen(pipe) as text:
        return [float(word) for word in text.read().split()]


def main() -> None:
    for devices, share in ((4, 0.3), (4, 0.4), (2, 0.4), (2, 0.8)):
        for has_ticks in (False, True):
            steady, times = measured(devices, share, has_ticks=has_ticks)
            texts = (
                f"{work} ms {fmean(own) * 1e3:.1f} +- {pstdev(own) * 1e3:.1f} of {work / share:.1f}"
                for work, own in zip(WORK_MS, times, strict=True)
            )
            ticks = "with" if has_ticks else "no"
            print(f"{devices} x {share}, {ticks} ticks: share {steady:.3f}; {', '.join(texts)}")


if __name__ == "__main__":
    main()
