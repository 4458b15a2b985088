"""What runs where: a strategy laid over nodes, and how many microbatches each of its pipelines does.

A plan that runs on a cluster, as an arrangement on that cluster's nodes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from math import gcd

import numpy as np
from numpy.typing import NDArray

from shardwise.cluster import Cluster, Node
from shardwise.errors import ConfigError
from shardwise.plans import Plan
from shardwise.strategy import Strategy, node_slots

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]


NO_NODE = ""
"""In a slot: no node."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrangement:
    """A strategy on nodes. Node `slots[k]` holds ranks k * devices per node and on; the dp-th pipeline does
    `microbatches[dp]` of the step's microbatches. Where a slot is `NO_NODE`, the microbatches of its stages
    are re-routed to their peers in other pipelines."""

    strategy: Strategy
    slots: tuple[str, ...]
    microbatches: tuple[int, ...]

    @property
    def is_rerouted(self) -> bool:
        """Whether nodes are missing and others do their work."""
        return NO_NODE in self.slots

    @property
    def nodes(self) -> tuple[str, ...]:
        """The nodes that it runs on."""
        return tuple(name for name in self.slots if name != NO_NODE)

    @property
    def has_unreplicated_states(self) -> bool:
        """Whether every part of the optimizer's states lies on one node only, and others on others."""
        shards = self.strategy.dp * self.strategy.cp
        return len(self.slots) > 1 and self.strategy.optim_shard == shards

    @property
    def shape(self) -> Strategy:
        """What makes two layouts the same: the strategy but for its number of pipelines and the layers of its
        stages. A key, not a strategy that runs."""
        return shape_of(self.strategy)


def shape_of(strategy: Strategy) -> Strategy:
    """The shape of arrangements of a strategy."""
    return replace(with_dp(strategy, 1), first_stage_layers=0, last_stage_layers=0)


def with_dp(strategy: Strategy, dp: int) -> Strategy:
    """The strategy with `dp` pipelines. What is sharded over all replicas stays so; other degrees become what
    they have in common with the new number of ranks that share parameters. One replica alone is widened to
    ZeRO-1, which it cannot be told from."""
    if dp == strategy.dp:
        return strategy
    old, new = strategy.dp * strategy.cp, dp * strategy.cp

    def shard(degree: int) -> int:
        return new if degree == old and old > 1 else gcd(degree, new)

    return replace(
        strategy,
        dp=dp,
        param_shard=shard(strategy.param_shard),
        grad_shard=shard(strategy.grad_shard),
        optim_shard=new if old == 1 else shard(strategy.optim_shard),
    )


def dp_multiple(strategy: Strategy) -> int:
    """Pipelines that must come and go together: those that share experts."""
    return max(strategy.ep * strategy.etp // (strategy.tp * strategy.cp), 1)


def microbatch_unit(strategy: Strategy) -> tuple[int, int]:
    """Microbatches of a pipeline are a multiple of the first, and no fewer than the second."""
    if strategy.schedule == "interleaved_1f1b":
        return strategy.pp, strategy.pp
    if strategy.schedule in ("zb_v", "dualpipe_v"):
        return 1, 2 * strategy.pp
    return 1, 1


@lru_cache(maxsize=4096)
def pipeline_order(strategy: Strategy, devices_per_node: int) -> tuple[int, ...]:
    """Slots in the order in which pipelines meet them first: nodes that are alike and follow each other in it
    are in the same pipelines."""
    met = node_slots(strategy, devices_per_node).reshape(-1)
    _, first = np.unique(met, return_index=True)
    return tuple(int(slot) for slot in np.argsort(first))


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
