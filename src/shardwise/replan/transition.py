"""What it takes to go from one arrangement to another: bytes over each link, seconds, and work that is lost.

Every node fetches the weights and optimizer states that it will need and does not hold, each from a node that
does. What no node that is left holds is read from the last checkpoint, and then all is, since the rest is
newer: the work since then is lost.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from shardwise.cost import OPTIMIZERS, find_recipe
from shardwise.replan.arrangement import Arrangement
from shardwise.replan.holdings import Holdings, StateShard, holdings_of, overlapping, unit_elements
from shardwise.replan.links import LinkRoutes
from shardwise.replan.prices import Prices
from shardwise.replan.situation import Situation


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """What changes cost beside the bytes, in seconds: `regroup_s` where processes stay and groups of ranks
    are made anew, `restart_s` where they start again, and the work between two checkpoints.

    None of the defaults is measured: they are assumptions (docs/concepts/replanning.md)."""

    regroup_s: float = 10.0
    restart_s: float = 60.0
    checkpoint_interval_s: float = 600.0

    @property
    def rework_s(self) -> float:
        """What is done again after a loss, on average: half of what is between checkpoints."""
        return self.checkpoint_interval_s / 2.0

    def least_s(self, *, is_patch: bool) -> float:
        """Seconds that any change takes, to the same shape or to another."""
        return self.regroup_s if is_patch else self.restart_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Transition:
    """Bytes over each link, and the `seconds` from the change to the first step after it: moving, starting,
    and `lost_s` of work that is done again (on average half of what is between checkpoints)."""

    bytes_per_link: Mapping[str, float]
    seconds: float
    transfer_s: float
    lost_s: float


NO_TRANSITION = Transition(bytes_per_link={}, seconds=0.0, transfer_s=0.0, lost_s=0.0)
"""What keeping costs."""

STORAGE = ""
"""Where checkpoints are, as a source of bytes."""


class Transitions:
    """Transitions between arrangements of one model; `held` says what lies where, and is asked once."""

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
        recipe = find_recipe(prices.job.dtype)
        self._weight_bytes = recipe.weight_bytes
        self._state_bytes = recipe.master_bytes + OPTIMIZERS[prices.job.optimizer].state_bytes
        self._holdings: dict[tuple[object, ...], Holdings] = {}

    def between(
        self,
        old: Arrangement | None,
        new: Arrangement,
        situation: Situation,
        saved: frozenset[str] = frozenset(),
        returned: frozenset[str] = frozenset(),
    ) -> Transition:
        """From `old` (None: nothing runs, and all is read from a checkpoint) to `new`, with the nodes that
        are left. Nodes in `saved` had notice and put their states aside before they went; nodes in `returned`
        went and are there again, with nothing of what they held."""
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
        """The same by what lies where; nodes that are `left` still hold what they held."""
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
        """What lies where under an arrangement."""
        key = arrangement.strategy, arrangement.slots
        if key not in self._holdings:
            devices = self._prices.devices_of(arrangement.nodes[0])
            self._holdings[key] = self._holdings_function(arrangement, self._prices.model.layers, devices)
        return self._holdings[key]

    def _bytes_to_send(
        self, before: Holdings, after: Holdings, left: frozenset[str], saved: frozenset[str]
    ) -> Mapping[tuple[str, str], float] | None:
        """Bytes from node to node, of nodes that still hold what they held; None where something is held by
        no one."""
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
        """Adds what is fetched to `sent_bytes`; False where something that is needed is held by no one."""
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
