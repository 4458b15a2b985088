"""Runs code of the user: what it prints goes to stderr, which it cannot close; its exceptions, and calls
that would end the process at once, become a ConfigError of one line."""

from __future__ import annotations

import contextlib
import io
import os
import sys
import traceback
from collections.abc import Iterator
from typing import NoReturn, TextIO

from shardwise.errors import ConfigError
from shardwise.inputs import printable


class PrintedText(io.TextIOBase):
    """Writes to another stream. Closing it does not close that stream."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        return self._stream.write(text)

    def flush(self) -> None:
        self._stream.flush()

    def fileno(self) -> int:
        return self._stream.fileno()

    def close(self) -> None:
        """Does nothing: shardwise writes after the user's code has ended."""


@contextlib.contextmanager
def prints_to_stderr() -> Iterator[None]:
    """What is printed within this context goes to stderr."""
    printed = PrintedText(sys.stderr)
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        yield


class EndsProcess(BaseException):
    """The user's code would end the process without its last words; no `except Exception` holds it up."""


@contextlib.contextmanager
def does_not_end() -> Iterator[None]:
    """Within this context `os._exit` and `os.abort` raise EndsProcess. In a process that the user's code has
    forked, which ends like that, they are as ever."""
    own, exit_now, abort = os.getpid(), os._exit, os.abort

    def instead_of_exit(status: int) -> NoReturn:
        if os.getpid() != own:
            exit_now(status)
        raise EndsProcess(f"os._exit({status!r})")

    def instead_of_abort() -> NoReturn:
        if os.getpid() != own:
            abort()
        raise EndsProcess("os.abort()")

    os._exit, os.abort = instead_of_exit, instead_of_abort
    try:
        yield
    finally:
        os._exit, os.abort = exit_now, abort


@contextlib.contextmanager
def users_code(file: str, *, import_folder: str) -> Iterator[None]:
    """Runs the user's code: modules in its folder can be imported, prints go to stderr, and exceptions become
    a ConfigError with their line."""
    sys.path.insert(0, import_folder)
    try:
        with prints_to_stderr(), does_not_end():
            yield
    except (ConfigError, KeyboardInterrupt):
        raise
    except BaseException as error:  # SystemExit, and exceptions of the user's own that derive from it
        frames = traceback.extract_tb(error.__traceback__)
        lines = [frame.lineno for frame in frames if frame.filename == file]
        if isinstance(error, SyntaxError) and error.filename == file:
            lines = [error.lineno]
        raise ConfigError(
            "raises an error",
            file=printable(file),
            key=f"line {lines[-1]}" if lines else None,
            found=error_text(error),
            allowed="code that runs with torch.device('meta') as the default device",
        ) from error
    finally:
        with contextlib.suppress(ValueError):
            sys.path.remove(import_folder)


def error_text(error: BaseException) -> str:
    """The type and the first paragraph of an exception on one line, also where its `__str__` raises."""
    try:
        message = " ".join(str(error).split("\n\n")[0].split())
    except Exception as failed:  # noqa: BLE001 - whatever the user's class raises
        message = f"no text: its __str__ raises {type(failed).__name__}"
    name = type(error).__name__
    return f"{name}: {message[:300]}" if message else name
