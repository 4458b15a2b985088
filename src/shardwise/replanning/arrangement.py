"""An `Arrangement`: a strategy on named nodes, with the number of micro-batches of each pipeline.

`running_on` turns a plan into an arrangement on the nodes of a cluster.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from math import gcd

import numpy as np
from numpy.typing import NDArray

from shardwise.cluster import Cluster, Node
from shardwise.errors import ConfigError
from shardwise.plans import Plan
from shardwise.strategy import Strategy, node_slots, strategy_record

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]


NO_NODE = ""
"""An empty slot."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrangement:
    """A strategy on nodes. Node `slots[k]` holds the ranks from k * devices per node on. Pipeline i does
    `microbatches[i]` of the step's micro-batches. If a slot is `NO_NODE`, the micro-batches of its stages are
    re-routed to their peers in other pipelines."""

    strategy: Strategy
    slots: tuple[str, ...]
    microbatches: tuple[int, ...]

    @property
    def is_rerouted(self) -> bool:
        """Whether nodes are missing and their micro-batches are re-routed."""
        return NO_NODE in self.slots

    @property
    def nodes(self) -> tuple[str, ...]:
        """The nodes that it runs on."""
        return tuple(name for name in self.slots if name != NO_NODE)

    @property
    def can_be_saved(self) -> bool:
        """Whether a plan file can represent it as a strategy: no re-routing, equal shares of pipelines."""
        return not self.is_rerouted and len(set(self.microbatches)) == 1

    @property
    def stage_dp(self) -> int:
        """Largest number of replicas of a stage that are not pipelines of their own."""
        return 1

    @property
    def document(self) -> dict[str, object]:
        """What runs, as the JSON answers have it."""
        return {"strategy": strategy_record(self.strategy)}

    @property
    def has_unreplicated_states(self) -> bool:
        """Whether every optimizer state shard is on a single node, and the shards on different nodes."""
        shards = self.strategy.dp * self.strategy.cp
        return len(self.slots) > 1 and self.strategy.optim_shard == shards

    @property
    def shape(self) -> Strategy:
        """The key of the pipeline shape: the strategy without its number of pipelines and its layers per
        stage. It is not a strategy that runs."""
        return shape_of(self.strategy)


def shape_of(strategy: Strategy) -> Strategy:
    """The shape key of arrangements of a strategy."""
    return replace(with_dp(strategy, 1), first_stage_layers=0, last_stage_layers=0)


def pipelines_of(strategy: Strategy) -> Strategy:
    """The strategy with two pipelines: `with_dp` of it has the same pipelines and the same ZeRO stage. It is
    not a strategy that runs."""
    return with_dp(strategy, 2)


def with_dp(strategy: Strategy, dp: int) -> Strategy:
    """The strategy with `dp` pipelines. Full sharding stays full; other sharding degrees become their
    greatest common divisor with the new number of ranks that share parameters. A single replica becomes ZeRO
    stage 1, which is the same on one rank."""
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
    """Number of pipelines that must be added or removed together because they share experts."""
    return max(strategy.ep * strategy.etp // (strategy.tp * strategy.cp), 1)


def microbatch_unit(strategy: Strategy) -> tuple[int, int]:
    """The unit of micro-batches per pipeline, and their least number."""
    if strategy.schedule == "interleaved_1f1b":
        return strategy.pp, strategy.pp
    if strategy.schedule in ("zb_v", "dualpipe_v"):
        return 1, 2 * strategy.pp
    return 1, 1


@lru_cache(maxsize=4096)
def pipeline_order(strategy: Strategy, devices_per_node: int) -> tuple[int, ...]:
    """Slots in the order in which pipelines first use them. If equal nodes are consecutive in this order,
    they share pipelines."""
    met = node_slots(strategy, devices_per_node).reshape(-1)
    _, first = np.unique(met, return_index=True)
    return tuple(int(slot) for slot in np.argsort(first))


def running_on(plan: Plan, cluster: Cluster) -> Arrangement:
    """The plan on the nodes that it names, or on the first nodes of the cluster that are equal to its own.
    Raises ConfigError if there are none, or if nodes have several sizes."""
    sizes = sorted({node.devices for node in plan.cluster.nodes})
    if len(sizes) > 1:
        raise ConfigError(
            "is a strategy on nodes of several sizes, which replanning does not support",
            key="PLAN",
            found=f"nodes of {', '.join(map(str, sizes))} devices",
            allowed="nodes of one size, or an uneven plan",
        )
    slots = nodes_of(plan, cluster)
    strategy = plan.strategy
    each = plan.job.global_batch_size // (strategy.dp * strategy.micro_batch_size)
    return Arrangement(strategy=strategy, slots=slots, microbatches=(each,) * strategy.dp)


def with_devices_of(planned: Cluster, cluster: Cluster) -> Cluster:
    """The cluster with the device properties of the plan's cluster, which may have been measured. Raises
    ConfigError if devices of one name have different memory."""
    for name in sorted(planned.classes.keys() & cluster.classes.keys()):
        if planned.classes[name].memory_bytes != cluster.classes[name].memory_bytes:
            raise ConfigError("is not of this cluster: its devices differ", key="PLAN", found=name)
    both = {name: planned.classes.get(name, own) for name, own in cluster.classes.items()}
    return replace(cluster, classes=both)


def nodes_of(plan: Plan, cluster: Cluster) -> tuple[str, ...]:
    """For each node of the plan's cluster, the node of `cluster` that the plan names, or the first equal one.
    Raises ConfigError if there is none."""
    planned = plan.cluster
    named = plan.for_trace.nodes if plan.for_trace is not None else (None,) * len(planned.nodes)
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
    """The differing properties of the node and the first node of the cluster with the same devices, if
    any."""
    for other in cluster.nodes:
        if (other.device_class, other.devices) == (node.device_class, node.devices):
            names = [
                field.name
                for field in fields(Node)
                if field.name != "name" and getattr(node, field.name) != getattr(other, field.name)
            ]
            return "".join(
                f", {name} {getattr(node, name)} instead of {getattr(other, name)}" for name in names
            )
    if any(one.device_class == node.device_class and one.devices > node.devices for one in cluster.nodes):
        return ", with only some devices of a node; plan with --use-all for whole nodes"
    return ""
