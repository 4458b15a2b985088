"""Child processes and the ends of their parent: interrupts (Ctrl-C, SIGINT) are blocked while children are
started, so that only the parent handles them, and a child ends with its parent."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


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
