"""Block interrupts (Ctrl-C, SIGINT) while child processes are started, so that only the parent handles
them."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_interrupts() -> Iterator[None]:
    """Context manager that blocks SIGINT until it ends.

    No interrupt arrives between the start of a process and its registration. Child processes inherit the
    blocked signal, so they receive none before they ignore it.
    """
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
