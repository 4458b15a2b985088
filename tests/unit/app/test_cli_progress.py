"""The progress line of a search: on a terminal, and nowhere else."""

from __future__ import annotations

import io
import sys

import pytest

from shardwise.app.cli.output import WIDTH, progress


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
    assert stderr.getvalue() == f"{clear}256 of 4,361 schedules{clear}{'x' * (WIDTH - 1)}{clear}"


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
