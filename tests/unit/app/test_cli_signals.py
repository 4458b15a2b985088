"""Signals that end a process, tested in separate processes."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

SENDS = "os.kill(os.getpid(), signal.SIGTERM)"


def ran(*lines: str) -> subprocess.CompletedProcess[str]:
    head = (
        "import os, signal; from shardwise.app.cli.launched import signals_as_interrupts, ignore_termination"
    )
    return subprocess.run(
        [sys.executable, "-c", "\n".join((head, *lines))], check=False, capture_output=True, text=True
    )


def test_a_termination_signal_ends_like_an_interrupt() -> None:
    done = ran(
        "try:", f"  with signals_as_interrupts(): {SENDS}", "except KeyboardInterrupt: print('interrupted')"
    )
    assert (done.stdout, done.returncode) == ("interrupted\n", 0)


@pytest.mark.parametrize("ignores", [True, False])
def test_after_its_last_report_a_process_keeps_its_exit_code(ignores: bool) -> None:
    """A launcher ends all other processes when one ends: those that have reported their error keep their exit
    codes.
    """
    words = "ignore_termination()" if ignores else "pass"
    done = ran(f"with signals_as_interrupts(): {words}", SENDS, "raise SystemExit(2)")
    assert done.returncode == (2 if ignores else -signal.SIGTERM)


def test_a_report_after_an_interrupt_is_the_last_too() -> None:
    done = ran(
        "with signals_as_interrupts():", f"  try: {SENDS}",
        "  except KeyboardInterrupt: ignore_termination()", SENDS, "raise SystemExit(2)",
    )  # fmt: skip
    assert done.returncode == 2


def test_an_interrupt_is_raised_once() -> None:
    done = ran(
        "with signals_as_interrupts():", f"  try: {SENDS}", f"  except KeyboardInterrupt: {SENDS}",
        "raise SystemExit(2)",
    )  # fmt: skip
    assert done.returncode == 2


def test_after_an_interrupt_signals_are_as_they_were() -> None:
    done = ran(
        "try:", f"  with signals_as_interrupts(): {SENDS}", "except KeyboardInterrupt: pass", SENDS,
        "raise SystemExit(2)",
    )  # fmt: skip
    assert done.returncode == -signal.SIGTERM
