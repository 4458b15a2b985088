"""A search clock ends by its budget or by an interrupt, also in copies in other processes."""

from __future__ import annotations

import pickle
import signal
import threading
import time
from collections.abc import Iterator

import pytest

from shardwise.search.clock import SearchClock
from shardwise.search.worker_pool import SearchWorkers


@pytest.fixture(autouse=True)
def heeded() -> Iterator[None]:
    """Interrupts raise, as in the foreground, however this process was started."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_a_budget_is_spent_or_not() -> None:
    assert not SearchClock().is_over and not SearchClock(1e3).is_over
    spent = SearchClock(-1.0)
    assert spent.is_over and not spent.is_interrupted


def test_an_interrupt_ends_all_clocks_that_share_it() -> None:
    clock = SearchClock(1e3)
    spent, free = clock.with_budget(-1.0), clock.with_budget(None)
    assert spent.is_over and not clock.is_over and not free.is_over
    free.interrupt()
    assert clock.is_interrupted and clock.is_over and spent.is_interrupted
    assert not SearchClock().is_interrupted


def test_the_first_interrupt_is_noted_and_the_second_raised() -> None:
    with SearchClock().handling_interrupts() as clock:
        signal.raise_signal(signal.SIGINT)
        assert clock.is_over
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


def test_only_the_outermost_clock_handles_signals() -> None:
    with SearchClock().handling_interrupts() as outer, SearchClock().handling_interrupts() as inner:
        signal.raise_signal(signal.SIGINT)
        assert outer.is_interrupted and not inner.is_interrupted


def test_a_foreign_signal_handler_is_kept() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with SearchClock().handling_interrupts() as clock:
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
        signal.raise_signal(signal.SIGINT)
    assert not clock.is_over


def test_other_threads_install_no_signal_handler() -> None:
    handlers = []

    def listen() -> None:
        with SearchClock().handling_interrupts():
            handlers.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=listen)
    thread.start()
    thread.join()
    assert handlers == [signal.default_int_handler]


def test_a_worker_sees_an_interrupt_of_the_clock_of_its_parent() -> None:
    clock = SearchClock()

    def work(task: str) -> bool:
        if task == "interrupt":
            clock.interrupt()
        return clock.is_interrupted

    with SearchWorkers(2, work) as pool:
        assert pool.results(["look", "look"]) == [False, False]
        pool.results(["interrupt", "look"])
        assert clock.is_interrupted
        assert pool.results(["look", "look"]) == [True, True]


def test_a_clock_that_is_sent_keeps_its_end() -> None:
    clock, spent = SearchClock(1e3), SearchClock(-1.0)
    clock.interrupt()
    sent, other = (pickle.loads(pickle.dumps(each)) for each in (clock, spent))  # noqa: S301 - our own bytes
    assert not sent.is_interrupted and not sent.is_over
    assert other.is_over
    assert time.perf_counter() < sent._end_s < float("inf")
