"""The side of the child process: `serve` answers requests with what other software reads.

Values of that software become JSON by `plain_items`: enumerations and functions are their names, data types
their text; other objects are omitted.
"""

from __future__ import annotations

import io
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from enum import Enum
from typing import Any, TextIO

_FAILURES = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    ImportError,
    LookupError,
    NameError,
    OSError,
    RuntimeError,
    TypeError,
    ValueError,
)
"""Exceptions by which software rejects its input or fails to import."""


def serve(importing: Callable[[], object], read: Callable[[Mapping[str, Any]], dict[str, Any]]) -> None:
    """Answer requests until the input ends.

    `importing` imports the software; `read` gives the answer to one request. A rejected request has only
    `error`, one line; where the software cannot be imported, also `is_missing`.
    """
    replies = _own_output()
    try:
        with _silence(io.StringIO()):
            importing()
        missing = None
    except _FAILURES as error:
        missing = line_of(error)
    for line in sys.stdin:
        request = json.loads(line)
        answer = {"error": missing, "is_missing": True} if missing is not None else _answer(read, request)
        replies.write(json.dumps(answer) + "\n")
        replies.flush()


def _own_output() -> TextIO:
    """Standard output for answers only; everything that the software writes to it goes to standard error."""
    sys.stdout.flush()
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return replies


def _answer(
    read: Callable[[Mapping[str, Any]], dict[str, Any]], request: Mapping[str, Any]
) -> dict[str, Any]:
    output = io.StringIO()
    try:
        with _silence(output):
            return read(request)
    except SystemExit:
        # argparse prints the usage, and then one line with its reason.
        lines = output.getvalue().strip().splitlines() or ["it exited without a message"]
        return {"error": lines[-1]}
    except _FAILURES as error:
        return {"error": line_of(error)}


@contextmanager
def _silence(output: io.StringIO) -> Iterator[None]:
    """Capture the output of Python code."""
    with redirect_stdout(output), redirect_stderr(output):
        yield


def plain_items(values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The values that JSON can represent, as it represents them."""
    for name, value in values.items():
        is_plain, plain = _plain(value)
        if is_plain:
            yield name, plain


def _plain(value: Any) -> tuple[bool, Any]:
    """Whether JSON can represent the value, and its representation."""
    if isinstance(value, Enum):
        return True, value.name
    if value is None or isinstance(value, bool | int | float | str):
        return True, value
    if isinstance(value, list | tuple):
        parts = [_plain(part) for part in value]
        return all(is_plain for is_plain, _ in parts), [part for _, part in parts]
    if isinstance(value, dict):
        return True, {str(key): part for key, part in plain_items(value)}
    if type(value).__module__ == "torch" and type(value).__name__ == "dtype":
        return True, str(value)
    name = getattr(value, "__name__", None)
    return isinstance(name, str), name


def line_of(error: BaseException) -> str:
    """The type and the message of an exception on one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}".rstrip(": ")
