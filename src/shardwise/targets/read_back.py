"""Comparison of a plan with what the software of a target reads in the exported files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadBackDifference:
    """A value that the target read differently from the plan."""

    field: str
    plan: str
    read: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadBack:
    """The number of compared values, and the ones that differ."""

    values: int
    differences: tuple[ReadBackDifference, ...]


def compared(planned: Mapping[str, object], read: Mapping[str, object]) -> ReadBack:
    """Compare every value of a plan with the value that the target read under the same name. A value that
    it did not read differs."""
    return ReadBack(
        values=len(planned),
        differences=tuple(
            ReadBackDifference(field=name, plan=str(value), read=str(read.get(name, "nothing")))
            for name, value in planned.items()
            if name not in read or value != read[name]
        ),
    )


def rejected(error: str) -> ReadBack:
    """The comparison where the target does not accept the files, with its message."""
    refused = ReadBackDifference(field="files", plan="accepted", read=error)
    return ReadBack(values=1, differences=(refused,))
