"""Pipelines: overlap at the two ends of a step."""

from __future__ import annotations

import numpy as np

from shardwise.equations.quantity import Quantity


def reduction_after_backward_s(
    reduction_s: Quantity, backward_s: Quantity, buckets: Quantity, overlap: Quantity
) -> Quantity:
    """Seconds that a stage's gradient reduction adds to its last backward of `backward_s`.

    The reduction goes bucket by bucket as layers finish: R - (1 - 1/n) min(o R, b) for n equal buckets. The
    first bucket can start after b / n, the last one only after b. `overlap` is the share of the reduction
    that can overlap with the backward pass.
    """
    return reduction_s - (1.0 - 1.0 / buckets) * np.minimum(overlap * reduction_s, backward_s)


def gathering_before_forward_s(
    gathering_s: Quantity, forward_s: Quantity, buckets: Quantity, overlap: Quantity
) -> Quantity:
    """Seconds that gathering parameters adds to a stage's first forward of `forward_s`.

    G - (1 - 1/n) min(o G, f): the first bucket is exposed, the others overlap with the forward pass.
    """
    return gathering_s - (1.0 - 1.0 / buckets) * np.minimum(overlap * gathering_s, forward_s)
