"""Goodput: the share of a long run that is progress, after failures, checkpoints and the slowest node."""

from __future__ import annotations

import numpy as np

from shardwise.equations.quantity import Quantity


def system_mtbf_s(device_mtbf_s: Quantity, devices: Quantity) -> Quantity:
    """MTBF / n: the mean time between failures of a job that any of its n devices stops.

    Independent failures at a constant rate, so the rates add up. devices >= 1.
    """
    return device_mtbf_s / devices


def optimal_interval_s(stall_s: Quantity, mtbf_s: Quantity) -> Quantity:
    """sqrt(2 * stall * MTBF): the work between two checkpoints that loses least, MTBF of the whole system.

    To first order in stall / MTBF; meant for stalls well below half the MTBF. (Young 1974; Daly 2006.)
    """
    return np.sqrt(2.0 * stall_s * mtbf_s)


def checkpoint_fraction(interval_s: Quantity, stall_s: Quantity) -> Quantity:
    """stall / (interval + stall): the share of running time that waits for checkpoints.

    One stall after each `interval_s` of work. interval_s > 0.
    """
    return stall_s / (interval_s + stall_s)


def lost_per_failure_s(interval_s: Quantity, stall_s: Quantity, restart_s: Quantity) -> Quantity:
    """(interval + stall) / 2 + restart: half of what ran since the last checkpoint is done again, on average.

    `restart_s` is from the failure to the first new step: noticing, replacing, loading. For intervals well
    below the mean time between failures. (Young 1974.)
    """
    return (interval_s + stall_s) / 2.0 + restart_s


def surviving_fraction(
    interval_s: Quantity, stall_s: Quantity, restart_s: Quantity, mtbf_s: Quantity
) -> Quantity:
    """x / (exp(r) (exp(x) - 1)) with x = (interval + stall) / MTBF, r = restart / MTBF: what failures leave.

    A segment of work and its checkpoint takes MTBF exp(r) (exp(x) - 1) on average, where failures at rate
    1 / MTBF also hit restarts. (Daly 2006, the more complete of its two models.) To first order it is
    1 - (the loss per failure) / MTBF. Written with negative exponents, which cannot overflow.
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
