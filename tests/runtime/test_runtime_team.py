"""Processes that work together, beside their work."""

from __future__ import annotations

import os
import signal

import pytest

from shardwise.runtime import Team

pytestmark = pytest.mark.xdist_group("runtime")


def profiler_level(report: object) -> str | None:
    return os.environ.get("KINETO_LOG_LEVEL")


def takes_interrupts(report: object) -> bool:
    return signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, [])


def test_an_interrupt_is_for_the_process_that_started_them(team: Team) -> None:
    """A terminal's Ctrl-C goes to all processes. What a rank does not take, the fork server that it is a copy
    of did not either, which imports for seconds and would leave a traceback."""
    assert team.run(2, takes_interrupts) == [False, False]


def test_the_profiler_says_nothing_amid_what_is_said_of_steps(team: Team) -> None:
    """Below 5 it tells of every start and stop (PyTorch 2.13), by a line of each rank."""
    assert team.run(1, profiler_level) == ["5"]
