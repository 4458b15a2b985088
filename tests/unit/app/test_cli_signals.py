"""Signals that ask a process to end, in processes of their own."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

SENDS = "os.kill(os.getpid(), signal.SIGTERM)"


def ran(*lines: str) -> subprocess.CompletedProcess[str]:
    head = "import os, signal; from shardwise.app.cli.signals import ended_like_interrupts, ignore_ending"
    return subprocess.run(
        [sys.executable, "-c", "\n".join((head, *lines))], check=False, capture_output=True, text=True
    )


def test_what_is_asked_to_end_ends_as_by_the_keyboard() -> None:
    done = ran("try:", f"  with ended_like_interrupts(): {SENDS}", "except KeyboardInterrupt: print('told')")
    assert (done.stdout, done.returncode) == ("told\n", 0)


@pytest.mark.parametrize("speaks", [True, False])
def test_behind_its_last_words_a_process_ends_as_it_means_to(speaks: bool) -> None:
    """A launcher ends all others when it has seen one end: those that have spoken keep their exit codes."""
    words = "ignore_ending()" if speaks else "pass"
    done = ran(f"with ended_like_interrupts(): {words}", SENDS, "raise SystemExit(2)")
    assert done.returncode == (2 if speaks else -signal.SIGTERM)


def test_words_behind_an_interrupt_are_the_last_too() -> None:
    done = ran(
        "with ended_like_interrupts():", f"  try: {SENDS}", "  except KeyboardInterrupt: ignore_ending()",
        SENDS, "raise SystemExit(2)",
    )  # fmt: skip
    assert done.returncode == 2


def test_an_interrupt_comes_once() -> None:
    done = ran(
        "with ended_like_interrupts():", f"  try: {SENDS}", f"  except KeyboardInterrupt: {SENDS}",
        "raise SystemExit(2)",
    )  # fmt: skip
    assert done.returncode == 2


def test_after_an_interrupt_signals_are_as_they_were() -> None:
    done = ran(
        "try:", f"  with ended_like_interrupts(): {SENDS}", "except KeyboardInterrupt: pass", SENDS,
        "raise SystemExit(2)",
    )  # fmt: skip
    assert done.returncode == -signal.SIGTERM
