"""Mutations of a text: of its values where it is JSON or YAML, else of its lines and characters."""

from __future__ import annotations

import json
from math import isfinite
from random import Random
from typing import Any

import yaml

HOSTILE = (
    "", " ", "\n", "a\nb", "a\tb", "\u2028", "\x85", "\x1b[31m", "\u202e", "\0", "\ud800", "\ufeff", "日本語",
    "é" * 300, "x" * 5000, "<script>alert(1)</script>", "$(touch x)", "../../etc/passwd",
    "/dev/zero", "%s%n", "{0}",
    "-1", "0", "1e400", "1e-320", "NaN", "Infinity", "0x10", "1_000", "9" * 50, "true", "null", "~", "yes",
    "400Gb/s", "3TiB",
)  # fmt: skip
NUMBERS = (
    0, 1, -1, 2, 3, 7, 127, 2**31, 2**53, 2**63, 10**15, 10**30, 0.0, -0.0, 0.5, 1e-9, 1e-320, 1e15, 1e300,
    float("nan"), float("inf"), float("-inf"),
)  # fmt: skip
SIGNS = "{}[]:,\"'\\#&*!|>%@`=-+.~$()<>;/ \n\t0123456789eEnN_\0\u2028\x85\ufeff"


def mutated(text: str, others: tuple[str, ...], random: Random) -> str:
    """`text` with one to three mutations; `others` are texts from which parts are taken."""
    value = _parsed(text)
    for _ in range(random.choice((1, 1, 1, 2, 3))):
        if value is not None and random.random() < 0.7:
            value = _changed(value, random)
            text = _written(value, text, random)
        else:
            text = _edited(text, others, random)
            value = _parsed(text)
    return text


def _parsed(text: str) -> Any:
    """The mapping or list that `text` is; None where it is neither JSON nor YAML with more than one line."""
    if len(text) > 300_000:
        return None
    try:
        value = json.loads(text) if text.lstrip().startswith(("{", "[")) else yaml.safe_load(text)
    except (ValueError, RecursionError, yaml.YAMLError):
        return None
    return value if isinstance(value, dict | list) else None


def _written(value: Any, before: str, random: Random) -> str:
    if before.lstrip().startswith(("{", "[")):
        return json.dumps(value, ensure_ascii=random.random() < 0.5, default=str)
    try:
        return str(yaml.safe_dump(value, sort_keys=False, allow_unicode=random.random() < 0.5))
    except (yaml.YAMLError, UnicodeError):
        return json.dumps(value, default=str)


def _places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    found = [path] if path else []
    if isinstance(value, dict):
        for key in value:
            found += _places(value[key], (*path, key))
    elif isinstance(value, list):
        for index in range(min(len(value), 20)):
            found += _places(value[index], (*path, index))
    return found


def _changed(value: Any, random: Random) -> Any:
    """`value`, a tree of its own, with one place changed."""
    places = _places(value)
    if not places:
        return {_scalar(random): _scalar(random)}
    path = random.choice(places)
    parent = value
    for step in path[:-1]:
        parent = parent[step]
    last, old = path[-1], parent[path[-1]]
    change = random.choice(
        ("value", "value", "value", "near", "near", "kind", "remove", "rename", "add", "move")
    )
    if change == "value":
        parent[last] = _scalar(random)
    elif change == "near":
        parent[last] = _near(old, random)
    elif change == "kind":
        parent[last] = random.choice(([old], {"a": old}, [], {}, str(old), [old] * 3, None))
    elif change == "remove":
        del parent[last]
    elif change == "move":
        other = random.choice(places)
        target = value
        for step in other[:-1]:
            target = target[step]
        parent[last] = json.loads(json.dumps(target[other[-1]], default=str))
    elif isinstance(parent, dict):
        name = random.choice((*HOSTILE, *map(str, parent), str(last)[:-1], str(last).upper()))
        parent[name] = parent.pop(last) if change == "rename" else _scalar(random)
    else:
        parent.insert(last, old)
    return value


def _scalar(random: Random) -> Any:
    return random.choice((random.choice(HOSTILE), random.choice(NUMBERS), True, False, None))


def _near(old: Any, random: Random) -> Any:
    """A value that differs little from `old` and has its kind."""
    if isinstance(old, bool):
        return not old
    if isinstance(old, int):
        return random.choice((old + 1, old - 1, -old, old * 2, old * 1000, old // 2, float(old) + 0.5))
    if isinstance(old, float) and isfinite(old):
        return random.choice((old * 1.001, -old, old * 1e6, old * 1e-6, int(min(abs(old), 1e18))))
    if isinstance(old, str) and old:
        at = random.randrange(len(old))
        return random.choice(
            (old[:at] + old[at + 1 :], old + old[at], old.upper(), old[:at] + "\n" + old[at:])
        )
    if isinstance(old, list) and old:
        return random.choice((old[1:], old[::-1], old + old, [*old, _scalar(random)]))
    return _scalar(random)


def _edited(text: str, others: tuple[str, ...], random: Random) -> str:
    """`text` with one change of its characters or lines."""
    lines = text.split("\n")
    at, line = random.randrange(len(text) + 1), random.randrange(len(lines))
    change = random.randrange(9)
    if change == 0:
        return text[:at]
    if change == 1:
        return text[:at] + random.choice(SIGNS) + text[at:]
    if change == 2:
        return text[:at] + text[at + random.choice((1, 1, 2, 10, 100)) :]
    if change == 3:
        return text[:at] + random.choice(HOSTILE) + text[at:]
    if change == 4:
        return "\n".join([*lines[:line], *lines[line + 1 :]])
    if change == 5:
        return "\n".join([*lines[: line + 1], *lines[line:]])
    if change == 6:
        return "\n".join([*lines[:line], "  " + lines[line], *lines[line + 1 :]])
    if change == 7:
        numbers = [place for place, sign in enumerate(text[:20_000]) if sign.isdigit()]
        if not numbers:
            return text[::-1]
        place = random.choice(numbers)
        new = str(random.choice((*NUMBERS, random.randrange(10))))
        return text[:place] + new + text[place + 1 :]
    other = random.choice(others)
    start = random.randrange(len(other) + 1)
    return text[:at] + other[start : start + random.choice((5, 50, 500))] + text[at:]
