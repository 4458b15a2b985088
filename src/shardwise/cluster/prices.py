"""Prices of devices: the dated snapshot of list prices, and a cluster at other prices."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from shardwise.cluster.cluster import Cluster, node_runs
from shardwise.cluster.device import Device
from shardwise.cluster.ranges import DEVICE_PRICE
from shardwise.errors import ConfigError
from shardwise.inputs import listed, unknown
from shardwise.units import parse_quantity

PRICE = "price_usd_per_hour"
"""The field of a device, and the key of its source."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PriceOffer:
    """A list price per device and hour, of a provider and a commitment such as `on-demand` or `3-years`."""

    provider: str
    commitment: str
    device: str
    usd_per_hour: float
    date: str
    url: str

    @property
    def source(self) -> str:
        return f"list price, {self.commitment}, {self.provider}, {self.date}, {self.url} (not verified)"


@cache
def price_offers() -> tuple[PriceOffer, ...]:
    """All offers of the snapshot, in its order."""
    text = Path(__file__).with_name("data").joinpath("prices.json").read_text("utf-8")
    return tuple(
        PriceOffer(
            provider=each["provider"], commitment=each["commitment"], device=each["device"],
            usd_per_hour=parse_quantity(each["price"], "USD/h"), date=each["date"], url=each["url"],
        )
        for each in json.loads(text)["offers"]
    )  # fmt: skip


def at_price(cluster: Cluster, price: float | str) -> Cluster:
    """`cluster` at dollars per device and hour, or at the offers that a text such as `aws:3-years` names.

    ConfigError for a price out of range, and where the snapshot has no such offer of a device.
    """
    classes = {name: _priced(device, price) for name, device in cluster.classes.items()}
    nodes = []
    for node, count in node_runs(cluster.nodes):
        each = classes[node.device_class].price_usd_per_hour or 0.0
        nodes += [replace(node, price_usd_per_hour=each * node.devices)] * count
    return replace(cluster, classes=classes, nodes=tuple(nodes))


def _priced(device: Device, price: float | str) -> Device:
    if isinstance(price, str):
        offer = _offer(device, price)
        price, source = offer.usd_per_hour, offer.source
    else:
        source = "given"
    if not DEVICE_PRICE["low"] <= price <= DEVICE_PRICE["high"]:
        raise ConfigError(
            "is not a price", key="--price", found=f"{price:g}",
            allowed=f"dollars per device and hour, up to {DEVICE_PRICE['high']:g}",
        )  # fmt: skip
    return replace(device, price_usd_per_hour=price, sources={**device.sources, PRICE: source})


def _offer(device: Device, text: str) -> PriceOffer:
    provider, _, commitment = text.partition(":")
    for offer in price_offers():
        if (offer.provider, offer.commitment, offer.device) == (provider, commitment, device.name):
            return offer
    known = [f"{one.provider}:{one.commitment}" for one in price_offers() if one.device == device.name]
    allowed = listed(["dollars per device and hour such as 2.9", *known])
    raise unknown(f"is no offer of {device.name}", text, known, key="--price", allowed=allowed)


def price_lines(cluster: Cluster) -> list[str]:
    """One line per class with the price of its devices and where it is from; empty where a node has none."""
    if cluster.price_usd_per_hour is None:
        return []
    lines = []
    for name, device in cluster.classes.items():
        nodes = [node for node, _ in node_runs(cluster.nodes) if node.device_class == name]
        own = device.price_usd_per_hour
        if own is not None and all(node.price_usd_per_hour == own * node.devices for node in nodes):
            lines.append(f"price of {name}: ${own:,.3g} an hour ({device.sources[PRICE]})")
        else:
            lines.append(f"price of nodes of {name}: as the cluster file gives it")
    return lines
