"""Runs readers on mutated texts, and judges how they refuse."""

from __future__ import annotations

import hashlib
import traceback
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random

from tests.fuzz.mutations import mutated
from tests.fuzz.readers import Reader

from shardwise.errors import ConfigError, Infeasible

MAX_ERROR = 2500
"""Most characters of an error."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """An input that a reader neither read nor refused in one line."""

    reader: str
    text: str
    reason: str


@dataclass(slots=True)
class Counts:
    """How many inputs a reader has read and refused."""

    read: int = 0
    refused: int = 0


def run(reader: Reader, folder: Path, random: Random, counts: Counts) -> Iterator[Fault | None]:
    """Endlessly: one mutated text through `reader`, and its fault, or None. Files lie in `folder`."""
    seeds = reader.seeds()
    for number, seed in enumerate(seeds):
        reason, refused = judged(reader, seed, folder)
        if reason or refused:
            raise AssertionError(f"{reader.name}: valid text {number} is refused: {reason or refused}")
    while True:
        text = mutated(random.choice(seeds), seeds, random)
        reason, refused = judged(reader, text, folder)
        counts.read += not refused
        counts.refused += bool(refused)
        yield Fault(reader=reader.name, text=text, reason=reason) if reason else None


def judged(reader: Reader, text: str, folder: Path) -> tuple[str, str]:
    """The reason why `reader` handles `text` wrongly, or "", and the text of its error, or "" where it was
    read."""
    given = text
    if reader.suffix:
        path = folder / f"input{reader.suffix}"
        path.write_bytes(text.encode("utf-8", "surrogatepass"))
        given = str(path)
    try:
        with warnings.catch_warnings(action="error"):
            reader.read(given)
    except (ConfigError, Infeasible) as error:
        refused = str(error)
        if not refused.isprintable():
            return f"not one line: {refused!r}", refused
        return (f"too long: {refused[:200]}" if len(refused) > MAX_ERROR else ""), refused or "?"
    except RecursionError as error:
        return f"RecursionError: {error}", "?"
    except Exception:  # noqa: BLE001 - any other exception is a fault
        return traceback.format_exc(), "?"
    return "", ""


def save(fault: Fault, folder: Path) -> Path:
    """Writes the input of `fault` and its reason into `folder`; returns the path of the input."""
    folder.mkdir(parents=True, exist_ok=True)
    data = fault.text.encode("utf-8", "surrogatepass")
    path = folder / f"{fault.reader.replace(' ', '-')}-{hashlib.sha256(data).hexdigest()[:12]}"
    path.write_bytes(data)
    path.with_suffix(".reason").write_text(fault.reason, "utf-8", "backslashreplace")
    return path
