"""The public exceptions: ConfigError, Infeasible and InternalError. Any other exception that escapes is a
bug.

Errors of all packages name options of the command line, such as `--seq-len`. `naming_arguments` turns them
into the arguments of a function, `seq_len`, except within `naming_options`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

MAX_PART = 1000
"""Most characters of each part of an error: its message, place, found and allowed values."""


def one_line(text: str) -> str:
    """`text` on one line that can be printed: other characters are escaped, and it is cut at MAX_PART."""
    short = text if len(text) <= MAX_PART else text[: MAX_PART - 3] + "..."
    if short.isprintable():
        return short
    return "".join(sign if sign.isprintable() else ascii(sign)[1:-1] for sign in short)


class ShardwiseError(Exception):
    """Base class of the public exceptions; catch it to catch all three."""


class ConfigError(ShardwiseError):
    """An input that cannot be used. Its text is one line: where, what was found, and what is allowed.

    `file` and `key` locate it (`key` is a dotted path such as `nodes[0].device`); either is None where the
    input has no such place. `found` and `allowed` are short texts. `one_line` keeps each part on one line,
    whatever it quotes.
    """

    def __init__(
        self,
        message: str,
        *,
        file: str | None = None,
        key: str | None = None,
        found: str | None = None,
        allowed: str | None = None,
    ) -> None:
        super().__init__(message)
        self.message = one_line(message)
        self.file = None if file is None else one_line(file)
        self.key = None if key is None else one_line(key)
        self.found = None if found is None else one_line(found)
        self.allowed = None if allowed is None else one_line(allowed)

    def __str__(self) -> str:
        where = ": ".join(part for part in (self.file, self.key) if part)
        text = f"{where}: {self.message}" if where else self.message
        if self.found is not None:
            text += f"; found {self.found}"
        if self.allowed is not None:
            text += f"; allowed: {self.allowed}"
        return text

    def within(self, *, file: str | None = None, key: str | None = None) -> ConfigError:
        """The same error, located in `file`, with `key` put in front of its own key."""
        if key and self.key:
            path = key + self.key if self.key.startswith("[") else f"{key}.{self.key}"
        else:
            path = key or self.key or ""
        return ConfigError(
            self.message, file=self.file or file, key=path or None, found=self.found, allowed=self.allowed
        )


class Infeasible(ShardwiseError):
    """No strategy of the search space is legal and fits in memory.

    `reasons` counts the rejected candidates by reason code. `relaxations` are one-line changes of the
    question with which a plan fits, cheapest first. `point` is the nearest answer as plain values, or None.
    """

    # `reasons` has a default so that the error can be pickled: other attributes are restored afterwards.

    def __init__(
        self,
        message: str,
        *,
        reasons: Mapping[str, int] | tuple[()] = (),
        relaxations: Sequence[str] = (),
        point: Mapping[str, object] | None = None,
    ) -> None:
        super().__init__(message)
        self.message = one_line(message)
        self.reasons = dict(reasons)
        self.relaxations = tuple(map(one_line, relaxations))
        self.point = point


class InternalError(ShardwiseError):
    """An invariant of shardwise is broken: a bug. `seed` and `plan_hash` help to reproduce it."""

    def __init__(self, message: str, *, seed: int | None = None, plan_hash: str | None = None) -> None:
        super().__init__(message)
        self.seed = seed
        self.plan_hash = plan_hash


# Names of options and of arguments

_NAMES_OPTIONS: ContextVar[bool] = ContextVar("names_options", default=False)

_WORDS = ("any", "default", "core", "adafactor")
"""Texts that messages name as the value of an option."""

_OPTION = re.compile(rf"(?<![\w-])--([a-z][a-z-]*)(?: ([0-9][0-9.]*\b|{'|'.join(_WORDS)})\b)?")


_KEYS = {"MODEL": "model", "GRAPH": "model", "FILE": "files", "inter-node": "inter_node"}
"""Arguments whose places in messages have other names."""


@contextmanager
def naming_options() -> Iterator[None]:
    """Context manager of the command line: errors name options as they are, instead of arguments."""
    token = _NAMES_OPTIONS.set(True)
    try:
        yield
    finally:
        _NAMES_OPTIONS.reset(token)


@contextmanager
def naming_arguments() -> Iterator[None]:
    """Context manager of a public function: errors that leave it name its arguments, not options."""
    try:
        yield
    except ConfigError as error:
        if _NAMES_OPTIONS.get():
            raise
        raise ConfigError(
            _as_arguments(error.message),
            file=error.file,
            key=_KEYS.get(error.key or "") or _if_given(error.key),
            found=error.found,
            allowed=_if_given(error.allowed),
        ) from None
    except Infeasible as error:
        if _NAMES_OPTIONS.get():
            raise
        raise Infeasible(
            _as_arguments(error.message),
            reasons=error.reasons,
            relaxations=[_as_arguments(line) for line in error.relaxations],
            point=error.point,
        ) from None


def _as_arguments(written: str) -> str:
    """`--memory-margin 0` as `memory_margin=0`, `--target any` as `target="any"`, `--dtype` as `dtype`."""
    return _OPTION.sub(_as_argument, written)


def _as_argument(match: re.Match[str]) -> str:
    name, value = match[1].replace("-", "_"), match[2]
    if value is None:
        return name
    return f'{name}="{value}"' if value in _WORDS else f"{name}={value}"


def _if_given(written: str | None) -> str | None:
    return None if written is None else _as_arguments(written)
