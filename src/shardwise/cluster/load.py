"""Loads a cluster from a text (`load_cluster`): a shorthand, the name of a shipped cluster, or a file's path.

A shorthand is one line: `8x8xH100-SXM`, `64xA100-80G`, `4x8xA100-80G+4x8xV100-16G`. Shipped clusters are
files like those of users, with a source for each figure (docs/concepts/mixed-clusters.md).
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from shardwise.cluster.catalogue import find_device
from shardwise.cluster.cluster import Cluster, Node
from shardwise.cluster.device import Device
from shardwise.cluster.ranges import MAX_DEVICES
from shardwise.cluster.tiers import NodeRun, default_tiers
from shardwise.errors import ConfigError
from shardwise.inputs import short_repr
from shardwise.units import format_rate, parse_quantity

# Shorthands
_FORM = "NODESxPER_NODExDEVICE or COUNTxDEVICE, joined by +, such as 8x8xH100-SXM or 4x8xA100-80G+16xT4"
_PART = re.compile(r"([0-9]{1,12})[xX](?:([0-9]{1,12})[xX])?([^+]{1,100})")
_CARDS = re.compile(r"(?:([0-9]{1,4})[xX])?([0-9].*)")


def is_shorthand(text: str) -> bool:
    """Whether `text` has the form of a shorthand; its devices may still be unknown."""
    return all(_PART.fullmatch(part.strip()) for part in text.split("+"))


def cluster_of_shorthand(
    text: str, *, inter_node: str | None = None, measured: Mapping[str, Device] | None = None
) -> Cluster:
    """The cluster of a shorthand, with the default fabric of its devices.

    `COUNTxDEVICE` fills default nodes; the last one may be smaller. `inter_node` replaces the bandwidth of
    the network cards: `200Gb/s` per card, or `4x200Gb/s` for four cards per node. Devices of `measured` (by
    name) replace those of the catalogue. Raises ConfigError for a text that is not a cluster.
    """
    classes: dict[str, Device] = {}
    runs: list[NodeRun] = []
    for part in text.split("+"):
        device, found = _runs_of(part.strip(), text, measured)
        classes[device.name] = device
        runs += found
    if inter_node is not None:
        cards, rate = cards_of(inter_node)
        runs = [(_with_cards(node, cards, rate), count) for node, count in runs]
    if sum(node.devices * count for node, count in runs) > MAX_DEVICES:
        raise _wrong("has too many devices", text, f"at most {MAX_DEVICES:,} devices")
    if len(classes) > 1:
        runs = [
            (replace(node, scale_up_bytes_per_s=classes[node.device_class].scale_up_bytes_per_s), count)
            for node, count in runs
        ]
    return Cluster(
        name=text,
        classes=classes,
        nodes=tuple(node for node, count in runs for _ in range(count)),
        tiers=default_tiers(classes, runs),
        assumptions=default_lines(classes, runs),
    )


def default_node(device: Device, devices: int) -> Node:
    """The default node with `devices` devices and a proportional number of network cards."""
    nics = max(-(-device.nics_per_node * devices // device.devices_per_node), 1)
    price = device.price_usd_per_hour
    return Node(
        name=f"{devices}x{device.name}",
        device_class=device.name,
        devices=devices,
        nics=nics,
        nic_bytes_per_s=device.scale_out_bytes_per_s * device.devices_per_node / device.nics_per_node,
        host_memory_bytes=device.host_memory_bytes,
        host_link_bytes_per_s=device.host_link_bytes_per_s,
        price_usd_per_hour=None if price is None else price * devices,
    )


def cards_of(text: str) -> tuple[int | None, float]:
    """Network cards per node (None: unchanged) and bytes per second of each, from `200Gb/s` or
    `4x200Gb/s`."""
    match = _CARDS.fullmatch(text.strip())
    try:
        rate = parse_quantity(match.group(2), "B/s") if match else 0.0
    except ConfigError:
        rate = 0.0
    cards = int(match.group(1)) if match and match.group(1) else None
    if not 1e3 <= rate <= 1e15 or cards == 0:
        allowed = "the bandwidth of a network card such as 200Gb/s, or 4x200Gb/s for four per node"
        raise ConfigError("is not a network", key="inter-node", found=short_repr(text), allowed=allowed)
    return cards, rate


def _with_cards(node: Node, cards: int | None, rate: float) -> Node:
    return replace(node, nics=cards or node.nics, nic_bytes_per_s=rate)


def _runs_of(part: str, text: str, measured: Mapping[str, Device] | None) -> tuple[Device, list[NodeRun]]:
    """The device and the node runs of one term of a shorthand."""
    match = _PART.fullmatch(part)
    if match is None:
        raise _wrong("is not a cluster", text, _FORM)
    try:
        device = find_device(match.group(3), measured)
    except ConfigError as error:
        raise error.within(key="cluster") from None
    first, per_node = int(match.group(1)), match.group(2)
    if first == 0 or (per_node is not None and int(per_node) == 0):
        raise _wrong("has no devices", text, _FORM)
    if first * int(per_node or 1) > MAX_DEVICES:
        raise _wrong("has too many devices", text, f"at most {MAX_DEVICES:,} devices")
    if per_node is not None:
        return device, [(default_node(device, int(per_node)), first)]
    full, remainder = divmod(first, device.devices_per_node)
    runs = [(default_node(device, device.devices_per_node), full)] if full else []
    return device, runs + ([(default_node(device, remainder), 1)] if remainder else [])


def _wrong(message: str, text: str, allowed: str) -> ConfigError:
    return ConfigError(message, key="cluster", found=short_repr(text), allowed=allowed)


def default_lines(classes: Mapping[str, Device], runs: Sequence[NodeRun]) -> tuple[str, ...]:
    """Lines of the card on the fabrics of each class, and whether they are defaults or given.

    Plan files contain the lines, so their text is part of the format."""
    lines = []
    for name, device in classes.items():
        node = next(node for node, _ in runs if node.device_class == name)
        rate = format_rate(device.scale_up_bytes_per_s)
        line = f"{name}: {device.scale_up_name}: {rate} per direction (default)"
        if sum(count for _, count in runs) > 1:
            line += f"; {_network_text(device, node)}"
        lines.append(line)
    return tuple(lines)


def _network_text(device: Device, node: Node) -> str:
    defaults = default_node(device, node.devices)
    is_default = (defaults.nics, defaults.nic_bytes_per_s) == (node.nics, node.nic_bytes_per_s)
    cards = f"{node.nics} x {format_rate(node.nic_bytes_per_s)} per node of {node.devices}"
    return f"{device.scale_out_name}: {cards} (default)" if is_default else f"network: {cards} (given)"


# Shipped clusters and files
_FOLDER = Path(__file__).with_name("data") / "clusters"


def cluster_names() -> tuple[str, ...]:
    """Names of all shipped clusters (docs/concepts/mixed-clusters.md)."""
    return tuple(sorted(path.stem for path in _FOLDER.glob("*.yaml")))


def named_cluster_file(name: str) -> Path | None:
    """The file of the shipped cluster `name`; None where there is none."""
    path = _FOLDER / f"{name}.yaml"
    return path if name in cluster_names() else None


def load_cluster(
    text: str, *, inter_node: str | None = None, measured: Mapping[str, Device] | None = None
) -> Cluster:
    """The cluster that `text` names: a shorthand such as `8x8xH100-SXM`, a shipped cluster such as
    `spot-mix`, or the path of a YAML or JSON file.

    `inter_node` (`200Gb/s` per network card, `4x200Gb/s` for four cards per node) replaces the default
    network of a shorthand; a file gives its own. Devices of `measured` (by name) replace those of the
    catalogue. Raises ConfigError where `text` names no cluster, or `inter_node` comes with a file.
    """
    is_path = os.sep in text or text.lower().endswith((".yaml", ".yml", ".json"))
    if not is_path and is_shorthand(text):
        return cluster_of_shorthand(text, inter_node=inter_node, measured=measured)
    named = None if is_path else named_cluster_file(text)
    if named is None and not is_path and not os.path.exists(text):
        names = ", ".join(cluster_names())
        allowed = f"a shorthand such as 8x8xH100-SXM, the path of a YAML file, or one of {names}"
        raise ConfigError(
            "is neither a cluster nor a file", key="cluster", found=short_repr(text), allowed=allowed
        )
    from shardwise.cluster.file import cluster_of_file  # shorthands do not need it

    if inter_node is not None:
        raise ConfigError(
            "is for shorthands", key="inter-node", found=short_repr(inter_node), allowed="nics in the file"
        )
    return cluster_of_file(text if named is None else str(named), measured=measured)
