"""The tiers of a cluster whose file gives links: what a ring over consecutive devices reaches on them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from shardwise.cluster.cluster import Cluster, Link, Node, Tier, node_runs
from shardwise.cluster.links import route
from shardwise.cluster.tiers import common_span


def tiers_of_links(cluster: Cluster) -> tuple[Tier, ...]:
    """A tier for the node and one for the whole cluster (`cluster` has links and no tiers yet).

    A ring over the devices of each group, by the routes of the graph: `bytes_per_s` is the least share of a
    link that carries several of its hops, `flow_bytes_per_s` the least capacity on one hop, `latency_s` the
    longest hop.
    """
    inner = common_span(node_runs(cluster.nodes), _devices)
    spans = [span for span in (inner, cluster.devices) if span > 1] or [1]
    tiers: list[Tier] = []
    for span in dict.fromkeys(spans):
        ring = _rings(cluster, span)
        name = "node" if span < cluster.devices else "cluster"
        tiers.append(
            Tier(
                name=name,
                span=span,
                bytes_per_s=ring.shared,
                flow_bytes_per_s=ring.alone,
                latency_s=ring.latency_s,
            )
        )
    return tuple(tiers)


def _devices(node: Node) -> int:
    return node.devices


@dataclass(frozen=True, slots=True)
class _Rings:
    shared: float
    alone: float
    latency_s: float


def _rings(cluster: Cluster, span: int) -> _Rings:
    """What the hops of one ring per group of `span` devices reach, all rings sending at once."""
    by_name = {link.name: link for link in cluster.links}
    load: Counter[str] = Counter()
    paths: list[Sequence[Link]] = []
    for first in range(0, cluster.devices, span):
        ranks = range(first, min(first + span, cluster.devices))
        for rank in ranks if len(ranks) > 1 else ():
            names = route(cluster, rank, rank + 1 if rank + 1 < ranks.stop else first)
            load.update(names)
            paths.append([by_name[name] for name in names])
    if not paths:
        fastest = max(link.capacity.at(0.0) for link in cluster.links)
        return _Rings(fastest, fastest, 0.0)
    return _Rings(
        shared=min(link.capacity.at(0.0) / load[link.name] for path in paths for link in path),
        alone=min(link.capacity.at(0.0) for path in paths for link in path),
        latency_s=max(sum(link.latency_s for link in path) for path in paths),
    )
