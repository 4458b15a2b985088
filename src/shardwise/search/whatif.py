"""Another cluster or job than a plan's: `inter_node_bandwidth=2x,seq_len=16384`."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace

from shardwise.cluster import Cluster, Device, Node, Tier, multiplied, resized
from shardwise.cost import find_recipe
from shardwise.errors import ConfigError
from shardwise.inputs import nearest, short_repr
from shardwise.search.question import Question
from shardwise.units import parse_quantity

_FACTOR = re.compile(r"([0-9]{1,9}(?:\.[0-9]{0,9})?)x")
_LARGEST_FACTOR = 1e6
_LARGEST_COUNT = 10_000_000


def changed_question(question: Question, text: str, *, key: str = "--what-if") -> Question:
    """The question with the changes that `text` names: `name=2x` multiplies, `name=quantity` sets.

    Names are those of CHANGES. ConfigError, below `key`, for an unknown or repeated name, and for a value
    that is no factor and no quantity of that kind, or that the cluster cannot take.
    """
    changed, names = question, set[str]()
    for pair in filter(None, (part.strip() for part in text.split(","))):
        name, equals, value = (piece.strip() for piece in pair.partition("="))
        if name not in CHANGES:
            near = nearest(name, CHANGES)
            hint = f" (did you mean {near}?)" if near else ""
            raise ConfigError(
                f"is not known{hint}", key=key, found=short_repr(name), allowed=", ".join(CHANGES)
            )
        where = f"{key}.{name}"
        if not equals or not value:
            raise ConfigError("needs a value", key=where, allowed="a factor such as 2x, or a quantity")
        if name in names:
            raise ConfigError("is given twice", key=where)
        names.add(name)
        try:
            changed = CHANGES[name](changed, value)
        except ConfigError as error:
            raise ConfigError(error.message, key=where, found=error.found, allowed=error.allowed) from None
    if not names:
        raise ConfigError("names no change", key=key, found=short_repr(text), allowed=", ".join(CHANGES))
    return changed


def _ratio(value: str, unit: str, now: float) -> float:
    """By how much a figure that is `now` changes."""
    match = _FACTOR.fullmatch(value)
    try:
        ratio = float(match[1]) if match else parse_quantity(value, unit) / now
    except ConfigError as error:
        raise ConfigError(
            error.message, found=error.found, allowed=f"a factor such as 2x, or {error.allowed}"
        ) from None
    if not 1.0 / _LARGEST_FACTOR <= ratio <= _LARGEST_FACTOR:
        raise ConfigError(
            "is out of range",
            found=short_repr(value),
            allowed=f"1/{_LARGEST_FACTOR:g} to {_LARGEST_FACTOR:g} times",
        )
    return ratio


def _count(value: str, now: int) -> int:
    """A whole number, or a multiple of the one that is `now`."""
    match = _FACTOR.fullmatch(value)
    number = float(match[1]) * now if match else float(value) if re.fullmatch(r"[0-9]{1,9}", value) else 0.0
    if not number.is_integer() or not 1 <= number <= _LARGEST_COUNT:
        allowed = f"1 to {_LARGEST_COUNT}, or a factor that gives a whole number"
        raise ConfigError("is not a whole number in range", found=short_repr(value), allowed=allowed)
    return int(number)


def _inter_node(question: Question, value: str) -> Question:
    cluster = question.cluster
    if not any(tier.is_network for tier in cluster.tiers):
        raise ConfigError("the cluster has no network between nodes", found=cluster.name)
    ratio = _ratio(value, "B/s", cluster.nodes[0].nic_bytes_per_s)
    return _with_cluster(question, _retiered(_with_nodes(cluster, lambda node: replace(
        node, nic_bytes_per_s=node.nic_bytes_per_s * ratio
    )), ratio, is_network=True))  # fmt: skip


def _intra_node(question: Question, value: str) -> Question:
    cluster = question.cluster
    inside = [tier for tier in cluster.tiers if not tier.is_network]
    if not inside:
        raise ConfigError("the cluster has no fabric inside nodes", found=cluster.name)
    ratio = _ratio(value, "B/s", inside[0].bytes_per_s)

    def faster(node: Node) -> Node:
        given = node.scale_up_bytes_per_s
        return node if given is None else replace(node, scale_up_bytes_per_s=given * ratio)

    devices = _with_devices(
        cluster, lambda device: replace(device, scale_up_bytes_per_s=device.scale_up_bytes_per_s * ratio)
    )
    return _with_cluster(question, _retiered(_with_nodes(devices, faster), ratio, is_network=False))


def _memory(question: Question, value: str) -> Question:
    ratio = _ratio(value, "B", min(device.memory_bytes for device in question.cluster.classes.values()))
    return _with_cluster(question, _with_devices(
        question.cluster, lambda device: replace(device, memory_bytes=round(device.memory_bytes * ratio))
    ))  # fmt: skip


def _flops(question: Question, value: str) -> Question:
    dtype = find_recipe(question.job.dtype).matmul
    now = min(device.peak_flop_per_s[dtype] for device in question.cluster.classes.values())
    ratio = _ratio(value, "FLOP/s", now)
    return _with_cluster(question, _with_devices(question.cluster, lambda device: replace(
        device, peak_flop_per_s={name: peak * ratio for name, peak in device.peak_flop_per_s.items()}
    )))  # fmt: skip


def _host_memory(question: Question, value: str) -> Question:
    cluster = question.cluster
    ratio = _ratio(value, "B", min(node.host_memory_bytes for node in cluster.nodes))
    return _with_cluster(question, _with_nodes(
        cluster, lambda node: replace(node, host_memory_bytes=node.host_memory_bytes * ratio)
    ))  # fmt: skip


def _devices(question: Question, value: str) -> Question:
    return _with_cluster(question, resized(question.cluster, _count(value, question.cluster.devices)))


def _nodes(question: Question, value: str) -> Question:
    cluster = question.cluster
    count = _count(value, len(cluster.nodes))
    if count % len(cluster.nodes) == 0:
        factor = count // len(cluster.nodes)
        return question if factor == 1 else _with_cluster(question, multiplied(cluster, factor))
    first_nodes = cluster.nodes[:count]
    more = (count - len(first_nodes)) * cluster.nodes[-1].devices
    return _with_cluster(question, resized(cluster, sum(node.devices for node in first_nodes) + more))


def _seq_len(question: Question, value: str) -> Question:
    return replace(question, job=replace(question.job, seq_len=_count(value, question.job.seq_len)))


def _batch(question: Question, value: str) -> Question:
    size = _count(value, question.job.global_batch_size)
    return replace(question, job=replace(question.job, global_batch_size=size))


CHANGES: Mapping[str, Callable[[Question, str], Question]] = {
    "inter_node_bandwidth": _inter_node,
    "intra_node_bandwidth": _intra_node,
    "memory": _memory,
    "flops": _flops,
    "devices": _devices,
    "nodes": _nodes,
    "seq_len": _seq_len,
    "global_batch_size": _batch,
    "host_memory": _host_memory,
}
"""What may be changed. Quantities: of a network card; of a device inside its node; of a device; of its dense
peak in the job's dtype; counts; of a node's host. Where a cluster is mixed, what is given is for the least of
it, and the others keep their proportion."""


def _with_cluster(question: Question, cluster: Cluster) -> Question:
    return replace(question, cluster=cluster)


def _with_devices(cluster: Cluster, change: Callable[[Device], Device]) -> Cluster:
    return replace(cluster, classes={name: change(device) for name, device in cluster.classes.items()})


def _with_nodes(cluster: Cluster, change: Callable[[Node], Node]) -> Cluster:
    """Nodes that are one record stay one record."""
    changed: dict[int, Node] = {}
    for node in cluster.nodes:
        if id(node) not in changed:
            changed[id(node)] = change(node)
    return replace(cluster, nodes=tuple(changed[id(node)] for node in cluster.nodes))


def _retiered(cluster: Cluster, ratio: float, *, is_network: bool) -> Cluster:
    """Tiers of one kind with `ratio` times their bandwidth; they stand for the links, where these were
    given."""

    def faster(tier: Tier) -> Tier:
        return replace(
            tier, bytes_per_s=tier.bytes_per_s * ratio, flow_bytes_per_s=tier.flow_bytes_per_s * ratio
        )

    tiers = tuple(faster(tier) if tier.is_network == is_network else tier for tier in cluster.tiers)
    return replace(cluster, tiers=tiers, links=(), is_without_links=cluster.has_links_as_tiers)
