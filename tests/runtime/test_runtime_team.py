"""Processes that work together, beside their work."""

from __future__ import annotations

import signal

import pytest

from shardwise.runtime import Team

pytestmark = pytest.mark.xdist_group("runtime")


def takes_interrupts(report: object) -> bool:
    return signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, [])


def test_an_interrupt_is_for_the_process_that_started_them(team: Team) -> None:
    """A terminal's Ctrl-C goes to all processes. What a rank does not take, the fork server that it is a copy
    of did not either, which imports for seconds and would leave a traceback."""
    assert team.run(2, takes_interrupts) == [False, False]
