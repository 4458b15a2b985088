"""The differences between two records: numbers that differ by more than a part in a billion, and any other
change."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from math import isclose
from typing import Any

EQUAL = 1e-9
"""Relative difference up to which two numbers are equal."""

ROUNDING = 1e-12
"""Rounding error of a number that is a difference of others: relative to 1, and in `SUMS` to their largest
entry."""

SUMS = ("seconds", "bytes")
"""Mappings whose numbers add up."""


def differences(found: Any, recorded: Any, at: str = "", whole: float = 1.0) -> Iterator[str]:
    """Every place where `found` differs from `recorded`, including entries that only one of them has."""
    if isinstance(recorded, Mapping) and isinstance(found, Mapping):
        if at.rpartition(".")[2] in SUMS:
            whole = max((abs(value) for value in recorded.values()), default=1.0)
        for name in dict.fromkeys((*recorded, *found)):
            place = f"{at}.{name}" if at else name
            if name not in found or name not in recorded:
                yield f"{place}: only {'recorded' if name in recorded else 'found'}"
            else:
                yield from differences(found[name], recorded[name], place, whole)
    elif isinstance(recorded, list) and isinstance(found, list):
        if len(found) != len(recorded):
            yield f"{at}: {len(found)} entries instead of {len(recorded)}"
        for place, (one, other) in enumerate(zip(found, recorded, strict=False)):
            yield from differences(one, other, f"{at}[{place}]", whole)
    elif not is_equal(found, recorded, whole):
        yield f"{at}: {found!r} instead of {recorded!r}"


def is_equal(found: Any, recorded: Any, whole: float = 1.0) -> bool:
    """Whether two plain values are equal; a number may be a difference of numbers up to `whole`."""
    if _is_number(found) and _is_number(recorded):
        return isclose(found, recorded, rel_tol=EQUAL, abs_tol=ROUNDING * whole)
    return type(found) is type(recorded) and bool(found == recorded)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def settled(found: Any, recorded: Any) -> Any:
    """`found` with the recorded layout of each graph point where both layouts cost the same: the order of
    sums decides which of them the search finds."""
    if "layouts" not in found or "layouts" not in recorded:
        return found
    changed = copy.deepcopy(found)
    of_points = [*zip(changed["layouts"], recorded["layouts"], strict=False)]
    if changed["chosen"] is not None and recorded["chosen"] is not None:
        of_points.append((changed["chosen"], recorded["chosen"]))
    tied = [(one, other) for one, other in of_points if _is_tied(one, other)]
    for one, other in tied:
        one["layout"] = other["layout"]
    if tied:
        changed["blocks"] = recorded["blocks"]
    return changed


def _is_tied(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether two points differ in their layouts only, and each layout has the point's cost."""
    mine, theirs = ({key: value for key, value in each.items() if key != "layout"} for each in (one, other))
    is_same = not list(differences(mine, theirs))
    return is_same and bool(one["costs_what_its_layout_does"]) and one["layout"] != other["layout"]
