"""Converts a cluster to plain JSON values and back without loss, for plan files."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, fields
from typing import Any

from shardwise.cluster.cluster import Capacity, Cluster, Link, Node, Tier, node_runs
from shardwise.cluster.device import Backend, Device
from shardwise.cluster.device_file import checked_links, efficiency_from_record
from shardwise.cluster.ranges import DERIVED_RATE, DEVICE, LINK, MAX_DEVICES, NODE, PEAK, TIER, Range
from shardwise.inputs import Fields, join_key, short_repr


def cluster_record(cluster: Cluster) -> dict[str, Any]:
    """`cluster` as mappings, lists, texts and numbers; a run of equal nodes is one entry with a count."""
    record: dict[str, Any] = {
        "name": cluster.name,
        "classes": {name: _plain(device) for name, device in cluster.classes.items()},
        "nodes": [{"count": count, **_plain(node)} for node, count in node_runs(cluster.nodes)],
        "tiers": [_plain(tier) for tier in cluster.tiers],
        "links": [_plain(link) for link in cluster.links],
        "assumptions": list(cluster.assumptions),
    }
    return {**record, "is_without_links": True} if cluster.is_without_links else record


def _plain(record: Any) -> dict[str, Any]:
    """A dataclass as nested dicts, with tuples as lists."""
    plain: dict[str, Any] = _listed(asdict(record))
    return plain


def _listed(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _listed(item) for key, item in value.items()}
    return [_listed(item) for item in value] if isinstance(value, tuple) else value


def cluster_from_record(
    record: Mapping[str, Any], *, file: str | None = None, key: str = "cluster"
) -> Cluster:
    """The cluster of a record by `cluster_record`. ConfigError, located below `key`, where the record is
    wrong."""
    part = Fields(record, file=file, key=key)
    classes = {name: _device(item) for name, item in part.mapping("classes").items()}
    nodes: list[Node] = []
    devices = 0
    for item in part.mappings("nodes", low=1):
        count, node = item.integer("count", low=1, high=MAX_DEVICES), _node(item, classes)
        devices += count * node.devices
        if devices > MAX_DEVICES:
            raise item.error(
                "count", "is too many devices", found=f"{devices:,}", allowed=f"at most {MAX_DEVICES:,}"
            )
        nodes += [node] * count
    cluster = Cluster(
        name=part.text("name"),
        classes=classes,
        nodes=tuple(nodes),
        tiers=tuple(_tier(item) for item in part.mappings("tiers", low=1)),
        links=tuple(_link(item) for item in part.mappings("links")),
        assumptions=tuple(_line(part, item) for item in part.sequence("assumptions")),
        is_without_links=part.boolean("is_without_links", default=False),
    )
    part.finish()
    spans = [tier.span for tier in cluster.tiers]
    if sorted(set(spans)) != spans or spans[-1] != cluster.devices:
        allowed = f"spans that grow to {cluster.devices}, all devices"
        raise part.error("tiers", "do not span the cluster", found=str(spans[:8]), allowed=allowed)
    return cluster


def _line(part: Fields, item: object) -> str:
    if not isinstance(item, str):
        raise part.error(
            "assumptions", "has an entry that is not text", found=short_repr(item), allowed="texts"
        )
    return item


def _device(part: Fields) -> Device:
    """A device from its record; every figure is required, and unknown keys are errors."""
    skipped = (
        "peak_flop_per_s", "efficiency", "sources", "price_usd_per_hour", "scale_up_links", "backend",
    )  # fmt: skip
    values = _figures(part, Device, DEVICE, skip=skipped)
    links = _pairs(part, "scale_up_links") if part.has("scale_up_links") else ()
    if any(count % 1 for _, count in links):
        raise part.error(
            "scale_up_links", "has a fraction of a link", found=short_repr(links), allowed="whole links"
        )
    counts = [(size, int(count)) for size, count in links]
    values["scale_up_links"] = checked_links(part, "scale_up_links", counts) if counts else ()
    peaks = part.mapping("peak_flop_per_s")
    values["peak_flop_per_s"] = {name: peaks.number(name, **PEAK) for name in peaks.names}
    values["sources"] = _texts(part.mapping("sources"))
    values["price_usd_per_hour"] = _optional(part, "price_usd_per_hour", DEVICE)
    if part.has("backend"):  # older records have none
        values["backend"] = _backend(part.mapping("backend"))
    efficiency = part.mapping("efficiency")
    values["efficiency"] = efficiency_from_record(efficiency)
    part.finish()
    return Device(**values)


def _backend(part: Fields) -> Backend:
    backend = Backend(name=part.text("name"), instead=_texts(part.mapping("instead")))
    part.finish()
    return backend


def _node(part: Fields, classes: Mapping[str, Device]) -> Node:
    optional = ("price_usd_per_hour", "scale_up_bytes_per_s")
    values = _figures(part, Node, NODE, skip=("device_class", *optional))
    values["device_class"] = part.choice("device_class", classes)
    values |= {name: _optional(part, name, NODE) for name in optional}
    part.finish()
    return Node(**values)


def _tier(part: Fields) -> Tier:
    values = _figures(part, Tier, TIER, skip=("part_shares",))
    values["part_shares"] = _pairs(part, "part_shares") if part.has("part_shares") else ()
    part.finish()
    return Tier(**values)


def _link(part: Fields) -> Link:
    values = _figures(part, Link, LINK, skip=("capacity",))
    capacity = part.mapping("capacity")
    times_s = _numbers(capacity, "times_s", {"low": 0.0, "high": 1e16})
    values["capacity"] = Capacity(times_s, _numbers(capacity, "bytes_per_s", DERIVED_RATE))
    if times_s[0] != 0.0 or sorted(set(times_s)) != list(times_s):
        raise capacity.error(
            "times_s", "is not ascending", found=short_repr(times_s), allowed="ascending times from 0"
        )
    if len(values["capacity"].bytes_per_s) != len(times_s):
        raise capacity.error("bytes_per_s", "needs one rate per time", allowed=f"{len(times_s)} rates")
    capacity.finish()
    part.finish()
    return Link(**values)


def _figures(
    part: Fields, record: type[Any], ranges: Mapping[str, Range], skip: tuple[str, ...] = ()
) -> dict[str, Any]:
    """The plain fields of a record, each read by its declared type and checked against its range."""
    readers: dict[str, Callable[[str], object]] = {
        "str": lambda name: part.text(name, max_length=10_000),
        "int": lambda name: part.integer(name, low=ranges[name]["low"], high=ranges[name]["high"]),
        "float": lambda name: part.number(name, **ranges[name]),
        "bool": part.boolean,
    }
    return {
        field.name: readers[str(field.type)](field.name) for field in fields(record) if field.name not in skip
    }


def _optional(part: Fields, name: str, ranges: Mapping[str, Range]) -> float | None:
    return part.number(name, **ranges[name]) if part.has(name) else None


def _pairs(part: Fields, name: str) -> tuple[tuple[int, float], ...]:
    """Pairs of a number of members and a figure, in ascending order of members."""
    pairs = []
    for index, item in enumerate(part.sequence(name)):
        listed = dict(zip(("members", "figure"), item, strict=False)) if isinstance(item, list) else {}
        pair = Fields(listed, file=part.file, key=join_key(part.key, f"{name}.{index}"))
        pairs.append((pair.integer("members", low=2, high=1e7), pair.number("figure", low=1e-9, high=1e6)))
    if pairs != sorted(dict(pairs).items()):
        raise part.error(name, "is not ascending", found=short_repr(pairs), allowed="ascending members")
    return tuple(pairs)


def _texts(part: Fields) -> dict[str, str]:
    return {name: part.text(name, max_length=10_000) for name in part.names}


def _numbers(part: Fields, name: str, bounds: Range) -> tuple[float, ...]:
    listed = {str(index): item for index, item in enumerate(part.sequence(name, low=1))}
    items = Fields(listed, file=part.file, key=join_key(part.key, name))
    return tuple(items.number(index, **bounds) for index in items.names)
