"""Reads clusters from YAML or JSON files: classes, nodes, and tiers or links.

Reading is strict: unknown keys are errors. docs/reference/formats.md describes the keys.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate

from shardwise.cluster.catalogue import device_names, find_device
from shardwise.cluster.cluster import Capacity, Cluster, Link, Node, Tier
from shardwise.cluster.device import Device
from shardwise.cluster.device_file import device_of
from shardwise.cluster.link_groups import close_order, nested_groups
from shardwise.cluster.load import default_lines, default_node
from shardwise.cluster.ranges import HOST_MEMORY, LATENCY, MAX_DEVICES, NODE_PRICE, RATE, SPEED
from shardwise.cluster.tiers import (
    NodeRun,
    common_span,
    default_tiers,
    network_figures,
    scale_up_tier,
    tiers_of_links,
)
from shardwise.errors import ConfigError
from shardwise.inputs import Fields, join_key, read_mapping, short_repr

MAX_GRAPH_DEVICES = 4096
"""Most devices of a cluster whose file gives links."""


def cluster_of_file(path: str, *, measured: Mapping[str, Device] | None = None) -> Cluster:
    """The cluster that the file at `path` describes.

    Devices of `measured` (by name) replace those of the catalogue. ConfigError names the file and the wrong
    key.
    """
    return cluster_of_fields(Fields(read_mapping(path), file=path), measured)


def cluster_of_fields(fields: Fields, measured: Mapping[str, Device] | None = None) -> Cluster:
    """The cluster of a file that was read: `name`, `classes`, `nodes`, and `tiers` or `links`."""
    name = fields.text("name", default="cluster")
    classes = _classes(fields, measured)
    runs = _node_runs(fields, classes, measured)
    used = {key: device for key, device in classes.items() if any(n.device_class == key for n, _ in runs)}
    devices = sum(node.devices * count for node, count in runs)
    if devices > MAX_DEVICES:
        raise fields.error(
            "nodes", "have too many devices", found=f"{devices:,}", allowed=f"at most {MAX_DEVICES:,}"
        )
    nodes = tuple(node for node, count in runs for _ in range(count))
    if fields.has("links"):
        return _with_links(fields, name, used, nodes)
    given = fields.has("tiers")
    tiers = _given_tiers(fields, runs, devices, used) if given else default_tiers(used, runs)
    lines = (*(() if given else default_lines(used, runs)), *_assumed(fields))
    fields.finish(allowed=("tiers", "links", "provenance"))
    return Cluster(name=name, classes=used, nodes=nodes, tiers=tiers, assumptions=lines)


def _assumed(fields: Fields) -> tuple[str, ...]:
    """The defaults that an import took, from the section `provenance` of the file."""
    if not fields.has("provenance"):
        return ()
    part = fields.mapping("provenance")
    lists = {key: _lines(part, key) for key in ("files", "defaults", "left_out")}
    given = part.mapping("given", default={})
    for name in given.chosen_names():
        given.text(name, max_length=MAX_LINE)
    part.finish()
    return lists["defaults"]


MAX_LINE = 400
"""Longest line of `provenance`, characters."""


def _lines(part: Fields, key: str) -> tuple[str, ...]:
    listed = {str(index): item for index, item in enumerate(part.sequence(key, default=()))}
    lines = Fields(listed, file=part.file, key=join_key(part.key, key))
    return tuple(lines.text(index, max_length=MAX_LINE) for index in listed)


def _classes(fields: Fields, measured: Mapping[str, Device] | None) -> dict[str, Device]:
    """The device classes of the file by name; each is a known device with changed figures."""
    classes: dict[str, Device] = {}
    if fields.has("classes"):
        for name, part in fields.mapping("classes").items():
            base = _known(part, "device", measured)
            classes[name] = device_of(
                part, name=name, base=base, given=f"given in {fields.file or 'the file'}"
            )
    return classes


def _known(fields: Fields, key: str, measured: Mapping[str, Device] | None) -> Device:
    text = fields.text(key)
    try:
        return find_device(text, measured)
    except ConfigError as error:
        raise fields.error(key, error.message, found=error.found, allowed=error.allowed) from None


def _node_runs(
    fields: Fields, classes: dict[str, Device], measured: Mapping[str, Device] | None
) -> list[NodeRun]:
    """The nodes of the file in order. Known devices that they name are added to `classes`."""
    runs: list[NodeRun] = []
    total = 0
    for part in fields.mappings("nodes", low=1):
        device = _device_of_node(part, classes, measured)
        classes.setdefault(device.name, device)
        count = part.integer("count", low=1, high=MAX_DEVICES, default=1)
        node = _node(part, device)
        part.finish()
        total += count * node.devices
        if total > MAX_DEVICES:
            raise part.error(
                "", "has too many devices", found=f"{total:,}", allowed=f"at most {MAX_DEVICES:,}"
            )
        runs.append((node, count))
    return runs


def _device_of_node(
    part: Fields, classes: Mapping[str, Device], measured: Mapping[str, Device] | None
) -> Device:
    """The device of a node: a class of this file, or a known device."""
    text = part.text("device")
    if text in classes:
        return classes[text]
    try:
        return find_device(text, measured)
    except ConfigError as error:
        allowed = ", ".join(classes) + " or a known device" if classes else error.allowed
        if "ambiguous" in error.message or not classes:
            raise part.error("device", error.message, found=error.found, allowed=allowed) from None
        known = (*classes, *device_names())
        message = "is not a class of this file or a known device"
        raise part.unknown("device", text, known, message, allowed=allowed) from None


def _node(part: Fields, device: Device) -> Node:
    """The default node of the device, with the values that the file gives."""
    devices = part.integer("devices", low=1, high=65_536, default=device.devices_per_node)
    defaults = default_node(device, devices)
    nics, rate = defaults.nics, defaults.nic_bytes_per_s
    if part.has("nics"):
        cards = part.mapping("nics")
        nics = cards.integer("count", low=1, high=1024, default=nics)
        rate = cards.quantity("bandwidth", unit="B/s", **RATE, default=rate)
        cards.finish()
    memory, link = defaults.host_memory_bytes, defaults.host_link_bytes_per_s
    if part.has("host"):
        host = part.mapping("host")
        memory = host.quantity("memory", unit="B", **HOST_MEMORY, default=memory)
        link = host.quantity("link", unit="B/s", **RATE, default=link)
        host.finish()
    price = defaults.price_usd_per_hour
    if part.has("price"):
        price = part.quantity("price", unit="USD/h", **NODE_PRICE)
    return replace(
        defaults,
        name=part.text("name", default=defaults.name),
        device_class=device.name,
        speed=part.number("speed", **SPEED, default=1.0),
        nics=nics,
        nic_bytes_per_s=rate,
        host_memory_bytes=memory,
        host_link_bytes_per_s=link,
        price_usd_per_hour=price,
    )


# Tiers
def _given_tiers(
    fields: Fields, runs: list[NodeRun], devices: int, classes: Mapping[str, Device]
) -> tuple[Tier, ...]:
    """The tiers of the file, innermost first; the last one spans all devices.

    The first one without a bandwidth, which is no network, has the figures of the devices' scale-up fabric.
    """
    node_span = common_span(runs, lambda node: node.devices)
    tiers: list[Tier] = []
    parts = fields.mappings("tiers", low=1, high=8)
    for index, part in enumerate(parts):
        is_last = index == len(parts) - 1
        span = _span(part, node_span, devices, is_last)
        if tiers and span <= tiers[-1].span:
            allowed = f"more than the tier inside it, {tiers[-1].span}"
            raise part.error("span", "is not larger", found=str(span), allowed=allowed)
        if tiers and span % tiers[-1].span and not is_last:
            allowed = f"a multiple of the tier inside it, {tiers[-1].span}"
            raise part.error("span", "cuts groups of the tier inside it", found=str(span), allowed=allowed)
        is_network = span > node_span and (index > 0 or not part.has("bandwidth"))
        is_network = part.boolean("network", default=is_network)
        base = scale_up_tier(classes, runs, span) if index == 0 and not is_network else None
        tiers.append(_tier(part, span, runs, is_network, base if not part.has("bandwidth") else None))
    return tuple(tiers)


def _span(part: Fields, node_span: int, devices: int, is_last: bool) -> int:
    """Devices of a tier's group: a number, `node`, or `cluster`."""
    value = part.any("span", default="cluster" if is_last else None)
    if value == "cluster":
        return devices
    span = node_span if value == "node" else part.integer("span", low=1, high=MAX_DEVICES)
    if span > devices or (is_last and span < devices):
        allowed = (
            f"{devices}, all devices, for the last tier" if is_last else f"at most {devices}, all devices"
        )
        raise part.error("span", "does not fit the nodes", found=str(span), allowed=allowed)
    return span


