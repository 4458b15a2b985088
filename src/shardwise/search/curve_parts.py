"""On which parts of a cluster curves are searched: on a mixed one its pools and their unions too."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import combinations

from shardwise.cluster import Cluster, Parts, Selection, part_sizes
from shardwise.errors import ConfigError, InternalError
from shardwise.plan import NO_IDLE_DEVICES, Idle
from shardwise.search.answer import idle_in, used_ranks

MOST_UNITED = 4
"""Pools of which every union is searched, at most: 15 curves. Of more, each pool alone and all devices."""

LONGEST_NAME = 150
"""Characters of a cluster's name that the name of a part has."""


@dataclass(frozen=True)
class PartChoice:
    """The parts of `cluster`: some of its first devices. Where it has several pools, and `uses_all` does not
    request all devices, also unions of its pools, and some devices of each pool."""

    cluster: Cluster
    uses_all: bool = False
    _made: dict[Selection, Cluster] = field(default_factory=dict, repr=False, compare=False)

    @property
    def has_pools(self) -> bool:
        """Whether some pools may stay idle."""
        return not self.uses_all and len(self._parts.pools) > 1

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """The device counts of all parts, ascending."""
        return tuple(sorted({*part_sizes(self.cluster), *self._by_size}))

    @cached_property
    def unions(self) -> tuple[Cluster, ...]:
        """The unions of pools, the whole cluster last; it alone where no pool may stay idle."""
        return tuple(map(self._cluster_of, self._unions))

    def of(self, devices: int) -> tuple[Cluster, ...]:
        """The parts with so many devices, each once. ConfigError where there are none."""
        found = list(self._by_size.get(devices, ()))
        if devices in part_sizes(self.cluster):
            found.append(self._first(devices))
        if not found:
            raise ConfigError(
                "is no part of the cluster",
                key="--devices",
                found=str(devices),
                allowed=runs_text(self.sizes),
            )
        return tuple(map(self._cluster_of, dict.fromkeys(found)))

    def idle_of(self, part: Cluster) -> Idle:
        """What is left of the cluster where it, or one of the parts that this has yielded, is used."""
        if part == self.cluster:
            return NO_IDLE_DEVICES
        for selection, cluster in self._made.items():
            if cluster == part:
                return idle_in(self.cluster, used_ranks(self.cluster, selection))
        raise InternalError(f"{part.name} is no part that was searched")

    @cached_property
    def _parts(self) -> Parts:
        return Parts(self.cluster)

    @cached_property
    def _unions(self) -> tuple[Selection, ...]:
        pools = self._parts.pools
        if not self.has_pools:
            return (self._parts.whole,)
        sizes = range(1, len(pools) + 1) if len(pools) <= MOST_UNITED else (1, len(pools))
        return tuple(
            Selection(nodes=tuple(pool.nodes if at in chosen else 0 for at, pool in enumerate(pools)))
            for size in sizes
            for chosen in combinations(range(len(pools)), size)
        )

    @cached_property
    def _by_size(self) -> dict[int, list[Selection]]:
        """The parts by their device counts."""
        found: dict[int, list[Selection]] = {}
        for part in (*self._of_pools(), *self._unions):
            found.setdefault(self._parts.devices_of(part), []).append(part)
        return found

    def _of_pools(self) -> Iterator[Selection]:
        """Some devices of a node, or some nodes, of one pool."""
        for place, pool in enumerate(self._parts.pools if self.has_pools else ()):
            yield from self._parts.within_a_node(place)
            for count in range(1, pool.nodes + 1):
                nodes = [0] * len(self._parts.pools)
                nodes[place] = count
                yield Selection(nodes=tuple(nodes))

    def _first(self, devices: int) -> Selection:
        """The first devices of the cluster, one of its `part_sizes`."""
        nodes, left = [0] * len(self._parts.pools), devices
        for node in self.cluster.nodes:
            if left <= 0:
                break
            nodes[next(at for at, pool in enumerate(self._parts.pools) if pool.contains(node))] += 1
            left -= node.devices
        return Selection(nodes=tuple(nodes), devices=devices if left < 0 else None)

    def _cluster_of(self, part: Selection) -> Cluster:
        """The part as a cluster, made once, and named by its pool where it is a part of one of several."""
        if part in self._made:
            return self._made[part]
        cluster = self._parts.cluster_of(part)
        if len(part.pools) == 1 < len(self._parts.pools):
            pool = self._parts.pools[part.pools[0]]
            if cluster.devices < pool.devices:
                counted = f"{cluster.devices:,} {'device' if cluster.devices == 1 else 'devices'}"
                cluster = replace(
                    cluster, name=f"{counted} of {pool.name} of {self.cluster.name[:LONGEST_NAME]}"
                )
        self._made[part] = cluster
        return cluster


def runs_text(sizes: Sequence[int]) -> str:
    """Ascending sizes as runs: `1 to 8, 16, 24`; at most eight of them."""
    runs: list[list[int]] = []
    for size in sizes:
        if runs and size == runs[-1][-1] + 1:
            runs[-1].append(size)
        else:
            runs.append([size])
    texts = [str(run[0]) if len(run) == 1 else f"{run[0]} to {run[-1]}" for run in runs]
    return ", ".join(texts if len(texts) <= 8 else [*texts[:7], "...", texts[-1]])
