"""CPU seconds of a call, and the peak memory of this process."""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Callable

SECONDS = 1.5
"""CPU seconds of calls per figure."""


def cpu_s(work: Callable[[], object], seconds: float = SECONDS) -> float:
    """CPU seconds of one call: the least of the calls within `seconds`, after one warm-up call."""
    work()
    best, spent = float("inf"), 0.0
    while spent < seconds:
        started = time.process_time()
        work()
        taken = time.process_time() - started
        best, spent = min(best, taken), spent + taken
    return best


def peak_memory_bytes() -> int:
    """Peak memory of this process so far, in bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # macOS reports bytes, Linux KiB