def _tier(part: Fields, span: int, runs: list[NodeRun], is_network: bool, base: Tier | None) -> Tier:
    """One tier with its bandwidth per device and direction; by default, a network tier has the bandwidth of
    the network cards. `base` has the figures of a scale-up tier without bandwidth."""
    if base is not None:
        tier = replace(
            base,
            name=part.text("name"),
            latency_s=part.quantity("latency", unit="s", **LATENCY, default=base.latency_s),
        )
        part.finish(allowed=("bandwidth",))
        return tier
    name = part.text("name")
    oversubscription = part.number("oversubscription", low=1.0, high=1e4, default=1.0)
    rails = part.integer("rails", low=1, high=1024) if part.has("rails") else None
    if is_network and not part.has("bandwidth"):
        figures = network_figures([node for node, _ in runs], oversubscription=oversubscription, rails=rails)
        rate, alone = figures.bytes_per_s, figures.flow_bytes_per_s
    else:
        if rails is not None:
            raise part.error(
                "rails", "divides the bandwidth of network cards, but the tier gives a bandwidth",
                found=str(rails), allowed="rails or bandwidth, not both",
            )  # fmt: skip
        alone = part.quantity("bandwidth", unit="B/s", **RATE)
        rate = alone / oversubscription
    tier = Tier(
        name=name,
        span=span,
        bytes_per_s=rate,
        flow_bytes_per_s=alone,
        latency_s=part.quantity("latency", unit="s", **LATENCY),
        in_switch_reduction=part.boolean("in_switch_reduction", default=False),
        is_network=is_network,
    )
    part.finish()
    return tier


