"""Which clusters are mixed: those on which uneven plans are searched for too."""

from __future__ import annotations

from shardwise.cluster import Cluster, pools_of

MOST_POOLS = 4
"""Pools of a cluster on which uneven plans are searched for, at most."""


def is_mixed(cluster: Cluster) -> bool:
    """Whether uneven plans are searched for: several pools, not too many, and tiers rather than links given
    one by one."""
    return not cluster.links and 1 < len(pools_of(cluster)) <= MOST_POOLS


def why_not_mixed(cluster: Cluster) -> str | None:
    """Why no uneven plan of a cluster with unlike nodes is searched for; None where one is."""
    pools = len(pools_of(cluster))
    if cluster.links:
        return "no uneven plan is searched for where the cluster gives its links one by one"
    if pools > MOST_POOLS:
        return f"uneven plans are searched for on 2 to {MOST_POOLS} kinds of nodes; the cluster has {pools}"
    return None
