"""What files of other software say about a cluster: `FileFacts`, of nodes by name or of the inside of one
node."""

from __future__ import annotations

from dataclasses import dataclass

from shardwise.inputs import Fields, short_repr

MAX_NAME = 1000
"""Longest name of a node, characters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeFacts:
    """What one file says about one node; None and () where it says nothing.

    `device` is the text that names its devices. `switches` are the network switches above it, the nearest
    first. `domain` names the group of nodes with a common scale-up fabric. `absent` is why no job can use the
    node.
    """

    name: str
    device: str | None = None
    devices: int | None = None
    host_memory_bytes: float | None = None
    switches: tuple[str, ...] = ()
    domain: str | None = None
    absent: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class InsideFacts:
    """What a file says about the inside of one node, which holds for all nodes with the same devices.

    `memory_bytes` is the memory of a device as the driver reports it. `power_w` is a power limit below the
    default. `pcie` is the generation of PCIe and its width. `nics` are network cards for training, each
    with `nic_bytes_per_s` per direction. `nvlinks[i][j]` counts the NVLinks between devices i and j, those
    through a switch included.
    """

    devices: int
    device: str | None = None
    memory_bytes: float | None = None
    power_w: float | None = None
    pcie: tuple[int, int] | None = None
    nics: int | None = None
    nic_bytes_per_s: float | None = None
    nvlinks: tuple[tuple[int, ...], ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class FileFacts:
    """What one file says. `kind` names its format, with its version. `lists_nodes` is true where a node that
    the file does not name is no node of the cluster. `has_blocks` is true where its switches are blocks of
    Slurm. `notes` say what of the file is not used."""

    file: str
    kind: str
    nodes: tuple[NodeFacts, ...] = ()
    inside: InsideFacts | None = None
    lists_nodes: bool = False
    has_blocks: bool = False
    notes: tuple[str, ...] = ()


def name_of(item: Fields, key: str) -> str:
    """The name of a node, with any characters: outputs escape it."""
    name = item.any(key, allowed="the name of a node")
    if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME:
        raise item.error(key, "is not a name", found=short_repr(name), allowed="the name of a node")
    return name
