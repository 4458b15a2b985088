"""Nodes of Kubernetes (`kubectl get nodes -o json`) and the graph of Topograph: devices, switches and
scale-up domains from labels."""

from __future__ import annotations

import re
from collections.abc import Mapping

from shardwise.cluster.imports.facts import FileFacts, NodeFacts, name_of
from shardwise.inputs import Fields

RESOURCES = ("nvidia.com/gpu", "amd.com/gpu", "habana.ai/gaudi")
"""Resources that count devices."""

PRODUCT = ("nvidia.com/gpu.product", "amd.com/gpu.product-name")
COUNT, SHARING, CLIQUE = "nvidia.com/gpu.count", "nvidia.com/gpu.replicas", "nvidia.com/gpu.clique"

DOMAIN = ("accelerator.topograph.run/domain", "network.topology.nvidia.com/accelerator", CLIQUE)
"""Labels of the scale-up domain: of Topograph since 1.0, before, and of NVIDIA's GPU operator."""

_TIER = re.compile(r"fabric\.topograph\.run/tier-(\d{1,2})")
_OLD_TIERS = tuple(f"network.topology.nvidia.com/{name}" for name in ("leaf", "spine", "core"))

_QUANTITY = re.compile(r"(\d{1,18})(Ki|Mi|Gi|Ti|k|M|G|T)?")
_FACTORS = {
    "Ki": 2.0**10,
    "Mi": 2.0**20,
    "Gi": 2.0**30,
    "Ti": 2.0**40,
    "k": 1e3,
    "M": 1e6,
    "G": 1e9,
    "T": 1e12,
}


def is_kubernetes(document: Mapping[str, object]) -> bool:
    """Whether a JSON document is a list of nodes of Kubernetes, or one node."""
    return document.get("kind") in ("List", "NodeList", "Node") and (
        "items" in document or "metadata" in document
    )


def read_kubernetes(document: Mapping[str, object], file: str) -> FileFacts:
    """The nodes, with the labels of NVIDIA's feature discovery and of Topograph."""
    fields = Fields(document, file=file)
    items = [fields] if fields.any("kind") == "Node" else fields.mappings("items", high=100_000)
    if not items:
        raise fields.error("items", "has no nodes", allowed="1 or more of kind Node")
    nodes = [_node(item) for item in items]
    return FileFacts(file=file, kind="kubectl get nodes -o json", nodes=tuple(nodes), lists_nodes=True)


def _node(item: Fields) -> NodeFacts:
    item.choice("kind", ("Node",), default="Node")
    metadata = item.mapping("metadata")
    labels = metadata.mapping("labels", default={})
    capacity = item.mapping("status").mapping("capacity", default={})
    product = next((_text(labels, key) for key in PRODUCT if labels.has(key)), None)
    absent = _absent(item)
    if product is not None and "-MIG-" in product:
        absent = absent or "slices of devices (MIG)"
    return NodeFacts(
        name=name_of(metadata, "name"),
        device=None if product is None else product.removesuffix("-SHARED"),
        devices=_devices(labels, capacity),
        host_memory_bytes=_quantity(capacity, "memory") if capacity.has("memory") else None,
        switches=_switches(labels),
        domain=next((_text(labels, key) for key in DOMAIN if labels.has(key)), None),
        absent=absent,
    )


def _text(labels: Fields, key: str) -> str:
    return str(labels.any(key))[:200]


def _devices(labels: Fields, capacity: Fields) -> int:
    """The devices of a node. With time slicing the resource counts each several times, and the label does
    not."""
    if labels.has(COUNT):
        return _count(labels, COUNT)
    found = next((_count(capacity, key) for key in RESOURCES if capacity.has(key)), 0)
    shared = _count(labels, SHARING) if labels.has(SHARING) else 1
    return found // max(shared, 1)


def _count(part: Fields, key: str) -> int:
    value = str(part.any(key))
    if not re.fullmatch(r"\d{1,6}", value):
        raise part.error(key, "is not a number of devices", found=repr(value[:40]), allowed="such as 8")
    return int(value)


def _quantity(part: Fields, key: str) -> float:
    value = str(part.any(key))
    match = _QUANTITY.fullmatch(value)
    if match is None:
        raise part.error(key, "is not a quantity", found=repr(value[:40]), allowed="such as 2113390172Ki")
    return float(match[1]) * _FACTORS.get(match[2] or "", 1.0)


def _switches(labels: Fields) -> tuple[str, ...]:
    """The switches above a node, the nearest first, from either generation of Topograph's labels."""
    tiers = sorted((int(match[1]), key) for key in labels.names if (match := _TIER.fullmatch(key)))
    keys = [key for _, key in tiers] or [key for key in _OLD_TIERS if labels.has(key)]
    return tuple(_text(labels, key) for key in keys)


def _absent(item: Fields) -> str | None:
    if item.mapping("spec", default={}).any("unschedulable", default=False) is True:
        return "not schedulable"
    for condition in item.mapping("status").mappings("conditions", default=()):
        if condition.any("type", default="") == "Ready" and condition.any("status", default="") != "True":
            return "not ready"
    return None


# Topograph
def is_topograph(document: Mapping[str, object]) -> bool:
    """Whether a JSON document is a graph of Topograph."""
    return "instances" in document


def read_topograph(document: Mapping[str, object], file: str) -> FileFacts:
    """The instances with their layers of switches and scale-up domains; the graph has no devices."""
    fields = Fields(document, file=file)
    nodes = []
    for item in fields.mappings("instances", low=1, high=100_000):
        labels = item.mapping("labels", default={})
        nodes.append(
            NodeFacts(
                name=name_of(item, "id"),
                switches=tuple(str(layer)[:200] for layer in item.sequence("network_layers", default=())),
                domain=next((_text(labels, key) for key in DOMAIN if labels.has(key)), None),
            )
        )
    return FileFacts(file=file, kind="graph of Topograph", nodes=tuple(nodes))
