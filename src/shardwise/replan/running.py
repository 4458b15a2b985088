"""A plan that runs on a cluster, as an arrangement on that cluster's nodes."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import fields, replace

from shardwise.cluster import Cluster, Node
from shardwise.errors import ConfigError
from shardwise.plan import Plan
from shardwise.replan.arrangement import Arrangement


def running_on(plan: Plan, cluster: Cluster) -> Arrangement:
    """The plan on the nodes that it names, or on the first nodes of the cluster that are like those it was
    made for. ConfigError where it has none such, or where they are not of one size."""
    sizes = sorted({node.devices for node in plan.cluster.nodes})
    if len(sizes) > 1:
        raise ConfigError(
            "is a strategy on nodes of several sizes, whose ranks cannot be followed node by node",
            key="PLAN",
            found=f"nodes of {', '.join(map(str, sizes))} devices",
            allowed="nodes of one size, or an uneven plan",
        )
    named = plan.for_trace.nodes if plan.for_trace is not None else (None,) * len(plan.cluster.nodes)
    slots = nodes_like(plan.cluster, cluster, named)
    strategy = plan.best.strategy
    each = plan.job.global_batch_size // (strategy.dp * strategy.micro_batch_size)
    return Arrangement(strategy=strategy, slots=slots, microbatches=(each,) * strategy.dp)


def with_devices_of(planned: Cluster, cluster: Cluster) -> Cluster:
    """The cluster with devices as those were that a plan was made for, which may have been measured.
    ConfigError where devices of one name have another memory."""
    for name in sorted(planned.classes.keys() & cluster.classes.keys()):
        if planned.classes[name].memory_bytes != cluster.classes[name].memory_bytes:
            raise ConfigError("is not of this cluster: its devices differ", key="PLAN", found=name)
    both = {name: planned.classes.get(name, own) for name, own in cluster.classes.items()}
    return replace(cluster, classes=both)


def nodes_like(planned: Cluster, cluster: Cluster, named: Sequence[str | None]) -> tuple[str, ...]:
    """For each node that a plan was made for the one of the cluster that is `named`, or the first that is
    like it. ConfigError where there is none."""
    free: dict[Node, deque[str]] = {}
    for index, node in enumerate(cluster.nodes):
        free.setdefault(replace(node, name=""), deque()).append(f"n{index}")
    slots: list[str] = []
    for name, node in zip(named, planned.nodes, strict=True):
        like = free.get(replace(node, name=""))
        if not like or name not in (None, *like):
            raise ConfigError(
                f"is not of this cluster: it needs other nodes{_difference(node, cluster)}", key="PLAN",
                found=f"{len(planned.nodes)} nodes, {node.devices} x {node.device_class} among them",
                allowed=f"nodes of {cluster.name}",
            )  # fmt: skip
        if name is not None:
            like.remove(name)
        slots.append(like.popleft() if name is None else name)
    return tuple(slots)


def _difference(node: Node, cluster: Cluster) -> str:
    """What the node is like where the cluster's nodes of its devices are not, if anything."""
    for other in cluster.nodes:
        if (other.device_class, other.devices) == (node.device_class, node.devices):
            names = [
                field.name
                for field in fields(Node)
                if field.name != "name" and getattr(node, field.name) != getattr(other, field.name)
            ]
            return "".join(f", {name} {getattr(node, name)} and not {getattr(other, name)}" for name in names)
    if any(one.device_class == node.device_class and one.devices > node.devices for one in cluster.nodes):
        return ", only some devices of one; plan with --use-all for whole nodes"
    return ""
