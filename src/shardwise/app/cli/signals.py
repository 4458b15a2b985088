"""Signals that ask a process to end, as one that the user's keyboard sends."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator

TERMINATION_SIGNALS = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name))


@contextlib.contextmanager
def signals_as_interrupts() -> Iterator[None]:
    """SIGTERM and SIGHUP end what is done under this as Ctrl-C does, so that nothing is left behind; those
    that follow the first are ignored while it ends. One that is ignored already (`nohup`) stays so, and so do
    all from the last words (`ignore_termination`) on."""
    if threading.current_thread() is not threading.main_thread():  # the only one that may set handlers
        yield
        return
    taken = [number for number in TERMINATION_SIGNALS if signal.getsignal(number) == signal.SIG_DFL]

    def interrupt(number: int, frame: object) -> None:
        for each in taken:
            signal.signal(each, _ignore)
        raise KeyboardInterrupt

    for number in taken:
        signal.signal(number, interrupt)
    try:
        yield
    finally:
        for number in taken:
            if signal.getsignal(number) in (interrupt, _ignore):
                signal.signal(number, signal.SIG_DFL)


def _ignore(number: int, frame: object) -> None:
    """Nothing more: the process is ending."""


def ignore_termination() -> None:
    """Let the process say its last words, and end as it means to: who sends these signals ends it by force
    after a while."""
    if threading.current_thread() is threading.main_thread():
        for number in TERMINATION_SIGNALS:
            signal.signal(number, signal.SIG_IGN)
