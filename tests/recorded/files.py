"""Where the files of the net are, and their form: JSON with one record a line."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent

KINDS = ("uniform", "mixed", "graph")
"""Of questions: a strategy on like nodes, a plan of a mixed cluster, the frontier of an operator graph."""

CANDIDATES = ("uniform", "uneven", "graph")
"""Of candidates that are priced one by one."""

PLANS = FOLDER / "plans"
"""The folder of the plan files."""

DIGITS = 12
"""Of a number that is recorded: a thousand times finer than what counts as equal."""


def file_of(folder: str, name: str) -> Path:
    """`questions/uniform.json` and the like."""
    return FOLDER / folder / f"{name}.json"


@cache
def frozen(name: str) -> dict[str, Any]:
    """The frozen data of a kind (`devices`, `clusters`, `models`, `software`, `targets`, `graphs`) by name:
    to be read, not to be changed."""
    found: dict[str, Any] = read_lines(file_of("frozen", name))
    return found


def read_lines(path: Path) -> Any:
    """What `write_lines` wrote."""
    return json.loads(path.read_text(encoding="utf-8"))


def write_lines(path: Path, records: Mapping[str, Any] | Sequence[Any]) -> None:
    """A mapping of records, or a list of them, as JSON with one record a line."""
    path.parent.mkdir(exist_ok=True)
    if isinstance(records, Mapping):
        ends = "{}"
        lines = [f"{_text(name)}: {_text(record)}" for name, record in records.items()]
    else:
        ends = "[]"
        lines = [_text(record) for record in records]
    path.write_text("\n".join((ends[0], ",\n".join(lines), ends[1], "")), encoding="utf-8")


def rounded(value: Any) -> Any:
    """Plain values with numbers of so many digits, and mappings and lists as JSON has them."""
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}")
    if isinstance(value, Mapping):
        return {key: rounded(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(item) for item in value]
    return value


def _text(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
