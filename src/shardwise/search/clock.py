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

from shardwise.interrupts import terminated_by
from shardwise.units import format_seconds


def left_text(spent_s: float, done: float, total: float) -> str:
    """How long the rest takes at the rate so far, such as `about 2.5 min left`; empty where nothing is
    done."""
    return f"about {format_seconds(spent_s * (total - done) / done)} left" if done > 0.0 else ""


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
        So do termination signals that count as interrupts, also where keyboard interrupts are ignored.

        Changes nothing if another handler is installed, or outside the main thread.
        """
        is_main = threading.current_thread() is threading.main_thread()
        present = signal.getsignal(signal.SIGINT)
        if not is_main or present not in (signal.default_int_handler, signal.SIG_IGN):
            yield self
            return

        def on_interrupt(_: int, __: FrameType | None) -> None:
            if self.is_interrupted:
                raise KeyboardInterrupt
            self.interrupt()

        is_heard = present is signal.default_int_handler
        if is_heard:
            signal.signal(signal.SIGINT, on_interrupt)
        try:
            with terminated_by(on_interrupt):
                yield self
        finally:
            if is_heard:
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
