"""How long a step waits for other ranks: what communication adds to computation, as it is."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

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
