"""Signals that ask for the end, noted as they come and heeded where nothing is half done."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class DeferredSignals:
    """Whether a signal has come. It is waited for like a file (`fileno`), which can be read once one has."""

    def __init__(self, reader: int) -> None:
        self._reader = reader
        self.has_come = False

    def fileno(self) -> int:
        return self._reader

    def check(self) -> None:
        """KeyboardInterrupt where one has come."""
        if self.has_come:
            raise KeyboardInterrupt


@contextlib.contextmanager
def deferred_signals() -> Iterator[DeferredSignals]:
    """Within this, SIGINT, SIGTERM and SIGHUP are noted and interrupt nothing: however many come, what takes
    down is not stopped on its way. Those that are ignored stay so. A first one that came when nothing was
    left to check is a KeyboardInterrupt at the end."""
    reader, writer = os.pipe()
    noted = DeferredSignals(reader)

    def note(number: int, frame: object) -> None:
        if not noted.has_come:
            noted.has_come = True
            os.write(writer, b"!")

    taken = [number for number in ENDING if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, note) for number in taken}
    try:
        yield noted
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        os.close(reader)
        os.close(writer)
    noted.check()
