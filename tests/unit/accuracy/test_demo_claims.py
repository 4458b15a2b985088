"""The demo fails if any of its claims does not hold."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from benchmarks.demo import TOLERANCE, missed, seconds_of

MOVE = {"measured_s": 0.5, "moved_s": 2.0, "moved_bytes": 100}


def log(seconds: float, *, change: Any = None) -> list[dict[str, Any]]:
    """Three steps, the change after the second."""
    lines = [
        {"step": step, "tokens": 10 * step, "loss": 3.0 - step, "step_time_s": seconds} for step in (1, 2)
    ]
    lines[1]["change"] = change
    return [*lines, {"step": 3, "tokens": 30, "loss": 0.5, "step_time_s": seconds, "change": None}]


def test_claims_that_hold_are_not_reported_as_missed() -> None:
    adaptive = log(1.0, change=MOVE)
    assert seconds_of(adaptive) == 3 * 1.0 + 0.5 + 2.0
    assert list(missed(log(1.0), log(2.0), adaptive, steps=3)) == []


def shifted(lines: list[dict[str, Any]]) -> None:
    lines[2]["loss"] *= 1.0 + 1.1 * TOLERANCE


def doubled(lines: list[dict[str, Any]]) -> None:
    lines[2]["tokens"] += 10


def truncated(lines: list[dict[str, Any]]) -> None:
    del lines[2]


def stayed(lines: list[dict[str, Any]]) -> None:
    lines[1]["change"] = None


def alone(lines: list[dict[str, Any]]) -> None:
    lines[1]["change"] = MOVE | {"moved_bytes": 0}


def late(lines: list[dict[str, Any]]) -> None:
    lines[1]["change"] = MOVE | {"moved_s": 2.6}


@pytest.mark.parametrize(
    ("broken", "named"),
    [
        (shifted, "losses of the adaptive run differ"),
        (doubled, "skipped samples"),
        (truncated, "every step once"),
        (stayed, "did not change plans"),
        (alone, "no state moved"),
        (late, "the adaptive run took 6.1 s, the static one 6.0 s"),
    ],
)
def test_each_claim_can_fail(broken: Callable[[list[dict[str, Any]]], None], named: str) -> None:
    adaptive = log(1.0, change=MOVE)
    broken(adaptive)
    assert any(named in line for line in missed(log(1.0), log(2.0), adaptive, steps=3))
