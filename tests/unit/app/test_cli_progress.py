"""The progress line of a search: on a terminal, and nowhere else."""

from __future__ import annotations

import io
import os
import pty
import re
import signal
import subprocess
import sys

import pytest

from shardwise import api
from shardwise.app.cli.activity import ActivityLine, active, clear_activity, progress
from shardwise.app.cli.output import columns
from shardwise.search.clock import left_text
from shardwise_verify.proof import progress_text


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class ClosedTerminal(Terminal):
    def write(self, text: str) -> int:
        raise OSError("no one listens")


def test_a_terminal_is_shown_one_line_that_is_cleared(monkeypatch: pytest.MonkeyPatch) -> None:
    stderr = Terminal()
    monkeypatch.setattr(sys, "stderr", stderr)
    with progress() as show:
        assert show is not None
        show("256 of 4,361 schedules")
        show("x" * 300)
    clear = "\r\x1b[K"
    assert stderr.getvalue() == f"{clear}256 of 4,361 schedules{clear}{'x' * (columns() - 1)}{clear}"


def search_that_is_interrupted() -> None:
    with progress() as show:
        assert show is not None
        show("half way")
        raise KeyboardInterrupt


def test_the_line_is_cleared_where_the_search_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    stderr = Terminal()
    monkeypatch.setattr(sys, "stderr", stderr)
    with pytest.raises(KeyboardInterrupt):
        search_that_is_interrupted()
    assert stderr.getvalue().endswith("\r\x1b[K")


@pytest.mark.parametrize("stderr", [io.StringIO(), None])
def test_no_progress_is_shown_without_a_terminal(
    monkeypatch: pytest.MonkeyPatch, stderr: io.StringIO | None
) -> None:
    monkeypatch.setattr(sys, "stderr", stderr)
    with progress() as show:
        assert show is None
    assert stderr is None or stderr.getvalue() == ""


def test_a_closed_terminal_does_not_stop_the_search(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", ClosedTerminal())
    with progress() as show:
        assert show is not None
        show("anything")


def test_the_line_of_a_command_has_its_seconds_and_how_far_it_is() -> None:
    stderr, clock = Terminal(), iter([10.0, 11.2, 13.0, 14.0])
    line = ActivityLine(stderr, "shardwise plan", lambda: next(clock))
    line.clear()  # nothing is shown yet
    line.update()  # 1.2 s after the start
    line.show("3 of 9 grids")
    line.clear()
    line.clear()
    line.update()
    clear = "\r\x1b[K"
    assert stderr.getvalue() == (
        f"{clear}shardwise plan, 1 s{clear}shardwise plan, 3 s: 3 of 9 grids{clear}"
        f"{clear}shardwise plan, 4 s: 3 of 9 grids"
    )


def test_a_timer_updates_the_line_until_the_command_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """The signal of the timer is sent here, so that the test does not wait for it."""
    stderr = Terminal()
    monkeypatch.setattr(sys, "stderr", stderr)
    with active("shardwise validate"):
        assert signal.getitimer(signal.ITIMER_REAL)[1] == 1.0
        signal.raise_signal(signal.SIGALRM)
        assert stderr.getvalue().startswith("\r\x1b[Kshardwise validate, ")
        with progress() as show, active("another within it"):
            assert show is not None
            show("half way")
        assert stderr.getvalue().endswith(" s: half way\r\x1b[K")
        signal.raise_signal(signal.SIGALRM)
        clear_activity()
        assert stderr.getvalue().endswith("\r\x1b[K")
        signal.raise_signal(signal.SIGALRM)
    assert stderr.getvalue().endswith("\r\x1b[K")
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
    assert signal.getsignal(signal.SIGALRM) == signal.SIG_DFL


def test_another_timer_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", Terminal())
    before = signal.signal(signal.SIGALRM, signal.SIG_IGN)
    try:
        with active("shardwise plan"):
            assert signal.getsignal(signal.SIGALRM) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGALRM, before)


PROGRAM = """
import signal
from shardwise.app.cli import commands, output
from shardwise.app.cli.main import main
class Command:
    def main(self, **options):
        signal.raise_signal(signal.SIGALRM)
        output.print_notes(["a note"])
        return output.Output(document={})
commands.command = Command
raise SystemExit(main(["validate"]))
"""


def test_a_command_has_its_line_on_a_terminal_of_the_system() -> None:
    ours, theirs = pty.openpty()
    ran = subprocess.run([sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE, stderr=theirs, check=True)
    os.close(theirs)
    with os.fdopen(ours, "rb", buffering=0) as terminal:
        shown = terminal.read(4096).decode()
    assert ran.stdout == b"{}\n"
    assert shown.startswith("\r\x1b[Kshardwise validate, 0 s\r\x1b[Ka note")


def test_what_is_left_is_the_rest_at_the_rate_so_far() -> None:
    """A quarter in 10 s: three quarters take 30 s; 200 s of 300 are left after the first 100."""
    assert left_text(10.0, 25.0, 100.0) == "about 30 s left"
    assert left_text(100.0, 1.0, 3.0) == "about 3.33 min left"
    assert left_text(5.0, 0.0, 100.0) == ""
    assert progress_text("optimal", 25, 100, 10.0) == (
        "optimal: 25 of 100 candidates decided, about 30 s left"
    )
    assert progress_text("optimal", 1, 3, 100.0).endswith("about 3 min left")
    assert progress_text("optimal", 0, 100, 5.0) == "optimal: 0 of 100 candidates decided"


def test_an_exhaustive_search_and_its_check_say_how_far_they_are() -> None:
    """Counts rise up to the number of grids and of candidates; the search has an estimate but in the last
    line."""
    lines: list[str] = []
    made = api.plan(
        "gpt2", cluster="1x4xV100-32G", seq_len=512, global_batch_size=16, space="core", target="any",
        exhaustive=True, progress=lines.append,
    )  # fmt: skip
    counts = [int(line.split(" of ")[0].replace(",", "")) for line in lines]
    assert lines and counts == sorted(counts)
    assert all(re.search(r"^[0-9,]+ of [0-9,]+ grids, best .* s", line) for line in lines)
    assert all("left" in line for line in lines[:-1]) and "left" not in lines[-1]
    reported: list[str] = []
    assert api.check(made, progress=reported.append).ok
    found = [re.fullmatch(r"optimal: ([0-9,]+) of ([0-9,]+) candidates decided.*", line) for line in reported]
    decided = [int(one[1].replace(",", "")) for one in found if one]
    assert len(decided) == len(reported) > 0 and decided == sorted(decided)
    total = made.proof.enumerated
    assert all(one is not None and int(one[2].replace(",", "")) == total for one in found)
