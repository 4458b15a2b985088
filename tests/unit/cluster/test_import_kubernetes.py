"""Clusters from nodes of Kubernetes, with labels of NVIDIA and of both generations of Topograph."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import shardwise as sw
from shardwise.cluster import facts_of_text
from shardwise.errors import ConfigError


def node(name: str, **labels: object) -> dict[str, Any]:
    """A node as `kubectl get nodes -o json` prints it, with NVIDIA's GPU feature discovery."""
    gpus = {
        "kubernetes.io/hostname": name, "node.kubernetes.io/instance-type": "p5.48xlarge",
        "nvidia.com/gpu.count": "8", "nvidia.com/gpu.memory": "81559", "nvidia.com/gpu.replicas": "1",
        "nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3", "nvidia.com/gpu.present": "true",
    }  # fmt: skip
    resources = {"cpu": "192", "memory": "2113390172Ki", "nvidia.com/gpu": "8", "pods": "110"}
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": name, "labels": gpus | labels},
        "spec": {"providerID": "aws:///us-east-1a/i-0"},
        "status": {
            "capacity": resources,
            "allocatable": resources,
            "conditions": [
                {"type": "MemoryPressure", "status": "False"},
                {"type": "Ready", "status": "True"},
            ],
        },
    }


def listed(*nodes: Mapping[str, Any]) -> str:
    return json.dumps({"apiVersion": "v1", "items": nodes, "kind": "List", "metadata": {}})


def imported(tmp_path: Path, *texts: str, **options: str) -> Any:
    paths = []
    for place, text in enumerate(texts):
        path = tmp_path / f"file{place}"
        path.write_text(text)
        paths.append(str(path))
    return sw.import_cluster(paths, **options)


NEW = ("fabric.topograph.run/tier-0", "fabric.topograph.run/tier-1", "accelerator.topograph.run/domain")
OLD = (
    "network.topology.nvidia.com/leaf", "network.topology.nvidia.com/spine",
    "network.topology.nvidia.com/accelerator",
)  # fmt: skip


@pytest.mark.parametrize("labels", [NEW, OLD])
def test_labels_of_both_generations_give_switches(tmp_path: Path, labels: tuple[str, ...]) -> None:
    """Four nodes below two leaf switches, in turn: spans of 8, 16 and 32 devices."""
    leaf, spine, _ = labels
    nodes = [node(f"ip-10-0-0-{at}", **{leaf: f"leaf-{at % 2}", spine: "spine-1"}) for at in range(4)]
    found = imported(tmp_path, listed(*nodes))
    assert [(tier.name, tier.span) for tier in found.cluster.tiers] == [
        ("NVLink 4", 8), ("leaf", 16), ("network", 32),
    ]  # fmt: skip
    assert [each.name for each in found.cluster.nodes] == ["ip-10-0-0-[0-3]"] * 4
    assert found.cluster.nodes[0].host_memory_bytes == pytest.approx(2113390172 * 1024, abs=2**20)


@pytest.mark.parametrize("domain", [NEW[2], OLD[2], "nvidia.com/gpu.clique"])
def test_scale_up_domains_are_tiers_of_several_nodes(tmp_path: Path, domain: str) -> None:
    """Two racks of three nodes of four GB200, below one leaf switch each: 12 devices share NVLink."""
    product = {"nvidia.com/gpu.product": "NVIDIA-GB200", "nvidia.com/gpu.count": "4"}
    racks = [
        node(f"r{rack}-{at}", **product, **{domain: f"nvl{rack}", NEW[0]: f"leaf{rack}", NEW[1]: "spine"})
        for at in range(3)
        for rack in range(2)
    ]
    found = imported(tmp_path, listed(*racks))
    assert [(tier.name, tier.span, tier.is_network) for tier in found.cluster.tiers] == [
        ("NVLink 5", 12, False), ("network", 24, True),
    ]  # fmt: skip
    assert found.cluster.tiers[0].bytes_per_s == 900e9


def test_the_graph_of_topograph_places_nodes_of_another_file(tmp_path: Path) -> None:
    graph = {
        "instances": [
            {"id": f"n{at}", "network_layers": [f"leaf-{at // 2}", "spine-a"], "labels": {}}
            for at in range(5)
        ]
    }
    found = imported(tmp_path, json.dumps(graph), listed(*(node(f"n{at}") for at in range(4))))
    assert [tier.span for tier in found.cluster.tiers] == [8, 16, 32]
    assert found.provenance["left_out"] == ["1 node n4: not in the list of nodes"]
    with pytest.raises(ConfigError, match="does not name the devices of node 'n0'"):
        imported(tmp_path, json.dumps(graph))


@pytest.mark.parametrize(
    ("changes", "devices", "absent"),
    [
        ({}, 8, None),
        ({"spec": {"unschedulable": True}}, 8, "not schedulable"),
        ({"conditions": [{"type": "Ready", "status": "Unknown"}]}, 8, "not ready"),
        ({"labels": {"nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3-MIG-1g.10gb"}}, 8,
         "slices of devices (MIG)"),
        # Without the label of the count: time slicing in four multiplies the resource, and names it.
        ({"labels": {"nvidia.com/gpu.count": None, "nvidia.com/gpu.replicas": "4",
                     "nvidia.com/gpu.product": "Tesla-T4-SHARED"}, "nvidia.com/gpu": "16"}, 4, None),
        ({"labels": {"nvidia.com/gpu.count": None}, "nvidia.com/gpu": None}, 0, None),
        ({"labels": {"nvidia.com/gpu.count": None, "nvidia.com/gpu.product": None,
                     "amd.com/gpu.product-name": "AMD_Instinct_MI300X"}, "nvidia.com/gpu": None,
          "amd.com/gpu": "8"}, 8, None),
    ],
)  # fmt: skip
def test_what_a_node_offers(changes: dict[str, Any], devices: int, absent: str | None) -> None:
    one = node("n")
    one["spec"] |= changes.pop("spec", {})
    one["status"]["conditions"] = changes.pop("conditions", one["status"]["conditions"])
    one["metadata"]["labels"] |= changes.pop("labels", {})
    one["status"]["capacity"] = one["status"]["capacity"] | changes
    (found,) = facts_of_text(listed(one), "nodes.json").nodes
    assert (found.devices, found.absent) == (devices, absent)
    assert found.device is None or "SHARED" not in found.device


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (listed(), "items: has no nodes"),
        (listed({"kind": "Pod", "metadata": {"name": "p"}}), r"items\[0\].kind: is not one of the choices"),
        (listed({"kind": "Node", "metadata": {}, "status": {}}), r"items\[0\].metadata.name: is missing"),
        (listed(node("n", **{"nvidia.com/gpu.count": "many"})), r"gpu.count.*is not a number of devices"),
        (listed(node("n"))[:-30], "is not valid JSON"),
        ('{"instances": [{"network_layers": []}]}', r"instances\[0\].id: is missing"),
        ('{"instances": []}', "instances: has the wrong length"),
    ],
)
def test_wrong_files_are_refused_with_the_place(tmp_path: Path, text: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why) as caught:
        imported(tmp_path, text)
    assert "\n" not in str(caught.value) and str(caught.value).startswith(str(tmp_path))
