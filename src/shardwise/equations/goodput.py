"""Goodput: the share of a long run that is progress, after failures, checkpoints and the slowest node."""

from __future__ import annotations

import numpy as np

from shardwise.equations.quantity import Quantity


def system_mtbf_s(device_mtbf_s: Quantity, devices: Quantity) -> Quantity:
    """MTBF / n: mean time between failures of a job that stops when any of its n devices fails.

    Failures are independent and have a constant rate, so the rates add up. devices >= 1.
    """
    return device_mtbf_s / devices


def optimal_interval_s(stall_s: Quantity, mtbf_s: Quantity) -> Quantity:
    """sqrt(2 * stall * MTBF): the interval between checkpoints that loses least; MTBF of the whole system.

    To first order in stall / MTBF; valid for stalls well below half the MTBF. (Young 1974; Daly 2006.)
    """
    return np.sqrt(2.0 * stall_s * mtbf_s)


def checkpoint_fraction(interval_s: Quantity, stall_s: Quantity) -> Quantity:
    """stall / (interval + stall): the share of running time that waits for checkpoints.

    One stall follows each `interval_s` of work. interval_s > 0.
    """
    return stall_s / (interval_s + stall_s)


def lost_per_failure_s(interval_s: Quantity, stall_s: Quantity, restart_s: Quantity) -> Quantity:
    """(interval + stall) / 2 + restart: on average, half of the work since the last checkpoint is repeated.

    `restart_s` runs from the failure to the first new step: detection, replacement, loading. Valid for
    intervals well below the mean time between failures. (Young 1974.)
    """
    return (interval_s + stall_s) / 2.0 + restart_s


def surviving_fraction(
    interval_s: Quantity, stall_s: Quantity, restart_s: Quantity, mtbf_s: Quantity
) -> Quantity:
    """x / (exp(r) (exp(x) - 1)), x = (interval + stall) / MTBF, r = restart / MTBF: progress despite
    failures.

    A segment of work with its checkpoint takes MTBF exp(r) (exp(x) - 1) on average, where failures at rate 1
    / MTBF also interrupt restarts. (Daly 2006, the more complete of its two models.) To first order it is 1 -
    (the loss per failure) / MTBF. The code uses negative exponents, which cannot overflow.
    """
    segments = (interval_s + stall_s) / mtbf_s
    return segments * np.exp(-(restart_s / mtbf_s + segments)) / -np.expm1(-segments)


def slowest_node_slowdown(nodes: Quantity, jitter: Quantity) -> Quantity:
    """1 + jitter * sqrt(2 ln(nodes)): a synchronous step waits for the slowest of its nodes.

    `jitter` is the standard deviation of a node's step time over its mean. The expected maximum of n normal
    variables is at most sqrt(2 ln n) standard deviations above the mean, and tends to it. (Boucheron, Lugosi
    and Massart 2013, theorem 2.5.) nodes >= 1.
    """
    return 1.0 + jitter * np.sqrt(2.0 * np.log(nodes))
