"""Hostlists of Slurm, such as `gpu[001-016,020]`: `expanded` and `folded`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from shardwise.errors import ConfigError
from shardwise.inputs import short_repr

MAX_HOSTS = 100_000
"""Most names of a hostlist."""

_PART = re.compile(r"((?:[^][,]|\[[^][]*\])+)(?:,|$)")
_PIECE = re.compile(r"\[([^][]*)\]|([^][]+)")
_RANGE = re.compile(r"(\d{1,12})(?:-(\d{1,12}))?")
_NUMBERED = re.compile(r"(.*?)(\d{1,12})(\D*)")


def expanded(text: str) -> list[str]:
    """The names of a hostlist, in order. ConfigError where it is none, or is cut off."""
    names: list[str] = []
    at, text = 0, text.strip()
    while at < len(text):
        match = _PART.match(text, at)
        if match is None or (match.end() == len(text) and text.endswith(",")):
            raise _wrong(text)
        names += _names_of(match.group(1).strip(), text)
        at = match.end()
        if len(names) > MAX_HOSTS:
            raise ConfigError("names too many nodes", found=short_repr(text), allowed=f"at most {MAX_HOSTS}")
    if not names:
        raise _wrong(text)
    return names


def _names_of(part: str, text: str) -> list[str]:
    names = [""]
    for ranges, plain in _PIECE.findall(part):
        parts = [plain] if plain else list(_numbers(ranges, text))
        if len(names) * len(parts) > MAX_HOSTS:
            raise ConfigError("names too many nodes", found=short_repr(text), allowed=f"at most {MAX_HOSTS}")
        names = [name + each for name in names for each in parts]
    return names


def _numbers(ranges: str, text: str) -> Iterator[str]:
    for each in ranges.split(","):
        match = _RANGE.fullmatch(each.strip())
        if match is None:
            raise _wrong(text)
        low, high = match.group(1), match.group(2) or match.group(1)
        if int(high) < int(low) or int(high) - int(low) >= MAX_HOSTS:
            raise _wrong(text)
        yield from (str(number).zfill(len(low)) for number in range(int(low), int(high) + 1))


def _wrong(text: str) -> ConfigError:
    return ConfigError("is not a hostlist", found=short_repr(text), allowed="names such as gpu[001-016]")


def folded(names: Iterable[str]) -> str:
    """The hostlist of `names`: those that differ in their last number only share a bracket."""
    groups: dict[tuple[str, str, int], list[int]] = {}
    others: list[str] = []
    for name in names:
        match = _NUMBERED.fullmatch(name)
        if match is None:
            others.append(name)
        else:
            # A number without leading zeros has width 0, so that 9 and 10 are one range.
            digits = match.group(2)
            width = len(digits) if digits.startswith("0") or len(digits) == 1 else 0
            groups.setdefault((match.group(1), match.group(3), width), []).append(int(digits))
    texts = [_bracket(prefix, suffix, width, numbers) for (prefix, suffix, width), numbers in groups.items()]
    return ",".join([*others, *texts])


def _bracket(prefix: str, suffix: str, width: int, numbers: list[int]) -> str:
    ranges: list[list[int]] = []
    for number in sorted(set(numbers)):
        if ranges and number == ranges[-1][1] + 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    texts = [
        str(low).zfill(width) if low == high else f"{str(low).zfill(width)}-{str(high).zfill(width)}"
        for low, high in ranges
    ]
    is_single = len(ranges) == 1 and ranges[0][0] == ranges[0][1]
    return f"{prefix}{texts[0]}{suffix}" if is_single else f"{prefix}[{','.join(texts)}]{suffix}"
