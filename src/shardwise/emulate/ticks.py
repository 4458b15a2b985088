"""Ticks on every core, so that the kernel sees in time when a device has used up its share of it."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable

INTERVAL_S = 5e-4
"""Between two ticks on a core: half of what a device may run in a period. They take 2 to 3 % of it."""

_MOST_PER_S = 32_000
"""Ticks on all cores together that one interpreter gives: beyond 16 cores they come less often."""


class Ticks:
    """A thread for each core that wakes up every so often and goes back to sleep.

    The kernel looks at a quota when it takes the core from a process, and otherwise with its own tick, every
    4 ms by most kernels (`account_cfs_rq_runtime` in kernel/sched/fair.c). A device that may run for 1 ms at
    a time runs for up to 4 then, pays for it later, and is now early, now late where others wait for it. A
    thread of a class above all devices takes their core for an instant.
    """

    def __init__(self) -> None:
        self._is_over = False
        self._threads: list[threading.Thread] = []

    def begin(self, talk: Callable[[str], None]) -> None:
        """Start them, once nothing is forked any more with code of its own. Where the kernel refuses such
        threads there are none, and `talk` says so."""
        cores = sorted(os.sched_getaffinity(0))
        interval_s = max(INTERVAL_S, len(cores) / _MOST_PER_S)
        begun = threading.Barrier(len(cores) + 1)
        refused: list[str] = []
        for core in cores:
            arguments = (core, interval_s, begun, refused)
            thread = threading.Thread(target=self._tick, args=arguments, name=f"tick {core}", daemon=True)
            thread.start()
            self._threads.append(thread)
        begun.wait()
        if refused:
            talk(
                "shares of cores are kept only by the kernel's own tick, so that waiting ranks are early or "
                f"late by milliseconds: real-time threads are refused ({refused[0]})"
            )

    def _tick(self, core: int, interval_s: float, begun: threading.Barrier, refused: list[str]) -> None:
        try:
            os.sched_setaffinity(0, {core})  # of this thread, as the next
            os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(os.sched_get_priority_min(os.SCHED_FIFO)))
        except OSError as error:
            refused.append((error.strerror or str(error)).lower())
            return
        finally:
            begun.wait()
        while not self._is_over:
            time.sleep(interval_s)

    def close(self) -> None:
        self._is_over = True
        for thread in self._threads:
            thread.join()
