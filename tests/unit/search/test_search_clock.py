"""A clock ends by its budget or by an interrupt, which copies of the process see."""

from __future__ import annotations

import pickle
import signal
import threading
import time
from collections.abc import Iterator

import pytest

from shardwise.search.clock import Clock
from shardwise.search.lanes import Lanes


@pytest.fixture(autouse=True)
def heeded() -> Iterator[None]:
    """Interrupts raise, as they do in the foreground, whatever this process was started with."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_a_budget_is_spent_or_not() -> None:
    assert not Clock().is_over and not Clock(1e3).is_over
    spent = Clock(-1.0)
    assert spent.is_over and not spent.is_interrupted


def test_an_interrupt_ends_clocks_that_stand_beside_one_another() -> None:
    clock = Clock(1e3)
    spent, free = clock.beside(-1.0), clock.beside(None)
    assert spent.is_over and not clock.is_over and not free.is_over
    free.interrupt()
    assert clock.is_interrupted and clock.is_over and spent.is_interrupted
    assert not Clock().is_interrupted


def test_the_first_interrupt_is_heard_the_second_is_raised() -> None:
    with Clock().listening() as clock:
        signal.raise_signal(signal.SIGINT)
        assert clock.is_over
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


def test_only_the_outermost_clock_listens() -> None:
    with Clock().listening() as outer, Clock().listening() as inner:
        signal.raise_signal(signal.SIGINT)
        assert outer.is_interrupted and not inner.is_interrupted


def test_the_handler_of_somebody_else_stays() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with Clock().listening() as clock:
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
        signal.raise_signal(signal.SIGINT)
    assert not clock.is_over


def test_other_threads_listen_to_nothing() -> None:
    handlers = []

    def listen() -> None:
        with Clock().listening():
            handlers.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=listen)
    thread.start()
    thread.join()
    assert handlers == [signal.default_int_handler]


def test_a_worker_sees_what_the_clock_of_its_parent_hears() -> None:
    clock = Clock()

    def work(task: str) -> bool:
        if task == "interrupt":
            clock.interrupt()
        return clock.is_interrupted

    with Lanes(2, work) as lanes:
        assert lanes.answers(["look", "look"]) == [False, False]
        lanes.answers(["interrupt", "look"])
        assert clock.is_interrupted
        assert lanes.answers(["look", "look"]) == [True, True]


def test_a_clock_that_is_sent_keeps_its_end() -> None:
    clock, spent = Clock(1e3), Clock(-1.0)
    clock.interrupt()
    sent, other = (pickle.loads(pickle.dumps(each)) for each in (clock, spent))  # noqa: S301 - our own bytes
    assert not sent.is_interrupted and not sent.is_over
    assert other.is_over
    assert time.perf_counter() < sent._end_s < float("inf")
