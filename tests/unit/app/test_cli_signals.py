"""Signals that end a process, tested in separate processes."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

SENDS = "os.kill(os.getpid(), signal.SIGTERM)"


def ran(*lines: str) -> subprocess.CompletedProcess[str]:
    head = "import os, signal; from shardwise.interrupts import signals_as_interrupts, ignore_termination"
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


COMMAND = """
import os, signal
from shardwise.questions import planning
from shardwise.app.cli.main import main
signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job ignores interrupts
def plan(*_, **__):
    {body}
planning._search = plan
words = ["--cluster", "1x1xA100-80G", "--seq-len", "64", "--global-batch-size", "8", "--target", "any"]
raise SystemExit(main(["plan", "gpt2", *words]))
"""


def command(body: str) -> subprocess.CompletedProcess[str]:
    """`plan`, of which `body` stands for the search with its clock, in a process of its own."""
    script = COMMAND.format(body=body)
    return subprocess.run([sys.executable, "-c", script], check=False, capture_output=True, text=True)


@pytest.mark.parametrize(("name", "code"), [("SIGTERM", 143), ("SIGHUP", 129), ("SIGINT", 130)])
def test_each_signal_interrupts_a_command_with_its_code(name: str, code: int) -> None:
    done = command(f"os.kill(os.getpid(), signal.{name})")
    assert (done.returncode, done.stdout) == (code, "")
    assert done.stderr == "shardwise: error: interrupted before there was an answer\n"


@pytest.mark.parametrize(("name", "code"), [("SIGTERM", 143), ("SIGHUP", 129), ("SIGINT", 130)])
def test_an_interrupt_while_a_dataclass_is_made_has_its_code_too(
    name: str, code: int, tmp_path: Path
) -> None:
    """Formerly the interpreter of `python -m shardwise` ended itself by SIGINT, as it does after an interrupt
    within exec() of a text, even where it is handled."""
    lines = (
        "import os, signal, sys, shardwise.app.cli.output",  # what is imported later calls exec() too
        "main = sys.modules['shardwise.app.cli.main']",
        "signal.signal(signal.SIGINT, signal.default_int_handler)",
        f"main._run = lambda arguments: exec('os.kill(os.getpid(), signal.{name})')",
        "raise SystemExit(main.main([]))",
    )
    (tmp_path / "interrupted.py").write_text("\n".join(lines))
    done = subprocess.run(
        [sys.executable, "-m", "interrupted"], cwd=tmp_path, check=False, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (code, "")


@pytest.mark.parametrize(("name", "code"), [("SIGTERM", 143), ("SIGHUP", 129), ("SIGINT", 130)])
def test_an_error_that_an_interrupt_causes_is_the_interrupt(name: str, code: int) -> None:
    """Formerly it was called a bug, with exit code 1: modules that fail to be imported raise ImportError."""
    end = f"os.kill(os.getpid(), signal.{name})"
    done = command(
        f"try: {end}; import this\n    except BaseException: raise ImportError('numpy failed to import')"
    )
    assert (done.returncode, done.stdout) == (code, "")
    assert done.stderr == "shardwise: error: interrupted before there was an answer\n"


def test_a_termination_signal_ends_a_search_as_ctrl_c_does() -> None:
    """The first one ends the time of the search, whose best so far is the answer."""
    done = ran(
        "from shardwise.search.clock import SearchClock",
        "with signals_as_interrupts(), SearchClock().handling_interrupts() as clock:",
        f"  {SENDS}", "  print(clock.is_interrupted, clock.is_over)",
    )  # fmt: skip
    assert (done.stdout, done.returncode) == ("True True\n", 0)


def test_a_termination_signal_waits_until_children_are_started() -> None:
    done = ran(
        "from shardwise.interrupts import without_interrupts",
        "try:",
        "  with signals_as_interrupts():",
        f"    with without_interrupts(): {SENDS}; print('started')",
        "except KeyboardInterrupt: print('interrupted')",
    )
    assert (done.stdout, done.returncode) == ("started\ninterrupted\n", 0)


def test_a_child_leaves_signals_to_its_parent() -> None:
    done = ran(
        "from shardwise.interrupts import leave_signals_to_parent", "leave_signals_to_parent()", SENDS,
        "os.kill(os.getpid(), signal.SIGHUP); os.kill(os.getpid(), signal.SIGINT); print('alive')",
    )  # fmt: skip
    assert done.stdout == "alive\n"


def test_an_ignored_hangup_stays_ignored() -> None:
    done = ran(
        "signal.signal(signal.SIGHUP, signal.SIG_IGN)",
        "with signals_as_interrupts(): os.kill(os.getpid(), signal.SIGHUP)",
        "print('alive')",
    )
    assert done.stdout == "alive\n"
