"""Pipelines: closed forms, and overlap at the step's two ends."""

from __future__ import annotations

import numpy as np

from shardwise.equations.number import Quantity


def equal_stages_s(
    pp: Quantity, microbatches: Quantity, forward_s: Quantity, backward_s: Quantity
) -> Quantity:
    """(m + pp - 1)(t_f + t_b): GPipe and 1F1B with equal stages and free hops. (Huang et al. 2019; Narayanan
    et al. 2021, section 2.2.)"""
    return (microbatches + pp - 1) * (forward_s + backward_s)


def interleaved_equal_stages_s(
    pp: Quantity, vpp: Quantity, microbatches: Quantity, forward_s: Quantity, backward_s: Quantity
) -> Quantity:
    """(m + (pp - 1) / vpp)(t_f + t_b), t of a rank's whole part: the bubble divided by vpp. (Narayanan et al.
    2021, section 2.2.)"""
    return (microbatches + (pp - 1) / vpp) * (forward_s + backward_s)


def reduction_after_backward_s(reduction_s: Quantity, backward_s: Quantity, buckets: Quantity) -> Quantity:
    """What is left of a stage's gradient reduction after its last backward of `backward_s`.

    The reduction goes bucket by bucket as layers finish: max(R - b (1 - 1/n), R / n) for n equal buckets; the
    first can start after b / n, the last only after b.
    """
    return np.maximum(reduction_s - backward_s * (1.0 - 1.0 / buckets), reduction_s / buckets)


def gathering_before_forward_s(gathering_s: Quantity, forward_s: Quantity, buckets: Quantity) -> Quantity:
    """What must be gathered before a stage's first forward of `forward_s` so that the rest arrives in time.

    max(G - f (1 - 1/n), G / n): the mirror image of the reduction.
    """
    return np.maximum(gathering_s - forward_s * (1.0 - 1.0 / buckets), gathering_s / buckets)
