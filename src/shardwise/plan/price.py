"""What training costs in money, where the prices of the devices are known."""

from __future__ import annotations

from shardwise.cluster import Cluster
from shardwise.strategy import Job


def usd_per_step(cluster: Cluster, step_time_s: float) -> float | None:
    """Dollars for a step of `step_time_s` on all nodes of `cluster`, or None where one price is not known."""
    price = cluster.price_usd_per_hour
    return None if price is None else price / 3600.0 * step_time_s


def usd_per_billion_tokens(cluster: Cluster, job: Job, step_time_s: float) -> float | None:
    """Dollars for 1e9 trained tokens at `step_time_s` per step, or None where one price is not known."""
    price = cluster.price_usd_per_hour
    if price is None:
        return None
    tokens_per_s = job.seq_len * job.global_batch_size / step_time_s
    return price / 3600.0 * 1e9 / tokens_per_s
