"""Goodput of a plan, the share of a long run that is progress, given failures, checkpoints and jitter; and
its cost in USD."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from shardwise.cluster import Cluster
from shardwise.equations import goodput
from shardwise.plans.record import Result
from shardwise.strategy import Job

GOODPUT_FROM_DEVICES = 1000
"""Number of devices from which goodput is reported by default."""

DEVICE_MTBF_S = 54 * 86400.0 * 16384 / 419
"""Mean time between failures of a device, in seconds: 50,677 h, from 419 unexpected interruptions in 54 days
on 16,384 H100 (Llama 3, arXiv 2407.21783, 3.3.4)."""

CHECKPOINT_STALL_S = 6.3
"""Seconds for which an asynchronous checkpoint of a 7B model stops training (PyTorch and IBM 2024, "Reducing
Model Checkpointing Times by Over 10x"); "several seconds" in MegaScale (arXiv 2402.15627, 4.4)."""

RESTART_S = 600.0
"""Seconds from a failure to the restart. Detection and diagnostics take less than 10 minutes on average
(MegaScale, 6.3); a fully synchronous job stops for 10 minutes (arXiv 2602.00277, abstract)."""

JITTER = 0.007
"""Relative standard deviation of node step times. About 0.5 % of the hosts take 10 % longer (MegaScale, 5.1
and 6.3), which gives 0.10 * sqrt(0.005 * 0.995) = 0.0071. Normally distributed node times are an
assumption."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reliability:
    """How often a device fails, what checkpoints and restarts cost, and how node step times vary.

    `checkpoint_interval_s` is the work between checkpoints, None for the optimum. `jitter` is the standard
    deviation of a node's step time divided by its mean.
    """

    device_mtbf_s: float = DEVICE_MTBF_S
    checkpoint_interval_s: float | None = None
    checkpoint_stall_s: float = CHECKPOINT_STALL_S
    restart_s: float = RESTART_S
    jitter: float = JITTER


@dataclass(frozen=True, slots=True, kw_only=True)
class Goodput:
    """`fraction` of the wall time is progress at the planned step time; `lost` are the other shares.

    `fraction` and `lost` (failures, checkpoints, jitter) sum to 1. `tokens_per_s_per_device` is the effective
    rate, `lost_per_failure_s` the mean cost of a failure, `inputs` the parameters.
    """

    fraction: float
    lost: Mapping[str, float]
    tokens_per_s_per_device: float | None
    system_mtbf_s: float
    checkpoint_interval_s: float
    lost_per_failure_s: float
    inputs: Reliability


def goodput_of(result: Result, cluster: Cluster, reliability: Reliability) -> Goodput:
    """The goodput of a long run of `result` on `cluster`."""
    return goodput_at(result.step_time_s, result.tokens_per_s_per_device, cluster, reliability)


def goodput_at(
    step_time_s: float, tokens_per_s: float | None, cluster: Cluster, reliability: Reliability
) -> Goodput:
    """The goodput of a long run on `cluster` with steps of `step_time_s` and `tokens_per_s` per device (None
    where samples have no tokens).

    Checkpoints are at the ends of steps, so an interval is at least one step.
    """
    mtbf_s = goodput.system_mtbf_s(reliability.device_mtbf_s, cluster.devices)
    stall_s, restart_s = reliability.checkpoint_stall_s, reliability.restart_s
    chosen_s = reliability.checkpoint_interval_s
    requested_s = goodput.optimal_interval_s(stall_s, mtbf_s) if chosen_s is None else chosen_s
    interval_s = max(float(requested_s), step_time_s)
    surviving = float(goodput.surviving_fraction(interval_s, stall_s, restart_s, mtbf_s))
    working = surviving * (1.0 - goodput.checkpoint_fraction(interval_s, stall_s))
    fraction = working / float(goodput.slowest_node_slowdown(len(cluster.nodes), reliability.jitter))
    return Goodput(
        fraction=fraction,
        lost={"failures": 1.0 - surviving, "checkpoints": surviving - working, "jitter": working - fraction},
        tokens_per_s_per_device=None if tokens_per_s is None else tokens_per_s * fraction,
        system_mtbf_s=mtbf_s,
        checkpoint_interval_s=interval_s,
        lost_per_failure_s=goodput.lost_per_failure_s(interval_s, stall_s, restart_s),
        inputs=reliability,
    )


def usd_per_step(cluster: Cluster, step_time_s: float) -> float | None:
    """USD for a step of `step_time_s` on all nodes of `cluster`; None if a price is unknown."""
    price = cluster.price_usd_per_hour
    return None if price is None else price / 3600.0 * step_time_s


def usd_per_billion_tokens(cluster: Cluster, job: Job, step_time_s: float) -> float | None:
    """USD for 1e9 trained tokens at `step_time_s` per step; None if a price is unknown."""
    price = cluster.price_usd_per_hour
    if price is None:
        return None
    tokens_per_s = job.seq_len * job.global_batch_size / step_time_s
    return price / 3600.0 * 1e9 / tokens_per_s
