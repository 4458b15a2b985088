"""What a decision is made on: how every node is that can be used, and what lies between sites."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from shardwise.cluster import Conditions, NodeState, NodeView, stepped


@dataclass(frozen=True, slots=True, kw_only=True)
class Between:
    """Two sites by their nodes, and what a trace says of the way between them: bytes/s in each direction for
    all of it together (None: nothing), and its one-way latency."""

    first: frozenset[str]
    second: frozenset[str]
    bytes_per_s: float | None
    latency_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Situation:
    """States of the nodes that can be used, in the order of the cluster; those of them with notice to go; and
    what lies between sites."""

    states: Mapping[str, NodeState]
    noticed: frozenset[str] = frozenset()
    between: tuple[Between, ...] = ()

    @property
    def key(self) -> tuple[object, ...]:
        """Equal for situations that are alike."""
        return (tuple(self.states.items()), self.noticed, self.between)

    def states_of(self, slots: Sequence[str], nominal: Sequence[float]) -> list[NodeState]:
        """How the nodes of an arrangement are together: where it lies on two sites, all that leaves a node is
        no faster than its share of what lies between them. `nominal` is the bytes/s of a pool's node to
        others. KeyError where one of them cannot be used."""
        own = [self.states[name] for name in slots]
        for between in self.between:
            fewest = min(
                sum(name in between.first for name in slots), sum(name in between.second for name in slots)
            )
            if fewest:
                own = [_bounded(state, between, fewest, nominal[state.pool]) for state in own]
        return own


def _bounded(state: NodeState, between: Between, nodes: int, nominal: float) -> NodeState:
    """The nodes on the smaller side share what lies between, each with all of its devices sending."""
    share = state.network
    if between.bytes_per_s is not None:
        share = min(share, stepped(between.bytes_per_s / nodes / nominal))
    return replace(state, network=share, latency_s=max(state.latency_s, between.latency_s))


def situation_of(
    view: NodeView, conditions: Conditions, sites: Mapping[str, tuple[str, ...]] | None = None
) -> Situation:
    """The situation under some conditions, with the sites of their trace."""
    between: list[Between] = []
    pairs = sorted({*conditions.site_rates, *conditions.site_latencies_s})
    for first, second in pairs:
        between.append(
            Between(
                first=frozenset((sites or {})[first]),
                second=frozenset((sites or {})[second]),
                bytes_per_s=conditions.site_rates.get((first, second)),
                latency_s=conditions.site_latencies_s.get((first, second), 0.0),
            )
        )
    return Situation(
        states=view.states(conditions),
        noticed=conditions.noticed & conditions.present,
        between=tuple(between),
    )
