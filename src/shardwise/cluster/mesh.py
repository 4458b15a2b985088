"""Meshes of devices: ranks numbered along one to three axes that follow the tiers of a cluster."""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd, prod

from shardwise.cluster.cluster import Cluster
from shardwise.cluster.tiers import group_members
from shardwise.errors import ConfigError

MAX_AXES = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshAxis:
    """`size` ranks in a row, `stride` apart; `sizes` are the members of such a row per tier of the cluster,
    innermost first: their product is the size."""

    size: int
    stride: int
    sizes: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Mesh:
    """The first devices of a cluster, laid along axes, the outermost (with the largest stride) first."""

    axes: tuple[MeshAxis, ...]

    @property
    def devices(self) -> int:
        """How many ranks there are."""
        return prod(axis.size for axis in self.axes)

    @property
    def ranks(self) -> tuple[int, ...]:
        """The size of each axis."""
        return tuple(axis.size for axis in self.axes)

    @property
    def members(self) -> tuple[tuple[int, ...], ...]:
        """The members per tier of each axis, in ascending order: all that prices on a mesh depend on, but
        for the order in which a layout names its axes."""
        return tuple(sorted(axis.sizes for axis in self.axes))

    @property
    def name(self) -> str:
        """`8x8`: the sizes, the outermost first."""
        return "x".join(str(axis.size) for axis in self.axes)


def mesh_of(cluster: Cluster, ranks: tuple[int, ...]) -> Mesh:
    """The mesh of the first devices of `cluster` with so many ranks per axis, the outermost first.

    ConfigError where there are more than three axes, or more ranks than devices.
    """
    if not 1 <= len(ranks) <= MAX_AXES or min(ranks) < 1 or prod(ranks) > cluster.devices:
        allowed = f"one to {MAX_AXES} sizes whose product is at most {cluster.devices}"
        raise ConfigError("is no mesh of this cluster", key="mesh", found=repr(list(ranks)), allowed=allowed)
    axes: list[MeshAxis] = []
    stride = 1
    for size in reversed(ranks):
        axes.append(MeshAxis(size=size, stride=stride, sizes=_sizes(cluster, stride, size)))
        stride *= size
    return Mesh(axes=tuple(reversed(axes)))


def _sizes(cluster: Cluster, stride: int, size: int) -> tuple[int, ...]:
    """Members of a row of ranks per tier, innermost first."""
    below, sizes = 1, []
    for members in group_members(cluster.tiers, stride, size):
        sizes.append(int(members) // below)
        below = int(members)
    return tuple(sizes)


def tier_factors(cluster: Cluster, devices: int) -> tuple[int, ...]:
    """Into how many groups of the tier below the first `devices` devices fall on each tier, innermost first;
    tiers that join nothing are left out.

    64 devices of nodes of 8: (8, 8). 12 of them: (4, 3), three groups of 4 that no node's end cuts.
    """
    spans = [gcd(tier.span, devices) for tier in cluster.tiers[:-1]]
    spans.append(devices)
    factors: list[int] = []
    below = 1
    for span in spans:
        if span % below == 0 and span > below:
            factors.append(span // below)
            below = span
    return tuple(factors)


def tier_mesh(cluster: Cluster, devices: int) -> Mesh:
    """One axis for each tier; where there are more than three, the outermost ones are one axis."""
    inner = list(tier_factors(cluster, devices)) or [1]
    ranks = [*inner[: MAX_AXES - 1], prod(inner[MAX_AXES - 1 :])] if len(inner) > MAX_AXES else inner
    return mesh_of(cluster, tuple(reversed(ranks)))


def meshes_of(cluster: Cluster, devices: int) -> tuple[Mesh, ...]:
    """All meshes of the first `devices` devices of one to three axes of which each lies within one tier or
    spans whole ones; those with the fewest axes first.

    64 devices in nodes of 8: 64, 8x8, and each 8 of these as 2x4 or 4x2. ConfigError where the cluster has
    fewer devices.
    """
    if not 1 <= devices <= cluster.devices:
        raise ConfigError(
            "is no number of devices of this cluster", key="devices", found=str(devices),
            allowed=f"1 to {cluster.devices}",
        )  # fmt: skip
    if devices == 1:
        return (mesh_of(cluster, (1,)),)
    rows = _axis_splits(tier_factors(cluster, devices), MAX_AXES)
    shapes = sorted({tuple(reversed(row)) for row in rows}, key=lambda shape: (len(shape), shape))
    return tuple(mesh_of(cluster, shape) for shape in shapes)


def _axis_splits(factors: tuple[int, ...], axes: int) -> list[tuple[int, ...]]:
    """Ways to cut whole tiers with these factors into at most so many axes, innermost first."""
    if not factors:
        return [()]
    if axes == 0:
        return []
    found: list[tuple[int, ...]] = []
    for count in range(1, len(factors) + 1):
        whole = prod(factors[:count])
        found += [(whole, *tail) for tail in _axis_splits(factors[count:], axes - 1)]
    for parts in _tier_splits(factors[0], axes):
        found += [(*parts, *tail) for tail in _axis_splits(factors[1:], axes - len(parts))]
    return found


def _tier_splits(factor: int, axes: int) -> list[tuple[int, ...]]:
    """Ways to cut one tier into two or more axes, at most so many."""
    found: list[tuple[int, ...]] = []
    for size in range(2, factor):
        if factor % size == 0 and axes > 1:
            found.append((size, factor // size))
            found += [(size, *tail) for tail in _tier_splits(factor // size, axes - 1)]
    return found
