"""How long a call takes, on a machine that also does other things."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchTimer:
    """Times calls in `batches` batches of at least `batch_s` seconds each; the median batch counts.

    A batch spans several periods of a scheduler that gives a process a share of a core (5 ms to 100 ms), so
    that its pauses are spread over the calls. `ready` comes back when a batch may begin: with the others',
    where several processes measure. `now` and `wait` are the machine's clock and the device's end of work;
    tests have their own.
    """

    batches: int = 5
    batch_s: float = 0.03
    now: Callable[[], float] = time.perf_counter
    wait: Callable[[], object] = lambda: None
    ready: Callable[[], object] = lambda: None

    def seconds(self, call: Callable[[], object]) -> float:
        """Seconds of one call, the first of all (which warms up) not counted."""
        self._batch(call, 1)
        once_s = self._batch(call, 1)
        calls = max(1, round(self.batch_s / max(once_s, 1e-9)))
        return median(self._batch(call, calls) for _ in range(self.batches))

    def _batch(self, call: Callable[[], object], calls: int) -> float:
        self.ready()
        start_s = self.now()
        for _ in range(calls):
            call()
        self.wait()
        return (self.now() - start_s) / calls
