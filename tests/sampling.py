"""Test cases of which every run has a sample, and `--full` all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest


def sample_of(cases: Sequence[Any], sample: Sequence[Any]) -> list[Any]:
    """`cases` as parameters; those that are not in `sample` run with `--full` only."""
    assert all(case in cases for case in sample)
    without_sample = [
        pytest.param(*_values(case), marks=pytest.mark.in_full) for case in cases if case not in sample
    ]
    return [pytest.param(*_values(case)) for case in sample] + without_sample


def _values(case: Any) -> tuple[Any, ...]:
    return case if isinstance(case, tuple) else (case,)
