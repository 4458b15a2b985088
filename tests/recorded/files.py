"""The files of the recorded questions and answers: JSON with one record per line."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent

KINDS = ("uniform", "mixed", "graph")
"""Kinds of questions: a uniform strategy, a plan of a mixed cluster, the frontier of an operator graph."""

CANDIDATES = ("uniform", "uneven", "graph")
"""Kinds of candidates, which are evaluated one by one."""

PLANS = FOLDER / "plans"
"""The folder of the plan files."""

DIGITS = 12
"""Digits of a recorded number: a thousand times finer than the tolerance."""


def file_of(folder: str, name: str) -> Path:
    """A path such as `questions/uniform.json`."""
    return FOLDER / folder / f"{name}.json"


@cache
def frozen(name: str) -> dict[str, Any]:
    """The frozen data of a kind (`devices`, `clusters`, `models`, `software`, `targets`, `graphs`) by name;
    read-only."""
    found: dict[str, Any] = read_lines(file_of("frozen", name))
    return found


def read_lines(path: Path) -> Any:
    """Reads a file of `write_lines`."""
    return json.loads(path.read_text(encoding="utf-8"))


def write_lines(path: Path, records: Mapping[str, Any] | Sequence[Any]) -> None:
    """Writes a mapping of records, or a list of them, as JSON with one record per line."""
    path.parent.mkdir(exist_ok=True)
    if isinstance(records, Mapping):
        ends = "{}"
        lines = [f"{_text(name)}: {_text(record)}" for name, record in records.items()]
    else:
        ends = "[]"
        lines = [_text(record) for record in records]
    path.write_text("\n".join((ends[0], ",\n".join(lines), ends[1], "")), encoding="utf-8")


def rounded(value: Any) -> Any:
    """Plain values with numbers rounded to DIGITS, and mappings and lists as in JSON."""
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}")
    if isinstance(value, Mapping):
        return {key: rounded(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(item) for item in value]
    return value


def _text(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
