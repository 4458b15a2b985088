"""Texts for error messages: names and found values, short, printable and on one line.

Also the limits of an input file (MAX_BYTES, MAX_DEPTH, MAX_NODES) and the errors for files that exceed them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, Final

from shardwise.errors import ConfigError


def nearest(word: str, choices: Iterable[str], *, cutoff: float = 0.6) -> str | None:
    """The choice most similar to `word`, ignoring case, or None below the similarity `cutoff` (1: equal)."""
    from difflib import get_close_matches  # imported only when a word is misspelt

    by_folded = {choice.casefold(): choice for choice in reversed(sorted(choices))}
    found = get_close_matches(word[:100].casefold(), by_folded, n=1, cutoff=cutoff)
    return by_folded[found[0]] if found else None


def install_text(extra: str) -> str:
    """How to install what `extra` needs, from a wheel or a checkout."""
    return f"pip install 'shardwise[{extra}]', or pip install '.[{extra}]' in a checkout"


def misspelt(word: str, known: Iterable[str]) -> str | None:
    """The known name from which `word` differs by one letter: one more, one less, another, or two swapped.

    None for words of less than four letters. Digits count as equal only to themselves, as in `fp8` and `fp4`.
    """
    if len(word) < 4:
        return None
    return next((name for name in known if _is_slip(word.casefold(), name.casefold())), None)


def _is_slip(word: str, name: str) -> bool:
    """Whether they differ by one letter, or only in case."""
    if abs(len(word) - len(name)) > 1:
        return False
    one, other = _without_start(word, name)
    one, other = _without_start(one[::-1], other[::-1])
    if any(sign.isdigit() for sign in one + other):
        return False
    return max(len(one), len(other)) <= 1 or (len(one) == 2 and one == other[::-1])


def _without_start(one: str, other: str) -> tuple[str, str]:
    """Both texts without what both begin with."""
    same = 0
    while same < min(len(one), len(other)) and one[same] == other[same]:
        same += 1
    return one[same:], other[same:]


_SAME: Final[Any] = object()


def unknown(
    message: str,
    name: object,
    known: Iterable[str],
    *,
    file: str | None = None,
    key: str | None = None,
    found: str | None = _SAME,
    allowed: str | None = None,
    prefix: str = "",
    guess: str | None = None,
) -> ConfigError:
    """The error for a `name` that is none of `known`, for every reader: what was found, what is allowed, and
    which known name is meant, where one is similar.

    `found` is the name itself unless given: None where `key` has it. `allowed` replaces the list of `known`.
    `prefix` is what a known name has in front of it (`graph:`). `guess` is the name that is meant, where
    the caller knows it.
    """
    names = tuple(known)
    if guess is None and isinstance(name, str) and len(names) <= MAX_COMPARED:
        guess = nearest(name, names)
    hint = f" (did you mean {prefix}{guess}?)" if guess and guess != name else ""
    return ConfigError(
        message + hint,
        file=file,
        key=key,
        found=short_repr(name) if found is _SAME else found,
        allowed=listed([prefix + one for one in names]) if allowed is None else allowed,
    )


def listed(choices: Iterable[str]) -> str:
    """Names as the `allowed` of an error: at most MAX_LISTED of them."""
    names = tuple(choices)
    text = ", ".join(printable(name) for name in names[:MAX_LISTED])
    return (text + (", ..." if len(names) > MAX_LISTED else "")) or "none"


MAX_LISTED: Final = 40
"""Most names that an error lists."""

MAX_COMPARED: Final = 1000
"""Most names that are compared with an unknown one: the comparison takes microseconds each."""


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
