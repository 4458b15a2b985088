"""When searches end: `SearchClock` (time budget, user interrupt) and `WorkLimit` (a deterministic limit)."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from mmap import mmap
from types import FrameType
from typing import Any


class SearchClock:
    """The remaining part of a budget in seconds (None: no limit). A user interrupt also ends it.

    Forked worker processes see the interrupt too; spawned ones do not.
    """

    def __init__(self, budget_s: float | None = None) -> None:
        self._end_s = float("inf") if budget_s is None else time.perf_counter() + budget_s
        self._shared = mmap(-1, 1)

    def __getstate__(self) -> dict[str, Any]:
        return {"_end_s": self._end_s}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._end_s, self._shared = state["_end_s"], mmap(-1, 1)

    @property
    def is_interrupted(self) -> bool:
        """Whether the user interrupted the search."""
        return self._shared[0] != 0

    @property
    def is_over(self) -> bool:
        """Whether the budget is spent or the user interrupted."""
        return self.is_interrupted or time.perf_counter() > self._end_s

    def interrupt(self) -> None:
        """Ends the search now."""
        self._shared[0] = 1

    def with_budget(self, budget_s: float | None) -> SearchClock:
        """Another clock with its own budget; an interrupt ends both."""
        other = SearchClock(budget_s)
        other._shared = self._shared
        return other

    @contextmanager
    def handling_interrupts(self) -> Iterator[SearchClock]:
        """Treats the first keyboard interrupt as the end of the time; a second one raises KeyboardInterrupt.

        Changes nothing if another handler is installed, or outside the main thread.
        """
        is_main = threading.current_thread() is threading.main_thread()
        if not is_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
            yield self
            return

        def on_interrupt(_: int, __: FrameType | None) -> None:
            if self.is_interrupted:
                raise KeyboardInterrupt
            self.interrupt()

        signal.signal(signal.SIGINT, on_interrupt)
        try:
            yield self
        finally:
            signal.signal(signal.SIGINT, signal.default_int_handler)


class WorkLimit(SearchClock):
    """Ends a search after `checks` polls of the clock. The search polls once before each part of the space,
    so in one process it ends at the same place however fast the machine is."""

    def __init__(self, checks: int) -> None:
        super().__init__()
        self._left = checks

    @property
    def is_over(self) -> bool:
        """Whether the polls are used up. Each read counts as one poll."""
        self._left -= 1
        return self.is_interrupted or self._left < 0
