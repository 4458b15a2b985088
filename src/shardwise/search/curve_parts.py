"""The parts of a cluster (`PartChoice`) and the device meshes (`MeshChoice`) on which curves are searched.

On a mixed cluster the parts include its pools and their unions.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import combinations

from shardwise.cluster import Cluster, Mesh, Parts, Selection, meshes_of, part_sizes, tier_mesh
from shardwise.errors import ConfigError, InternalError
from shardwise.inputs import short_repr
from shardwise.plans import NO_IDLE_DEVICES, Idle, idle_in
from shardwise.search.answer import used_ranks

MOST_UNITED = 4
"""Largest number of pools of which all unions are searched (15 curves); beyond, single pools and all
devices."""

LONGEST_NAME = 150
"""Characters of a cluster's name that are repeated in the name of a part."""


@dataclass(frozen=True)
class PartChoice:
    """The parts of `cluster`: some of its first devices. If it has several pools and `uses_all` is false,
    also unions of its pools and some devices of each pool."""

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
        """The unions of pools, the whole cluster last; only the whole cluster if no pool may stay idle."""
        return tuple(map(self._cluster_of, self._unions))

    def of(self, devices: int) -> tuple[Cluster, ...]:
        """The distinct parts with `devices` devices. Raises ConfigError if there are none."""
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
        """The devices that are idle if `part`, one of the parts returned here, is used."""
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
        """The parts by their device count."""
        found: dict[int, list[Selection]] = {}
        for part in (*self._of_pools(), *self._unions):
            found.setdefault(self._parts.devices_of(part), []).append(part)
        return found

    def _of_pools(self) -> Iterator[Selection]:
        """Parts of a single pool: some devices of a node, or some nodes."""
        for place, pool in enumerate(self._parts.pools if self.has_pools else ()):
            yield from self._parts.within_a_node(place)
            for count in range(1, pool.nodes + 1):
                nodes = [0] * len(self._parts.pools)
                nodes[place] = count
                yield Selection(nodes=tuple(nodes))

    def _first(self, devices: int) -> Selection:
        """The first devices of the cluster; `devices` is one of its `part_sizes`."""
        nodes, left = [0] * len(self._parts.pools), devices
        for node in self.cluster.nodes:
            if left <= 0:
                break
            nodes[next(at for at, pool in enumerate(self._parts.pools) if pool.contains(node))] += 1
            left -= node.devices
        return Selection(nodes=tuple(nodes), devices=devices if left < 0 else None)

    def _cluster_of(self, part: Selection) -> Cluster:
        """The part as a cluster, built once; a part of one of several pools is named after the pool."""
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
    """Ascending sizes as at most eight ranges: `1 to 8, 16, 24`."""
    runs: list[list[int]] = []
    for size in sizes:
        if runs and size == runs[-1][-1] + 1:
            runs[-1].append(size)
        else:
            runs.append([size])
    texts = [str(run[0]) if len(run) == 1 else f"{run[0]} to {run[-1]}" for run in runs]
    return ", ".join(texts if len(texts) <= 8 else [*texts[:7], "...", texts[-1]])


# Meshes

MESHES_OPTION = "--meshes"

MOST_SHOWN = 12
"""Largest number of meshes or device counts that an error message lists."""


@dataclass(frozen=True, slots=True)
class MeshChoice:
    """The meshes to search. `tiers`: one axis for each tier of the cluster. `all`: every mesh of one to three
    axes that follow the tiers, the tier mesh first. Otherwise named meshes, such as `8,2x4`."""

    text: str = "tiers"

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the given meshes; none for `tiers` and `all`."""
        return () if self.text in ("tiers", "all") else tuple(self.text.split(","))

    def of(self, cluster: Cluster, devices: int) -> tuple[Mesh, ...]:
        """The meshes of the first `devices` devices of `cluster`; named meshes that do not exist there are
        left out. The order of axes matters, since it determines which shards of a dimension are neighbours.
        Raises ConfigError if a mesh is named twice."""
        names = self.names
        if len(set(names)) < len(names):
            raise ConfigError("names a mesh twice", key=MESHES_OPTION, found=short_repr(self.text))
        if self.text == "tiers":
            return (tier_mesh(cluster, devices),)
        if self.text == "all":
            return _every(cluster, devices)
        named = (_named(cluster, devices, name) for name in names)
        return tuple(mesh for mesh in named if mesh is not None)

    def require(self, parts: Sequence[tuple[Cluster, int]]) -> None:
        """Raises ConfigError if a pair of cluster and device count has no chosen mesh, or if a named mesh
        exists on none of them."""
        for cluster, devices in parts:
            if not self.of(cluster, devices):
                raise _no_mesh(self.text, [(cluster, devices)])
        for name in self.names:
            if all(_named(cluster, devices, name) is None for cluster, devices in parts):
                raise _no_mesh(name, parts)


def _every(cluster: Cluster, devices: int) -> tuple[Mesh, ...]:
    tiers = tier_mesh(cluster, devices)
    return tuple({mesh.ranks: mesh for mesh in (tiers, *meshes_of(cluster, devices))}.values())


def _no_mesh(text: str, parts: Sequence[tuple[Cluster, int]]) -> ConfigError:
    """The error for a mesh that exists on none of these parts."""
    names = {mesh.name: None for cluster, devices in parts for mesh in _every(cluster, devices)}
    counts = [str(devices) for _, devices in parts]
    some = counts if len(counts) <= MOST_SHOWN else [*counts[: MOST_SHOWN - 1], "...", counts[-1]]
    shown_names = [*names] if len(names) <= MOST_SHOWN else [*[*names][:MOST_SHOWN], "..."]
    return ConfigError(
        f"is no mesh of {', '.join(some)} devices whose axes follow the tiers", key=MESHES_OPTION,
        found=short_repr(text),
        allowed=", ".join(("tiers", "all", *shown_names)),
    )  # fmt: skip


def _named(cluster: Cluster, devices: int, name: str) -> Mesh | None:
    """The mesh of `devices` devices with this name; None if its axes do not follow the tiers."""
    if re.fullmatch(r"[1-9][0-9]{0,8}(x[1-9][0-9]{0,8}){0,2}", name) is None:
        return None
    ranks = tuple(map(int, name.split("x")))
    return next((mesh for mesh in meshes_of(cluster, devices) if mesh.ranks == ranks), None)
