"""Overlap at both ends of a step, by hand."""

from __future__ import annotations

import pytest

from shardwise.equations import pipeline


@pytest.mark.parametrize(
    ("reduction_s", "backward_s", "buckets", "overlap", "expected"),
    [
        (10.0, 6.0, 4, 1.0, 5.5),  # 10 - 6 * 3/4: the last bucket finds the link busy
        (10.0, 20.0, 4, 1.0, 2.5),  # all but the last bucket is hidden: 10 / 4
        (10.0, 20.0, 4, 0.75, 4.375),  # ... of which 7.5 s slow the backward by a quarter: 2.5 + 7.5 / 4
        (10.0, 40.0, 4, 0.75, 4.375),  # ... however long it is; a fraction of it would overlap all 7.5 s
        (10.0, 6.0, 4, 0.75, 5.5),  # with 6 s no more than that overlaps
        (10.0, 20.0, 1, 1.0, 10.0),  # a single bucket can only follow
        (10.0, 0.0, 4, 1.0, 10.0),  # no computation to overlap with
        (10.0, 20.0, 4, 0.0, 10.0),  # no overlap
        (0.0, 6.0, 4, 1.0, 0.0),
    ],
)
def test_what_a_reduction_or_gathering_adds(
    reduction_s: float, backward_s: float, buckets: int, overlap: float, expected: float
) -> None:
    assert pipeline.reduction_after_backward_s(reduction_s, backward_s, buckets, overlap) == expected
    assert pipeline.gathering_before_forward_s(reduction_s, backward_s, buckets, overlap) == expected
