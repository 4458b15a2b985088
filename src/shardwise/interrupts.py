"""Interrupts (Ctrl-C, SIGINT), termination signals (SIGTERM, SIGHUP), and child processes.

A command treats termination signals as interrupts (`signals_as_interrupts`). Both are held back while
children are started, so that only the parent handles them, and a child ends with its parent.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

INTERRUPTED = 130
"""Exit code after an interrupt."""

TERMINATION_SIGNALS = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name))


class _State:
    """Of this process: the termination signal that has arrived, what handles it (None: the handler of
    Ctrl-C), and whether it waits for children to start."""

    received: int | None = None
    handler: Callable[[int, Any], None] | None = None
    held_back = 0
    is_pending = False


@contextmanager
def signals_as_interrupts() -> Iterator[None]:
    """SIGTERM and SIGHUP do within this context what Ctrl-C does there.

    Signals after the first are ignored. A signal that is ignored already (`nohup`) stays ignored, and after
    `ignore_termination` all are. Within another such context, and outside the main thread, it does nothing.
    """
    if threading.current_thread() is not threading.main_thread():  # only the main thread may set handlers
        yield
        return
    taken = [number for number in TERMINATION_SIGNALS if signal.getsignal(number) == signal.SIG_DFL]
    if taken:
        _State.received = None
    for number in taken:
        signal.signal(number, _interrupt)
    try:
        yield
    finally:
        for number in taken:
            if signal.getsignal(number) in (_interrupt, _ignore):
                signal.signal(number, signal.SIG_DFL)


def was_interrupted(error: BaseException | None) -> bool:
    """Whether an interrupt caused `error`, as where a module whose import it ended raises its own error: a
    termination signal has arrived, or `error` was raised while Ctrl-C was handled."""
    if _State.received is not None:
        return True
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__cause__ or error.__context__
    return error is not None


def _interrupt(number: int, frame: Any) -> None:
    note_termination(number)
    for each in TERMINATION_SIGNALS:
        if signal.getsignal(each) is _interrupt:
            signal.signal(each, _ignore)
    if _State.held_back:
        _State.is_pending = True
    else:
        _handle_as_interrupt(frame)


@contextmanager
def terminated_by(handler: Callable[[int, Any], None]) -> Iterator[None]:
    """Within this context `handler` handles termination signals, also where Ctrl-C is ignored, as it is in
    background jobs of scripts."""
    before, _State.handler = _State.handler, handler
    try:
        yield
    finally:
        _State.handler = before


def _handle_as_interrupt(frame: Any) -> None:
    """What the present handler does. Where there is none and Ctrl-C is ignored, it ends this process."""
    handler = _State.handler or signal.getsignal(signal.SIGINT)
    if callable(handler):
        handler(signal.SIGINT, frame)
    else:
        raise KeyboardInterrupt


def _ignore(number: int, frame: object) -> None:
    """A handler that does nothing: the process is ending."""


def note_termination(number: int) -> None:
    """Record that this termination signal ends the process; `exit_code` follows from it."""
    if number in TERMINATION_SIGNALS:
        _State.received = number


def exit_code(code: int) -> int:
    """The exit code of a command that would end with `code`: 128 + the signal where a termination signal has
    interrupted it (143 after SIGTERM, 129 after SIGHUP)."""
    return 128 + _State.received if code == INTERRUPTED and _State.received is not None else code


def ignore_termination() -> None:
    """Ignore SIGTERM and SIGHUP from now on, so that the process can report and exit; launchers send SIGKILL
    after a while."""
    if threading.current_thread() is threading.main_thread():
        for number in TERMINATION_SIGNALS:
            signal.signal(number, signal.SIG_IGN)


# Child processes


@contextmanager
def without_interrupts() -> Iterator[None]:
    """Context manager that holds back interrupts and termination signals until it ends.

    None arrives between the start of a process and its registration. Child processes inherit the blocked
    SIGINT, so they receive none before they ignore it.
    """
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    _State.held_back += 1
    try:
        yield
    finally:
        _State.held_back -= 1
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        if _State.is_pending and not _State.held_back:
            _State.is_pending = False
            _handle_as_interrupt(None)


def leave_signals_to_parent() -> None:
    """In a child process: ignore interrupts and termination signals, which the parent handles."""
    for number in (signal.SIGINT, *TERMINATION_SIGNALS):
        signal.signal(number, signal.SIG_IGN)


def end_with_parent() -> None:
    """In a process of `multiprocessing`: end it when its parent is gone, however that ended.

    Nobody else would end it. A thread waits for the end of the parent's side of a pipe.
    """
    import multiprocessing  # it costs commands without children some milliseconds

    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=_end_after, args=(parent,), daemon=True).start()


def _end_after(parent: Any) -> None:
    parent.join()
    os._exit(1)
