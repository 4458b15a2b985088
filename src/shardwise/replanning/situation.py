"""A `Situation`: the state of every usable node and of the links between sites, on which a decision is made.

`epochs_of` divides a trace into epochs, periods in which the situation does not change.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby

from shardwise.cluster import Conditions, EventTrace, NodeGroups, NodeState, NodeView, rounded_down

StateRuns = tuple[tuple[NodeState, int], ...]
"""Run-length encoding of the states of an arrangement's nodes, in the order of its slots."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InterSiteLink:
    """Two sites by their nodes, and what a trace says about the link between them: its total bandwidth in
    bytes/s in each direction (None: not limited), and its one-way latency."""

    first: frozenset[str]
    second: frozenset[str]
    bytes_per_s: float | None
    latency_s: float


@dataclass(frozen=True, kw_only=True)
class Situation:
    """States of the usable nodes, in the order of the cluster; those of them with notice; nodes that are
    present but not usable, since a link or a device does not work; the links between sites; and the groups of
    nodes under the tiers of the cluster."""

    states: Mapping[str, NodeState]
    noticed: frozenset[str] = frozenset()
    unreachable: frozenset[str] = frozenset()
    inter_site: tuple[InterSiteLink, ...] = ()
    groups: NodeGroups

    @cached_property
    def common(self) -> NodeState | None:
        """The state of all nodes if it is the same, else None."""
        distinct = set(self.states.values())
        return distinct.pop() if len(distinct) == 1 else None

    @cached_property
    def _known(self) -> dict[tuple[str, ...], StateRuns | None]:
        return {}

    @cached_property
    def key(self) -> tuple[object, ...]:
        """Equal for equivalent situations."""
        return (tuple(self.states.items()), self.noticed, self.inter_site)

    def states_of(self, slots: tuple[str, ...], nominal: Sequence[float]) -> StateRuns | None:
        """The states of the nodes of an arrangement, run-length encoded. All traffic between nodes has the
        bandwidth of the worst connected node, since gradient reductions join all of them. On two sites,
        traffic between them has at most its share of the inter-site bandwidth. Tiers join only nodes of one
        group of the cluster. `nominal` is the bandwidth in bytes/s of a node of each pool. None if one of the
        nodes is not usable, or cannot reach another."""
        if slots not in self._known:
            can = all(name in self.states for name in slots) and self.connected_to(slots).issuperset(slots)
            self._known[slots] = self._combined_states(slots, nominal) if can else None
        return self._known[slots]

    def connected_to(self, slots: Sequence[str]) -> frozenset[str]:
        """The usable nodes that no dead inter-site link separates from these."""
        found = frozenset(self.states)
        for inter_site in self.inter_site:
            if inter_site.bytes_per_s == 0.0:
                for here, there in (
                    (inter_site.first, inter_site.second),
                    (inter_site.second, inter_site.first),
                ):
                    found -= there if not here.isdisjoint(slots) else frozenset()
        return found

    def _combined_states(self, slots: tuple[str, ...], nominal: Sequence[float]) -> StateRuns:
        if self.common is not None and not self.inter_site and not self.groups.has_any:
            return ((self.common, len(slots)),)
        each = [self.states[name] for name in slots]
        network, latency_s = min(one.network for one in each), max(one.latency_s for one in each)
        alike = {state: replace(state, network=network, latency_s=latency_s) for state in set(each)}
        if self.groups.has_any:
            spans = self._spans(slots)
            alike = {state: replace(one, spans=spans[state.pool]) for state, one in alike.items()}
        own = [alike[state] for state in each]
        crossed = [
            (inter_site, fewest, site_tiers)
            for inter_site, site_tiers in self._within
            if (fewest := _on_both(inter_site, slots))
        ]
        least = min((site_tiers for _, _, site_tiers in crossed), default=0)
        for inter_site, fewest, _ in crossed:
            own = [_bounded(state, inter_site, fewest, nominal[state.pool], least) for state in own]
        return tuple((state, len(list(run))) for state, run in groupby(own))

    def _spans(self, slots: tuple[str, ...]) -> dict[int, tuple[int, ...]]:
        """By pool, the spans of tiers that differ from those in the cluster."""
        places = [int(name[1:]) for name in slots]
        by_pool = {self.states[name].pool: place for name, place in zip(slots, places, strict=True)}
        return {pool: self.groups.changed_spans(places, like) for pool, like in by_pool.items()}

    @cached_property
    def _within(self) -> list[tuple[InterSiteLink, int]]:
        """Every inter-site link with the number of multi-node tiers that lie inside both of its sites."""
        return [
            (
                one,
                self.groups.separate_tiers(
                    *([int(name[1:]) for name in side] for side in (one.first, one.second))
                ),
            )
            for one in self.inter_site
        ]


