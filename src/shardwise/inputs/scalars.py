"""What JSON and YAML have in common: numbers, text, and keys that stand once."""

from __future__ import annotations

import re
from math import isfinite
from typing import Final

from shardwise.errors import ConfigError
from shardwise.inputs.words import short_repr

JSON_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
NOT_TEXT = re.compile("[\ud800-\udfff\0]")
_MAX_DIGITS: Final = 40


def number(text: str) -> int | float:
    """Finite number that `text` in JSON syntax stands for; ValueError where it is too long or too large."""
    match = JSON_NUMBER.fullmatch(text)
    if match is not None and match.group(1) is None and match.group(2) is None:
        if len(text) > _MAX_DIGITS:
            raise ValueError(f"a number of {len(text)} digits")
        return int(text)
    value = float(text)
    if not isfinite(value):
        raise ValueError(f"the number {short_repr(text)[1:-1]}")
    return value


def checked_text(text: str, file: str | None, key: str) -> str:
    """`text` itself; ConfigError at `key` where it holds what UTF-8 cannot, or NUL."""
    if NOT_TEXT.search(text):
        raise ConfigError(
            "is not text", file=file, key=key or None, found=short_repr(text), allowed="UTF-8 without NUL"
        )
    return text


def duplicate_key(file: str | None, key: str) -> ConfigError:
    """The error of a key that stands twice in one mapping."""
    return ConfigError("is given twice", file=file, key=key, allowed="each key once")
