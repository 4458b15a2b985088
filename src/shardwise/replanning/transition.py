"""The transition between two arrangements: bytes over each link, seconds, and lost work (`Transitions`).

Every node fetches the weights and optimizer states that it will need and does not hold from nodes that hold
them. If no remaining node holds some of them, everything is read from the last checkpoint, since other state
is newer, and the work since then is lost.

`Holdings` says which node holds which state shards. All parameters form a plane: units (embedding, layers,
head) by shares of each unit from 0 to 1. A tensor-parallel rank holds its interval of shares; if states are
sharded, each rank of the group holds its part of that interval. `LinkRoutes` are the links between nodes.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate, pairwise

import numpy as np

from shardwise.cluster import Cluster, Link, link_graph, route
from shardwise.cost import bind
from shardwise.model import Model
from shardwise.operators import Operator
from shardwise.replanning.arrangement import NO_NODE, Arrangement, with_dp
from shardwise.replanning.pipeline_costs import Prices
from shardwise.replanning.situation import Situation
from shardwise.schedule import stage_ranks
from shardwise.strategy import Strategy, layer_counts, rank_grid

# State shards


@dataclass(frozen=True, slots=True)
class StateShard:
    """Units `first` to `last` (exclusive) and shares `low` to `high` of each, on these nodes."""

    first: int
    last: int
    low: float
    high: float
    nodes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Holdings:
    """Weights and optimizer states of an arrangement as state shards; those of one stage are in the order of
    their shares."""

    weights: tuple[tuple[StateShard, ...], ...]
    states: tuple[tuple[StateShard, ...], ...]


def unit_elements(model: Model) -> tuple[float, ...]:
    """Cumulative elements of the units before each index: the embedding, every layer, the head."""
    kinds = [_elements(kind.operators) for kind in model.kinds]
    units = [_elements(model.embedding), *(kinds[kind] for kind in model.pattern), _elements(model.head)]
    return tuple(accumulate(units, initial=0.0))


def _elements(operators: Iterable[Operator]) -> float:
    return float(sum(weight.parameters for operator in operators for weight in operator.weights))


def holdings_of(arrangement: Arrangement, layers: int, devices_per_node: int) -> Holdings:
    """The state shards of an arrangement."""
    strategy = arrangement.strategy
    slots = rank_grid(strategy) // devices_per_node
    units = _units(strategy, layers)
    places = stage_ranks(strategy.schedule, strategy.pp, strategy.vpp)
    # Lost replicas of a stage hold nothing; states are sharded over the remaining ones.
    gone = np.array([name == NO_NODE for name in arrangement.slots])
    on = [slots[:, place][~gone[slots[:, place]].any(axis=(1, 2))] for place in places]
    widths = [with_dp(strategy, len(replicas)) for replicas in on]
    return Holdings(
        weights=tuple(
            _state_shards(strategy, on[stage], unit, widths[stage].param_shard, arrangement.slots)
            for stage, unit in enumerate(units)
        ),
        states=tuple(
            _state_shards(strategy, on[stage], unit, widths[stage].optim_shard, arrangement.slots)
            for stage, unit in enumerate(units)
        ),
    )


def sharded_holdings_of(arrangement: Arrangement, layers: int, devices_per_node: int) -> Holdings:
    """The state shards between steps if weights are sharded like optimizer states (as by PyTorch's
    `fully_shard`), including weights that stay gathered during a step."""
    found = holdings_of(arrangement, layers, devices_per_node)
    return replace(found, weights=found.states)


def _units(strategy: Strategy, layers: int) -> list[tuple[int, int]]:
    """Units of every stage; the embedding is on the first stage, the head on the last."""
    counts = layer_counts(
        layers, strategy.pp * strategy.vpp, strategy.first_stage_layers, strategy.last_stage_layers
    )
    ends = [1 + end for end in accumulate(counts)]
    ends[-1] += 1
    return list(zip([0, *ends[:-1]], ends, strict=True))


def _state_shards(
    strategy: Strategy, slots: np.ndarray, unit: tuple[int, int], shards: int, names: Sequence[str]
) -> tuple[StateShard, ...]:
    """The state shards of one stage; `slots` of its ranks has shape (dp, cp, tp). Adjacent shards on the same
    nodes are merged."""
    replicas = slots.reshape(-1, strategy.tp)
    found: list[StateShard] = []
    for tp in range(strategy.tp):
        for shard in range(shards):
            on = tuple(names[slot] for slot in sorted(set(replicas[shard::shards, tp].tolist())))
            low = (tp + shard / shards) / strategy.tp
            high = (tp + (shard + 1) / shards) / strategy.tp
            if found and found[-1].nodes == on:
                found[-1] = StateShard(*unit, found[-1].low, high, on)
            else:
                found.append(StateShard(*unit, low, high, on))
    return tuple(found)


def overlapping(
    stages: Sequence[Sequence[StateShard]], lows: Sequence[Sequence[float]], state_shard: StateShard
) -> Iterable[StateShard]:
    """The overlaps of `state_shard` with the shards of `stages`, with the nodes of the latter. `lows` are the
    lower shares of the shards of each stage."""
    for row, starts in zip(stages, lows, strict=True):
        first, last = max(row[0].first, state_shard.first), min(row[0].last, state_shard.last)
        if first >= last:
            continue
        place = max(bisect_right(starts, state_shard.low) - 1, 0)
        while place < len(row) and row[place].low < state_shard.high:
            low, high = max(row[place].low, state_shard.low), min(row[place].high, state_shard.high)
            if high > low:
                yield StateShard(first, last, low, high, row[place].nodes)
            place += 1


# Links

Pair = tuple[str, str]
"""A sending node ("" is the checkpoint storage on the network) and a receiving node."""


class LinkRoutes:
    """The routes between the nodes of a cluster."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._firsts = tuple(accumulate((node.devices for node in cluster.nodes), initial=0))
        self._network = [place for place, tier in enumerate(cluster.tiers) if tier.is_network]
        self._links: dict[str, Link] = {}
        self._route = lru_cache(maxsize=1 << 16)(self._route_of)

    def bytes_per_link(self, sent_bytes: Mapping[Pair, float]) -> dict[str, float]:
        """Bytes over every link between nodes, by link name."""
        total: dict[str, float] = defaultdict(float)
        for (source, target), nbytes in sent_bytes.items():
            if source != target and nbytes > 0.0:
                for name in self._route(source, target):
                    total[name] += nbytes
        return dict(sorted(total.items()))

    def seconds(self, links: Mapping[str, float], situation: Situation) -> float:
        """Seconds until the busiest link is done, at the present bandwidth of its nodes."""
        longest_s = 0.0
        for name, nbytes in links.items():
            link = self._named(name)
            ends = [end for end in (link.source, link.target) if end in situation.states]
            share = min((situation.states[end].network for end in ends), default=1.0)
            longest_s = max(longest_s, nbytes / (link.capacity.at(0.0) * share))
        return longest_s

    def inter_site_s(self, sent_bytes: Mapping[Pair, float], situation: Situation) -> float:
        """Seconds until the transfers between sites are done, at the present inter-site bandwidth."""
        longest_s = 0.0
        for inter_site in situation.inter_site:
            for here, there in ((inter_site.first, inter_site.second), (inter_site.second, inter_site.first)):
                nbytes = sum(size for (a, b), size in sent_bytes.items() if a in here and b in there)
                if nbytes and inter_site.bytes_per_s is not None:
                    longest_s = max(longest_s, nbytes / inter_site.bytes_per_s)
        return longest_s

    def _named(self, name: str) -> Link:
        if not self._links:
            self._links = {link.name: link for link in link_graph(self._cluster)}
        return self._links[name]

    def _route_of(self, source: str, target: str) -> tuple[str, ...]:
        if self._cluster.links:
            return self._given(source, target)
        up, down = self._path_to_root(source or target), self._path_to_root(target)
        meet = next((place for place, vertex in enumerate(up) if vertex in down), len(up) - 1)
        rise = [] if not source else [f"{a}>{b}" for a, b in pairwise(up[: meet + 1])]
        fall = down if not source else down[: down.index(up[meet]) + 1]
        return (*rise, *(f"{b}>{a}" for a, b in reversed(list(pairwise(fall)))))

    def _path_to_root(self, name: str) -> list[str]:
        """Vertices from a node up to the outermost switch."""
        rank = self._firsts[int(name[1:])]
        tiers = self._cluster.tiers
        return [name, *(f"s{place}g{rank // tiers[place].span}" for place in self._network)]

    def _given(self, source: str, target: str) -> tuple[str, ...]:
        """The route in a link graph, from first device to first device; from storage, the last link of a
        route to the target."""
        first = self._firsts[int(target[1:])]
        if source:
            return route(self._cluster, self._firsts[int(source[1:])], first)
        other = 0 if first else self._cluster.devices - 1
        return route(self._cluster, other, first)[-1:]


