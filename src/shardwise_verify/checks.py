"""`Check`, the result of one verified statement, and the rules for when two numbers agree (`same`,
TOLERANCE)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import isfinite

TOLERANCE = 1e-9
"""Relative difference up to which the planner and the checker may disagree."""

ROUNDING = 1e-12
"""Rounding of a small part, relative to the total: sums in another order differ by up to some thousand
roundings."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UncheckedKey:
    """A key of a plan file, with everything below it, that no check covers, and the reason."""

    key: str
    why: str


def unchecked(why: str, *keys: str) -> tuple[UncheckedKey, ...]:
    """Keys that are unchecked for one reason."""
    return tuple(UncheckedKey(key=key, why=why) for key in keys)


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One verified statement: `found` in the plan, `expected` by the checker; both ready to print.

    `is_open`: undecided; the check neither holds nor fails.
    """

    name: str
    ok: bool
    found: str
    expected: str
    is_open: bool = False


def same(found: float, expected: float, scale: float = 0.0) -> bool:
    """Whether two numbers agree to TOLERANCE of the larger, or to ROUNDING of `scale`, the total that they
    are part of.

    Infinity and NaN agree with nothing.
    """
    if not (isfinite(found) and isfinite(expected)):
        return False
    tolerance = max(TOLERANCE * max(abs(found), abs(expected)), ROUNDING * abs(scale))
    return abs(found - expected) <= tolerance


def number_check(name: str, found: float, expected: float, scale: float = 0.0) -> Check:
    """Two numbers that must agree."""
    return Check(name=name, ok=same(found, expected, scale), found=repr(found), expected=repr(expected))


def fits(nbytes: float, limit: float) -> bool:
    """Whether bytes are within a limit, up to TOLERANCE."""
    return nbytes <= limit * (1.0 + TOLERANCE)


def fit_check(name: str, nbytes: float, limit: float) -> Check:
    """Bytes that must be within a limit."""
    return Check(name=name, ok=fits(nbytes, limit), found=f"{nbytes!r} B", expected=f"at most {limit!r} B")


def value_check(name: str, found: object, expected: object) -> Check:
    """Two values that must be equal."""
    return Check(name=name, ok=found == expected, found=str(found), expected=str(expected))


def open_if_approximated(check: Check, *, is_approximated: bool) -> Check:
    """The check of a proof, left open where something else was estimated than was given."""
    if not is_approximated or not (check.ok or check.is_open):
        return check
    found = f"as estimated: {check.found}"
    return replace(check, ok=False, is_open=True, found=found, expected="a proof for the input as given")


def parts_check(name: str, found: Mapping[str, float], expected: Mapping[str, float], total: float) -> Check:
    """Named numbers that must agree one by one and sum to `total`."""
    wrong = list(_differing(found, expected, total))
    parts_sum = sum(found.values())
    if not same(parts_sum, total):
        wrong.append(("sum", repr(parts_sum), repr(total)))
    if wrong:
        return Check(
            name=name,
            ok=False,
            found=", ".join(f"{part} {has}" for part, has, _ in wrong[:3]),
            expected=", ".join(f"{part} {should}" for part, _, should in wrong[:3]),
        )
    return Check(name=name, ok=True, found=f"{len(found)} parts of {total!r}", expected="the same parts")


def _differing(
    found: Mapping[str, float], expected: Mapping[str, float], total: float
) -> Iterator[tuple[str, str, str]]:
    """Name, found value and expected value of each part that differs."""
    for part in {**expected, **found}:
        has, should = found.get(part), expected.get(part)
        if has is None or should is None or not same(has, should, total):
            yield (
                part,
                "missing" if has is None else repr(has),
                "no such part" if should is None else repr(should),
            )
