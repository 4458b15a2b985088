"""Plans with one change: a number, a word or a list entry; the hash is computed again."""

from __future__ import annotations

import copy
import random
import re
from collections.abc import Iterator
from typing import Any

from shardwise.plans.documents import document_hash
from shardwise.strategy import CP_KINDS, OFFLOADS, RECOMPUTES, SCHEDULES

Path = tuple[str | int, ...]

PARTS = ("best", "runners_up", "certificate", "schedule", "job")
"""Parts in which mutants differ from their plan: all claims of the planner, and the job that they
are about.
"""

WORDS: dict[str, tuple[str, ...]] = {
    "cp_kind": CP_KINDS,
    "schedule": SCHEDULES,
    "name": SCHEDULES,
    "recompute": RECOMPUTES,
    "offload": OFFLOADS,
    "axis_order": ("tp-cp-dp-pp", "cp-tp-dp-pp", "pp-tp-cp-dp", "dp-tp-cp-pp", "cp-dp-tp-pp", "tp-pp-cp-dp"),
    "space": ("core", "default", "everything"),
    "dtype": ("fp32", "fp16", "bf16", "fp8"),
    "optimizer": ("adamw", "adafactor", "sgd", "muon"),
    "evaluator": ("max-plus", "event-engine"),
}

Change = tuple[Path, dict[str, Any]]
"""Path of the change, and the whole document after it."""


def mutants(document: dict[str, Any], rng: random.Random) -> Iterator[Change]:
    """Without end: the document with one change at a random place of PARTS, equally often in each part. The
    software of the job counts as one place.
    """
    places = {part: list(_places(document[part], (part,))) for part in PARTS}
    of_software = [path for path in places["job"] if path[1] == "profile"]
    places["job"] = [path for path in places["job"] if path[1] != "profile"] + [("job", "profile")]
    while True:
        part = rng.choice(PARTS)
        if not places[part]:
            continue
        path = rng.choice(places[part])
        path = rng.choice(of_software) if path == ("job", "profile") else path
        changed = copy.deepcopy(document)
        parent: Any = changed
        for step in path[:-1]:
            parent = parent[step]
        before = parent[path[-1]]
        parent[path[-1]] = _changed(before, str(path[-1]), rng)
        if parent[path[-1]] != before:
            yield path, with_hash(changed)


def with_hash(document: dict[str, Any]) -> dict[str, Any]:
    """The document with the hash of its content."""
    document["hash"] = document_hash(document)
    return document


def _places(value: Any, path: Path) -> Iterator[Path]:
    """The path of every number, word and list."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _places(item, (*path, key))
        return
    yield path
    if isinstance(value, list):
        for index, item in enumerate(value):
            yield from _places(item, (*path, index))


def _changed(value: Any, key: str, rng: random.Random) -> Any:
    if isinstance(value, bool):
        return not value
    if isinstance(value, list):
        return _changed_list(value, rng)
    if isinstance(value, str):
        return _changed_text(value, key, rng)
    small = abs(value) * rng.choice((1e-7, 1e-4, 0.5, 1.0)) or 1.0
    if isinstance(value, int):
        return rng.choice((value + 1, value - 1, value * 2, value // 2, 0, value + max(int(small), 1)))
    return rng.choice((value + small, value - small, -value, 0.0))


def _changed_list(value: list[Any], rng: random.Random) -> list[Any]:
    """The list without an entry, with one entry twice, or with two entries exchanged."""
    changed = copy.deepcopy(value)
    if not changed:
        return [1]
    at, other = rng.randrange(len(changed)), rng.randrange(len(changed))
    match rng.choice(("drop", "double", "swap")):
        case "drop":
            del changed[at]
        case "double":
            changed.insert(at, copy.deepcopy(changed[at]))
        case _:
            changed[at], changed[other] = changed[other], changed[at]
    return changed


def _changed_text(value: str, key: str, rng: random.Random) -> str:
    """Another word of the same kind, another number in the text, or another action."""
    if key in WORDS:
        return rng.choice(WORDS[key])
    parts = re.split(r"(\d+|[FBIW])", value)
    at = rng.choice([place for place, part in enumerate(parts) if part] or [0])
    part = parts[at]
    if part.isdigit():
        parts[at] = str(max(int(part) + rng.choice((-1, 1)), 0))
    else:
        parts[at] = rng.choice("FBIW") if part in ("F", "B", "I", "W") else f"{part}x"
    return "".join(parts)
