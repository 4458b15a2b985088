"""One line on a terminal's stderr that says what a command does, from its second second on.

`active` shows it while a command runs; `progress` gives a search the function that says how far it is. What
else writes to stderr calls `clear_activity` before. A timer of the system interrupts the command for each
update: with a thread, worker processes could not be forked safely.
"""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import TextIO

from shardwise.app.cli.output import columns

FIRST_S, EVERY_S = 1.0, 1.0
"""Seconds until the line is shown, and between its updates."""


class ActivityLine:
    """The line of the command `what` on the terminal `stream`; `clock` gives seconds."""

    def __init__(self, stream: TextIO, what: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream, self._what, self._clock = stream, what, clock
        self._started_s, self._text, self._is_shown = clock(), "", False

    def show(self, text: str) -> None:
        """Shows how far the command is, from now on."""
        self._text = text
        self.update()

    def update(self) -> None:
        """Writes the command with the seconds since its start, and how far it is."""
        seconds = f"{self._what}, {self._clock() - self._started_s:.0f} s" if self._what else ""
        self._write(": ".join(filter(None, (seconds, self._text))))
        self._is_shown = True

    def clear(self) -> None:
        """Removes the line, until the next update."""
        if self._is_shown:
            self._write("")
            self._is_shown = False

    def _write(self, text: str) -> None:
        # An update may interrupt another one: RuntimeError.
        with contextlib.suppress(OSError, ValueError, RuntimeError):
            encoding = self._stream.encoding or "utf-8"
            shown = text[: columns() - 1].encode(encoding, "replace").decode(encoding)
            self._stream.write(f"\r\x1b[K{shown}")
            self._stream.flush()


class _Current:
    line: ActivityLine | None = None


@contextlib.contextmanager
def active(what: str) -> Iterator[None]:
    """Shows the line of the command `what` within this context, unless it is empty: on a terminal, from the
    main thread, where no other timer is in use."""
    if not (what and _is_terminal(sys.stderr) and _has_timer()):
        yield
        return
    line = _Current.line = ActivityLine(sys.stderr, what)
    signal.signal(signal.SIGALRM, lambda *_: line.update())
    signal.setitimer(signal.ITIMER_REAL, FIRST_S, EVERY_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        _Current.line = None
        line.clear()


@contextlib.contextmanager
def progress() -> Iterator[Callable[[str], None] | None]:
    """A function that shows the progress of a search on the line of the command, or on one of its own, which
    is cleared at the end; None where stderr is not a terminal."""
    if not _is_terminal(sys.stderr):
        yield None
        return
    line = _Current.line or ActivityLine(sys.stderr, "")
    try:
        yield line.show
    finally:
        line.clear()


def clear_activity() -> None:
    """Removes the line, if there is one, so that others can write to stderr."""
    if _Current.line is not None:
        _Current.line.clear()


def _is_terminal(stream: TextIO | None) -> bool:
    return stream is not None and stream.isatty()


def _has_timer() -> bool:
    return (
        hasattr(signal, "setitimer")
        and threading.current_thread() is threading.main_thread()
        and signal.getsignal(signal.SIGALRM) == signal.SIG_DFL
    )
