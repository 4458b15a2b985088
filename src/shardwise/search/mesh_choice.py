"""On which meshes of a cluster's devices layouts are searched."""

from __future__ import annotations

import re
from dataclasses import dataclass

from shardwise.cluster import Cluster, Mesh, meshes_of, tier_mesh
from shardwise.errors import ConfigError
from shardwise.inputs import shown

KEY = "--meshes"


@dataclass(frozen=True, slots=True)
class MeshChoice:
    """`tiers`: one axis for each tier of the cluster. `all`: every mesh of one to three axes that follow the
    tiers, that of the tiers first. Else some of these by their names, such as `8,2x4`."""

    text: str = "tiers"

    def of(self, cluster: Cluster, devices: int) -> tuple[Mesh, ...]:
        """The meshes of the first `devices` devices of `cluster`: the same axes in another order are another
        one, since the order says which parts of a dim lie side by side. ConfigError where there is none."""
        tiers = tier_mesh(cluster, devices)
        if self.text == "tiers":
            return (tiers,)
        every = tuple({mesh.ranks: mesh for mesh in (tiers, *meshes_of(cluster, devices))}.values())
        if self.text == "all":
            return every
        named = [_named(cluster, devices, name) for name in self.text.split(",")]
        for name, mesh in zip(self.text.split(","), named, strict=True):
            if mesh is None:
                allowed = ", ".join(("tiers", "all", *(each.name for each in every)))
                raise ConfigError(
                    f"is no mesh of {devices} devices whose axes follow the tiers", key=KEY,
                    found=shown(name), allowed=allowed,
                )  # fmt: skip
        wanted = tuple(mesh for mesh in named if mesh is not None)
        if len({mesh.ranks for mesh in wanted}) < len(wanted):
            raise ConfigError("names a mesh twice", key=KEY, found=shown(self.text))
        return wanted


def _named(cluster: Cluster, devices: int, name: str) -> Mesh | None:
    """The mesh of `devices` devices whose name this is; None where its axes do not follow the tiers."""
    if re.fullmatch(r"[1-9][0-9]{0,8}(x[1-9][0-9]{0,8}){0,2}", name) is None:
        return None
    ranks = tuple(map(int, name.split("x")))
    return next((mesh for mesh in meshes_of(cluster, devices) if mesh.ranks == ranks), None)
