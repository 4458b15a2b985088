"""Device meshes: one to three axes of ranks that follow the tiers of a cluster."""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd, prod

from shardwise.cluster.cluster import Cluster
from shardwise.cluster.tiers import group_members
from shardwise.errors import ConfigError

MAX_AXES = 3
"""Most axes of a mesh."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshAxis:
    """An axis of `size` ranks with distance `stride`.

    `sizes` has the factor of each tier of the cluster, innermost first; their product is `size`."""

    size: int
    stride: int
    sizes: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Mesh:
    """The first devices of a cluster along axes; the outermost axis (with the largest stride) comes first."""

    axes: tuple[MeshAxis, ...]

    @property
    def devices(self) -> int:
        """Number of ranks."""
        return prod(axis.size for axis in self.axes)

    @property
    def ranks(self) -> tuple[int, ...]:
        """The size of each axis."""
        return tuple(axis.size for axis in self.axes)

    @property
    def members(self) -> tuple[tuple[int, ...], ...]:
        """The `sizes` of all axes in ascending order.

        Costs on a mesh depend on them only, apart from the order in which a layout names the axes."""
        return tuple(sorted(axis.sizes for axis in self.axes))

    @property
    def name(self) -> str:
        """The sizes of the axes, the outermost first: `8x8`."""
        return "x".join(str(axis.size) for axis in self.axes)


def mesh_of(cluster: Cluster, ranks: tuple[int, ...]) -> Mesh:
    """The mesh of the first devices of `cluster` with `ranks` ranks per axis, the outermost first.

    Raises ConfigError for more than MAX_AXES axes, or more ranks than devices.
    """
    if not 1 <= len(ranks) <= MAX_AXES or min(ranks) < 1 or prod(ranks) > cluster.devices:
        allowed = f"one to {MAX_AXES} sizes whose product is at most {cluster.devices}"
        raise ConfigError(
            "is not a mesh of this cluster", key="mesh", found=repr(list(ranks)), allowed=allowed
        )
    axes: list[MeshAxis] = []
    stride = 1
    for size in reversed(ranks):
        axes.append(MeshAxis(size=size, stride=stride, sizes=_sizes(cluster, stride, size)))
        stride *= size
    return Mesh(axes=tuple(reversed(axes)))


def _sizes(cluster: Cluster, stride: int, size: int) -> tuple[int, ...]:
    """Factor of each tier in the size of an axis, innermost first."""
    below, sizes = 1, []
    for members in group_members(cluster.tiers, stride, size):
        sizes.append(int(members) // below)
        below = int(members)
    return tuple(sizes)


def tier_factors(cluster: Cluster, devices: int) -> tuple[int, ...]:
    """Number of groups of the next inner tier that each tier joins among the first `devices` devices.

    The innermost tier comes first; tiers with a factor of 1 are left out. 64 devices in nodes of 8 have the
    factors (8, 8). 12 of them have (4, 3): three groups of 4, none of which crosses a node.
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
    """The mesh with one axis per tier; the outermost tiers share an axis where there are more than
    MAX_AXES."""
    inner = list(tier_factors(cluster, devices)) or [1]
    ranks = [*inner[: MAX_AXES - 1], prod(inner[MAX_AXES - 1 :])] if len(inner) > MAX_AXES else inner
    return mesh_of(cluster, tuple(reversed(ranks)))


def meshes_of(cluster: Cluster, devices: int) -> tuple[Mesh, ...]:
    """All meshes of the first `devices` devices with one to three axes, those with the fewest axes first.

    Each axis is within one tier or spans whole tiers. 64 devices in nodes of 8 have the meshes 64, 8x8, and
    those with one 8 split as 2x4 or 4x2. Raises ConfigError where the cluster has fewer devices.
    """
    if not 1 <= devices <= cluster.devices:
        raise ConfigError(
            "is not a number of devices of this cluster", key="devices", found=str(devices),
            allowed=f"1 to {cluster.devices}",
        )  # fmt: skip
    if devices == 1:
        return (mesh_of(cluster, (1,)),)
    rows = _axis_splits(tier_factors(cluster, devices), MAX_AXES)
    shapes = sorted({tuple(reversed(row)) for row in rows}, key=lambda shape: (len(shape), shape))
    return tuple(mesh_of(cluster, shape) for shape in shapes)


def _axis_splits(factors: tuple[int, ...], axes: int) -> list[tuple[int, ...]]:
    """All splits of tiers with these factors into at most `axes` axes, innermost first."""
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
    """All splits of one tier into two or more axes, at most `axes`."""
    found: list[tuple[int, ...]] = []
    for size in range(2, factor):
        if factor % size == 0 and axes > 1:
            found.append((size, factor // size))
            found += [(size, *tail) for tail in _tier_splits(factor // size, axes - 1)]
    return found