def _on_both(inter_site: InterSiteLink, slots: tuple[str, ...]) -> int:
    """Number of these nodes on the side that has fewer of them."""
    return min(sum(name in side for name in slots) for side in (inter_site.first, inter_site.second))


def _bounded(
    state: NodeState, inter_site: InterSiteLink, nodes: int, nominal: float, site_tiers: int
) -> NodeState:
    """The state with the inter-site bandwidth that each node of the smaller side gets if all their devices
    send."""
    share = state.inter_site_share
    if inter_site.bytes_per_s is not None:
        share = min(share, rounded_down(inter_site.bytes_per_s / nodes / nominal))
    late_s = max(state.inter_site_latency_s, inter_site.latency_s)
    return replace(state, inter_site_share=share, inter_site_latency_s=late_s, site_tiers=site_tiers)


def situation_of(
    view: NodeView, conditions: Conditions, sites: Mapping[str, tuple[str, ...]] | None = None
) -> Situation:
    """The situation under some conditions, with the sites of their trace."""
    inter_site: list[InterSiteLink] = []
    pairs = sorted({*conditions.site_rates, *conditions.site_latencies_s})
    for first, second in pairs:
        inter_site.append(
            InterSiteLink(
                first=frozenset((sites or {})[first]),
                second=frozenset((sites or {})[second]),
                bytes_per_s=conditions.site_rates.get((first, second)),
                latency_s=conditions.site_latencies_s.get((first, second), 0.0),
            )
        )
    states = view.states(conditions)
    return Situation(
        states=states,
        noticed=conditions.noticed & conditions.present,
        unreachable=conditions.present.difference(states),
        inter_site=tuple(inter_site),
        groups=view.groups,
    )


# Epochs of a trace


@dataclass(frozen=True, slots=True, kw_only=True)
class Epoch:
    """A period from `start_s` to `end_s` with one situation. `lost` are the nodes that left at its start,
    `saved` those of them that had notice."""

    start_s: float
    end_s: float
    situation: Situation
    lost: frozenset[str]
    saved: frozenset[str]

    @property
    def returned(self) -> frozenset[str]:
        """Nodes that left at its start and joined again at the same instant."""
        return self.lost & frozenset(self.situation.states)

    @property
    def length_s(self) -> float:
        """Duration in seconds."""
        return self.end_s - self.start_s


MAX_SHARED = 10_000
"""Most situations that epochs share; a trace with more begins to collect them anew."""


def epochs_of(trace: EventTrace, view: NodeView, end_s: float) -> list[Epoch]:
    """All epochs up to `end_s`, as `epochs_in_order` gives them."""
    return list(epochs_in_order(trace, view, end_s))


def epochs_in_order(trace: EventTrace, view: NodeView, end_s: float) -> Iterator[Epoch]:
    """Every epoch up to `end_s`. Events of one instant make one change; events that change nothing start no
    epoch. Epochs with equal situations share one object, with what is known of it."""
    conditions = Conditions.at_start(trace)
    situation = situation_of(view, conditions, trace.sites)
    shared = {(situation.key, situation.unreachable): situation}
    start_s, lost, saved = 0.0, frozenset[str](), frozenset[str]()
    place = 0
    while place < len(trace.events):
        now = trace.events[place].time_s
        if now >= end_s:
            break
        gone, noticed = frozenset[str](), frozenset[str]()
        while place < len(trace.events) and trace.events[place].time_s == now:
            before, conditions = conditions, conditions.after(trace.events[place])
            gone |= before.present - conditions.present
            noticed |= (before.present - conditions.present) & before.noticed
            place += 1
        after = situation_of(view, conditions, trace.sites)
        if after.key == situation.key and not gone:
            continue
        if len(shared) >= MAX_SHARED:
            shared.clear()
        after = shared.setdefault((after.key, after.unreachable), after)
        if now > start_s:
            yield Epoch(start_s=start_s, end_s=now, situation=situation, lost=lost, saved=saved)
            start_s, lost, saved = now, gone, noticed
        else:
            lost, saved = lost | gone, saved | noticed
        situation = after
    yield Epoch(start_s=start_s, end_s=end_s, situation=situation, lost=lost, saved=saved)
