"""Texts for error messages: names and found values, short, printable and on one line.

Also the limits of an input file (MAX_BYTES, MAX_DEPTH, MAX_NODES) and the errors for files that exceed them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Final

from shardwise.errors import ConfigError


def nearest(word: str, choices: Iterable[str], *, cutoff: float = 0.6) -> str | None:
    """The choice most similar to `word`, ignoring case, or None below the similarity `cutoff` (1: equal)."""
    from difflib import get_close_matches  # imported only when a word is misspelt

    by_folded = {choice.casefold(): choice for choice in reversed(sorted(choices))}
    found = get_close_matches(word[:100].casefold(), by_folded, n=1, cutoff=cutoff)
    return by_folded[found[0]] if found else None


def short_repr(value: object) -> str:
    """A found value, short and on one line."""
    if isinstance(value, Mapping):
        return f"a mapping of {len(value)} keys" if value else "an empty mapping"
    if isinstance(value, list | tuple):
        return f"a list of {len(value)}" if value else "an empty list"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    text = ascii(value) if isinstance(value, str) and not value.isprintable() else repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def printable(text: str) -> str:
    """`text` itself if it can be printed on one line, else escaped; cut at 200 characters."""
    short = text if len(text) <= 200 else text[:197] + "..."
    return short if short.isprintable() else ascii(short)[1:-1]


def join_key(key: str, name: str) -> str:
    """The dotted path of `name` below `key`: `nodes[0].device`; names that are not plain words are quoted."""
    part = name if re.fullmatch(r"[\w-]{1,80}", name) else short_repr(name)
    return f"{key}.{part}" if key else part


MAX_BYTES: Final = 1 << 20
MAX_DEPTH: Final = 32
MAX_NODES: Final = 100_000
"""Default limits of an input file: bytes, levels of nesting, and number of values."""


def too_large(path: str | None, nbytes: int, max_bytes: int) -> ConfigError:
    """The error for a text of more than `max_bytes`."""
    where = printable(path) if path else None
    return ConfigError(
        "is too large", file=where, found=f"{nbytes} bytes", allowed=f"at most {max_bytes} bytes"
    )


def too_deep(file: str | None) -> ConfigError:
    """The error for a text with more than MAX_DEPTH levels."""
    return ConfigError("is nested too deeply", file=file, allowed=f"at most {MAX_DEPTH} levels")


def too_many(file: str | None, max_nodes: int) -> ConfigError:
    """The error for a text with more than `max_nodes` values."""
    return ConfigError(
        "has too many values", file=file, found=f"more than {max_nodes}", allowed=f"at most {max_nodes}"
    )
