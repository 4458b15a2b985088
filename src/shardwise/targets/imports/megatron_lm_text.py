"""Text of Megatron-LM runs as named values: the `arguments` block of a log, or flags in a file or script."""

from __future__ import annotations

import ast
import re
import shlex
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

from shardwise.errors import ConfigError
from shardwise.inputs import short_repr

_LOG_BLOCK = re.compile(r"-{3,} arguments -{3,}(.*?)-{3,} end of arguments -{3,}", re.DOTALL)
_LOG_LINE = re.compile(r"(?:^|\s)([a-z][a-z0-9_]*) \.+ ?(.*)$", re.MULTILINE)
_ASSIGNMENT = re.compile(
    r"^\s*(?:export\s+)?([A-Za-z_]\w*)=(?!\()([^\s;]*|\"[^\"]*\"|'[^']*')\s*$", re.MULTILINE
)
_VARIABLE = re.compile(r"\$(?:(\w+)|\{(\w+)(?::?-([^}]*))?\})")

MOST_STAGE_LETTERS = 200_000
"""Longest layout that is expanded."""


def is_log(text: str) -> bool:
    """Whether the text has an `arguments` block."""
    return _LOG_BLOCK.search(text) is not None


def is_flags(text: str, *names: str) -> bool:
    """Whether the text has one of these flags of Megatron-LM (default: flags that every run has), outside of
    comments."""
    known = "|".join(names or ("micro-batch-size", "num-layers", "tensor-model-parallel-size"))
    return re.search(rf"(?m)^[^#\n]*--({known})\b", text) is not None


def log_values(text: str) -> dict[str, Any]:
    """Every argument of the first `arguments` block, by its name."""
    block = _LOG_BLOCK.search(text)
    lines = _LOG_LINE.findall(block.group(1)) if block else ()
    return {name: _value(value.strip()) for name, value in lines}


def flag_values(text: str) -> tuple[dict[str, Any], list[str]]:
    """Every flag by the name of its argument, the last one where it is repeated, and the flags that are
    repeated with another value. Variables of a script are replaced where it sets them."""
    found: dict[str, Any] = {}
    repeated = []
    for flag, values in _flags(_words(text)):
        name, value = flag.removeprefix("--").replace("-", "_"), _value(" ".join(values)) if values else True
        if found.get(name, value) != value:
            repeated.append(flag)
        found[name] = value
    return found, repeated


def _words(text: str) -> list[str]:
    joined = text.replace("\\\n", " ")
    variables = {name: value.strip("\"'") for name, value in _ASSIGNMENT.findall(joined)}
    for _ in range(3):  # variables of variables
        joined = _VARIABLE.sub(lambda match: _replaced(match, variables), joined)
    try:
        return shlex.split(joined, comments=True)
    except ValueError as error:
        raise ConfigError(
            f"is no shell text: {error}".lower(), allowed="flags, or a script with one command"
        ) from None


def _replaced(match: re.Match[str], variables: Mapping[str, str]) -> str:
    """The value of a variable, else its default, else its own text."""
    name = match.group(1) or match.group(2)
    value = variables.get(name, match.group(3))
    return match.group(0) if value is None or match.group(0) == value else value


def _flags(words: list[str]) -> Iterator[tuple[str, list[str]]]:
    """Flags with their values: the words up to the next flag, or the end of a bash array or a command."""
    flag: str | None = None
    values: list[str] = []
    for word in (*words, "--"):
        if word.startswith("--") or word in (")", "&&", ";", "|"):
            if flag is not None:
                yield flag, values
            flag, values = (word if len(word) > 2 and word[0] == "-" else None), []
            if flag is not None and "=" in flag:
                flag, _, value = flag.partition("=")
                values = [value]
        elif flag is not None:
            is_last = word.endswith(")") and "(" not in word
            values.append(word.removesuffix(")") if is_last else word)
            if is_last:
                yield flag, values
                flag, values = None, []


def _value(text: str) -> Any:
    """The plain value that a text of Python or of a shell stands for."""
    if "$" in text:
        return text
    try:
        with warnings.catch_warnings(action="ignore", category=SyntaxWarning):
            value = ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return text
    return value if isinstance(value, int | float | list | type(None)) else text


def layout_counts(text: str, field: str) -> tuple[int, ...]:
    """Decoder layers of each stage of a `--pipeline-model-parallel-layout`, in model order."""
    expanded = text.replace(",", "").replace(" ", "")
    pattern = re.compile(r"\(([^()]*)\)\*(\d{1,5})|([A-Za-z])\*(\d{1,5})|\(([^()*]*)\)(?!\*)")
    while (match := pattern.search(expanded)) is not None:
        inner = match.group(1) or match.group(3) or match.group(5) or ""
        times = int(match.group(2) or match.group(4) or 1)
        if len(inner) * times + len(expanded) > MOST_STAGE_LETTERS:
            raise ConfigError("is too long", key=field, found=short_repr(text))
        expanded = expanded[: match.start()] + inner * times + expanded[match.end() :]
    if set(expanded) - set("Etm|L"):
        raise ConfigError(
            "is no layout",
            key=field,
            found=short_repr(text),
            allowed="E, t, m and L of each stage, joined by |",
        )
    return tuple(stage.count("t") for stage in expanded.split("|"))