# Links
def _with_links(fields: Fields, name: str, classes: Mapping[str, Device], nodes: tuple[Node, ...]) -> Cluster:
    """A cluster with given links; its tiers have the bandwidth of rings over consecutive devices."""
    if fields.has("tiers"):
        raise fields.error("tiers", "is given together with links", allowed="tiers or links, not both")
    devices = sum(node.devices for node in nodes)
    if devices > MAX_GRAPH_DEVICES:
        allowed = f"at most {MAX_GRAPH_DEVICES} devices with links"
        raise fields.error("links", "has too many devices", found=str(devices), allowed=allowed)
    vertices = {f"d{rank}" for rank in range(devices)} | {f"n{index}" for index in range(len(nodes))}
    if fields.has("switches"):
        vertices |= {str(item) for item in fields.sequence("switches")}
    links: dict[str, Link] = {}
    for part in fields.mappings("links", low=1):
        for link in _links(part, vertices):
            if link.name in links:
                raise part.error(
                    "name", "is given twice", found=short_repr(link.name), allowed="each link once"
                )
            links[link.name] = link
    fields.finish(allowed=("switches",))
    order = close_order(nodes, nested_groups(nodes, links.values()))
    bare = Cluster(
        name=name, classes=classes, nodes=tuple(nodes[place] for place in order), tiers=(),
        links=_reordered(links.values(), nodes, order), assumptions=_order_lines(order),
    )  # fmt: skip
    try:
        return replace(bare, tiers=tiers_of_links(bare))
    except ConfigError as error:
        raise fields.error(
            "links", error.message, found=error.found, allowed="a route between all devices"
        ) from None


def _reordered(links: Iterable[Link], nodes: Sequence[Node], order: Sequence[int]) -> tuple[Link, ...]:
    """The links of nodes in another order: devices and hosts have the numbers of their new places."""
    if list(order) == list(range(len(nodes))):
        return tuple(links)
    firsts = [*accumulate((node.devices for node in nodes), initial=0)]
    ranks = [firsts[place] + each for place in order for each in range(nodes[place].devices)]
    names = {f"n{place}": f"n{at}" for at, place in enumerate(order)}
    names |= {f"d{rank}": f"d{at}" for at, rank in enumerate(ranks)}

    def moved(link: Link) -> Link:
        source, target = (names.get(vertex, vertex) for vertex in (link.source, link.target))
        return replace(link, name=f"{source}>{target}", source=source, target=target)

    return tuple(map(moved, links))


def _order_lines(order: Sequence[int]) -> tuple[str, ...]:
    if list(order) == list(range(len(order))):
        return ()
    shown = ", ".join(f"n{place}" for place in order[:20]) + (", ..." if len(order) > 20 else "")
    return (f"nodes in the order of their links: n0, n1, ... are {shown} of the file, devices as well",)


def _links(part: Fields, vertices: set[str]) -> tuple[Link, ...]:
    """The links of one entry: one per direction, or one where the entry has `one_way: true`."""
    source, target = (_vertex(part, key, vertices) for key in ("from", "to"))
    capacity = Capacity.constant(part.quantity("bandwidth", unit="B/s", **RATE))
    latency = part.quantity("latency", unit="s", **LATENCY)
    one_way = part.boolean("one_way", default=False)
    part.finish()
    pairs = ((source, target),) if one_way else ((source, target), (target, source))
    return tuple(
        Link(name=f"{a}>{b}", source=a, target=b, capacity=capacity, latency_s=latency) for a, b in pairs
    )


def _vertex(part: Fields, key: str, vertices: set[str]) -> str:
    text = part.text(key)
    if text not in vertices:
        allowed = "a device d0, d1, ..., a node n0, n1, ... or a name listed in switches"
        raise part.unknown(key, text, vertices, "is not a vertex", allowed=allowed)
    return text
