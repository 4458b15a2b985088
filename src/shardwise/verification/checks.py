"""One thing that was checked, and when two numbers are the same."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import isfinite

from shardwise.cluster import Cluster

TOLERANCE = 1e-9
"""Relative difference up to which two evaluators may disagree."""

ROUNDING = 1e-12
"""What sums in another order may leave of a small part, relative to the whole: some thousand roundings."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UncheckedKey:
    """A key of a plan file, with all below it, that no check is about, and why."""

    key: str
    why: str


REASON_QUESTION = "the question, taken as it stands"
REASON_EFFORT = "how long the search took"
REASON_SUM = "of these counts only the sum is judged"
REASON_TRACE = "what the plan does over the trace of events is not replayed"


def unchecked(why: str, *keys: str) -> tuple[UncheckedKey, ...]:
    """Keys that are not judged for one reason."""
    return tuple(UncheckedKey(key=key, why=why) for key in keys)


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """`found` is what the plan says, `expected` what the checker found; both ready to print.

    `is_open`: neither holds nor fails, for it could not be decided.
    """

    name: str
    ok: bool
    found: str
    expected: str
    is_open: bool = False


def same(found: float, expected: float, scale: float = 0.0) -> bool:
    """Whether two numbers agree to TOLERANCE of the larger, or to ROUNDING of `scale`, their whole.

    What is not finite agrees with nothing.
    """
    if not (isfinite(found) and isfinite(expected)):
        return False
    tolerance = max(TOLERANCE * max(abs(found), abs(expected)), ROUNDING * abs(scale))
    return abs(found - expected) <= tolerance


def number_check(name: str, found: float, expected: float, scale: float = 0.0) -> Check:
    """Two numbers that must agree."""
    return Check(name=name, ok=same(found, expected, scale), found=repr(found), expected=repr(expected))


def fits(nbytes: float, limit: float) -> bool:
    """Whether bytes are within a limit, as far as two evaluators agree on it."""
    return nbytes <= limit * (1.0 + TOLERANCE)


def fit_check(name: str, nbytes: float, limit: float) -> Check:
    """Bytes that must be within a limit."""
    return Check(name=name, ok=fits(nbytes, limit), found=f"{nbytes!r} B", expected=f"at most {limit!r} B")


def value_check(name: str, found: object, expected: object) -> Check:
    """Two values that must be equal."""
    return Check(name=name, ok=found == expected, found=str(found), expected=str(expected))


def priced_as_check(cluster: Cluster, stated: Sequence[str], *, is_for_trace: bool) -> Iterator[Check]:
    """The lines that say what was priced in the place of what was given, where there are any: those of the
    cluster first; of a plan for a trace also those of its events, which no plan file has."""
    own = cluster.priced_as
    if own or stated:
        allowed = "; ".join(own) or "nothing of the cluster"
        yield Check(
            name="priced as",
            ok=tuple(stated[: len(own)]) == own and (is_for_trace or len(stated) == len(own)),
            found="; ".join(stated),
            expected=f"{allowed}, then what is not judged, of the events" if is_for_trace else allowed,
        )


def open_if_priced_as(check: Check, priced_as: Sequence[str]) -> Check:
    """A proof is open where something else was priced than what was given."""
    if not priced_as or not (check.ok or check.is_open):
        return check
    found = f"as priced: {check.found}"
    return replace(check, ok=False, is_open=True, found=found, expected="a proof on what was given")


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
    return Check(
        name=name, ok=True, found=f"{len(found)} parts of {total!r}", expected="the same, one by one"
    )


def _differing(
    found: Mapping[str, float], expected: Mapping[str, float], total: float
) -> Iterator[tuple[str, str, str]]:
    """Name, what is there and what should be, of each part that differs."""
    for part in {**expected, **found}:
        has, should = found.get(part), expected.get(part)
        if has is None or should is None or not same(has, should, total):
            yield (
                part,
                "missing" if has is None else repr(has),
                "no such part" if should is None else repr(should),
            )
