"""On which meshes of a cluster's devices layouts are searched."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from shardwise.cluster import Cluster, Mesh, meshes_of, tier_mesh
from shardwise.errors import ConfigError
from shardwise.inputs import short_repr

MESHES_OPTION = "--meshes"

MOST_SHOWN = 12
"""Meshes and device counts that an error names at most."""


@dataclass(frozen=True, slots=True)
class MeshChoice:
    """`tiers`: one axis for each tier of the cluster. `all`: every mesh of one to three axes that follow the
    tiers, that of the tiers first. Else some of these by their names, such as `8,2x4`."""

    text: str = "tiers"

    @property
    def names(self) -> tuple[str, ...]:
        """The names of meshes that are given; none for `tiers` and `all`."""
        return () if self.text in ("tiers", "all") else tuple(self.text.split(","))

    def of(self, cluster: Cluster, devices: int) -> tuple[Mesh, ...]:
        """The meshes of the first `devices` devices of `cluster`, of those given the ones that are such: the
        same axes in another order are another one, since the order says which parts of a dim lie side by
        side. ConfigError where one is named twice."""
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
        """ConfigError where so many devices of one of these clusters have none of the meshes, or a mesh is
        given that none of them has."""
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
    """What is no mesh of any of these parts."""
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
    """The mesh of `devices` devices whose name this is; None where its axes do not follow the tiers."""
    if re.fullmatch(r"[1-9][0-9]{0,8}(x[1-9][0-9]{0,8}){0,2}", name) is None:
        return None
    ranks = tuple(map(int, name.split("x")))
    return next((mesh for mesh in meshes_of(cluster, devices) if mesh.ranks == ranks), None)
