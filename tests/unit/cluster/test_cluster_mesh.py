"""Meshes that follow the tiers of a cluster."""

import pytest

from shardwise.cluster import load_cluster, mesh_of, meshes_of, tier_mesh
from shardwise.errors import ConfigError


@pytest.mark.parametrize(
    ("cluster", "devices", "names"),
    [
        # One tier of 8: 8 itself, and its factorisations into two or three.
        ("1x8xV100-32G", 8, ["8", "2x4", "4x2", "2x2x2"]),
        # Nodes of 8, 8 of them: whole tiers joined or separate, one of them factorised in two.
        ("8x8xH100-SXM", 64, ["64", "8x8", "2x4x8", "4x2x8", "8x2x4", "8x4x2"]),
        # 12 devices on nodes of 8 form 3 groups of 4.
        ("8x8xH100-SXM", 12, ["12", "3x4", "3x2x2"]),
        ("8x8xH100-SXM", 1, ["1"]),
        ("8x8xH100-SXM", 7, ["7"]),
    ],
)
def test_meshes_are_within_tiers_or_span_whole_ones(cluster: str, devices: int, names: list[str]) -> None:
    assert [mesh.name for mesh in meshes_of(load_cluster(cluster), devices)] == names


def test_meshes_of_the_same_axes_have_the_same_members() -> None:
    cluster = load_cluster("8x8xH100-SXM")
    members = {mesh.name: mesh.members for mesh in meshes_of(cluster, 64)}
    assert members["2x4x8"] == members["4x2x8"] == ((1, 2), (1, 4), (8, 1))
    assert members["8x2x4"] == members["8x4x2"] and len(set(members.values())) == 4


def test_axes_have_their_members_per_tier() -> None:
    # 4x2x8 on nodes of 8: the innermost 8 are a node, the others are between nodes.
    axes = mesh_of(load_cluster("8x8xH100-SXM"), (4, 2, 8)).axes
    assert [(axis.size, axis.stride, axis.sizes) for axis in axes] == [
        (4, 16, (1, 4)),
        (2, 8, (1, 2)),
        (8, 1, (8, 1)),
    ]
    # 16 in a row are two nodes: 8 within each, 2 between them.
    assert mesh_of(load_cluster("8x8xH100-SXM"), (4, 16)).axes[1].sizes == (8, 2)


def test_one_axis_per_tier() -> None:
    assert tier_mesh(load_cluster("8x8xH100-SXM"), 64).ranks == (8, 8)
    assert tier_mesh(load_cluster("8x8xH100-SXM"), 4).ranks == (4,)
    assert tier_mesh(load_cluster("8x8xH100-SXM"), 1).ranks == (1,)


@pytest.mark.parametrize("ranks", [(), (9, 8), (2, 2, 2, 2), (0,)])
def test_an_invalid_mesh_is_refused(ranks: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match="mesh"):
        mesh_of(load_cluster("8x8xH100-SXM"), ranks)


def test_more_devices_than_there_are_is_refused() -> None:
    with pytest.raises(ConfigError, match="devices"):
        meshes_of(load_cluster("1x8xV100-32G"), 16)
