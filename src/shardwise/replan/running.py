"""A plan that runs on a cluster, as an arrangement on that cluster's nodes."""

from __future__ import annotations

from collections import deque
from dataclasses import replace

from shardwise.cluster import Cluster, Node
from shardwise.errors import ConfigError
from shardwise.plan import Plan
from shardwise.replan.arrangement import Arrangement


def running_on(plan: Plan, cluster: Cluster) -> Arrangement:
    """The plan on the nodes that it names, or on the first nodes of the cluster that are like those it was
    made for. ConfigError where it has none such, or uses a node in part."""
    free: dict[Node, deque[str]] = {}
    for index, node in enumerate(cluster.nodes):
        free.setdefault(replace(node, name=""), deque()).append(f"n{index}")
    slots: list[str] = []
    named = plan.for_trace.nodes if plan.for_trace is not None else (None,) * len(plan.cluster.nodes)
    for name, node in zip(named, plan.cluster.nodes, strict=True):
        like = free.get(replace(node, name=""))
        if not like or name not in (None, *like):
            raise ConfigError(
                "is not of this cluster: it needs other nodes", key="PLAN",
                found=f"{len(plan.cluster.nodes)} nodes, {node.devices} x {node.device_class} among them",
                allowed=f"nodes of {cluster.name}",
            )  # fmt: skip
        if name is not None:
            like.remove(name)
        slots.append(like.popleft() if name is None else name)
    used = {node.device_class for node in plan.cluster.nodes}
    for name in sorted(used):
        if plan.cluster.classes[name].memory_bytes != cluster.classes[name].memory_bytes:
            raise ConfigError("is not of this cluster: its devices differ", key="PLAN", found=name)
    strategy = plan.best.strategy
    each = plan.job.global_batch_size // (strategy.dp * strategy.micro_batch_size)
    return Arrangement(strategy=strategy, slots=tuple(slots), microbatches=(each,) * strategy.dp)
