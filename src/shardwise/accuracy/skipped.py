"""Rows that were skipped, by the reason."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shardwise.accuracy.rows import Fault


@dataclass(frozen=True, slots=True, kw_only=True)
class Skipped:
    """Rows that one reason rules out: their lines, and what was found in the first of them."""

    reason: str
    found: str
    lines: tuple[int, ...]


def skipped_by_reason(faults: Sequence[Fault]) -> tuple[Skipped, ...]:
    """The reasons with their rows, the commonest first, those alike in the order of the file."""
    groups: dict[str, list[Fault]] = {}
    for fault in faults:
        groups.setdefault(fault.reason, []).append(fault)
    found = [
        Skipped(reason=reason, found=group[0].found, lines=tuple(fault.line for fault in group))
        for reason, group in groups.items()
    ]
    return tuple(sorted(found, key=lambda skipped: -len(skipped.lines)))
