"""Clusters as data that can be written as a shorthand, as a file, or as links."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from tests.relations.commands import File, Word

from shardwise.cluster import find_device

Unit = Callable[[float], str]


def bytes_per_s(rate: float) -> str:
    return f"{number(rate / 1e9)}GB/s"


def number(value: float) -> str:
    """All digits of a number, without a decimal point if it is an integer."""
    return str(int(value)) if value == int(value) and abs(value) < 1e15 else repr(value)


@dataclass(frozen=True, kw_only=True)
class Nodes:
    """`count` equal nodes in a row. A number that is None is the device's default."""

    device: str
    count: int
    devices: int
    speed: float | None = None
    cards: int | None = None
    card_bytes_per_s: float | None = None
    memory_bytes: float | None = None
    scale_up_bytes_per_s: float | None = None
    scale_up_latency_s: float | None = None
    scale_out_latency_s: float | None = None
    price_usd_per_hour: float | None = None

    @property
    def is_plain(self) -> bool:
        """Whether a shorthand can describe the node."""
        return self == Nodes(device=self.device, count=self.count, devices=self.devices)

    @property
    def own_class(self) -> Mapping[str, Any] | None:
        """A device class for a file with these numbers; None if they are those of the known device."""
        figures: dict[str, Any] = {}
        if self.memory_bytes is not None:
            figures["memory"] = f"{number(self.memory_bytes)}B"
        scale_up = {}
        if self.scale_up_bytes_per_s is not None:
            scale_up["bandwidth"] = bytes_per_s(self.scale_up_bytes_per_s)
        if self.scale_up_latency_s is not None:
            scale_up["latency"] = f"{self.scale_up_latency_s!r}s"
        if scale_up:
            figures["scale_up"] = scale_up
        if self.scale_out_latency_s is not None:
            figures["scale_out"] = {"latency": f"{self.scale_out_latency_s!r}s"}
        return {"device": self.device, **figures} if figures else None

    @property
    def default_cards(self) -> tuple[int, float]:
        """Network cards of a node, and bytes per second of each."""
        known = find_device(self.device)
        cards = max(-(-known.nics_per_node * self.devices // known.devices_per_node), 1)
        each = known.scale_out_bytes_per_s * known.devices_per_node / known.nics_per_node
        return self.cards or cards, self.card_bytes_per_s or each


@dataclass(frozen=True, kw_only=True)
class Tier:
    """A tier of a file; without a `bandwidth` it has the sum of the nodes' cards."""

    name: str
    span: int | str
    latency_s: float
    bytes_per_s: float | None = None
    is_network: bool | None = None

    def document(self, unit: Unit) -> dict[str, Any]:
        found: dict[str, Any] = {"name": self.name, "span": self.span, "latency": f"{self.latency_s!r}s"}
        if self.bytes_per_s is not None:
            found["bandwidth"] = unit(self.bytes_per_s)
        if self.is_network is not None:
            found["network"] = self.is_network
        return found


@dataclass(frozen=True, kw_only=True)
class ClusterData:
    """Runs of equal nodes, and tiers unless they are the default ones. `inter_node` is the option of that
    name."""

    nodes: tuple[Nodes, ...]
    tiers: tuple[Tier, ...] = ()
    inter_node: str | None = None

    @property
    def devices(self) -> int:
        return sum(run.devices * run.count for run in self.nodes)

    @property
    def node_count(self) -> int:
        return sum(run.count for run in self.nodes)

    @property
    def kinds(self) -> tuple[Nodes, ...]:
        """One node of each pool, in the order of the file."""
        return tuple(dict.fromkeys(replace(run, count=1) for run in self.nodes))

    @property
    def is_mixed(self) -> bool:
        return len(self.kinds) > 1

    @property
    def has_shorthand(self) -> bool:
        return not self.tiers and all(run.is_plain for run in self.nodes)

    @property
    def shorthand(self) -> str:
        return "+".join(f"{run.count}x{run.devices}x{run.device}" for run in self.nodes)

    @property
    def inter_node_bytes_per_s(self) -> float | None:
        """The bandwidth of every network card, if `--inter-node` gives it."""
        return None if self.inter_node is None else float(self.inter_node.removesuffix("Gb/s")) * 1e9 / 8.0

    def words(self) -> tuple[Word, ...]:
        """The cluster as words of a command: a shorthand if possible, else a file."""
        if not self.has_shorthand:
            return ("--cluster", self.file())
        network = ("--inter-node", self.inter_node) if self.inter_node is not None else ()
        return ("--cluster", self.shorthand, *network)

    def file(self, *, unit: Unit = bytes_per_s, **more: Any) -> File:
        """The cluster as a file; `more` are further keys of the file."""
        return File("cluster", {**self.document(unit), **more})

    def document(self, unit: Unit = bytes_per_s) -> dict[str, Any]:
        classes: dict[str, Any] = {}
        nodes = []
        for run in self.nodes:
            name = run.device
            if run.own_class is not None:
                known = [key for key, value in classes.items() if value == run.own_class]
                name = known[0] if known else f"{run.device}-{len(classes)}"
                classes[name] = run.own_class
            nodes.append(self._node(run, name, unit))
        found: dict[str, Any] = {"nodes": nodes}
        if classes:
            found["classes"] = classes
        if self.tiers:
            found["tiers"] = [tier.document(unit) for tier in self.tiers]
        return found

    def _node(self, run: Nodes, name: str, unit: Unit) -> dict[str, Any]:
        node: dict[str, Any] = {"device": name, "count": run.count, "devices": run.devices}
        if run.speed is not None:
            node["speed"] = run.speed
        if run.price_usd_per_hour is not None:
            node["price"] = f"{run.price_usd_per_hour:g}USD/h"
        cards: dict[str, Any] = {}
        if run.cards is not None:
            cards["count"] = run.cards
        rate = self.inter_node_bytes_per_s or run.card_bytes_per_s
        if rate is not None:
            cards["bandwidth"] = unit(rate)
        if cards:
            node["nics"] = cards
        return node

    def changed(self, change: Callable[[Nodes], Nodes]) -> ClusterData:
        """The cluster with `change` applied to every run of nodes."""
        return replace(self, nodes=tuple(change(run) for run in self.nodes))

    def with_explicit_cards(self) -> ClusterData:
        """The same cluster with the network cards of each node given explicitly, as files need."""
        rate = self.inter_node_bytes_per_s

        def with_cards(run: Nodes) -> Nodes:
            count, each = run.default_cards
            return replace(run, cards=count, card_bytes_per_s=rate or each)

        return replace(self.changed(with_cards), inter_node=None)

    def of_counts(self, counts: tuple[int, ...]) -> ClusterData:
        """A part with this many nodes of each run; runs without nodes are left out."""
        remaining = tuple(
            replace(run, count=count) for run, count in zip(self.nodes, counts, strict=True) if count
        )
        return replace(self, nodes=remaining)