# Transitions


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """Costs of a transition in addition to transfers, in seconds: `regroup_s` if processes stay and process
    groups are created anew, `restart_s` if processes restart, and the work between two checkpoints.

    The defaults are assumptions, not measurements (docs/concepts/replanning.md).
    """

    regroup_s: float = 10.0
    restart_s: float = 60.0
    checkpoint_interval_s: float = 600.0

    @property
    def rework_s(self) -> float:
        """Mean seconds of lost work: half of the checkpoint interval."""
        return self.checkpoint_interval_s / 2.0

    def least_s(self, *, is_patch: bool) -> float:
        """Least seconds of a transition to the same shape (patch) or to another."""
        return self.regroup_s if is_patch else self.restart_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Transition:
    """Bytes over each link, and `seconds` from the change to the first step after it: transfer, regrouping or
    restart, and `lost_s` of lost work (on average half of the checkpoint interval)."""

    bytes_per_link: Mapping[str, float]
    seconds: float
    transfer_s: float
    lost_s: float


NO_TRANSITION = Transition(bytes_per_link={}, seconds=0.0, transfer_s=0.0, lost_s=0.0)
"""The transition of keeping the plan."""

STORAGE = ""
"""The checkpoint storage, as a source of bytes."""


class Transitions:
    """Transitions between arrangements of one model. `holdings_function` returns the state shards of an
    arrangement, which are cached."""

    def __init__(
        self,
        prices: Prices,
        costs: Costs,
        holdings_function: Callable[[Arrangement, int, int], Holdings] = holdings_of,
    ) -> None:
        self.costs = costs
        self._holdings_function = holdings_function
        self._prices = prices
        self._routes = LinkRoutes(prices.cluster)
        self._below = unit_elements(prices.model)
        problem = bind(prices.model, prices.cluster, prices.job)
        self._weight_bytes = problem.recipe.weight_bytes
        self._state_bytes = problem.recipe.master_bytes + problem.optimizer.state_bytes
        self._holdings: dict[tuple[object, ...], Holdings] = {}

    def between(
        self,
        old: Arrangement | None,
        new: Arrangement,
        situation: Situation,
        saved: frozenset[str] = frozenset(),
        returned: frozenset[str] = frozenset(),
    ) -> Transition:
        """From `old` (None: nothing runs, and everything is read from a checkpoint) to `new`, with the
        remaining nodes. Nodes in `saved` had notice and saved their states before they left; nodes in
        `returned` left and joined again without their states."""
        has_all = old is not None and returned.isdisjoint(old.slots)
        if old is not None and has_all and old.strategy == new.strategy and old.slots == new.slots:
            same = old.microbatches == new.microbatches
            return NO_TRANSITION if same else self._of({}, situation, self.costs.regroup_s, 0.0)
        is_patch = old is not None and old.shape == new.shape
        before = None if old is None else self.holdings_of(old)
        left = situation.connected_to(new.slots) - returned
        return self.between_holdings(before, self.holdings_of(new), situation, left, saved, is_patch=is_patch)

    def between_holdings(
        self,
        before: Holdings | None,
        after: Holdings,
        situation: Situation,
        left: frozenset[str],
        saved: frozenset[str],
        *,
        is_patch: bool,
    ) -> Transition:
        """The transition between state shards; nodes in `left` still hold theirs."""
        sent_bytes = None if before is None else self._bytes_to_send(before, after, left, saved)
        is_lost = sent_bytes is None and before is not None
        if sent_bytes is None:
            sent_bytes = self._from_checkpoint(after)
        starting_s = self.costs.least_s(is_patch=is_patch)
        lost_s = self.costs.rework_s if is_lost else 0.0
        return self._of(sent_bytes, situation, starting_s, lost_s)

    def _of(
        self,
        sent_bytes: Mapping[tuple[str, str], float],
        situation: Situation,
        starting_s: float,
        lost_s: float,
    ) -> Transition:
        links = self._routes.bytes_per_link(sent_bytes)
        transfer_s = max(
            self._routes.seconds(links, situation), self._routes.inter_site_s(sent_bytes, situation)
        )
        return Transition(
            bytes_per_link=links,
            seconds=transfer_s + starting_s + lost_s,
            transfer_s=transfer_s,
            lost_s=lost_s,
        )

    def holdings_of(self, arrangement: Arrangement) -> Holdings:
        """The state shards of an arrangement, cached."""
        key = arrangement.strategy, arrangement.slots
        if key not in self._holdings:
            devices = self._prices.devices_of(arrangement.nodes[0])
            self._holdings[key] = self._holdings_function(arrangement, self._prices.model.layers, devices)
        return self._holdings[key]

    def _bytes_to_send(
        self, before: Holdings, after: Holdings, left: frozenset[str], saved: frozenset[str]
    ) -> Mapping[tuple[str, str], float] | None:
        """Bytes from node to node; None if no node holds some of the required state."""
        sent_bytes: dict[tuple[str, str], float] = defaultdict(float)
        for have, need, nbytes in (
            (before.weights, after.weights, self._weight_bytes),
            (before.states, after.states, self._state_bytes),
        ):
            if not self._fetch(have, need, nbytes, left, saved, sent_bytes):
                return None
        return sent_bytes

    def _fetch(
        self,
        have: Sequence[Sequence[StateShard]],
        need: Sequence[Sequence[StateShard]],
        nbytes: float,
        left: frozenset[str],
        saved: frozenset[str],
        sent_bytes: dict[tuple[str, str], float],
    ) -> bool:
        """Adds the fetched bytes to `sent_bytes`; False if no node holds some of the required state."""
        lows = [[state_shard.low for state_shard in row] for row in have]
        for needed in (state_shard for row in need for state_shard in row):
            for part in overlapping(have, lows, needed):
                holders = [name for name in part.nodes if name in left]
                if not holders and not any(name in saved for name in part.nodes):
                    return False
                sources = holders or [STORAGE]
                size = self._elements(part) * nbytes
                holder_set = frozenset(holders)
                lacking = [name for name in needed.nodes if name not in holder_set]
                for index, name in enumerate(lacking):
                    sent_bytes[sources[index % len(sources)], name] += size
        return True

    def _elements(self, state_shard: StateShard) -> float:
        return (self._below[state_shard.last] - self._below[state_shard.first]) * (
            state_shard.high - state_shard.low
        )

    def _from_checkpoint(self, after: Holdings) -> Mapping[tuple[str, str], float]:
        sent_bytes: dict[tuple[str, str], float] = defaultdict(float)
        for rows, nbytes in ((after.weights, self._weight_bytes), (after.states, self._state_bytes)):
            for state_shard in _every(rows):
                for name in state_shard.nodes:
                    sent_bytes[STORAGE, name] += self._elements(state_shard) * nbytes
        return sent_bytes


def _every(rows: Iterable[Iterable[StateShard]]) -> Iterable[StateShard]:
    return (state_shard for row in rows for state_shard in row)
