"""Exposed communication of a step, as opposed to computation and to waiting for a CPU core."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from shardwise.runtime.timing import Stopwatch, thread_busy_s


def reported(*seconds: float | None) -> Iterator[float | None]:
    return iter(seconds)


@pytest.mark.parametrize(
    ("busy", "exposed_s"),
    [
        ((2.0, 2.75), 1.25),  # busy for 0.75 of 2 s
        ((2.0, 4.5), 0.0),  # thread clocks are coarser than the wall clock
        ((2.0, 1.5), 2.0),
        ((None, 1.0), None),
        ((2.0, None), None),
    ],
)
def test_wall_time_without_cpu_time_is_waiting(
    busy: tuple[float | None, float | None], exposed_s: float | None
) -> None:
    clock, at_work = iter((10.0, 12.0)), reported(*busy)
    stopwatch = Stopwatch.started(now=lambda: next(clock), busy=lambda: next(at_work))
    assert stopwatch.read() == (2.0, exposed_s)


def test_a_thread_that_waits_for_another_is_not_busy() -> None:
    """A mutant that reads the CPU time of the process would count the other thread's work."""
    done, others_s = threading.Event(), list[float | None]()

    def work() -> None:
        begun_s = thread_busy_s()
        sum(range(5_000_000))
        ended_s = thread_busy_s()
        others_s.append(None if begun_s is None or ended_s is None else ended_s - begun_s)
        done.set()

    before_s, stopwatch = thread_busy_s(), Stopwatch.started()
    threading.Thread(target=work).start()
    done.wait()
    _, exposed_s = stopwatch.read()
    after_s, (other_s,) = thread_busy_s(), others_s
    if before_s is None or after_s is None or other_s is None:
        assert exposed_s is None  # not Linux
    else:
        assert exposed_s is not None and exposed_s > 0.0
        assert after_s - before_s < 0.5 * other_s
