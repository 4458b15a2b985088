"""A verdict as plain values (`answer_of`) and as lines of text (`lines_of`)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import groupby

from shardwise_verify.checks import Check, UncheckedKey
from shardwise_verify.verdict import Verdict

VERSION = 1

SHOWN = 180
"""Most characters of a found or expected value in a line; JSON has all."""


def answer_of(verdict: Verdict) -> dict[str, object]:
    """The answer of `check --json` (docs/reference/formats.md)."""
    return {
        "schema": "shardwise.check",
        "version": VERSION,
        "plan_hash": verdict.plan_hash,
        "ok": verdict.ok,
        "checks": [asdict(check) for check in verdict.checks],
        "not_judged": [asdict(one) for one in verdict.not_judged],
        "not_re_derived": [asdict(one) for one in verdict.not_re_derived],
    }


def lines_of(verdict: Verdict) -> Iterator[tuple[str, str, str]]:
    """A line per check, then one per reason for keys that no check covers: a word, a name and a text."""
    yield from check_lines(verdict.checks)
    yield from _key_lines("not judged", verdict.not_judged)
    yield from _key_lines("not re-derived", verdict.not_re_derived)


def check_lines(checks: Sequence[Check]) -> Iterator[tuple[str, str, str]]:
    """A line per check."""
    for check in checks:
        word = "ok" if check.ok else "open" if check.is_open else "wrong"
        yield word, check.name, f"{_short(check.found)}; expected {_short(check.expected)}"


def _key_lines(name: str, keys: Sequence[UncheckedKey]) -> Iterator[tuple[str, str, str]]:
    for why, some in groupby(keys, key=lambda one: one.why):
        yield "note", name, f"{', '.join(one.key for one in some)}: {why}"


def _short(text: str) -> str:
    return text if len(text) <= SHOWN else f"{text[: SHOWN - 3]}..."
