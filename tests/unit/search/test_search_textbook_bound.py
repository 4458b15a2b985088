"""Why `sum(f + b) + (m - 1) max(f + b)` is neither the time of a pipeline nor a bound of it."""

from __future__ import annotations

import pytest

from shardwise.sim import Durations, makespan_s


def step_s(forward_s: list[float], backward_s: list[float], hop_s: float, microbatches: int) -> float:
    durations = Durations.of(
        stages=2, forward_s=forward_s, backward_s=backward_s, hop_forward_s=hop_s, hop_backward_s=hop_s
    )
    return float(makespan_s("1f1b", pp=2, microbatches=microbatches, vpp=1, durations=durations)[0])


def textbook_s(work_s: list[float], microbatches: int) -> float:
    return sum(work_s) + (microbatches - 1) * max(work_s)


def longest_s(microbatches: int, paths: list[tuple[float, float, float]]) -> float:
    """The longest path: to a stage, through all of its work, and back."""
    return max(before_s + microbatches * work_s + after_s for before_s, work_s, after_s in paths)


def test_uneven_stages_take_less() -> None:
    """Stage 0: F0 0-1, F1 1-2, B0 2-3, B1 3-4; stage 1, twice as fast, works at the same time: F0 1-1.5, B0
    1.5-2, F1 2-2.5, B1 2.5-3. The step takes 4 s. Textbook: (2 + 1) + (2 - 1) * 2 = 5 s.
    """
    assert step_s([1.0, 0.5], [1.0, 0.5], 0.0, 2) == pytest.approx(4.0, rel=1e-12)
    assert textbook_s([2.0, 1.0], 2) == 5.0
    assert longest_s(2, [(0.0, 2.0, 0.0), (1.0, 1.0, 1.0)]) == 4.0


def test_hops_take_more() -> None:
    """With 0.5 s hops: stage 0 F0 0-1, F1 1-2; stage 1 F0 1.5-2.5, B0 2.5-3.5, F1 3.5-4.5, B1 4.5-5.5;
    stage 0 B0 4-5, B1 6-7. The step takes 7 s. Textbook: (2 + 2) + (2 - 1) * 2 = 6 s."""
    assert step_s([1.0, 1.0], [1.0, 1.0], 0.5, 2) == pytest.approx(7.0, rel=1e-12)
    assert textbook_s([2.0, 2.0], 2) == 6.0
    assert longest_s(2, [(0.0, 2.0, 0.0), (1.5, 2.0, 1.5)]) == 7.0


def test_the_textbook_bound_is_exact_only_for_equal_stages_without_hops() -> None:
    assert step_s([1.0, 1.0], [2.0, 2.0], 0.0, 5) == pytest.approx(textbook_s([3.0, 3.0], 5), rel=1e-12)
