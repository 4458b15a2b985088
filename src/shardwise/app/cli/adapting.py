"""`train --adaptive`: measures the bandwidth of links with messages, and decides with the replanner."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shardwise.cluster import Cluster, link_graph
from shardwise.errors import ConfigError
from shardwise.plans import Plan
from shardwise.replanning import KEEP, Costs, LinkAwarePlanner
from shardwise.strategy import Strategy, target_of

if TYPE_CHECKING:
    from shardwise.measure import Pair
    from shardwise.runtime import Advice


UNCHANGED = 0.9
"""A link with at least this share of the bandwidth that the plan assumes counts as unchanged: measurements
vary by some percent."""

MAX_STEP_RATIO = 0.9
"""A change needs a predicted step time of at most this share of the current one: predictions have errors of
about 10 %."""


@dataclass(slots=True)
class LinkAdvisor:
    """Compares the measured bandwidth of links with the one that the plan's cost model assumes, and advises a
    run whether to change its plan."""

    plan: Plan
    _planner: LinkAwarePlanner | None = None

    def measure(self) -> Mapping[str, float]:
        """The bandwidth in bytes/s of every link between a node and the network."""
        from shardwise.measure import message_rates

        cluster = self.plan.cluster
        carried = link_rates(cluster, message_rates(rounds(cluster)))
        efficiency = cluster.classes[cluster.nodes[0].device_class].efficiency
        return {name: rate / efficiency.scale_out.fraction for name, rate in carried.items()}

    def advise(
        self, running: Strategy, rates: Mapping[str, float], *, horizon_s: float, migration_s: float
    ) -> Advice:
        """The advice for links at these bandwidths (bytes/s), for `horizon_s` seconds and a change that stops
        training for `migration_s` seconds."""
        from shardwise.runtime import Advice

        if self._planner is None:
            self._planner = LinkAwarePlanner(self.plan, target_of("shardwise"))
        nominal = {link.name: link.capacity.at(0.0) for link in link_graph(self.plan.cluster)}
        changed = {name: rate for name, rate in rates.items() if rate < UNCHANGED * nominal[name]}
        costs = Costs(regroup_s=migration_s, restart_s=migration_s)
        found = self._planner.decide(running, changed, costs=costs, horizon_s=horizon_s)
        if found.keep_step_s is not None and found.step_s > MAX_STEP_RATIO * found.keep_step_s:
            unchanged_s = found.keep_step_s
            return Advice(decision=KEEP, strategy=running, step_s=unchanged_s, keep_step_s=unchanged_s)
        return Advice(
            decision=found.decision,
            strategy=found.arrangement.strategy,
            step_s=found.step_s,
            keep_step_s=found.keep_step_s,
        )


def advisor_for(plan: Plan) -> LinkAdvisor:
    """The advisor of a run under `plan`. ConfigError where its cluster has no links that can be measured."""
    if len(plan.cluster.nodes) < 2 or plan.cluster.links:
        raise ConfigError(
            "has no links to monitor", key="--adaptive", found=plan.cluster.name,
            allowed="a plan for several nodes behind switches",
        )  # fmt: skip
    return LinkAdvisor(plan)


def rounds(cluster: Cluster) -> list[list[Pair]]:
    """Rounds of messages between the first ranks of neighbouring nodes, in both directions.

    Every node exchanges messages with two others, where there are as many: a slow link then differs from the
    links of its neighbours.
    """
    first, firsts = 0, []
    for node in cluster.nodes:
        firsts.append(first)
        first += node.devices
    found = []
    for start in (0, 1):
        pairs = list(zip(firsts[start::2], firsts[start + 1 :: 2], strict=False))
        found += [pairs, [(target, source) for source, target in pairs]]
    return [pairs for pairs in found if pairs]


def link_rates(cluster: Cluster, rates: Mapping[Pair, float]) -> dict[str, float]:
    """The bandwidth in bytes/s of each link between a node and the network: that of its fastest message."""
    node_of = [number for number, node in enumerate(cluster.nodes) for _ in range(node.devices)]
    names = {(link.source, link.target): link.name for link in link_graph(cluster)}
    switch = {one: other for one, other in names if one[0] == "n" and other[0] == "s"}
    found: dict[str, float] = {}
    for (source, target), rate in rates.items():
        up, down = f"n{node_of[source]}", f"n{node_of[target]}"
        for name in (names[up, switch[up]], names[switch[down], down]):
            found[name] = max(rate, found.get(name, 0.0))
    return found
